"""Structure of batches: inputs and targets, samples, tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from treadle.device import moves_itself
from treadle.errors import ConfigError


def split_batch(batch: Any) -> tuple[Any, Any]:
    """Return ``(inputs, targets)`` of a loader's item; targets are None if the item has none by position.

    A list or tuple of two or more yields its first two items, one of length one its only item. A tensor, a mapping or
    anything else is taken as inputs.

    Raises:
        ConfigError: the item is an empty list or tuple.

    Example:
        >>> split_batch((1, 2, 3)), split_batch([1]), split_batch({"x": 1})
        ((1, 2), (1, None), ({'x': 1}, None))
    """
    if not isinstance(batch, (list, tuple)) or moves_itself(batch):
        return batch, None
    if not batch:
        raise ConfigError(
            f"the loader yielded an empty {type(batch).__name__}; there is nothing to train on", argument="batch"
        )
    return batch[0], batch[1] if len(batch) > 1 else None


def first_tensor(obj: Any) -> Tensor | None:
    """Return the first tensor in a nesting of containers, or None."""
    return next(tensors_in(obj), None)


def tensors_in(obj: Any) -> Iterator[Tensor]:
    """Yield the tensors in a nesting of containers and of objects with attributes."""
    if isinstance(obj, Tensor):
        yield obj
    elif isinstance(obj, Mapping):
        for value in obj.values():
            yield from tensors_in(value)
    elif isinstance(obj, (list, tuple)):
        for value in obj:
            yield from tensors_in(value)
    elif hasattr(obj, "__dict__"):
        yield from tensors_in(vars(obj))


def num_samples(obj: Any) -> int | None:
    """Return the number of graphs of a graph batch, else dimension 0 of the first tensor; None without a tensor.

    Example:
        >>> import torch
        >>> num_samples({"x": torch.zeros(3, 2)})
        3
    """
    graphs = None if isinstance(obj, Tensor) else getattr(obj, "num_graphs", None)
    if isinstance(graphs, int):
        return graphs
    tensor = obj if isinstance(obj, Tensor) else first_tensor(obj)
    if tensor is None:
        return None
    return tensor.shape[0] if tensor.dim() else 1
