"""Trials before the first step of what a run needs later: schedule, evaluation, folders, state."""

from __future__ import annotations

import copy
import inspect
import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
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
from treadle.data.cursor import Cursor
from treadle.distributed.state_names import clean_name
from treadle.engine.evaluation import evaluation_rules
from treadle.engine.masks import warn_of_masks
from treadle.engine.metrics import EpochMetrics
from treadle.errors import ConfigError
from treadle.nested import flatten_nested_dict
from treadle.optim.schedules import scheduler_state
from treadle.seed import forked_rng
from treadle.task import HasMetrics, Task, as_step_output, update_of

if TYPE_CHECKING:
    from treadle.engine.loop import Engine


def refuse_fsdp_1(model: nn.Module) -> None:
    """Raise for FSDP1 (``FullyShardedDataParallel``), where each rank would clip by its local norm.

    Raises:
        ConfigError: a module of the model is wrapped in it.

    Example:
        >>> refuse_fsdp_1(nn.Linear(1, 1))
    """
    for name, module in model.named_modules():
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
            raise ConfigError(
                f"{clean_name(name) or 'it'} is wrapped in FullyShardedDataParallel (FSDP 1), which is not "
                'supported; use parallelize(model, "fsdp"), which shards it by fully_shard',
                argument="model",
            )


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
            f"{name} has no state_dict() and load_state_dict(), so no checkpoint could hold where it "
            "is; add them, or use one of torch.optim.lr_scheduler",
            argument="scheduler",
        )
    to_plain(scheduler_state(scheduler), "scheduler", encoding="odd")  # raises now for what no checkpoint can hold
    arguments = (1.0,) if isinstance(scheduler, ReduceLROnPlateau) else ()
    try:
        inspect.signature(scheduler.step).bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{name}.step() is called without arguments ({engine.scheduler_interval} by "
            f"{engine.scheduler_interval}), and this one wants more: {error}. Wrap it in a class whose step() "
            "counts and passes what it wants",
            argument="scheduler",
        ) from error
    except ValueError:  # a function without a signature
        pass
    # A step set on the object may step the original, whichever copy it is called on.
    trial = None if "step" in vars(scheduler) else _copied(engine)
    if trial is None:
        return
    before = engine.state.objects.attributes()  # a copy calls the same functions, which may change their closures
    try:
        with warnings.catch_warnings(), forked_rng(0):
            warnings.simplefilter("ignore")  # torch warns about the order of steps, but the trial makes none
            trial.step(*arguments)
    except Exception as error:
        raise ConfigError(
            f"{name}.step() fails when it is tried before step 1: {error}", argument="scheduler"
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
    scheduler, moves = engine.lr_scheduler, _moves_left(engine)
    if scheduler is None or moves is None or engine.state.length_checked:
        return
    engine.state.record_length_checked()
    if isinstance(scheduler, OneCycleLR) and scheduler.last_epoch + moves > scheduler.total_steps:
        raise ConfigError(
            f"OneCycleLR has total_steps={scheduler.total_steps} and is at {scheduler.last_epoch}; this run has "
            f"{moves} more {engine.scheduler_interval}s and the schedule would raise before its end; build it with "
            f"total_steps={scheduler.last_epoch + moves}",
            argument="scheduler",
        )
    by_epochs, steps = engine.scheduler_interval == "epoch", engine.target.total_steps(engine)
    for name, length, _ in [*_lengths(scheduler), *_one_cycle(scheduler)] if by_epochs else []:
        if steps is not None and length == steps > scheduler.last_epoch + moves:
            engine.logger.warning(
                "scheduler: %s is as long as this run has steps, and it moves with each of the %d epochs; build it for "
                "epochs, or let it move with steps",
                name, scheduler.last_epoch + moves,
            )  # fmt: skip
    for name, length, effect in _lengths(scheduler):
        if scheduler.last_epoch + moves > length:
            engine.logger.warning(
                "scheduler: %s ends after %d %ss and this run has %d: from there on the rate %s; build it for the "
                "whole run if that is not intended",
                name, length, engine.scheduler_interval, scheduler.last_epoch + moves, effect,
            )  # fmt: skip


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


def try_folders(engine: Engine) -> None:
    """Check that the folders into which hooks will write can be created.

    Raises:
        ConfigError: a file is in place of a folder, or a folder is not writable.
    """
    for hook in engine.hooks:
        for name, value in vars(hook).items() if hook.writes and not hook._may_fail_to_write else ():
            if not isinstance(value, Path):
                continue
            path = value if value.is_absolute() or engine.workspace is None else engine.workspace / value
            nearest = next((place for place in (path, *path.parents) if place.exists()), None)
            owner = f"{type(hook).__name__}: {name.lstrip('_')}={os.fspath(value)!r}"
            if nearest is not None and nearest != path and not nearest.is_dir():
                raise ConfigError(f"{owner}: {os.fspath(nearest)!r} is a file, not a folder; choose another path")
            if nearest is not None and not os.access(nearest, os.W_OK):
                raise ConfigError(f"{owner}: {os.fspath(nearest)!r} cannot be written to; choose another path")


def try_evaluation(engine: Engine, loader: Iterable[Any], task: Task | None) -> list[str] | None:
    """Read and evaluate the first batch of a loader, with the metrics if there are any; discard the result.

    Args:
        engine: engine whose model and random state the evaluation uses.
        loader: loader of the evaluation; if it cannot be iterated twice, nothing is tried.
        task: turns a batch into a loss, and holds the metrics; None only collates the batch.

    Returns:
        The names of records and metrics; None if unknown.
    """
    if isinstance(loader, Iterator):
        return None
    cursor = Cursor()
    with evaluation_rules(engine.model, loader, eval_seed=engine.eval_seed):
        try:
            cursor.restart()
            cursor.open(loader)
            batches = cursor.take(1).batches
            if batches:
                warn_of_masks(engine, batches[0], training=False)
            if task is None or not batches:
                return None
            metrics = task.new_metrics() if isinstance(task, HasMetrics) else None
            if metrics:
                metrics.reset()
            with engine.precision.autocast():
                output = as_step_output(task.step(engine.model, batches[0]), training=False)
            records = ["/".join(path) for path in flatten_nested_dict(output.records or {})]
            if not metrics or output.outputs is None:
                return records if not metrics else None
            if not isinstance(metrics, EpochMetrics):
                update_of(metrics)(output.outputs)
                metrics.reset()
                return None
            measured = metrics.try_batch(output.outputs)
            return None if measured is None else [*records, *measured]
        finally:
            cursor.close()
