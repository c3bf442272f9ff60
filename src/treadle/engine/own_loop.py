"""Epochs trained by a user's loop, counted, scored and finished like those of the engine's own loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.engine.epoch_end import finish_epoch
from treadle.engine.session import ranks_stop, resume_from_hooks, training_session
from treadle.engine.stopping import Target

if TYPE_CHECKING:
    from treadle.engine.loop import Engine


def run_own_epochs(engine: Engine, target: Target, train_epoch: Callable[[], bool]) -> None:
    """Train to a number of epochs with a function that reads each epoch's batches from the engine's cursor.

    Args:
        engine: keeps the counters, calls the hooks and saves the state.
        target: target in epochs; ``max_time`` is checked between two of them.
        train_epoch: trains one epoch; returns whether it stepped the scheduler, which is then left alone.
    """
    engine._refuse_if_closed()
    engine.prepare()
    resume_from_hooks(engine)
    limits = engine.settings.limits
    target = replace(target, epochs=limits.target(None, target.epochs)[1], deadline=limits.deadline())
    engine.should_stop, engine.target = False, target
    if target.reached(engine):
        return
    with training_session(engine):
        while not (target.reached(engine) or target.out_of_time or ranks_stop(engine)):
            stepped_schedule = train_epoch()
            engine.target = target  # a single step sets another target
            finish_epoch(engine, moves_schedule=not stepped_schedule)
        engine.emit("on_after_train")
        engine.write_requested()
