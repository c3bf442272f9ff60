"""Evaluation: the same weights give the same numbers to the bit, and training does not notice."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from treadle import distributed
from treadle.data.sources import generators_of
from treadle.means import RunningMeans
from treadle.seed import forked_rng
from treadle.task import HasMetrics, Task, add_output, as_step_output

if TYPE_CHECKING:
    from treadle.engine import Engine


class EvaluationAbandoned(Exception):
    """A signal arrived during an evaluation; the step boundary before it is saved."""


def evaluate(engine: Engine, loader: Iterable[Any], task: Task) -> dict[str, Any]:
    """Returns the weighted mean loss, records and epoch metrics of a task over a loader.

    Runs under the training autocast, without gradients, and under an RNG of its own seeded with the engine's
    ``eval_seed``. The mode of every module and the generators of the loader are put back.
    """
    means = RunningMeans()
    metrics = task.new_metrics() if isinstance(task, HasMetrics) else None
    with forked_rng(engine.eval_seed), _kept_generators(loader), evaluation_mode(engine.model):
        cursor = engine.eval_cursor
        cursor.restart()
        cursor.open(loader)
        while batches := cursor.take(1).batches:
            if engine.exit_plans and distributed.agree(engine.signals.received or 0, engine.device):
                raise EvaluationAbandoned
            with engine.precision.autocast():
                output = as_step_output(task.step(engine.model, batches[0]), training=False)
            add_output(means, output)
            if metrics is not None and output.outputs is not None:
                metrics.update(output.outputs)
    values = means.compute(lambda table: distributed.sum_over_ranks(table, engine.device))
    result = {"loss": values.get("loss", math.nan), **values.get("records", {})}
    return {**result, **(metrics.compute() if metrics is not None else {})}


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
