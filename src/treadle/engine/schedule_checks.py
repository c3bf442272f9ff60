"""Checks of a schedule before the first step: its state, a trial step, and its length compared with the run's."""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from treadle.checkpoint.introspection import has_state
from treadle.checkpoint.schema import to_plain
from treadle.errors import ConfigError
from treadle.optim.schedules import scheduler_state
from treadle.seed import forked_rng

if TYPE_CHECKING:
    from treadle.engine.loop import Engine

_TRIED_MOVES = 100  # of a schedule: all of one that moves once per epoch, in most runs


def try_schedule(engine: Engine) -> None:
    """Step a copy of the schedule once, as the run will, over a copy of the optimizer's groups.

    Raises:
        ConfigError: it has no state, takes other arguments, or fails.
    """
    scheduler = engine.lr_scheduler
    if scheduler is None:
        return
    name = type(scheduler).__name__
    if not has_state(scheduler):
        raise ConfigError(
            f"{name} has no state_dict() and load_state_dict(), so checkpoints could not hold its state; add them, "
            "or use one of torch.optim.lr_scheduler",
            argument="scheduler",
        )
    _refuse_short_one_cycle(scheduler, _moves_left(engine), engine.scheduler_interval)
    to_plain(scheduler_state(scheduler), "scheduler", encoding="odd")  # raises now for what no checkpoint can hold
    arguments = (1.0,) if isinstance(scheduler, ReduceLROnPlateau) else ()
    try:
        inspect.signature(scheduler.step).bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{name}.step() is called without arguments ({engine.scheduler_interval} by "
            f"{engine.scheduler_interval}), but this one requires some: {error}. Wrap it in a class whose step() "
            "counts and passes them",
            argument="scheduler",
        ) from error
    except ValueError:  # a function without a signature
        pass
    # A step set on the object may step the original, whichever copy it is called on.
    trial = None if "step" in vars(scheduler) else _copied(engine)
    if trial is None:
        return
    before = engine.state.objects.attributes()  # a copy calls the same functions, which may change their closures
    moves, tried = 1 if arguments else min(_moves_left(engine) or 1, _TRIED_MOVES), 0
    try:
        with warnings.catch_warnings(), forked_rng(0), contextlib.redirect_stdout(None):
            warnings.simplefilter("ignore")  # torch warns about the order of steps, but the trial makes none
            for tried in range(1, moves + 1):  # noqa: B007
                trial.step(*arguments)
    except Exception as error:
        raise ConfigError(
            f"{name}.step() failed when tried before step 1, as {engine.scheduler_interval} {tried} of this run will "
            f"call it: {type(error).__name__}: {error}",
            argument="scheduler",
        ) from error
    finally:
        engine.state.objects.restore_attributes(before)


