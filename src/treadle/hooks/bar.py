"""ProgressBarHook: a bar on a terminal or in a notebook, plain log lines anywhere else; RunProgress, its default."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Any

from treadle import distributed
from treadle.engine.hook import BaseHook
from treadle.engine.voice import VOICE
from treadle.errors import MissingExtraError
from treadle.errors.arguments import check_least, checked
from treadle.hooks.tracking import epoch_records
from treadle.hooks.values import hours
from treadle.means import RunningMeans, read_scalars
from treadle.seed import forked_rng
from treadle.task import add_output

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID

    from treadle.engine import Engine
    from treadle.engine.block import StepBlock

_BAR_WIDTH = 24
_LEAST_BAR = 8
_NOTEBOOK = 200
_FIRST_LINES, _LAST_LINES = 5.0, 60.0  # seconds between two lines, at the start and later


class ProgressBarHook(BaseHook):
    """Bar of epoch, step, loss, learning rate, gradient norm, samples per second and the time left.

    On a terminal and in notebooks it is one line that is redrawn, in a notebook without ipywidgets one without a bar;
    where stderr is a file or a pipe it is a log line of ``trainer.logger`` now and then. Loss and gradient norm are
    means since the last one shown. Tensors are read on the host when something is shown, and at no other time. The hook
    has no part in a checkpoint, so a run may be resumed with or without it.

    Args:
        refresh_seconds: time between two updates of the bar, at least 0.1.
        line_seconds: time between two log lines; one comes after every epoch that ends later than this.
        status: returns a short text to show at the end, such as the last validation loss.
        console: where the bar is drawn, and whether it is one; None takes stderr.

    Raises:
        ConfigError: a time is out of range.
        ImportError: when training starts and rich is not installed.

    Example:
        >>> hook = ProgressBarHook(line_seconds=30)
    """

    writes = True
    writes_in_workspace_alone = True

    @checked
    def __init__(
        self,
        *,
        refresh_seconds: float = 0.25,
        line_seconds: float = 10.0,
        status: Callable[[], str] | None = None,
        console: Console | None = None,
    ):
        check_least(0.1, refresh_seconds=refresh_seconds)
        check_least(0, line_seconds=line_seconds)
        self.refresh_seconds = refresh_seconds
        self.line_seconds = line_seconds
        self.status = status
        self.console = console
        self._means = RunningMeans()
        self._progress: Progress | None = None
        self._line: _RedrawnLine | None = None
        self._bar: BarColumn | None = None
        self._task: TaskID | None = None
        self._shown: dict[str, Any] = {}
        self._first_step = 0
        self._started = 0.0
        self._last_time = 0.0
        self._silent = False

    def on_before_train(self, trainer: Engine) -> None:
        """Start the clock of this process and open the bar where there is a terminal."""
        self._silent = distributed.rank() != 0
        self._first_step = trainer.step
        self._started = self._last_time = time.perf_counter()
        self._means.reset()
        self._shown = {}
        self._progress = self._line = None
        if not self._silent:
            self._open(trainer)
        if self._redraws and VOICE.screen is None:
            VOICE.screen = self

    @forked_rng()  # rich draws from python's random for its styles; training must not notice
    def _open(self, trainer: Engine) -> None:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn
        except ImportError as error:
            raise MissingExtraError(f"ProgressBarHook needs rich ({error}): pip install 'treadle[cli]'") from error
        if self.console is None:
            # rich takes FORCE_COLOR for a terminal, and a bar is of no use in a log file.
            console = Console(stderr=True, force_terminal=None if is_terminal(sys.stderr) else False)
        else:
            console = self.console
        if not (console.is_jupyter or (console.is_terminal and not console.is_dumb_terminal)):
            return
        if console.is_jupyter and importlib.util.find_spec("ipywidgets") is None:
            self._line = _RedrawnLine(console.file, width=_NOTEBOOK)  # rich would show a warning and nothing else
            return
        self._bar = BarColumn(bar_width=_BAR_WIDTH, style="bright_black", complete_style="cyan", finished_style="green")
        text = TextColumn("{task.description}", markup=False)
        # Drawn by the updates alone: another thread would take time from the training threads.
        self._progress = Progress(self._bar, text, console=console, auto_refresh=False)
        self._task = self._progress.add_task(f"starting at step {trainer.step:,}", total=None)
        self._progress.start()

    def on_after_step(self, trainer: Engine) -> None:
        """Collect the step, and show it when it is time."""
        if self._silent:
            return
        for output in trainer.attempt.outputs:
            add_output(self._means, output)
        if "grad_norm" in trainer.step_info:
            self._means.add_value(("grad_norm",), trainer.step_info["grad_norm"])
        self._means.add_total(("num_samples",), trainer.step_info["num_samples"])
        self._show_if_due(trainer)

    def steps_ahead(self, trainer: Engine) -> int | None:
        """Let any number of steps run: the bar is drawn by time, not by step."""
        return None

    def on_after_steps(self, trainer: Engine, block: StepBlock) -> None:
        """Collect the steps of a block, and show them when it is time."""
        if self._silent:
            return
        block.add_to(self._means)
        self._means.add_column(("grad_norm",), block.numbers[:, 0], 1.0)
        self._means.add_total(("num_samples",), len(block) * trainer.step_info["num_samples"])
        self._show_if_due(trainer)

    def _show_if_due(self, trainer: Engine) -> None:
        waited = time.perf_counter() - self._last_time
        if self._redraws:
            if waited >= self.refresh_seconds or trainer.is_last_step:
                self._show(trainer)
        elif waited >= self.line_seconds and not _at_the_end_of_an_epoch(trainer):
            # At the end of an epoch the line waits for the evaluation, so that the status is that of the epoch.
            self._show(trainer)

    def on_after_epoch(self, trainer: Engine) -> None:
        """Show what the epoch's evaluation gave."""
        if self._silent:
            return
        if self._redraws or time.perf_counter() - self._last_time >= self.line_seconds:
            self._show(trainer, epoch=trainer.epoch)

    def on_after_train(self, trainer: Engine) -> None:
        """Show the end of the run, as far as it was not shown yet."""
        if not self._silent and self._shown.get("step") != trainer.step:
            # Where no micro-batch of the next epoch is taken, the epoch that ended is the one to name.
            self._show(trainer, epoch=None if trainer.cursor.position else trainer.epoch)

    @forked_rng()
    def on_close(self, trainer: Engine, error: BaseException | None = None) -> None:
        """Leave the terminal as it was, with the last state of the bar on it."""
        if self._progress is not None:
            self._progress.stop()
        if self._line is not None:
            self._line.stop()
        self._progress = self._line = None
        if VOICE.screen is self:
            VOICE.screen = None

    @property
    def _redraws(self) -> bool:
        return self._progress is not None or self._line is not None

    def print_above(self, text: str) -> None:
        """Print a line of the log above the live display."""
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif self._line is not None:
            self._line.print_above(text)

    # -- display ------------------------------------------------------------------------------------------------------

    @forked_rng()
    def _show(self, trainer: Engine, *, epoch: int | None = None) -> None:
        """Read the means and show them; the only place where the host waits for the device."""
        now = time.perf_counter()
        means = self._read(trainer, now - self._last_time)
        if "lr" in trainer.step_info:
            means["lr"] = float(read_scalars(trainer.step_info["lr"][:1])[0])
        self._shown.update(means, step=trainer.step)
        self._last_time = now
        total = trainer.total_steps
        if self._line is not None:
            self._line.show(fitting(self._parts(trainer, epoch, total, now), self._line.width - 1))
            return
        if self._progress is None:
            trainer.logger.info("%s", " ".join(text for _, text in self._parts(trainer, epoch, total, now)))
            return
        assert self._task is not None
        room = self._progress.console.width - _LEAST_BAR - 1
        description = fitting(self._parts(trainer, epoch, total, now), room)
        assert self._bar is not None
        # What the text leaves over is the bar's, and the text never wraps.
        self._bar.bar_width = max(_LEAST_BAR, min(_BAR_WIDTH, self._progress.console.width - 1 - len(description)))
        self._progress.update(self._task, completed=trainer.step, total=total, description=description)
        self._progress.refresh()

    def _read(self, trainer: Engine, seconds: float) -> dict[str, Any]:
        """Return the means since the last time something was shown, which was ``seconds`` ago."""
        means = self._means.compute()
        samples = means.pop("num_samples", 0.0)
        if samples and seconds > 0:
            means["rate"] = f"{samples / seconds:.0f}/s"
        self._means.reset()
        return means

    def _parts(self, trainer: Engine, epoch: int | None, total: int | None, now: float) -> list[tuple[int, str]]:
        """The texts in their order on the line, each with its rank: where room is short, high ranks go first."""
        shown = self._shown
        of = "" if total is None else f"/{total}"
        per_epoch = math.ceil((trainer.cursor.length or 0) / trainer.accumulation_steps)
        of_epochs = f"/{total // per_epoch}" if total and per_epoch and total % per_epoch == 0 else ""
        number = trainer.epoch + 1 if epoch is None else epoch
        parts = [(0, f"epoch {number}{of_epochs}"), (3, f"step {trainer.step}{of}")]
        if "loss" in shown:
            parts.append((0, f"loss {shown['loss']:.4g}"))
        if "lr" in shown:
            parts.append((4, f"lr {shown['lr']:.1e}"))
        if "grad_norm" in shown:
            parts.append((5, f"grad {shown['grad_norm']:.2g}"))
        if "rate" in shown:
            parts.append((6, shown["rate"]))
        done = trainer.step - self._first_step
        if total is not None and done > 0 and trainer.step < total:
            # Of this process alone: the steps before a resume took no time here.
            left = (now - self._started) / done * (total - trainer.step)
            parts.append((1, f"eta {hours(left)}"))
        if self.status is not None and (status := self.status()):
            parts.append((2, status))
        return parts


