"""Warnings and errors for a batch of one sample in a BatchNorm layer."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from treadle.distributed.state_names import clean_name
from treadle.errors import ConfigError, TreadleError

if TYPE_CHECKING:
    from treadle.engine.loop import Engine


@contextlib.contextmanager
def explaining_single_samples(engine: Engine) -> Iterator[None]:
    """Turn BatchNorm's error about a batch of one sample into one that names batch and fix.

    Raises:
        ConfigError: a step failed on a batch of one sample.
    """
    try:
        yield
    except ValueError as error:
        found = None if isinstance(error, TreadleError) else _single_sample(engine, error)
        if found is None:
            raise
        batch, layer = found
        step = engine.step + (not engine.progress.in_step)  # a user's loop counts a step only after it
        raise ConfigError(
            f"batch {batch} of epoch {engine.epoch + 1} (step {step}) has one sample, but {layer} normalises over "
            "the samples of a batch in training, and one sample has no variance. Pass drop_last=True to the loader, "
            "use another batch_size, or put the layer into eval mode"
        ) from error


def _single_sample(engine: Engine, error: BaseException) -> tuple[int, str] | None:
    """Return the micro-batch with one sample and the layer that refuses it, if a step failed that way."""
    layers: dict[nn.Module, str] = {
        module: f"{clean_name(name)} ({type(module).__name__})"
        for name, module in engine.model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
    }
    if not layers:
        return None
    failed = _failed_layer(error)
    layer = layers.get(failed[0]) if failed is not None else next(iter(layers.values()))
    batches = engine.attempt.group.batches
    done = len(engine.attempt.outputs)
    if engine.progress.in_step and done < len(batches):
        number, samples = engine.cursor.position - len(batches) + done + 1, _num_samples(batches[done])
    else:  # in a user's step or loop, which the engine cannot inspect
        number, samples = engine.cursor.position, None if failed is None else len(failed[1])
    return None if layer is None or samples != 1 else (number, layer)


def _failed_layer(error: BaseException) -> tuple[nn.Module, Tensor] | None:
    """Return the BatchNorm layer in whose forward pass an error was raised, and its input."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module, given = frame.f_locals.get("self"), frame.f_locals.get("input")
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and isinstance(given, Tensor) and given.dim():
            return module, given
    return None


def _num_samples(batch: Any) -> int | None:
    """Return the first dimension of the first tensor, or the number of graphs of a graph batch."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else None
    graphs = getattr(batch, "num_graphs", None)
    if isinstance(graphs, int):
        return graphs
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((size for part in parts if (size := _num_samples(part)) is not None), None)
