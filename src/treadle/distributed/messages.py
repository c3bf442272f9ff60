"""Values as bytes for other ranks: pickled, with tensors as plain memory.

torch pickles each tensor as a separate archive, and reading one takes as long as some thousand steps of Python. The
state that ranks gather for a checkpoint holds some thirty small tensors of each rank.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor

_AS_NUMPY = {torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
             torch.uint8, torch.bool}  # fmt: skip


class _Packer(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor and _is_plain(value):
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented


def _is_plain(tensor: Tensor) -> bool:
    strided = tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.dtype in _AS_NUMPY
    return strided and not tensor.requires_grad and not tensor.is_conj() and not tensor.is_neg()


def packed(value: Any) -> bytes:
    """Return a value as bytes, which :func:`unpacked` reads; plain tensors on the CPU as their memory.

    Args:
        value: anything that can be pickled. Tensors that share memory are apart afterwards.

    Example:
        >>> unpacked(packed({"step": 3, "loss": torch.tensor(2.5)}))
        {'step': 3, 'loss': tensor(2.5000)}
    """
    into = io.BytesIO()
    _Packer(into, protocol=5).dump(value)
    return into.getvalue()


def unpacked(data: bytes) -> Any:
    """Return what :func:`packed` was given; only for bytes of this run's own ranks, since it unpickles them."""
    return pickle.loads(data)
