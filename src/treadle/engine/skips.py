"""Steps in fp16 that the device may have skipped: when the host must know, and what it undoes otherwise."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from torch.optim.lr_scheduler import ReduceLROnPlateau

from treadle.optim.ema import Ema
from treadle.optim.nonfinite import SCALE_LOWERED

if TYPE_CHECKING:
    from treadle.engine.loop import Engine
    from treadle.optim.late_skips import LateSkips


def take_back_skipped(engine: Engine, count: int, latest: int | None) -> None:
    """Subtract skipped steps that were counted as applied.

    Args:
        engine: the engine.
        count: number of steps.
        latest: the latest step if it is skipped; its record is corrected unless there is a newer one.
    """
    engine.progress.subtract_applied(count)
    for average in engine.averages.values():
        average.count_update(-count)
    if latest == engine.progress.step:
        engine.attempt.info["applied"] = False
        engine.attempt.info["reason"] = SCALE_LOWERED


def steps_until_hook(engine: Engine) -> int | None:
    """Return how many steps may run until a hook must see the last of them; None for any number."""
    dues = [
        hook.steps_ahead(engine)
        for event in ("on_before_step", "on_after_step")
        for hook in engine.events.hooks_for(engine.hooks, event)
    ]
    return min((due for due in dues if due is not None), default=None)


def decide_wait(engine: Engine, late: LateSkips) -> None:
    """Decide whether the host waits for the result of the next step, because something on it needs it at once."""
    if engine.num_ranks > 1 or _host_follows(engine, late):  # ranks must end in the same step, whatever their hooks
        late.wait_for_next(True)
        return
    due = steps_until_hook(engine)
    is_last = engine.target.max_steps == engine.progress.step + 1
    late.wait_for_next(is_last or (due is not None and due <= 1))


def _host_follows(engine: Engine, late: LateSkips) -> bool:
    """Return whether the schedule or an average follows an applied step on the host."""
    interval, scheduler = engine.settings.scheduler_interval, engine.lr_scheduler
    moves = interval == "step" and scheduler is not None and not isinstance(scheduler, ReduceLROnPlateau)
    return moves or not late.moves_averages(engine.averages.values(), engine.model)


def follow_on_device(engine: Engine, late: LateSkips, moved: Collection[Ema]) -> Collection[Ema] | None:
    """Return the averages that need no update on the host after the latest step; None if the step is skipped.

    Args:
        engine: the engine.
        late: has noted the step.
        moved: averages that the device has moved already.

    Raises:
        NonFiniteError: the scale cannot be lowered any more.
    """
    if late.host_waits or _host_follows(engine, late):
        engine.raise_if_refused()
        return None if late.close(engine.optimizer) else moved
    late.close(engine.optimizer)
    for average in engine.averages.values():
        if average not in moved:
            average.move(engine.model, unless=late.skips)
    return list(engine.averages.values())
