"""ProgressBarHook: a bar on a terminal or in a notebook, plain log lines elsewhere; RunProgress: its default."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from treadle import distributed
from treadle.device.host_transfer import read_scalars
from treadle.engine.hook import BaseHook
from treadle.engine.run_log import RUN_LOG
from treadle.engine.screens import RedrawnLine, Screen, is_terminal, open_screen
from treadle.errors import MissingExtraError
from treadle.errors.arguments import check_least, checked
from treadle.hooks.tracking import epoch_records
from treadle.hooks.values import hours
from treadle.means import RunningMeans
from treadle.seed import forked_rng
from treadle.task import add_output

if TYPE_CHECKING:
    from rich.console import Console

    from treadle.engine import Engine
    from treadle.engine.block import StepBlock

_FIRST_LINES, _LAST_LINES = 5.0, 60.0  # seconds between lines, at the start and later


class ProgressBarHook(BaseHook):
    """Bar of epoch, step, loss, learning rate, gradient norm, samples per second and the time left.

    On a terminal and in notebooks it is one redrawn line, without a bar in a notebook without ipywidgets; if stderr is
    a file or a pipe, log lines of ``trainer.logger`` at intervals. Loss and gradient norm are means since the last
    update. Tensors are read on the host only when something is shown. The hook saves nothing in checkpoints, so a run
    may be resumed with or without it.

    Args:
        refresh_seconds: time between two updates of the bar, at least 0.1.
        line_seconds: time between two log lines; one follows every epoch that takes longer than this.
        status: returns a short string to show at the end of the line, such as the last validation loss.
        console: console on which the bar is drawn; None takes stderr.

    Raises:
        ConfigError: a time is outside its range.
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
        """Start the clock of this process, and open the bar if there is a terminal."""
        self._silent = distributed.rank() != 0
        self._first_step = trainer.step
        self._started = self._last_time = time.perf_counter()
        self._means.reset()
        self._shown = {}
        self._screen = None if self._silent else self._open(trainer)
        if self._screen is not None:
            RUN_LOG.show_above(self._screen)

    @forked_rng()  # rich draws from Python's random for its styles, which must not affect training
    def _open(self, trainer: Engine) -> Screen | None:
        return open_screen(self.console, f"starting at step {trainer.step:,}")

    def on_after_step(self, trainer: Engine) -> None:
        """Collect the step, and update the display if due."""
        if self._silent:
            return
        for output in trainer.attempt.outputs:
            add_output(self._means, output)
        if "grad_norm" in trainer.step_info:
            self._means.add_value(("grad_norm",), trainer.step_info["grad_norm"])
        self._means.add_total(("num_samples",), trainer.step_info["num_samples"])
        self._show_if_due(trainer)

    def steps_ahead(self, trainer: Engine) -> int | None:
        """Allow any number of steps: the bar is updated by time, not by step."""
        return None

    def on_after_steps(self, trainer: Engine, block: StepBlock) -> None:
        """Collect the steps of a block, and update the display if due."""
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
        """Show the results of the epoch's evaluation."""
        if self._silent:
            return
        if self._screen is not None or time.perf_counter() - self._last_time >= self.line_seconds:
            self._show(trainer, epoch=trainer.epoch)

    def on_after_train(self, trainer: Engine) -> None:
        """Show the end of the run, unless already shown."""
        if not self._silent and self._shown.get("step") != trainer.step:
            # If no micro-batch of the next epoch was taken, show the epoch that ended.
            self._show(trainer, epoch=None if trainer.cursor.position else trainer.epoch)

    @forked_rng()
    def on_close(self, trainer: Engine, error: BaseException | None = None) -> None:
        """Restore the terminal, with the last state of the bar, or without it after an error or a signal."""
        if self._screen is not None:
            self._screen.stop(keep=error is None)
        RUN_LOG.leave(self._screen)
        self._screen = None

    def print_above(self, text: str) -> None:
        """Print a log line above the live display."""
        if self._screen is not None:
            self._screen.print_above(text)

    # -- display ------------------------------------------------------------------------------------------------------

    @forked_rng()
    def _show(self, trainer: Engine, *, epoch: int | None = None) -> None:
        """Read and show the means; the only place where the host waits for the device."""
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
        """Return the means since the last update, ``seconds`` ago."""
        means = self._means.compute()
        samples = means.pop("num_samples", 0.0)
        if samples and seconds > 0:
            means["rate"] = f"{samples / seconds:.0f}/s"
        self._means.reset()
        return means

    def _parts(self, trainer: Engine, epoch: int | None, total: int | None, now: float) -> list[tuple[int, str]]:
        """Return the parts of the line in order, each with a rank: if space is short, high ranks are dropped first."""
        shown = self._shown
        of = "" if total is None else f"/{total}"
        number = trainer.epoch + 1 if epoch is None else epoch
        epochs = _epochs_of(trainer, total)
        of_epochs = f"/{epochs}" if epochs is not None and epochs >= number else ""
        parts = [(0, f"epoch {number}{of_epochs}"), (3, f"step {trainer.step}{of}")]
        if "loss" in shown:
            parts.append((0, f"loss {shown['loss']:.4g}"))
        if "lr" in shown:
            parts.append((4, f"lr {shown['lr']:.3g}"))
        if "grad_norm" in shown:
            parts.append((5, f"grad {shown['grad_norm']:.3g}"))
        if "rate" in shown:
            parts.append((6, shown["rate"]))
        done = trainer.step - self._first_step
        if total is not None and done > 0 and trainer.step < total:
            # Steps of this process only: those before a resume took no time here.
            left = (now - self._started) / done * (total - trainer.step)
            parts.append((1, f"eta {hours(left)}"))
        if self.status is not None and (status := self.status()):
            parts.append((2, status))
        return parts


