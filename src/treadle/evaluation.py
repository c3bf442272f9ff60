"""Evaluation: the same weights give the same numbers to the bit, and training does not notice."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from treadle import distributed
from treadle.data.cursor import Cursor
from treadle.data.sources import generators_of
from treadle.means import RunningMeans
from treadle.nested import as_number, flatten_nested_dict, unflatten
from treadle.precision import Precision
from treadle.seed import forked_rng
from treadle.task import HasMetrics, Task, add_output, as_step_output


class EvaluationAbandoned(Exception):
    """A signal arrived during an evaluation; the step boundary before it is saved."""


def evaluate(
    model: nn.Module,
    loader: Iterable[Any],
    task: Task,
    *,
    precision: Precision,
    eval_seed: int = 0,
    cursor: Cursor | None = None,
    interrupted: Callable[[], bool] | None = None,
) -> dict[str, Any]:
    """Returns the weighted mean loss, records and epoch metrics of a task over a loader.

    Args:
        model: on the device of ``precision``.
        loader: any iterable of micro-batches.
        task: turns a batch into a loss.
        precision: autocast as in training.
        eval_seed: seeds the RNG of the evaluation.
        cursor: reused between evaluations to keep a loader's persistent workers.
        interrupted: asked before each batch.

    Returns:
        ``loss``, the records, then the metrics; all reduced over ranks.

    Raises:
        EvaluationAbandoned: ``interrupted`` says so.
    """
    means = RunningMeans()
    metrics = task.new_metrics() if isinstance(task, HasMetrics) else None

    def score(batch: Any) -> None:
        if interrupted is not None and interrupted():
            raise EvaluationAbandoned
        output = as_step_output(task.step(model, batch), training=False)
        add_output(means, output)
        if metrics is not None and output.outputs is not None:
            metrics.update(output.outputs)

    for_each_batch(model, loader, score, precision=precision, eval_seed=eval_seed, cursor=cursor)
    values = means.compute(lambda table: distributed.sum_over_ranks(table, precision.device))
    result = {"loss": values.get("loss", math.nan), **values.get("records", {})}
    return {**result, **(_as_numbers(metrics.compute()) if metrics is not None else {})}


def _as_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turns 0-d tensors and numpy numbers into floats, for records and files; tables and texts stay as they are."""
    flat = {}
    for path, value in flatten_nested_dict(values).items():
        try:
            flat[path] = float(as_number(path, value))
        except TypeError:
            flat[path] = value
    return unflatten(flat)


def for_each_batch(
    model: nn.Module,
    loader: Iterable[Any],
    fn: Callable[[Any], None],
    *,
    precision: Precision,
    eval_seed: int = 0,
    cursor: Cursor | None = None,
) -> None:
    """Calls ``fn`` with every batch under the rules of an evaluation.

    Eval mode, no gradients, autocast, and an RNG of its own. The mode of every module, the generators of the loader
    and the training RNG are put back, also after an exception.
    """
    cursor = Cursor() if cursor is None else cursor
    with evaluation_rules(model, loader, eval_seed=eval_seed):
        cursor.restart()
        cursor.open(loader)
        while batches := cursor.take(1).batches:
            with precision.autocast():
                fn(batches[0])


@contextlib.contextmanager
def evaluation_rules(model: nn.Module, loader: Any, *, eval_seed: int = 0) -> Iterator[None]:
    """Eval mode, no gradients, and random numbers of its own inside the block; training does not notice."""
    with forked_rng(eval_seed), _kept_generators(loader), evaluation_mode(model):
        yield


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Puts every module into eval mode without gradients, and each module's own mode back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def _kept_generators(loader: Any) -> Iterator[None]:
    """Puts the generators of an evaluation loader back, so that its next pass draws the same order."""
    states = [(generator, generator.get_state()) for generator in generators_of(loader)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
