"""The entry point of the command ``treadle``."""

from __future__ import annotations

import codecs
import io
import sys
from collections.abc import Sequence

from treadle.errors.interrupts import repeating_ignored_interrupts

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


def repeated_options(words: Sequence[str]) -> list[str]:
    """Return a sentence for each option that is given twice with different values, of which the last one counts.

    Args:
        words: the arguments after the program name; those after ``--`` are a script's.

    Example:
        >>> repeated_options(["train", "spectra", "--out", "a", "--out=b", "--", "--out", "c"])
        ['--out is given 2 times, as a and as b; b counts']
        >>> repeated_options(["train", "spectra", "--resume", "--no-resume"])
        ['--resume and --no-resume are both given; the last one counts']
    """
    own = list(words[: words.index("--")] if "--" in words else words)
    values: dict[str, list[str]] = {}
    for word, following in zip(own, [*own[1:], "-"], strict=True):
        name, equals, value = word.partition("=")
        if name.startswith("--") and name != "--member":  # the only one of which several count
            values.setdefault(name, []).append(value if equals else "" if following.startswith("-") else following)
    both = [name for name in values if f"--no-{name[2:]}" in values]
    twice = [(name, given) for name, given in values.items() if len(set(given)) > 1 and all(given)]
    return [
        *(f"{name} and --no-{name[2:]} are both given; the last one counts" for name in both),
        *(
            f"{name} is given {len(given)} times, as {' and as '.join(given)}; {given[-1]} counts"
            for name, given in twice
        ),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its exit code.

    Args:
        argv: the arguments after the program name; None takes those of the process.

    Raises:
        SystemExit: always; 0 for success, 2 for an invalid setting, 1 for a run that failed, 128 + n for signal n.

    Example:
        >>> # main(["train", "spectra", "epochs=20", "--out", "runs/short"])
    """
    write_in_any_locale()
    try:
        with repeating_ignored_interrupts():
            from treadle.cli.app import app

            words = list(sys.argv[1:] if argv is None else argv)
            for sentence in repeated_options(words):
                sys.stderr.write(f"warning: {sentence}\n")
            app(args=words, prog_name="treadle")
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.stderr.write(f"treadle: the command line needs {error.name}: pip install 'treadle[cli]'\n")
        sys.exit(1)
    except KeyboardInterrupt:  # before the command has begun, as while its modules are loaded
        sys.exit(130)
