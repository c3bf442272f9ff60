"""Graph sizes counted on the host before a batch is moved, so that models need not read them from the device.

They are attached only to the moved tensor with the graph index of each node: a modified copy, another batch, or the
same tensor after a write has none, and then the model counts itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from treadle.data.host_copies import host_of

_NAME = "_treadle_graph_sizes"
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class _Noted(NamedTuple):
    sizes: tuple[int, ...]
    version: int


def count_sizes(batch: Any) -> tuple[int, ...] | None:
    """Count the nodes of each graph of a batch on the host.

    Args:
        batch: batch with ``batch`` (N,), the graph index of each node, and ``num_graphs`` if known.

    Returns:
        One size per graph; None if unknown without waiting for a device, or if indices are outside 0 … ``num_graphs`` -
        1, which the model reports.

    Example:
        >>> from types import SimpleNamespace
        >>> count_sizes(SimpleNamespace(batch=torch.tensor([0, 2, 2]), num_graphs=3))
        (1, 0, 2)
    """
    graph_N = getattr(batch, "batch", None)
    if isinstance(graph_N, Tensor):
        graph_N = host_of(graph_N)
    if not isinstance(graph_N, Tensor) or graph_N.device.type != "cpu" or graph_N.dtype not in _INTEGERS:
        return None
    if graph_N.dim() != 1 or len(graph_N) == 0 or int(graph_N.min()) < 0:
        return None
    declared = getattr(batch, "num_graphs", None)
    if isinstance(declared, Tensor) and declared.device.type != "cpu":
        return None
    sizes = torch.bincount(graph_N, minlength=0 if declared is None else int(declared)).tolist()
    return tuple(sizes) if declared is None or len(sizes) == int(declared) else None


def record_sizes(moved: Any, sizes: tuple[int, ...]) -> None:
    """Attach the counted sizes to the moved batch, unless its nodes differ.

    Args:
        moved: the batch on its device; its ``batch`` must not be a tensor of the user, since it is marked.
        sizes: result of `count_sizes`.

    Example:
        >>> from types import SimpleNamespace
        >>> moved = SimpleNamespace(batch=torch.tensor([0, 2, 2]))
        >>> record_sizes(moved, (1, 0, 2))
        >>> recorded_sizes(moved.batch), recorded_sizes(moved.batch.clone())
        ((1, 0, 2), None)
    """
    graph_N = getattr(moved, "batch", None)
    # An inference tensor has no version counter.
    if isinstance(graph_N, Tensor) and graph_N.shape == (sum(sizes),) and not graph_N.is_inference():
        setattr(graph_N, _NAME, _Noted(sizes, graph_N._version))


def recorded_sizes(graph_N: Tensor) -> tuple[int, ...] | None:
    """Return the sizes attached to a tensor; None if there are none or it was written to since.

    Example:
        >>> recorded_sizes(torch.tensor([0, 0])) is None
        True
    """
    noted = getattr(graph_N, _NAME, None)
    return noted.sizes if isinstance(noted, _Noted) and noted.version == graph_N._version else None
