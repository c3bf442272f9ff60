"""Base of reporting hooks: means over the steps since the last report, kept on the device, exact after a resume."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from treadle import distributed
from treadle.device.host_transfer import NumbersTransfer
from treadle.engine.hook import BaseHook
from treadle.errors.arguments import check_least
from treadle.means import RunningMeans, means_of
from treadle.task import add_output

if TYPE_CHECKING:
    from treadle.engine import Engine
    from treadle.engine.block import StepBlock


@dataclass(frozen=True)
class _TransferredReport:
    """Data of a report, during its copy to the host.

    Attributes:
        names: names of the means and times.
        numbers: their values, and the learning rate of each parameter group.
        known: values already on the host, by their names in a report.
    """

    names: list[tuple[tuple[str, ...], bool]]
    numbers: NumbersTransfer
    known: dict[str, Any]


class IntervalHook(BaseHook):
    """Base class of hooks that call :meth:`report` at ``step % interval == 0`` and at the last step.

    Loss and records are weighted means over the steps since the last report, times are plain means, learning rates are
    those of the last step. The collected sums are part of the checkpoint, so a resumed run reports the same numbers.

    Args:
        interval: steps between reports, >= 1.
        sync: reduce sums over ranks.
    """

    writes = True
    writes_in_workspace_alone = True
    _may_report_late = False  # some steps late, so that the device does not idle while the host reads

    def __init__(self, interval: int, *, sync: bool):
        check_least(1, interval=interval)
        self.interval = interval
        self.sync = sync
        self._means = RunningMeans()
        self._times = RunningMeans()  # of this process; not part of an exact resume
        self._retries = 0
        self._pending = False
        self._transferred: _TransferredReport | None = None  # pending report

    def on_after_step(self, trainer: Engine) -> None:
        """Collect the step and report if due; read nothing on the host before that."""
        self._collect(trainer)
        if self._transferred is not None or trainer.step % self.interval == 0 or trainer.is_last_step:
            self._report_if_due(trainer)

    def steps_ahead(self, trainer: Engine) -> int | None:
        """Allow steps up to the next report."""
        return self.interval - trainer.step % self.interval

    def on_after_steps(self, trainer: Engine, block: StepBlock) -> None:
        """Collect the steps of a block and report if due."""
        info, count = trainer.step_info, len(block)
        block.add_to(self._means)
        self._times.add_value(("step_time",), info["step_time"], float(count))
        self._times.add_value(("data_time",), 0.0, float(count))  # captured steps gather their own batches
        self._means.add_column(("grad_norm",), block.numbers[:, 0], 1.0)
        for _ in range(count):
            self._means.add_total(("num_samples",), info["num_samples"])
        self._pending = True
        self._report_if_due(trainer)

    def on_after_epoch(self, trainer: Engine) -> None:
        """Deliver a pending report."""
        self._deliver(trainer)

    def on_after_train(self, trainer: Engine) -> None:
        """Report the remaining steps."""
        self._deliver(trainer)
        if self._pending:
            self._report(trainer)

    def on_close(self, trainer: Engine, error: BaseException | None = None) -> None:
        """Deliver a pending report, unless an error ended the run."""
        if error is None:
            self._deliver(trainer)
        self._transferred = None

    def _report_if_due(self, trainer: Engine) -> None:
        if self._transferred is not None and self._transferred.numbers.done:
            self._deliver(trainer)
        if trainer.step % self.interval == 0 or trainer.is_last_step:
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
        self._deliver(trainer)
        late = self._may_report_late and trainer.num_ranks == 1 and not trainer.is_last_step
        if not late and (self.sync or trainer.num_ranks == 1):  # else the other ranks would not know
            trainer.raise_if_refused()  # the device is read anyway, and a refused step is an error
        known = {"step": trainer.step, "report_time": time.perf_counter(), "retries": self._retries}
        if "max_memory" in trainer.step_info:
            known["max_memory"] = float(trainer.step_info["max_memory"])
        numbers = [*self._means.parts(), *self._times.parts(), *trainer.step_info.get("lr", trainer.last_lr)]
        self._transferred = _TransferredReport(
            [*self._means.names(), *self._times.names()], NumbersTransfer(numbers), known
        )
        self._means.reset()
        self._times.reset()
        self._retries = 0
        self._pending = False
        if not late or self._transferred.numbers.done:
            self._deliver(trainer)

    def _deliver(self, trainer: Engine) -> None:
        """Deliver a sent report."""
        sent, self._transferred = self._transferred, None
        if sent is None:
            return
        numbers, count = sent.numbers.read(), 4 * len(sent.names)
        means = means_of(sent.names, numbers[:count], distributed.sum_over_ranks if self.sync else None)
        means |= {**sent.known, "lr": numbers[count:]}
        if not math.isfinite(means.get("grad_norm", 0.0)):
            trainer.raise_if_refused()  # the steps of a late report may have been refused since
        self.report(trainer, means)

    def report(self, trainer: Engine, means: dict[str, Any]) -> None:
        """Report the means; overridden by each hook.

        Args:
            trainer: the engine.
            means: ``loss``, ``records``, ``step_time``, ``data_time``, ``grad_norm``, ``num_samples`` (a total), ``lr``
                (one per parameter group), ``retries``, and ``max_memory`` if measured; ``step``, and ``report_time``,
                the time of the report in seconds of ``time.perf_counter``.
        """
        raise NotImplementedError

    def on_state_dict(self, trainer: Engine, state_dict: dict[str, Any]) -> None:
        """Save the running means of the open interval."""
        self._deliver(trainer)
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
