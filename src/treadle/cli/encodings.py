"""Standard output in locales without full Unicode: missing characters are replaced instead of raising."""

from __future__ import annotations

import codecs
import io
import sys

_NAME = "treadle-in-other-words"
_WORDS = {
    "±": "+-", "²": "2", "³": "3", "µ": "u", "·": "-", "…": "...", "–": "-", "—": "-", "→": "->", "×": "x", "≥": ">=",
    "≤": "<=",
}  # fmt: skip
_SAMPLE = "±²µ…"


def write_in_any_locale() -> None:
    """Make the standard streams replace characters that their encoding lacks.

    An encoding that has them all, such as UTF-8, is left unchanged, and so is a stream that is not a file, as in a
    notebook.

    Example:
        >>> write_in_any_locale()
    """
    codecs.register_error(_NAME, _in_other_words)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not _has(stream.encoding, _SAMPLE):
            stream.reconfigure(errors=_NAME)


def _has(encoding: str, text: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def _in_other_words(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_WORDS.get(character, "?") for character in lacking), error.end
