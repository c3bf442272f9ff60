"""Several tensors in one piece of memory, so that one copy moves all: a launch for each costs more than the bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNED = 64  # bytes


def in_one_piece(tensors: Sequence[Tensor], *, pin_memory: bool = False) -> list[Tensor]:
    """Return copies of tensors of the CPU that lie one after the other in one piece of memory.

    Example:
        >>> one, two = in_one_piece([torch.ones(2), torch.tensor([True])])
        >>> one, two, one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()
        (tensor([1., 1.]), tensor([True]), True)
    """
    offsets, size = [], 0
    for tensor in tensors:
        offsets.append(size)
        size = _aligned(size + tensor.nbytes)
    views = views_of_piece(torch.zeros(size, dtype=torch.uint8, pin_memory=pin_memory), tensors, offsets)
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor)
    return views


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def offsets_in_one_piece(tensors: Sequence[Tensor]) -> list[int] | None:
    """Return where tensors begin in the piece of memory that they fill, in bytes; None where they fill none.

    Example:
        >>> offsets_in_one_piece(in_one_piece([torch.ones(2), torch.ones(1)]))
        [0, 64]
        >>> offsets_in_one_piece([torch.ones(2), torch.ones(1)]) is None
        True
    """
    if len(tensors) < 2 or any(tensor.device.type != "cpu" for tensor in tensors):
        return None
    first, last = tensors[0].untyped_storage(), tensors[-1].untyped_storage()
    start = first.data_ptr()
    if start != last.data_ptr():
        return None
    offsets, end = [], 0
    for tensor in tensors:
        offset = tensor.data_ptr() - start if tensor.numel() else _aligned(end)  # an empty one is nowhere
        if offset < end or not tensor.is_contiguous():
            return None
        offsets.append(offset)
        end = offset + tensor.nbytes
    return offsets if end <= first.nbytes() < end + _ALIGNED else None


def bytes_of_piece(tensors: Sequence[Tensor]) -> Tensor:
    """Return the memory of tensors that lie in one piece, as bytes."""
    storage = tensors[0].untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


def views_of_piece(piece: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int]) -> list[Tensor]:
    """Return tensors of the shapes and types of others, in a piece of memory."""
    return [
        piece[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, offset in zip(tensors, offsets, strict=True)
    ]