class RunProgress(ProgressBarHook):
    """Progress that every face shows by itself, unless a handler or a hook of the user's shows it.

    A step costs it one look at the clock: the loss is read from the sums of the running epoch, which the engine keeps,
    and the device is read when something is shown. Needs no package beyond torch; with rich the bar is nicer.

    Where a face has a ProgressHook by itself, the lines of that one go to handlers of the user's only.
    """

    state_key = "RunProgress"
    implicit = True

    def __init__(self) -> None:
        super().__init__(line_seconds=_FIRST_LINES)
        self._status: str = ""
        self.status = lambda: self._status
        self._last_step = 0
        self._due = math.inf
        self._before = (0, 0.0, 0.0)  # epoch, sum of losses and of weights when something was shown

    def on_before_train(self, trainer: Engine) -> None:
        """Start the clock of this process; open the bar if the run speaks and no other one is drawn."""
        super().on_before_train(trainer)
        self._status, self._last_step = "", trainer.step
        self._before = (trainer.epoch, *trainer.epoch_means.sums("loss"))
        self.idle = self._silent
        if not self._silent:
            VOICE.replaces_lines = True
        self._plan()

    def _open(self, trainer: Engine) -> None:
        if not VOICE.speaks() or VOICE.screen is not None:
            self._silent = True
            return
        try:
            super()._open(trainer)
        except MissingExtraError:
            if is_terminal(sys.stderr):
                self._line = _RedrawnLine(sys.stderr)

    def _plan(self) -> None:
        """Set when something is shown next; the lines of a long run come less often."""
        wait = self.refresh_seconds
        if not self._redraws:
            wait = min(max(self.line_seconds, (self._last_time - self._started) / 50), _LAST_LINES)
        self._due = math.inf if self._silent else self._last_time + wait

    def on_after_step(self, trainer: Engine) -> None:
        """Show the step when it is time."""
        if time.perf_counter() >= self._due:
            self._show(trainer)
            self._plan()

    def on_after_steps(self, trainer: Engine, block: StepBlock) -> None:
        """Show the last step of a block when it is time."""
        self.on_after_step(trainer)

    def on_after_epoch(self, trainer: Engine) -> None:
        """Note what the epoch's evaluation gave, for the next time something is shown."""
        self._before = (trainer.epoch, 0.0, 0.0)
        for record in epoch_records(trainer)[-1:]:
            numbers = {key: value for key, value in record.items() if isinstance(value, float)}
            scores = {key: value for key, value in numbers.items() if key.startswith(("val_", "eval_"))}
            self._status = " ".join(f"{key} {value:.4g}" for key, value in list(scores.items())[:3])
            if "train_loss" in numbers:
                self._shown["loss"] = numbers["train_loss"]
        if self._redraws and time.perf_counter() >= self._due:
            self._show(trainer, epoch=trainer.epoch)
            self._plan()

    def on_close(self, trainer: Engine, error: BaseException | None = None) -> None:
        """Leave the terminal as it was, with the last state of the bar on it."""
        if not self._silent:
            VOICE.replaces_lines = False
        super().on_close(trainer, error)

    def on_after_train(self, trainer: Engine) -> None:
        """Show the end of the run; without a terminal the line of the last epoch already did."""
        if self._redraws or not epoch_records(trainer):
            super().on_after_train(trainer)

    def _read(self, trainer: Engine, seconds: float) -> dict[str, Any]:
        """Return the mean loss since the last time, the norm of the latest gradient, and steps per second."""
        found: dict[str, Any] = {}
        epoch, value, weight = self._before
        now = trainer.epoch_means.sums("loss")
        value, weight = (value, weight) if epoch == trainer.epoch else (0.0, 0.0)
        if now[1] > weight:
            found["loss"] = (now[0] - value) / (now[1] - weight)
        self._before = (trainer.epoch, *now)
        if "grad_norm" in trainer.step_info:
            found["grad_norm"] = float(read_scalars([trainer.step_info["grad_norm"]])[0])
        if seconds > 0 and trainer.step > self._last_step:
            found["rate"] = f"{(trainer.step - self._last_step) / seconds:.3g} steps/s"
        self._last_step = trainer.step
        return found

    def _parts(self, trainer: Engine, epoch: int | None, total: int | None, now: float) -> list[tuple[int, str]]:
        parts = super()._parts(trainer, epoch, total, now)
        if trainer.state.saved_step is not None:
            parts.append((7, f"saved {trainer.state.saved_step}"))
        return parts


