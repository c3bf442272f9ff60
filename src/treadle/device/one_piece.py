"""Tensors in one contiguous buffer, so that one copy moves all: separate launches cost more than the bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNED = 64  # bytes


def in_one_piece(tensors: Sequence[Tensor], *, pin_memory: bool = False) -> list[Tensor]:
    """Return copies of CPU tensors that are consecutive in one buffer.

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
    """Return the byte offsets of tensors in their common buffer; None if they do not share one.

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
        offset = tensor.data_ptr() - start if tensor.numel() else _aligned(end)  # an empty tensor has no address
        if offset < end or not tensor.is_contiguous():
            return None
        offsets.append(offset)
        end = offset + tensor.nbytes
    return offsets if end <= first.nbytes() < end + _ALIGNED else None


def bytes_of_piece(tensors: Sequence[Tensor]) -> Tensor:
    """Return the common buffer of tensors, as bytes."""
    storage = tensors[0].untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


def views_of_piece(piece: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int]) -> list[Tensor]:
    """Return views of a buffer with the shapes and dtypes of other tensors."""
    return [
        piece[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, offset in zip(tensors, offsets, strict=True)
    ]