def _copied(engine: Engine) -> Any:
    """Return a copy of the schedule over copies of the optimizer's groups, or None if it cannot be copied."""
    optimizer = engine.optimizer
    shadow = copy.copy(optimizer)
    groups = [
        {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    shadow.__dict__.update(param_groups=groups)
    kept = [engine, engine.model, engine.task, engine.logger, *engine.model.parameters()]
    memo = {id(optimizer): shadow, **{id(one): one for one in kept}}
    try:
        return copy.deepcopy(engine.lr_scheduler, memo)
    except Exception:  # noqa: BLE001  (what cannot be copied is not tried)
        return None


def check_length_of_schedule(engine: Engine) -> None:
    """Raise for a schedule that would raise before the run reaches its target; warn about one that ends earlier.

    Raises:
        ConfigError: a OneCycleLR has fewer steps left than the run.
    """
    warn_of_long_steps(engine)
    scheduler, moves = engine.lr_scheduler, _moves_left(engine)
    if scheduler is None or moves is None or engine.state.length_checked:
        return
    engine.state.record_length_checked()
    if engine.scheduler_interval == "epoch" and all(group["lr"] == 0 for group in engine.optimizer.param_groups):
        engine.logger.warning(
            "scheduler: the learning rate is 0 in the whole of epoch %d, which trains nothing, since the schedule "
            "moves once per epoch; for one that counts steps pass scheduler_step_per_batch=True to Trainer, or "
            "scheduler_interval='step' to others",
            engine.epoch + 1,
        )  # fmt: skip
    _refuse_short_one_cycle(scheduler, moves, engine.scheduler_interval)
    by_epochs, steps = engine.scheduler_interval == "epoch", engine.target.total_steps(engine)
    for name, length, _ in [*_lengths(scheduler), *_one_cycle(scheduler)] if by_epochs else []:
        if steps is not None and length == steps > scheduler.last_epoch + moves:
            engine.logger.warning(
                "scheduler: %s covers the steps of this run but moves once in each of its %d epochs; build it for "
                "epochs, or set scheduler_interval='step'",
                name, scheduler.last_epoch + moves,
            )  # fmt: skip
    for name, length, effect in _lengths(scheduler):
        if scheduler.last_epoch + moves > length:
            engine.logger.warning(
                "scheduler: %s ends after %d %ss but this run has %d: after that the rate %s; build it for the whole "
                "run if that is not intended",
                name, length, engine.scheduler_interval, scheduler.last_epoch + moves, effect,
            )  # fmt: skip


def _refuse_short_one_cycle(scheduler: Any, moves: int | None, interval: str) -> None:
    if isinstance(scheduler, OneCycleLR) and moves is not None and scheduler.last_epoch + moves > scheduler.total_steps:
        raise ConfigError(
            f"OneCycleLR has total_steps={scheduler.total_steps} and is at {scheduler.last_epoch}; this run has "
            f"{moves} more {interval}s, so the schedule would raise before the end; build it with "
            f"total_steps={scheduler.last_epoch + moves}",
            argument="scheduler",
        )


def warn_of_long_steps(engine: Engine) -> None:
    """Warn once if a step accumulates more micro-batches than an epoch has, since no step spans two epochs."""
    steps, length, limits = engine.settings.accumulation_steps, engine.cursor.length, engine.settings.limits
    limited = limits.train is not None or limits.overfit_batches is not None
    if length and steps > length and not limited:
        engine.cursor.warn([
            f"accumulation over {steps} micro-batches, and an epoch has {length} micro-batches: a step ends with its "
            f"epoch, so each accumulates {length}; use accumulation over at most {length}, or a smaller batch_size"
        ])  # fmt: skip


def _moves_left(engine: Engine) -> int | None:
    """Return how many steps the schedule makes until the target, or None if unknown."""
    if engine.scheduler_interval == "epoch":
        return None if engine.target.epochs is None else engine.target.epochs - engine.epoch
    total = engine.target.total_steps(engine)
    return None if total is None else total - engine.progress.step


def _one_cycle(scheduler: Any) -> Iterator[tuple[str, int, str]]:
    if isinstance(scheduler, OneCycleLR):
        yield f"OneCycleLR(total_steps={scheduler.total_steps})", scheduler.total_steps, "raises"


def _lengths(scheduler: Any, start: int = 0) -> Iterator[tuple[str, int, str]]:
    """Yield torch schedules of finite length, with their number of steps and what follows."""
    if isinstance(scheduler, CosineAnnealingLR):
        yield f"CosineAnnealingLR(T_max={scheduler.T_max})", start + scheduler.T_max, "rises again"
    elif isinstance(scheduler, PolynomialLR):
        yield f"PolynomialLR(total_iters={scheduler.total_iters})", start + scheduler.total_iters, "is 0"
    elif isinstance(scheduler, SequentialLR):
        yield from _lengths(scheduler._schedulers[-1], start + scheduler._milestones[-1])
    elif isinstance(scheduler, ChainedScheduler):
        for inner in scheduler._schedulers:
            yield from _lengths(inner, start)
