"""Evaluation: bitwise reproducible for the same weights, with no effect on training."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DistributedSampler

from treadle import distributed
from treadle.data.amount import Amount, batches_in
from treadle.data.cursor import Cursor
from treadle.data.own_state import restored_generators
from treadle.data.samplers import samplers_of
from treadle.engine.failure import batch_named_in_errors
from treadle.engine.run_log import EvaluationCount
from treadle.errors import ConfigError
from treadle.means import RunningMeans
from treadle.nested import as_number, flatten_nested_dict, unflatten
from treadle.optim.precision import Precision
from treadle.seed import forked_rng, mix_seed
from treadle.task import HasMetrics, Task, add_output, as_step_output, update_of


class EvaluationAbandoned(Exception):
    """Signal during an evaluation; the state of the step boundary before it is saved."""


def evaluate(
    model: nn.Module,
    loader: Iterable[Any],
    task: Task,
    *,
    precision: Precision,
    eval_seed: int = 0,
    cursor: Cursor | None = None,
    interrupted: Callable[[], bool] | None = None,
    limit: Amount | None = None,
) -> dict[str, Any]:
    """Return the weighted mean loss, records and epoch metrics of a task over a loader.

    Args:
        model: model on the device of ``precision``.
        loader: any iterable of micro-batches.
        task: turns a batch into a loss.
        precision: autocast settings, as in training.
        eval_seed: seeds the RNG of the evaluation.
        cursor: cursor reused between evaluations to keep a loader's persistent workers.
        interrupted: called before each batch; on several ranks, before each batch that all of them have.
        limit: number of batches or fraction of the loader to evaluate; None for all.

    Returns:
        ``loss``, the records, then the metrics; all reduced over ranks.

    Raises:
        EvaluationAbandoned: ``interrupted`` returned True.
    """
    means = RunningMeans()
    metrics = task.new_metrics() if isinstance(task, HasMetrics) else None
    update = None
    if metrics is not None:
        metrics.reset()
        update = update_of(metrics)

    def score(batch: Any) -> None:
        output = as_step_output(task.step(model, batch), training=False)
        add_output(means, output)
        if update is not None and output.outputs is not None:
            update(output.outputs)

    for_each_batch(
        model, loader, score, precision=precision, eval_seed=eval_seed, cursor=cursor, interrupted=interrupted,
        limit=limit,
    )  # fmt: skip
    if distributed.world_size() > 1:
        means.align_keys(distributed.gather_objects(means.names()))  # a rank without batches has no names
    values = means.compute(distributed.sum_over_ranks)
    result = {"loss": values.get("loss", math.nan), **values.get("records", {})}
    return {**result, **(_as_plain(metrics.compute()) if metrics is not None else {})}


def results_of(method: str, result: Any) -> Mapping[str, Any]:
    """Return the checked result of a user's evaluation.

    Raises:
        ConfigError: it is not a mapping, for example because of a missing ``return``, or a value is neither a number
            nor a list.

    Example:
        >>> results_of("evaluate", {"loss": 1.0})
        {'loss': 1.0}
    """
    if not isinstance(result, Mapping):
        raise ConfigError(f"the override returned a {type(result).__name__}; return a dict of numbers", argument=method)
    for path, value in flatten_nested_dict(result).items():
        try:
            _ = value if isinstance(value, (list, str)) or value is None else as_number(path, value)
        except TypeError as error:
            raise ConfigError(f"the override returned a non-numeric value: {error}", argument=method) from error
    return result


def try_override(evaluate: Callable[[], Any], logger: logging.Logger) -> Mapping[str, Any] | None:
    """Run a user's evaluation on one batch before step 1 and return its results; None if it needs more data.

    Raises:
        ConfigError: it does not return a dict of numbers.
    """
    try:
        with restored_closure(evaluate):
            return results_of("evaluate", evaluate())
    except ConfigError:
        raise
    except (ValueError, LookupError, ArithmeticError, AssertionError) as error:  # a score may need two classes
        logger.warning(
            "evaluate: the override failed on the batch it was tried on before step 1: %s: %s",
            type(error).__name__, error,
        )  # fmt: skip
        return None


@contextlib.contextmanager
def restored_closure(function: Callable[..., Any]) -> Iterator[None]:
    """Restore, after the block, the plain values and container contents in a function's closure.

    Example:
        >>> calls = (lambda seen: lambda: seen.append(1) or len(seen))([])
        >>> with restored_closure(calls):
        ...     _ = calls()
        >>> calls()
        1
    """
    waiting, seen, cells, containers = [function], set[int](), list[Any](), list[Any]()
    while waiting:
        one: Any = waiting.pop()
        one = getattr(one, "func", getattr(one, "__func__", one))
        for cell in getattr(one, "__closure__", None) or () if id(one) not in seen else ():
            with contextlib.suppress(ValueError):  # an empty cell
                value = cell.cell_contents
                if callable(value):
                    waiting.append(value)
                elif isinstance(value, (list, dict, set, deque)):
                    containers.append((value, copy.copy(value)))
                elif value is None or isinstance(value, (int, float, str, tuple)):
                    cells.append((cell, value))
        seen.add(id(one))
    try:
        yield
    finally:
        for cell, value in cells:
            cell.cell_contents = value
        for value, before in containers:
            value.clear()
            value.extend(before) if isinstance(value, (list, deque)) else value.update(before)


def _as_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert numbers to floats, and tensors and arrays to lists, for records and files; keep strings."""
    flat: dict[tuple[str, ...], Any] = {}
    for path, value in flatten_nested_dict(values).items():
        try:
            flat[path] = float(as_number(path, value))
        except TypeError:
            flat[path] = value.tolist() if isinstance(value, (torch.Tensor, np.ndarray)) else value
    return unflatten(flat)