class _RedrawnLine:
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
        self._stream.write(f"\r{text.ljust(self._width)}\n{self._text}")
        self._stream.flush()

    def show(self, text: str) -> None:
        self._stream.write(f"\r{text.ljust(self._width)}")
        self._stream.flush()
        self._text, self._width = text, len(text)

    def stop(self) -> None:
        if self._width:
            self._stream.write("\n")


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal; False without a stream or without ``isatty``.

    Example:
        >>> import io
        >>> is_terminal(io.StringIO()), is_terminal(None)
        (False, False)
    """
    return bool(getattr(stream, "isatty", bool)())


def _at_the_end_of_an_epoch(trainer: Engine) -> bool:
    cursor = trainer.cursor
    return cursor.ended or cursor.position == cursor.length


def fitting(parts: list[tuple[int, str]], room: int) -> str:
    """Join texts in their order, leaving out those of the highest rank until the line fits.

    Example:
        >>> fitting([(0, "loss 1"), (2, "lr 2"), (1, "eta 3")], room=12)
        'loss 1 eta 3'
    """
    kept = list(parts)
    while len(kept) > 1 and len(" ".join(text for _, text in kept)) > room:
        kept.remove(max(kept, key=lambda part: part[0]))
    return " ".join(text for _, text in kept)[: max(room, 1)]


@contextlib.contextmanager
def work_bar(name: str, unit: str, console: Console) -> Iterator[Callable[[int, int], None]]:
    """Show on a terminal how far a piece of work is.

    Args:
        name: of the work.
        unit: name of the counted items.
        console: where the bar is drawn; nothing is where it is no terminal.

    Returns:
        A context that gives a function of two counts, done and total.

    Raises:
        ImportError: rich is not installed.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn(name), BarColumn(_BAR_WIDTH), MofNCompleteColumn(), TextColumn(unit))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)
