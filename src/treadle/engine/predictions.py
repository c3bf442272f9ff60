"""Outputs of a model over a whole loader, in the loader's order, on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from treadle.engine.evaluation import for_each_batch
from treadle.engine.outputs import joined, outputs_on_cpu
from treadle.engine.signal_exit import interruption
from treadle.optim.evaluation_point import at_evaluation_point

if TYPE_CHECKING:
    from treadle.engine.loop import Engine


@contextlib.contextmanager
def scored_weights(engine: Engine) -> Iterator[None]:
    """Use the weights that evaluations score inside the block: the averaged ones if there are any."""
    engine.prepare()
    average = next(iter(engine.averages.values()), None)
    with at_evaluation_point(engine.optimizer) if average is None else average.applied_to(engine.model):
        yield


def predicted(engine: Engine, loader: Iterable[Any], forward: Callable[[Any], Any]) -> Any:
    """Return the concatenated outputs of ``forward(batch)`` over a loader, without affecting training.

    Raises:
        ConfigError: the loader is empty, or the batches' outputs differ in more than dimension 0.
    """
    outputs: list[Any] = []
    with scored_weights(engine):
        for_each_batch(
            engine.model,
            loader,
            lambda batch: outputs.append(outputs_on_cpu(forward(batch))),
            precision=engine.precision,
            eval_seed=engine.eval_seed,
            cursor=engine.eval_cursor,
            interrupted=interruption(engine) if engine.num_ranks == 1 else None,  # one rank may predict alone
        )
    return joined(outputs)
