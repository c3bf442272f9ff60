"""Screens for one line of progress: a bar of rich, or a line that is written over itself."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Any

from treadle.errors import MissingExtraError

if TYPE_CHECKING:
    from rich.console import Console

_BAR_WIDTH = 24
_LEAST_BAR = 8
_NOTEBOOK = 200  # characters


class Screen(ABC):
    """Live display of one line."""

    _shown: tuple[list[tuple[int, str]], int, int | None] = ([], 0, None)

    def show(self, parts: list[tuple[int, str]], *, step: int, total: int | None) -> None:
        """Replace the line.

        Args:
            parts: texts in their order, each with its rank; where room is short, high ranks are left out first.
            step: steps done.
            total: steps in all, if known.
        """
        self._shown = (parts, step, total)
        self._draw(parts, step, total)

    def annotate(self, text: str) -> None:
        """Add a text to the line until it is replaced."""
        parts, step, total = self._shown
        self._draw([*parts, (0, text)], step, total)

    @abstractmethod
    def _draw(self, parts: list[tuple[int, str]], step: int, total: int | None) -> None:
        """Draw a line over the last one."""

    @abstractmethod
    def print_above(self, text: str) -> None:
        """Print a line of the log above the live line."""

    @abstractmethod
    def stop(self, *, keep: bool = True) -> None:
        """Leave the terminal as it was, with or without the line."""


def open_screen(console: Console | None, text: str) -> Screen | None:
    """Open the display that a console allows.

    Args:
        console: console of rich; None uses stderr.
        text: shown until the first update.

    Returns:
        The display; None where nothing can be redrawn, as in a file or a pipe.

    Raises:
        MissingExtraError: rich is not installed.
    """
    try:
        from rich.console import Console
    except ImportError as error:
        raise MissingExtraError(f"ProgressBarHook needs rich ({error}): pip install 'treadle[cli]'") from error
    if console is None:
        # rich takes FORCE_COLOR for a terminal, and a bar is of no use in a log file.
        console = Console(stderr=True, force_terminal=None if is_terminal(sys.stderr) else False)
    if not (console.is_jupyter or (console.is_terminal and not console.is_dumb_terminal)):
        return None
    if console.is_jupyter and importlib.util.find_spec("ipywidgets") is None:
        return RedrawnLine(console.file, width=_NOTEBOOK)  # rich would show a warning and nothing else
    return RichBar(console, text)


class RichBar(Screen):
    """Bar of rich that is drawn by its updates alone: a thread would take time from the training.

    Args:
        console: where it is drawn.
        text: shown until the first update.
    """

    def __init__(self, console: Console, text: str):
        from rich.progress import BarColumn, Progress, TextColumn

        self._console = console
        self._bar = BarColumn(bar_width=_BAR_WIDTH, style="bright_black", complete_style="cyan", finished_style="green")
        description = TextColumn("{task.description}", markup=False)
        self._progress = Progress(self._bar, description, console=console, auto_refresh=False)
        self._task = self._progress.add_task(text, total=None)
        self._progress.start()

    def _draw(self, parts: list[tuple[int, str]], step: int, total: int | None) -> None:
        """Draw the line; what the text leaves over is the bar's, and the text never wraps."""
        text = fit_to_width(parts, self._console.width - _LEAST_BAR - 1)
        self._bar.bar_width = max(_LEAST_BAR, min(_BAR_WIDTH, self._console.width - 1 - len(text)))
        self._progress.update(self._task, completed=step, total=total, description=text)
        self._progress.refresh()

    def print_above(self, text: str) -> None:
        """Print a line of the log above the bar."""
        # Broken between words; a word longer than a line, such as a path, stays whole.
        self._console.print(text, markup=False, highlight=False, overflow="ignore", crop=False)

    def stop(self, *, keep: bool = True) -> None:
        """Leave the last state of the bar on the terminal, or erase it."""
        self._progress.live.transient = not keep
        self._progress.stop()


class RedrawnLine(Screen):
    """A line that is written over itself, which every notebook shows as one.

    Args:
        stream: where it is written.
        width: characters that fit; None asks the terminal.
    """

    def __init__(self, stream: IO[str], *, width: int | None = None):
        self._stream = stream
        self._asked = width
        self._text = ""
        self._width = 0

    @property
    def width(self) -> int:
        return shutil.get_terminal_size().columns if self._asked is None else self._asked

    def print_above(self, text: str) -> None:
        """Print a line of the log, and the live line again below it."""
        self._stream.write(f"\r{text.ljust(self._width)}\n{self._text}")
        self._stream.flush()

    def _draw(self, parts: list[tuple[int, str]], step: int, total: int | None) -> None:
        """Write the line over the last one."""
        text = fit_to_width(parts, self.width - 1)
        self._stream.write(f"\r{text.ljust(self._width)}")
        self._stream.flush()
        self._text, self._width = text, len(text)

    def stop(self, *, keep: bool = True) -> None:
        """End the line, or erase it."""
        if self._width:
            self._stream.write("\n" if keep else f"\r{' ' * self._width}\r")


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal; False without a stream or without ``isatty``."""
    return bool(getattr(stream, "isatty", bool)())


def fit_to_width(parts: list[tuple[int, str]], room: int) -> str:
    """Join strings in order, each that still fits when those of lower rank have their place.

    Example:
        >>> fit_to_width([(0, "loss 1"), (2, "lr 2"), (1, "eta 3")], room=12)
        'loss 1 eta 3'
    """
    kept: set[int] = set()
    used = -1
    for place, (_, text) in sorted(enumerate(parts), key=lambda item: item[1][0]):
        if not kept or used + 1 + len(text) <= room:
            kept.add(place)
            used += 1 + len(text)
    return " ".join(text for place, (_, text) in enumerate(parts) if place in kept)[: max(room, 1)]


@contextlib.contextmanager
def work_bar(name: str, unit: str, console: Console) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal.

    Args:
        name: name of the work.
        unit: name of the items counted.
        console: console on which the bar is drawn; nothing is drawn without a terminal.

    Returns:
        A context manager that yields a function of two counts, done and total.

    Raises:
        ImportError: rich is not installed.

    Example:
        >>> from rich.console import Console
        >>> with work_bar("encodings", "graphs", Console(quiet=True)) as progress:
        ...     progress(1, 2)
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn(name), BarColumn(_BAR_WIDTH), MofNCompleteColumn(), TextColumn(unit))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)
