"""Blocks of captured steps, replayed one after another but counted and recorded together.

A step of a small model takes less time on a GPU than the host needs to record it. Where no hook has to see each step,
the host replays several and passes all their numbers to the hooks at once. The state after the block equals that after
the same steps one by one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from treadle.engine.attempt import Attempt
from treadle.engine.signal_exit import exit_after_step
from treadle.engine.skips import decide_wait, steps_until_hook
from treadle.optim.late_flags import StepLocation
from treadle.task import StepOutput, add_output

if TYPE_CHECKING:
    from treadle.data.cursor import Group
    from treadle.engine.loop import Engine
    from treadle.means import RunningMeans

MOST = 512  # steps
_FIRST, _LEAST, _SECONDS = 64, 8, 0.25  # steps before the pace is known; steps, and seconds, of the others


@dataclass(frozen=True)
class StepBlock:
    """Numbers of several applied steps of one micro-batch each.

    Attributes:
        first_step: number of the first step, 1-based.
        epoch: epochs completed.
        first_position: micro-batches of the epoch consumed after the first step.
        numbers: gradient norm and loss of each step, (N, 2) on the device.
        output: weight, reduction and records of a step, without its loss; the same for all steps.
        rates: learning rate of each parameter group.
        may_skip: whether the device has skipped those steps whose norm is not finite, as in fp16.
    """

    first_step: int
    epoch: int
    first_position: int
    numbers: Tensor
    output: StepOutput
    rates: Sequence[Any]
    may_skip: bool = False

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def first_location(self) -> StepLocation:
        """Location of the first step, for error messages."""
        return StepLocation(self.first_step, self.epoch, self.first_position, 1, 1)

    def add_to(self, means: RunningMeans) -> None:
        """Add the losses and records of the steps to running means, as if added one by one."""
        output = self.output
        weight = 1.0 if output.weight is None else output.weight
        if output.records or type(weight) is not float or output.reduction == "sum":
            for loss in self.losses:
                add_output(means, StepOutput(loss, output.records, output.weight, output.reduction))
        else:
            means.add_column(("loss",), self.numbers[:, 1], weight)

    @property
    def norms(self) -> Sequence[Tensor]:
        """Gradient norm of each step, 0-d on the device."""
        return self.numbers.unbind(1)[0].unbind()

    @property
    def losses(self) -> Sequence[Tensor]:
        """Loss of each step, 0-d on the device."""
        return self.numbers.unbind(1)[1].unbind()


class RunsAhead:
    """Base class of engine steps that can be replayed several at a time.

    Attributes:
        pace: host seconds per step in the latest block; None before the first.
    """

    pace: float | None = None

    def may_run_ahead(self) -> bool:
        """Return whether the next step can be replayed with others."""
        raise NotImplementedError

    def ahead(self, count: int) -> tuple[Group, StepBlock]:
        """Replay the next steps, not counted by the engine yet; return the last batch and their numbers."""
        raise NotImplementedError

    def end_run(self) -> None:
        """Free what must not outlive a run."""


def run_ahead(engine: Engine) -> bool:
    """Run as many steps as possible before a hook, the end of the epoch or the target needs a single step.

    Returns:
        Whether any step ran: none if steps are not captured or the next one must be captured first.
    """
    steps = engine.steps
    if not isinstance(steps, RunsAhead):
        return False
    due = steps_until_hook(engine)
    count = min(_steps_until_due(engine, due), _steps_per_interval(steps.pace))
    started = time.perf_counter()
    if count < 2 or not steps.may_run_ahead():
        return False
    group, block = steps.ahead(count)
    steps.pace = (time.perf_counter() - started) / count
    _count(engine, block)
    _record(engine, group, block)
    engine.attempt.info["step_time"] = steps.pace
    if engine.guard.skips is not None and due == count:
        engine.raise_if_refused()  # which subtracts skipped steps
    for hook in engine.events.hooks_for(engine.hooks, "on_after_step"):
        hook.on_after_steps(engine, block)
    engine.events.write_requested()
    if engine.guard.skips is not None:
        decide_wait(engine, engine.guard.skips)
    if engine.signals.plans:
        exit_after_step(engine)
    return True


def _steps_until_due(engine: Engine, due: int | None) -> int:
    """Return how many steps may run until hooks, due in so many, or the run must see the last of them."""
    target, cursor, progress = engine.target, engine.cursor, engine.progress
    if engine.should_stop or engine.signals.received or cursor.length is None or engine.accumulation_steps > 1:
        return 0
    if target.deadline is not None:
        return 0  # the time is checked after each step
    count = min(MOST, cursor.length - cursor.position - 1)  # the last batch of an epoch ends the epoch
    if target.max_steps is not None:
        count = min(count, target.max_steps - progress.step)
    return count if due is None else min(count, due)


def _steps_per_interval(pace: float | None) -> int:
    """Return how many steps fill a quarter of a second: signals are checked between blocks."""
    return _FIRST if pace is None else max(_LEAST, min(MOST, int(_SECONDS / max(pace, 1e-6))))


def _count(engine: Engine, block: StepBlock) -> None:
    """Count the steps of a block, as if one by one, and add their losses to the means of the epoch."""
    engine.progress.count_block(len(block), block.rates)
    for average in engine.averages.values():
        for _ in range(len(block)):
            average.count_update()
    block.add_to(engine.progress.epoch_means)


def _record(engine: Engine, group: Group, block: StepBlock) -> None:
    """Record the last step of a block as the latest attempt."""
    attempt = Attempt(group, rates=block.rates)
    output = block.output
    norm, loss = block.numbers[-1].unbind()
    attempt.keep(StepOutput(loss, output.records, output.weight, output.reduction, num_samples=output.num_samples))
    attempt.info.update(grad_norm=norm, applied=True)
    engine.attempt = attempt
