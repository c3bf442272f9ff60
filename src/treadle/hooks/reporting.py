"""What reporting hooks share: means over the steps since the last report, kept on the device, exact over a resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treadle import distributed
from treadle.engine.hook import BaseHook
from treadle.errors import ConfigError
from treadle.means import RunningMeans, read_scalars
from treadle.task import add_output

if TYPE_CHECKING:
    from treadle.engine import Engine
    from treadle.engine.block import StepBlock


class IntervalHook(BaseHook):
    """Collector of every step that calls :meth:`report` at ``step % interval == 0`` and at the last step.

    Loss and records are weighted means over the steps since the last report, times are plain means, the learning
    rates are those of the last step. What was collected is part of the checkpoint, so a resumed run reports the same
    numbers.

    Args:
        interval: steps between reports, >= 1.
        sync: reduce sums over ranks.
    """

    writes = True
    writes_in_workspace_alone = True

    def __init__(self, interval: int, *, sync: bool):
        if interval < 1:
            raise ConfigError("must be at least 1 step", argument="interval", value=interval)
        self.interval = interval
        self.sync = sync
        self._means = RunningMeans()
        self._times = RunningMeans()  # of this process; no part of an exact resume
        self._retries = 0
        self._pending = False

    def on_after_step(self, trainer: Engine) -> None:
        """Collect the step and report when it is time; read nothing on the host before that."""
        self._collect(trainer)
        if trainer.step % self.interval == 0 or trainer.is_last_step:
            self._report(trainer)

    def steps_ahead(self, trainer: Engine) -> int | None:
        """Let steps run up to the next report."""
        return self.interval - trainer.step % self.interval

    def on_after_steps(self, trainer: Engine, block: StepBlock) -> None:
        """Collect the steps of a block and report when it is time."""
        info, count = trainer.step_info, len(block)
        block.add_to(self._means)
        self._times.add_value(("step_time",), info["step_time"], float(count))
        self._times.add_value(("data_time",), 0.0, float(count))  # the steps gather their own batches
        self._means.add_column(("grad_norm",), block.numbers[:, 0], 1.0)
        for _ in range(count):
            self._means.add_total(("num_samples",), info["num_samples"])
        self._pending = True
        if trainer.step % self.interval == 0 or trainer.is_last_step:
            self._report(trainer)

    def on_after_train(self, trainer: Engine) -> None:
        """Report the rest."""
        if self._pending:
            self._report(trainer)

    def _collect(self, trainer: Engine) -> None:
        info = trainer.step_info
        means, times = self._means, self._times
        for output in trainer.attempt.outputs:
            add_output(means, output)
        times.add_value(("step_time",), info["step_time"])
        for seconds in info["data_time"]:
            times.add_value(("data_time",), seconds)
        if "grad_norm" in info:
            means.add_value(("grad_norm",), info["grad_norm"])
        means.add_total(("num_samples",), info["num_samples"])
        self._retries += info["retries"]
        self._pending = True

    def _report(self, trainer: Engine) -> None:
        if self.sync or trainer.num_ranks == 1:  # else the other ranks would not hear of it
            trainer.raise_if_refused()  # the device is read anyway, and what it refused is an error, not a number
        reduce = distributed.sum_over_ranks if self.sync else None
        means = {**self._means.compute(reduce), **self._times.compute(reduce)}
        means["lr"] = read_scalars(trainer.step_info.get("lr", trainer.last_lr)).tolist()
        means["retries"] = self._retries
        if "max_memory" in trainer.step_info:
            means["max_memory"] = float(trainer.step_info["max_memory"])
        self._means.reset()
        self._times.reset()
        self._retries = 0
        self._pending = False
        self.report(trainer, means)

    def report(self, trainer: Engine, means: dict[str, Any]) -> None:
        """Show the means; overridden by each hook.

        Args:
            trainer: the engine.
            means: ``loss``, ``records``, ``step_time``, ``data_time``, ``grad_norm``, ``num_samples`` (a total),
                ``lr`` (one per parameter group), ``retries``, and ``max_memory`` where it is measured.
        """
        raise NotImplementedError

    def on_state_dict(self, trainer: Engine, state_dict: dict[str, Any]) -> None:
        """Keep the running means of the open interval."""
        state_dict["hooks"][self.state_key] = {
            "means": self._means.state_dict(),
            "retries": self._retries,
            "pending": self._pending,
        }

    def on_load_state_dict(self, trainer: Engine, state_dict: Mapping[str, Any]) -> None:
        """Restore the running means."""
        saved = (state_dict.get("hooks") or {}).get(self.state_key)
        if saved is not None:
            self._means.load_state_dict(saved["means"], device=trainer.device)
            self._retries = saved["retries"]
            self._pending = saved["pending"]