def for_each_batch(
    model: nn.Module,
    loader: Iterable[Any],
    fn: Callable[[Any], None],
    *,
    precision: Precision,
    eval_seed: int = 0,
    cursor: Cursor | None = None,
    interrupted: Callable[[], bool] | None = None,
    limit: Amount | None = None,
) -> None:
    """Call ``fn`` with every batch under the rules of an evaluation.

    Eval mode, no gradients, autocast, and a separate RNG. The mode of every module, the generators of the loader and
    the training RNG are restored, also after an exception. Ranks may have unequal numbers of batches, unless the model
    is sharded: then every forward pass needs all ranks.

    Raises:
        ConfigError: the model is sharded and the ranks have unequal numbers of batches.
        EvaluationAbandoned: ``interrupted`` returned True.
    """
    cursor = Cursor() if cursor is None else cursor
    sharded = distributed.is_sharded(model)
    cursor.coordinate("equal" if sharded else "independent" if interrupted is None else "unequal")
    with evaluation_rules(model, loader, eval_seed=eval_seed):
        cursor.restart()
        cursor.warn(copies_in(loader))
        cursor.limit_to(None)
        cursor.attach(loader)
        total = cursor.length
        if limit is not None:
            cursor.limit_to(most := batches_in(limit, total, "limit_eval_batches"))
            total = most if total is None else min(most, total)
        cursor.open(loader)
        count = EvaluationCount(total)
        left_in_common = math.inf if cursor.lengths is None else cursor.lengths.common
        try:
            while batches := cursor.take(1).batches:
                if interrupted is not None and left_in_common > 0 and interrupted():
                    raise EvaluationAbandoned
                left_in_common -= 1
                with precision.autocast(), batch_named_in_errors(batches[0], "evaluation"):
                    fn(batches[0])
                count.add_batch()
        except BaseException:
            cursor.close()  # workers must not outlive the evaluation through the error's traceback
            raise


def refuse_no_batch(count: int, loader: str) -> None:
    """Raise ConfigError if a loader gave no batch on any rank; collective.

    Args:
        count: number of batches on this rank.
        loader: subject of the message, as in ``"val_loader: it"``.
    """
    if not distributed.agree(count):
        raise ConfigError(f"{loader} yielded no batch, so there is nothing to average")


def copies_in(loader: Any) -> list[str]:
    """Return a warning that a DistributedSampler biases the means of an evaluation; empty for other loaders.

    Example:
        >>> from torch.utils.data import DataLoader, DistributedSampler
        >>> copies_in(DataLoader(range(4), sampler=DistributedSampler(range(4), num_replicas=2, rank=0)))
        []
    """
    padding = [one for one in samplers_of(loader) if isinstance(one, DistributedSampler) and not one.drop_last]
    copies = {one.num_replicas: one.total_size - len(one.dataset) for one in padding}  # type: ignore[arg-type]
    return [
        f"the DistributedSampler of the evaluation repeats {count} samples to give all {ranks} ranks equally many, "
        "and these count twice in means over ranks; a treadle.data.RankBatchSampler repeats none"
        for ranks, count in copies.items()
        if count
    ]


@contextlib.contextmanager
def evaluation_rules(model: nn.Module, loader: Any, *, eval_seed: int = 0) -> Iterator[None]:
    """Enter eval mode without gradients and with a separate RNG, leaving training unaffected."""
    rank = distributed.rank()
    seed = mix_seed(eval_seed, rank) if rank else eval_seed  # ranks must not draw the same numbers
    with forked_rng(seed), restored_generators(loader), evaluation_mode(model):
        yield


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every module into eval mode without gradients, and restore each module's mode afterwards.

    A sharded model has sharded parameters before and after.
    """
    distributed.reshard(model)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), _without_buffer_sync(distributed.replicated(model)):
            yield
    finally:
        if modes[0][1]:
            model.train()  # it may be overridden, as by adapters that merge their weights to evaluate
        for module, training in modes:
            module.training = training
        distributed.reshard(model)


@contextlib.contextmanager
def _without_buffer_sync(replicas: nn.parallel.DistributedDataParallel | None) -> Iterator[None]:
    """Keep a replica from synchronizing buffers in its forward passes, since other ranks may run fewer."""
    if replicas is None:
        yield
        return
    before, replicas.require_forward_param_sync = replicas.require_forward_param_sync, False
    try:
        yield
    finally:
        replicas.require_forward_param_sync = before
