"""Serialization of values for other ranks: pickled, with tensors as raw memory.

torch pickles each tensor as a separate archive, and reading one is slow. The state that ranks gather for a checkpoint
holds about thirty small tensors per rank.
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
    """Serialize a value for :func:`unpacked`, with plain CPU tensors as raw memory.

    Args:
        value: any picklable value. Tensors that share memory no longer do afterwards.

    Example:
        >>> unpacked(packed({"step": 3, "loss": torch.tensor(2.5)}))
        {'step': 3, 'loss': tensor(2.5000)}
    """
    into = io.BytesIO()
    _Packer(into, protocol=5).dump(value)
    return into.getvalue()


def unpacked(data: bytes) -> Any:
    """Invert :func:`packed`; only for bytes from this run's ranks, since it unpickles them."""
    return pickle.loads(data)
