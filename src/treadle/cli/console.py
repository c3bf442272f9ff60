"""Console output of the commands: results on stdout, progress on stderr, errors as one line."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from treadle.cli.user_errors import described
from treadle.errors import ConfigError, TreadleError
from treadle.runs import report
from treadle.runs.launch import launched_rank, leave_for_torchrun
from treadle.runs.report import wrapped

_WIDEST = 10_000


def result_console() -> Console:
    """Return the console for results, stdout; on ranks other than the first it prints nothing."""
    return _console(stderr=False)


def message_console() -> Console:
    """Return the console for progress, log lines and errors, stderr; ranks other than the first print errors only."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    # No control characters in a file or a pipe, even if FORCE_COLOR is set for other programs.
    terminal = None if getattr(stream, "isatty", bool)() else False
    return Console(stderr=stderr, force_terminal=terminal, highlight=False, quiet=launched_rank() != 0)


def show_loading(name: str) -> None:
    """Print, on a terminal, what is being loaded: importing torch and reading data can take many seconds."""
    console = message_console()
    if console.is_terminal:
        console.print(f"loading {name}", style="bright_black", markup=False, soft_wrap=True)


def _audible(console: Console) -> Console:
    """Return a console for errors, which every rank prints."""
    return Console(stderr=True, force_terminal=False, highlight=False) if console.quiet else console


class ConsoleHandler(logging.Handler):
    """Handler that writes log records, unwrapped, above the progress bar of the same console.

    Args:
        console: the target console.
        start_block: also show the engine's start block; the command of a pack prints its own.
    """

    def __init__(self, console: Console, *, start_block: bool = False):
        super().__init__(logging.INFO if launched_rank() == 0 else logging.ERROR)
        self.console = _audible(console)
        if not start_block:
            self.addFilter(lambda record: getattr(record, "topic", None) != "start block")

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, prefixed by its level for warnings and errors."""
        try:
            level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
            line = Text(wrapped(f"{level}{record.getMessage()}", self.console))
            line.stylize("red" if record.levelno >= logging.ERROR else "yellow", 0, len(level))
            self.console.print(line, soft_wrap=True)
        except Exception:  # noqa: BLE001  (logging's own rule: a log line that fails must not end the run)
            self.handleError(record)


@contextlib.contextmanager
def log_to(console: Console, *, start_block: bool = False) -> Iterator[None]:
    """Show the library's log on a console inside the block; see :class:`ConsoleHandler`."""
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
    """Turn errors into a message and an exit code: a single line for treadle's own errors.

    An error in user code is followed by its locations in the user's files; any other keeps its traceback.

    Raises:
        SystemExit: 2 for an invalid setting, 1 for a failed run or a missing package.
    """
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split()) if isinstance(error, TreadleError) else described(error)
        if text is None:
            raise
        leave_for_torchrun(error)
        if launched_rank():
            text = f"rank {launched_rank()}: {text}"
        line = Text(wrapped(f"error: {text}", console))
        line.stylize("bold red", 0, len("error: "))
        _audible(console).print(line, soft_wrap=True)
        raise SystemExit(2 if isinstance(error, ConfigError) else 1) from None


# -- tables and reports ---------------------------------------------------------------------------------------------


def print_table(table: Table, console: Console) -> None:
    """Print a table at its full width: a narrower terminal wraps the lines, and no cell is truncated.

    Args:
        table: the table.
        console: the target console.
    """
    console.print(_Whole(table), crop=False)


class _Whole:
    def __init__(self, table: Table):
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        needed = Measurement.get(console, options.update_width(_WIDEST), self.table).maximum
        yield from console.render(self.table, options.update_width(max(needed, options.max_width)))


def print_named(
    name: str, text: str, console: Console, *, styles: tuple[str, str] = ("bold", ""), indent: int = 2
) -> None:
    """Print a name and a text in a style each, broken between words on a terminal."""
    line = Text(wrapped(name + text, console, indent=indent), style=styles[1])
    line.stylize(styles[0], 0, len(name))
    console.print(line, soft_wrap=True)


def show_table(table: report.Table, console: Console) -> None:
    """Print a table of a report with its notes; a terminal that is too narrow gets its columns in several parts."""
    chosen: list[int] = []
    title: str | None = table.title or None
    for column in range(1, len(table.columns)):
        if chosen and console.is_terminal and _width(_shown(table, [*chosen, column]), console) > console.width:
            print_table(_shown(table, chosen, title), console)
            chosen, title = [], None
        chosen.append(column)
    print_table(_shown(table, chosen, title), console)
    for note in table.notes:
        console.print(wrapped(note, console), soft_wrap=True, markup=False)


def _shown(table: report.Table, columns: Sequence[int], title: str | None = None) -> Table:
    """Return the names of the rows and some of the other columns."""
    shown = Table(title=title and escape(title), title_justify="left", box=None, pad_edge=False)
    shown.add_column(escape(table.columns[0]), min_width=table.width)
    for column in columns:  # such as "weight [g/mol]"
        shown.add_column(escape(table.columns[column]), justify="right")
    for row in table.rows:
        shown.add_row(*(escape(row[column]) for column in (0, *columns)))
    return shown


def _width(table: Table, console: Console) -> int:
    return Measurement.get(console, console.options.update_width(_WIDEST), table).maximum


def show_report(found: report.Report, out: Path, console: Console | None = None) -> None:
    """Print the results of a run.

    Args:
        found: the results.
        out: the run folder.
        console: None takes the console for results.
    """
    console = result_console() if console is None else console
    for table in found.tables:
        console.print()
        show_table(table, console)
    for title, text in found.texts.items():
        console.print(f"\n[bold]{escape(title)}[/bold]")
        for line in text.splitlines():
            console.print(Text(wrapped(f"  {line}".rstrip(), console)), soft_wrap=True)
    files = f"Files in {out}:"
    console.print("\n" + (f"{found.note} {files}" if found.note else files), soft_wrap=True, markup=False)
    for line in found.files:
        console.print(wrapped(line, console, indent=2), soft_wrap=True, markup=False)
