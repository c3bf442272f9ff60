"""Moves of the schedule: those of the engine, and those that something else makes beside them, which are named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from treadle.optim.schedules import step_plateau

if TYPE_CHECKING:
    from treadle.engine.loop import Engine


class ScheduleMoves:
    """Moves of a run's schedule, counted as its scheduler counts them.

    Example:
        >>> # engine.state.schedule.move(engine)
    """

    def __init__(self) -> None:
        self._left: tuple[Any, int, int] | None = None  # scheduler, loads and count after the last move made here

    def move(self, engine: Engine, value: float | None = None) -> None:
        """Step the scheduler of an engine, a plateau scheduler with a value; warn once if something else has, too."""
        scheduler, num_loads = engine.lr_scheduler, engine.state.num_loads
        if self._left is not None and self._left[:2] == (scheduler, num_loads) and _count(scheduler) > self._left[2]:
            engine.state.warn_once(
                engine,
                f"scheduler: something else steps this {type(scheduler).__name__} too, so it moves more than once "
                f"each {engine.settings.scheduler_interval}; leave scheduler.step() to the trainer, or keep the "
                "schedule in a hook and pass none",
            )
        if isinstance(scheduler, ReduceLROnPlateau):
            step_plateau(scheduler, value)  # type: ignore[arg-type]
        else:
            scheduler.step()  # type: ignore[union-attr]
        self._left = (scheduler, num_loads, _count(scheduler))


def _count(scheduler: Any) -> int:
    """Return how often a scheduler was stepped: one that composes others counts itself, or by its first one."""
    held = vars(scheduler)
    if "_step_count" in held or "last_epoch" in held:
        return int(held.get("_step_count", held.get("last_epoch")))
    return _count(held["_schedulers"][0]) if held.get("_schedulers") else 0
