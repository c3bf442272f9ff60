"""Copies on the host of batches on a device, and the sizes of graphs counted in them before the move.

Counting on the device and reading the result would make the host wait in every step. A copy is known as long as the
moved tensor lives, and no longer once either of the two was written to: then counting needs a read from the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_COPIES = WeakIdKeyDictionary()  # not attributes of the tensors, which would go into files with them


class _Noted(NamedTuple):
    copy: Tensor
    versions: tuple[int, int]


def note_host_copy(moved: Tensor, copy: Tensor) -> Tensor:
    """Note the copy on the host that a tensor of a device was made from, and return the tensor.

    Nothing is noted where the tensor was not moved: one that is its own copy would live for ever.

    Args:
        moved: the tensor.
        copy: equal to it; of this package, since it is not seen when NumPy writes to it.

    Example:
        >>> import torch
        >>> moved = note_host_copy(torch.ones(2, device="meta"), torch.ones(2))
        >>> host_of(moved)
        tensor([1., 1.])
    """
    was_moved = copy.device.type == "cpu" != moved.device.type and moved.shape == copy.shape
    if was_moved and not (moved.is_inference() or copy.is_inference()):
        _COPIES[moved] = _Noted(copy, (moved._version, copy._version))
    return moved


def note_host_copies(moved: Any, copies: Mapping[str, Tensor]) -> Any:
    """Note the copies of an object's tensors, by their names, and return the object."""
    for name, tensor in tensors_by_name(moved).items():
        if name in copies:
            note_host_copy(tensor, copies[name])
    return moved


def tensors_by_name(value: Any) -> dict[str, Tensor]:
    """Return the tensors that an object holds directly, as a graph of torch_geometric does or any other object.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> list(tensors_by_name(SimpleNamespace(x=torch.ones(1), n=3)))
        ['x']
    """
    is_graph = any(one.__module__.startswith("torch_geometric.") for one in type(value).__mro__)
    held = value.to_dict() if is_graph else getattr(value, "__dict__", {})
    return {name: tensor for name, tensor in held.items() if isinstance(tensor, Tensor)}


def host_of(tensor: Tensor) -> Tensor:
    """Return the copy on the host that a tensor was made from, where one is known; else the tensor itself.

    Example:
        >>> import torch
        >>> tensor = torch.ones(2)
        >>> host_of(tensor) is tensor
        True
    """
    if tensor.device.type == "cpu":
        return tensor
    noted = _COPIES.get(tensor)  # type: ignore[no-untyped-call]
    if noted is None or noted.versions != (tensor._version, noted.copy._version):
        return tensor
    copy: Tensor = noted.copy
    return copy


_NAME = "_treadle_graph_sizes"
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class _NotedSizes(NamedTuple):
    sizes: tuple[int, ...]
    version: int


def count_sizes(batch: Any) -> tuple[int, ...] | None:
    """Count the nodes of each graph of a batch on the host.

    Args:
        batch: with ``batch`` (N,), the graph of each node, and ``num_graphs``, where it knows.

    Returns:
        One size for each graph; None where that is not known without waiting for a device, or where the numbers are no
        graphs 0 … ``num_graphs`` - 1, which is for the model to complain about.

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


def note_sizes(moved: Any, sizes: tuple[int, ...]) -> None:
    """Note what was counted of a batch at the batch as it was moved; nothing where that has other nodes.

    Args:
        moved: the batch on its device; its ``batch`` must be no tensor of the user's, as it is marked.
        sizes: of `count_sizes`.

    Example:
        >>> from types import SimpleNamespace
        >>> moved = SimpleNamespace(batch=torch.tensor([0, 2, 2]))
        >>> note_sizes(moved, (1, 0, 2))
        >>> noted_sizes(moved.batch), noted_sizes(moved.batch.clone())
        ((1, 0, 2), None)
    """
    graph_N = getattr(moved, "batch", None)
    # A tensor of inference mode does not count its writes.
    if isinstance(graph_N, Tensor) and graph_N.shape == (sum(sizes),) and not graph_N.is_inference():
        setattr(graph_N, _NAME, _NotedSizes(sizes, graph_N._version))


def noted_sizes(graph_N: Tensor) -> tuple[int, ...] | None:
    """Return the sizes that were noted at a tensor; None where there are none, or it was written to since.

    Example:
        >>> noted_sizes(torch.tensor([0, 0])) is None
        True
    """
    noted = getattr(graph_N, _NAME, None)
    return noted.sizes if isinstance(noted, _NotedSizes) and noted.version == graph_N._version else None
