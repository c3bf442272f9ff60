"""ThroughputHook: how fast this process trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.engine.hook import BaseHook
from treadle.errors.arguments import check_least, checked

if TYPE_CHECKING:
    from treadle.engine import Engine
    from treadle.engine.block import StepBlock


class ThroughputHook(BaseHook):
    """Log points ``{"throughput": {"steps_per_second", "samples_per_second"}}`` every ``interval`` steps.

    The rates are those of this process since its last report. They count the time of steps and of waiting for their
    data, not that of evaluations and checkpoints. Samples are those the forward step reported with
    ``StepOutput(num_samples=)``; without any the rate of samples is left out.

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
        """Forget what an earlier run measured."""
        self._reset()

    def on_after_step(self, trainer: Engine) -> None:
        """Count the step and report when it is time."""
        info = trainer.step_info
        self._steps += 1
        self._samples += info["num_samples"]
        self._seconds += info["step_time"] + sum(info["data_time"])
        if trainer.step % self.interval == 0 or trainer.is_last_step:
            self._report(trainer)

    def steps_ahead(self, trainer: Engine) -> int | None:
        """Let steps run up to the next report."""
        return self.interval - trainer.step % self.interval

    def on_after_steps(self, trainer: Engine, block: StepBlock) -> None:
        """Count the steps of a block and report when it is time."""
        before = len(block) - 1
        self._steps += before
        self._samples += before * trainer.step_info["num_samples"]
        self._seconds += before * trainer.step_info["step_time"]
        self.on_after_step(trainer)

    def on_after_train(self, trainer: Engine) -> None:
        """Report the rest."""
        if self._steps:
            self._report(trainer)

    def _report(self, trainer: Engine) -> None:
        rates = {"steps_per_second": self._steps / self._seconds}
        if self._samples:
            rates["samples_per_second"] = self._samples / self._seconds
        self._reset()
        trainer.log({"throughput": rates})
