"""Faster pickling for ``torch.save`` of hundreds of small tensors, with identical bytes."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, BinaryIO

import torch
from torch import Tensor

_OfStorage = Callable[[Any], Any]
_STORAGES = torch.storage.TypedStorage, torch.storage.UntypedStorage
_COMMON = frozenset({str, int, float, bool, type(None), tuple, list, dict, OrderedDict, Tensor, torch.dtype})


class _TreePickler(pickle.Pickler):
    """Pickler that calls ``persistent_id`` only for storages, and reduces plain tensors itself."""

    def __init__(self, file: BinaryIO, protocol: int, of_storage: _OfStorage):
        super().__init__(file, protocol=protocol)
        self._of_storage = of_storage

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) in _COMMON:  # asked of every object, so the usual answer comes first
            return None
        return self._of_storage(obj) if isinstance(obj, _STORAGES) else None

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is OrderedDict and not obj and not vars(obj):  # each tensor has one
            return OrderedDict, ()
        if type(obj) is not Tensor or not _is_plain(obj):
            return NotImplemented
        storage: Any = obj._typed_storage()  # type: ignore[no-untyped-call]
        hooks: Any = OrderedDict()
        parts = storage, obj.storage_offset(), tuple(obj.shape), obj.stride(), False, hooks
        return torch._utils._rebuild_tensor_v2, parts


def _is_plain(tensor: Tensor) -> bool:
    flags = tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    plain = tensor.dtype in _DTYPES and tensor.layout is torch.strided and tensor.device.type == "cpu" and not flags
    return plain and not vars(tensor)


_DTYPES = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
}  # fmt: skip


class Pickler:
    """Pickler that ``torch.save`` subclasses with a method ``persistent_id``.

    Args:
        file: output file.
        protocol: pickle protocol.
    """

    persistent_id: _OfStorage

    def __init__(self, file: BinaryIO, protocol: int):
        self._file, self._protocol = file, protocol

    def dump(self, obj: Any) -> None:
        """Write an object."""
        _TreePickler(self._file, self._protocol, self.persistent_id).dump(obj)