class RunProgress(ProgressBarHook):
    """Default progress display of every front end, unless a handler or hook of the user shows progress.

    It costs one clock read per step: the loss is computed from the engine's sums of the running epoch, and the device
    is read only for updates. It needs no package beyond torch; with rich the bar looks better.

    If a front end adds a ProgressHook, its lines go only to the user's handlers.
    """

    state_key = "RunProgress"
    implicit = True

    def __init__(self) -> None:
        super().__init__(line_seconds=_FIRST_LINES)
        self._scores: list[str] = []
        self._last_step = 0
        self._due = math.inf
        self._before = (0, 0.0, 0.0)  # epoch, sum of losses and sum of weights at the last update

    def on_before_train(self, trainer: Engine) -> None:
        """Start the clock of this process; open the bar if the run is shown and no other bar is."""
        super().on_before_train(trainer)
        self._scores, self._last_step = [], trainer.step
        self._before = (trainer.epoch, *trainer.epoch_means.sums("loss"))
        self.idle = self._silent
        if not self._silent:
            RUN_LOG.replace_lines(True)
        self._plan()

    def _open(self, trainer: Engine) -> Screen | None:
        if not RUN_LOG.is_active() or RUN_LOG.screen is not None:
            self._silent = True
            return None
        try:
            return super()._open(trainer)
        except MissingExtraError:
            return RedrawnLine(sys.stderr) if is_terminal(sys.stderr) else None

    def _plan(self) -> None:
        """Schedule the next update; lines of a long run are less frequent."""
        wait = self.refresh_seconds
        if self._screen is None:
            wait = min(max(self.line_seconds, (self._last_time - self._started) / 50), _LAST_LINES)
        self._due = math.inf if self._silent else self._last_time + wait

    def on_after_step(self, trainer: Engine) -> None:
        """Show the step if due."""
        if time.perf_counter() >= self._due:
            self._show(trainer)
            self._plan()

    def on_after_steps(self, trainer: Engine, block: StepBlock) -> None:
        """Show the last step of a block if due."""
        self.on_after_step(trainer)

    def on_after_epoch(self, trainer: Engine) -> None:
        """Record the results of the epoch's evaluation for the next update."""
        self._before = (trainer.epoch, 0.0, 0.0)
        for record in epoch_records(trainer)[-1:]:
            numbers = {key: value for key, value in record.items() if isinstance(value, float)}
            scores = {key: value for key, value in numbers.items() if key.startswith(("val_", "eval_"))}
            self._scores = [f"{key} {value:.4g}" for key, value in list(scores.items())[:3]]
            if "train_loss" in numbers:
                self._shown["loss"] = numbers["train_loss"]
        if self._screen is not None and time.perf_counter() >= self._due:
            self._show(trainer, epoch=trainer.epoch)
            self._plan()

    def on_close(self, trainer: Engine, error: BaseException | None = None) -> None:
        """Restore the terminal, with the last state of the bar, or without it after an error or a signal."""
        if not self._silent:
            RUN_LOG.replace_lines(False)
        super().on_close(trainer, error)

    def on_after_train(self, trainer: Engine) -> None:
        """Show the end of the run; without a terminal the line of the last epoch already did."""
        if self._screen is not None or not epoch_records(trainer):
            super().on_after_train(trainer)

    def _read(self, trainer: Engine, seconds: float) -> dict[str, Any]:
        """Return the mean loss since the last update, the latest gradient norm, and steps per second."""
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
        parts += [(2 if place == 0 else 5, score) for place, score in enumerate(self._scores)]
        if trainer.state.saved_step is not None:
            parts.append((7, f"saved {trainer.state.saved_step}"))
        return parts


def _epochs_of(trainer: Engine, total: int | None) -> int | None:
    """Return the number of epochs of a run, if its target is an epoch or the last step of one."""
    if trainer.target.epochs is not None:
        return trainer.target.epochs
    per_epoch = math.ceil((trainer.cursor.length or 0) / trainer.accumulation_steps)
    return total // per_epoch if total and per_epoch and total % per_epoch == 0 else None


def _at_the_end_of_an_epoch(trainer: Engine) -> bool:
    cursor = trainer.cursor
    return cursor.ended or cursor.position == cursor.length
