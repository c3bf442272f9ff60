"""Detection of scheduler steps that the engine did not make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treadle.engine.loop import Engine


class ScheduleMoves:
    """Comparison of a scheduler's count with the moves that the engine made."""

    def __init__(self) -> None:
        self._since: tuple[Any, int] | None = None  # the scheduler, and the loads of the run
        self._others = 0  # moves that the scheduler counts beyond those of the engine

    def compare(self, engine: Engine, *, expected: bool = False) -> None:
        """Warn once if, since the last call, the scheduler has moved more often than the engine moved it.

        Args:
            engine: engine of the scheduler.
            expected: whether the user's code is known to step it, so that nothing is warned of.
        """
        since = engine.lr_scheduler, engine.state.num_loads
        others = _count(engine.lr_scheduler) - engine.progress.schedule_moves
        if self._since == since and others > self._others and not expected:
            engine.state.warn_once(
                engine,
                f"scheduler: something else also steps this {type(engine.lr_scheduler).__name__}, so it moves more "
                f"than once per {engine.settings.scheduler_interval}; leave scheduler.step() to the trainer, or keep "
                "the schedule in a hook and pass no scheduler",
            )
        self._since, self._others = since, others


def _count(scheduler: Any) -> int:
    """Return how often a scheduler was stepped; one composed of others may count through the first of them."""
    held = {} if scheduler is None else vars(scheduler)
    for name in ("_step_count", "last_epoch"):
        if name in held:
            return int(held[name])
    return _count(held["_schedulers"][0]) if held.get("_schedulers") else 0
