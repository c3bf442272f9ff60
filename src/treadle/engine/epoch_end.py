"""End of an epoch, of the engine's loop or the user's: score it, step schedulers, count it, call the hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from treadle.data.cursor import Group
from treadle.engine.evaluation import EvaluationAbandoned
from treadle.engine.failure import non_finite_error
from treadle.engine.session import agree_to_stop, resume_from_hooks, training_session
from treadle.engine.signal_exit import exit_on_signal
from treadle.engine.stopping import Target
from treadle.errors import DataExhaustedError
from treadle.optim.schedules import step_plateau

if TYPE_CHECKING:
    from treadle.engine.loop import Engine


def finish_epoch(engine: Engine, *, moves_schedule: bool = True) -> None:
    """Finish a complete epoch, in the order documented in ``treadle.hooks.base``.

    Args:
        engine: the engine whose epoch is complete.
        moves_schedule: False if the user's own loop stepped the scheduler.

    Raises:
        DataExhaustedError: the epoch had no batches.
    """
    if engine.cursor.position == 0:
        raise DataExhaustedError(
            f"the loader yielded no batch at step {engine.progress.step}, epoch {engine.epoch + 1}, before the "
            f"target {engine.target}: it is empty (a DataLoader with drop_last=True and fewer samples than "
            "batch_size) or an exhausted one-shot iterator; pass an iterable that can be iterated again"
        )
    engine.raise_if_refused()
    if engine.progress.epoch_applied_steps == 0:
        reason = engine.attempt.info.get("reason") or "a step had nothing to apply"
        engine.logger.warning("epoch %d: no step changed the weights (last step: %s)", engine.epoch + 1, reason)
    score_epoch, after_epoch = engine.target.score_epoch, engine.target.after_epoch
    try:
        value = score_epoch() if score_epoch is not None else engine.train_means().get("loss")
    except EvaluationAbandoned:
        exit_on_signal(engine)
        raise
    engine.state.schedule.compare(engine, expected=not moves_schedule)
    if moves_schedule:
        _step_epoch_scheduler(engine, value)
    engine.cursor.next_epoch()
    engine.progress.end_epoch()
    if engine.target.out_of_time:
        engine.should_stop = True
    engine.events.emit(engine, "on_after_epoch")
    engine.events.write_requested()
    if after_epoch is not None:
        after_epoch()


def _step_epoch_scheduler(engine: Engine, value: float | None) -> None:
    if isinstance(engine.lr_scheduler, ReduceLROnPlateau):
        if value is not None:
            step_plateau(engine.lr_scheduler, value)
            engine.progress.count_schedule_move()
    elif engine.lr_scheduler is not None and _moves_each_epoch(engine):
        engine.lr_scheduler.step()
        engine.progress.count_schedule_move()


def _moves_each_epoch(engine: Engine) -> bool:
    return engine.settings.scheduler_interval == "epoch" and engine.progress.epoch_applied_steps > 0


def fresh_group(engine: Engine, loader: Iterable[Any]) -> Group:
    """Return new data for a refused step; an empty group if an epoch-based trainer has none left.

    Raises:
        NonFiniteError: the retries are used up.
    """
    settings, progress = engine.settings, engine.progress
    if progress.tries > engine.max_non_finite_grad_retries:
        raise non_finite_error(engine)
    progress.retry()
    group = engine.cursor.take(settings.accumulation_steps)
    if not group.batches and engine.target.epochs is None:
        finish_epoch(engine)
        engine.cursor.open(loader)
        group = engine.cursor.take(settings.accumulation_steps)
    if not group.batches:
        engine.logger.warning(
            "step %d is skipped: its gradient was not finite and the epoch has no data left for a retry", progress.step
        )
    return group


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
        while not (target.reached(engine) or target.out_of_time or agree_to_stop(engine)):
            stepped_schedule = train_epoch()
            engine.target = target  # a single step sets another target
            finish_epoch(engine, moves_schedule=not stepped_schedule)
            exit_on_signal(engine)
        engine.emit("on_after_train")
        engine.write_requested()
