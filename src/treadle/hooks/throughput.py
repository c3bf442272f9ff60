"""ThroughputHook: training speed of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.engine.hook import BaseHook
from treadle.errors.arguments import check_least, checked

if TYPE_CHECKING:
    from treadle.engine import Engine
    from treadle.engine.block import StepBlock


class ThroughputHook(BaseHook):
    """Hook that logs ``{"throughput": {"steps_per_second", "samples_per_second"}}`` every ``interval`` steps.

    The rates are those of this process since its last report. They include the time of steps and of waiting for data,
    not that of evaluations and checkpoints. Samples are those reported by the forward step with
    ``StepOutput(num_samples=)``; without any, the sample rate is left out.

    Args:
        interval: steps between emissions, >= 1.

    Raises:
        ConfigError: ``interval`` is outside its range.

    Example:
        >>> hook = ThroughputHook(interval=100)
    """

    writes = True

    @checked
    def __init__(self, interval: int = 10):
        check_least(1, interval=interval)
        self.interval = interval
        self._reset()

    def _reset(self) -> None:
        self._steps = 0
        self._samples = 0
        self._seconds = 0.0

    def on_before_train(self, trainer: Engine) -> None:
        """Reset the measurements."""
        self._reset()

    def on_after_step(self, trainer: Engine) -> None:
        """Count the step and report if due."""
        info = trainer.step_info
        self._steps += 1
        self._samples += info["num_samples"]
        self._seconds += info["step_time"] + sum(info["data_time"])
        if trainer.step % self.interval == 0 or trainer.is_last_step:
            self._report(trainer)

    def steps_ahead(self, trainer: Engine) -> int | None:
        """Allow steps up to the next report."""
        return self.interval - trainer.step % self.interval

    def on_after_steps(self, trainer: Engine, block: StepBlock) -> None:
        """Count the steps of a block and report if due."""
        before = len(block) - 1
        self._steps += before
        self._samples += before * trainer.step_info["num_samples"]
        self._seconds += before * trainer.step_info["step_time"]
        self.on_after_step(trainer)

    def on_after_train(self, trainer: Engine) -> None:
        """Report the remaining steps."""
        if self._steps:
            self._report(trainer)

    def _report(self, trainer: Engine) -> None:
        rates = {"steps_per_second": self._steps / self._seconds}
        if self._samples:
            rates["samples_per_second"] = self._samples / self._seconds
        self._reset()
        trainer.log({"throughput": rates})
