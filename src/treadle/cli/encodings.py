"""Standard output in a locale that has not all characters: what it lacks is written in other words, never an error."""

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
    """Have the standard streams write other words for the characters that their encoding lacks.

    An encoding that has them, as UTF-8 does, is left as it is; so is a stream that is no file, as in a notebook.

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
