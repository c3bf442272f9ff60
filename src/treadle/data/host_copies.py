"""Host copies of batches on a device, for code that counts something in them.

Counting on the device and reading the result would make the host wait in every step. A copy is known while the moved
tensor lives and neither of the two is written to; otherwise counting needs a read from the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_COPIES = WeakIdKeyDictionary()  # not attributes of the tensors, which would be saved with them


class _Noted(NamedTuple):
    copy: Tensor
    versions: tuple[int, int]


def note_host_copy(moved: Tensor, copy: Tensor) -> Tensor:
    """Record the host copy of a device tensor, and return the tensor.

    Nothing is recorded if the tensor was not moved: a tensor that is its own copy would live forever.

    Args:
        moved: the tensor.
        copy: equal host tensor, created by this package, since writes through NumPy go unnoticed.

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
    """Record the host copies of an object's tensors by name, and return the object."""
    for name, tensor in tensors_by_name(moved).items():
        if name in copies:
            note_host_copy(tensor, copies[name])
    return moved


def tensors_by_name(value: Any) -> dict[str, Tensor]:
    """Return the tensors that an object, such as a graph of torch_geometric, holds directly.

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
    """Return the host copy of a tensor if known, else the tensor itself.

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
