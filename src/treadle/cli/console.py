"""Where the commands write: results on stdout, what happens meanwhile on stderr, errors as one line."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from treadle.cli.user_errors import described
from treadle.errors import ConfigError, TreadleError
from treadle.runs.launch import launched_rank, leave_for_torchrun


def result_console() -> Console:
    """Returns the console of results: stdout. Of several ranks, only the first has one that prints."""
    return _console(stderr=False)


def message_console() -> Console:
    """Returns the console of progress, log lines and errors: stderr. Other ranks than the first print errors only."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    # Never control characters in a file or a pipe, not even when FORCE_COLOR is set for other programs.
    terminal = None if getattr(stream, "isatty", bool)() else False
    return Console(stderr=stderr, force_terminal=terminal, highlight=False, quiet=launched_rank() != 0)


def _audible(console: Console) -> Console:
    """Returns a console for errors, which every rank prints."""
    return Console(stderr=True, force_terminal=False, highlight=False) if console.quiet else console


class ConsoleHandler(logging.Handler):
    """Writes log records above the bar that is drawn on the same console, and never wraps them.

    Args:
        console: where they go.
        start_block: also show the engine's block of decisions; a command of a pack has one of its own.
    """

    def __init__(self, console: Console, *, start_block: bool = False):
        super().__init__(logging.INFO if launched_rank() == 0 else logging.ERROR)
        self.console = _audible(console)
        if not start_block:
            self.addFilter(lambda record: getattr(record, "topic", None) != "start block")

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one record; warnings and errors say so."""
        try:
            line = Text(record.getMessage())
            if record.levelno >= logging.WARNING:
                style = "red" if record.levelno >= logging.ERROR else "yellow"
                line = Text(f"{record.levelname.lower()}: ", style=style).append(line)
            self.console.print(line, soft_wrap=True)
        except Exception:  # noqa: BLE001  (logging's own rule: a log line that fails must not end the run)
            self.handleError(record)


@contextlib.contextmanager
def log_to(console: Console, *, start_block: bool = False) -> Iterator[None]:
    """Shows the library's log on a console inside the block; see :class:`ConsoleHandler`."""
    logger = logging.getLogger("treadle")
    handler = ConsoleHandler(console, start_block=start_block)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


@contextlib.contextmanager
def errors_as_one_line(console: Console) -> Iterator[None]:
    """Turns errors into a message and an exit code: one line for those that treadle raises on purpose.

    An error of the user's code is followed by the places in their files; any other keeps its traceback.

    Raises:
        SystemExit: 2 for a wrong setting, 1 for a run that failed or a package that is to be installed.
    """
    try:
        yield
    except Exception as error:
        text = _message(error)
        if text is None:
            raise
        leave_for_torchrun(error)
        if launched_rank():
            text = f"rank {launched_rank()}: {text}"
        _audible(console).print(Text.assemble(("error: ", "bold red"), text), soft_wrap=True)
        raise SystemExit(2 if isinstance(error, ConfigError) else 1) from None


def _message(error: Exception) -> str | None:
    return " ".join(str(error).split()) if isinstance(error, TreadleError) else described(error)
