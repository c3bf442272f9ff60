"""Target of a run in steps or epochs, and the distance to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING

from treadle.engine.limits import Deadline
from treadle.errors import ConfigError

if TYPE_CHECKING:
    from treadle.engine.base import EngineBase
    from treadle.engine.loop import Engine


@dataclass(frozen=True)
class Target:
    """Absolute target, with callbacks for complete epochs.

    Attributes:
        max_steps: optimizer steps to have attempted at the end.
        epochs: epochs to have completed at the end.
        score_epoch: evaluates a complete epoch; returns the value of the best metric.
        after_epoch: writes epoch checkpoints and calls user callbacks.
        deadline: deadline of the call, or None.

    Raises:
        ConfigError: not exactly one target is given, or it is not a whole number >= 0.
    """

    max_steps: int | None = None
    epochs: int | None = None
    score_epoch: Callable[[], float | None] | None = None
    after_epoch: Callable[[], None] | None = None
    deadline: Deadline | None = None

    def __post_init__(self) -> None:
        if (self.max_steps is None) == (self.epochs is None):
            raise ConfigError(
                f"give exactly one of max_steps={self.max_steps} and epochs={self.epochs}", argument="run"
            )
        for name, value in (("max_steps", self.max_steps), ("epochs", self.epochs)):
            if value is not None and not (isinstance(value, Integral) and value >= 0):
                raise ConfigError(
                    f"{name}={value!r} must be a whole number >= 0, counted over the whole run", argument="run"
                )

    def __str__(self) -> str:
        return f"step {self.max_steps}" if self.max_steps is not None else f"epoch {self.epochs}"

    @property
    def out_of_time(self) -> bool:
        """Whether the call's deadline has passed."""
        return self.deadline is not None and self.deadline.over

    def reached(self, engine: Engine) -> bool:
        """Return whether the target is reached."""
        if self.max_steps is not None:
            return engine.progress.step >= self.max_steps
        stopped_early = any(driver.finished for driver in engine.state.drivers)
        return stopped_early or (self.epochs is not None and engine.epoch >= self.epochs)

    def completes_epoch(self, engine: Engine) -> bool:
        """Return whether the running epoch is complete and must be finished before the run continues or ends."""
        if not engine.cursor.ended or self.reached(engine):
            return False
        return self.epochs is not None or not engine.should_stop

    def is_last_step(self, engine: Engine) -> bool:
        """Return whether the current step is the last one."""
        if self.max_steps is not None:
            return engine.progress.step >= self.max_steps
        return self.epochs is not None and engine.cursor.ended and engine.epoch + 1 >= self.epochs

    def total_steps(self, engine: EngineBase) -> int | None:
        """Return the step at which the run ends, or None if unknown."""
        if self.max_steps is not None:
            return self.max_steps
        length = engine.cursor.length
        if self.epochs is None or length is None:
            return None
        in_this_epoch = math.ceil((length - engine.cursor.position) / engine.settings.accumulation_steps)
        per_epoch = math.ceil(length / engine.settings.accumulation_steps)
        return engine.progress.step + in_this_epoch + (self.epochs - engine.cursor.epoch - 1) * per_epoch
