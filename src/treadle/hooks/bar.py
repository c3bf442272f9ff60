"""ProgressBarHook: a bar on a terminal or in a notebook, plain log lines anywhere else; RunProgress, its default."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from treadle import distributed
from treadle.engine.hook import BaseHook
from treadle.engine.screens import RedrawnLine, Screen, is_terminal, open_screen
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

    from treadle.engine import Engine
    from treadle.engine.block import StepBlock

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
        self._screen: Screen | None = None
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
        self._screen = None if self._silent else self._open(trainer)
        if self._screen is not None and VOICE.screen is None:
            VOICE.screen = self._screen

    @forked_rng()  # rich draws from python's random for its styles; training must not notice
    def _open(self, trainer: Engine) -> Screen | None:
        return open_screen(self.console, f"starting at step {trainer.step:,}")

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
        if self._screen is not None:
            if waited >= self.refresh_seconds or trainer.is_last_step:
                self._show(trainer)
        elif waited >= self.line_seconds and not _at_the_end_of_an_epoch(trainer):
            # At the end of an epoch the line waits for the evaluation, so that the status is that of the epoch.
            self._show(trainer)

    def on_after_epoch(self, trainer: Engine) -> None:
        """Show what the epoch's evaluation gave."""
        if self._silent:
            return
        if self._screen is not None or time.perf_counter() - self._last_time >= self.line_seconds:
            self._show(trainer, epoch=trainer.epoch)

    def on_after_train(self, trainer: Engine) -> None:
        """Show the end of the run, as far as it was not shown yet."""
        if not self._silent and self._shown.get("step") != trainer.step:
            # Where no micro-batch of the next epoch is taken, the epoch that ended is the one to name.
            self._show(trainer, epoch=None if trainer.cursor.position else trainer.epoch)

    @forked_rng()
    def on_close(self, trainer: Engine, error: BaseException | None = None) -> None:
        """Leave the terminal as it was, with the last state of the bar on it."""
        if self._screen is not None:
            self._screen.stop()
        if VOICE.screen is self._screen:
            VOICE.screen = None
        self._screen = None

    def print_above(self, text: str) -> None:
        """Print a line of the log above the live display."""
        if self._screen is not None:
            self._screen.print_above(text)

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
        parts = self._parts(trainer, epoch, total, now)
        if self._screen is None:
            trainer.logger.info("%s", " ".join(text for _, text in parts))
        else:
            self._screen.show(parts, step=trainer.step, total=total)

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

    def _open(self, trainer: Engine) -> Screen | None:
        if not VOICE.speaks() or VOICE.screen is not None:
            self._silent = True
            return None
        try:
            return super()._open(trainer)
        except MissingExtraError:
            return RedrawnLine(sys.stderr) if is_terminal(sys.stderr) else None

    def _plan(self) -> None:
        """Set when something is shown next; the lines of a long run come less often."""
        wait = self.refresh_seconds
        if self._screen is None:
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
        if self._screen is not None and time.perf_counter() >= self._due:
            self._show(trainer, epoch=trainer.epoch)
            self._plan()

    def on_close(self, trainer: Engine, error: BaseException | None = None) -> None:
        """Leave the terminal as it was, with the last state of the bar on it."""
        if not self._silent:
            VOICE.replaces_lines = False
        super().on_close(trainer, error)

    def on_after_train(self, trainer: Engine) -> None:
        """Show the end of the run; without a terminal the line of the last epoch already did."""
        if self._screen is not None or not epoch_records(trainer):
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


def _at_the_end_of_an_epoch(trainer: Engine) -> bool:
    cursor = trainer.cursor
    return cursor.ended or cursor.position == cursor.length
