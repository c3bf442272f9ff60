"""Validation of a pickle's claims about tensors against the records, before any allocation.

``torch.load(weights_only=True)`` runs no foreign code, but trusts the sizes it reads: a storage that claims more
elements than its record holds is read beyond its end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

REBUILDS = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_qtensor")
CALLABLE = {
    *(f"torch._utils.{name}" for name in REBUILDS),
    "torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state",
    "torch._utils._rebuild_sparse_tensor", "torch._utils._rebuild_meta_tensor_no_storage",
    "torch._tensor._rebuild_from_type_v2", "torch.serialization._get_layout", "torch.Size", "torch.device",
    "collections.OrderedDict", "collections.Counter", "_codecs.encode", "builtins.set", "builtins.complex",
}  # fmt: skip
_ITEM_SIZES = {
    "Double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2, "Char": 1, "Byte": 1, "Bool": 1,
    "ComplexDouble": 16, "ComplexFloat": 8, "QInt8": 1, "QUInt8": 1, "QInt32": 4, "QUInt4x2": 1, "QUInt2x4": 1,
    "Untyped": 1,
}  # fmt: skip
_NAMES = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
}  # fmt: skip
_DTYPES = {  # bytes per element; a table, since inspecting a file must not import torch
    f"torch.{name}": width
    for width, names in {
        1: (
            "bool uint8 int8 quint8 qint8 quint4x2 quint2x4 bits1x8 bits2x4 bits4x2 bits8 bit uint1 uint2 uint3 uint4 "
            "uint5 uint6 uint7 int1 int2 int3 int4 int5 int6 int7 float8_e5m2 float8_e4m3fn float8_e5m2fnuz "
            "float8_e4m3fnuz float8_e8m0fnu float4_e2m1fn_x2"
        ),
        2: "int16 short uint16 float16 half bfloat16 bits16",
        4: "int32 int uint32 qint32 float32 float complex32 chalf bcomplex32",
        8: "int64 long uint64 float64 double complex64 cfloat",
        16: "complex128 cdouble",
    }.items()
    for name in names.split()
}
DATA = {
    *_DTYPES, "torch.Tensor", "torch.nn.parameter.Parameter", "torch.storage.UntypedStorage",
    *(f"torch.{kind}Storage" for kind in _ITEM_SIZES),
    *(f"torch.per_{kind}" for kind in ("tensor_affine", "tensor_symmetric", "channel_affine", "channel_symmetric")),
}  # fmt: skip


class PickleError(Exception):
    """Reason why a pickle is refused or damaged, in one sentence, internal to this package."""


@dataclass(frozen=True)
class Named:
    """Name in a pickle that an unpickler would import."""

    name: str


@dataclass(frozen=True)
class Storage:
    """Storage of tensors: dtype and claimed number of elements."""

    kind: str
    key: str
    numel: int


@dataclass(frozen=True)
class TensorEntry:
    """Tensor as described by the pickle.

    Attributes:
        shape: shape of the tensor.
        dtype: name of the dtype, without ``torch.``.
        nbytes: size of its elements in bytes.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass
class Made:
    """Result that a call would return."""

    function: str
    arguments: Any
    state: Any = None


def shortened(text: str) -> str:
    r"""Return an untrusted string as at most 80 ASCII characters, safe to show on a terminal.

    Example:
        >>> shortened("a\x1b[31m")
        'a\\x1b[31m'
    """
    plain = ascii(text)[1:-1]
    return plain if len(plain) <= 80 else f"{plain[:77]}..."


def storage_of(claim: Any, storages: Mapping[str, int]) -> Storage:
    """Return the storage named by a persistent id, if its record has exactly the claimed size.

    Raises:
        PickleError: the sizes differ.
    """
    match claim:
        case ("storage", Named(name=name), str(key), str(), int(numel)) if not isinstance(numel, bool):
            kind = name.rpartition(".")[2].removesuffix("Storage")
        case _:
            raise PickleError("its pickle refers to something outside the archive")
    if name not in DATA or kind not in _ITEM_SIZES:
        raise PickleError(f"it holds a storage of unknown kind {shortened(name)}")
    if key not in storages:
        raise PickleError(f"the record data/{shortened(key)} is missing")
    if numel * _ITEM_SIZES[kind] != storages[key]:
        raise PickleError(
            f"storage {shortened(key)} claims {numel:,} elements of {_ITEM_SIZES[kind]} bytes and its record has "
            f"{storages[key]:,} bytes"
        )
    return Storage(kind, key, numel)


def sizes_of(value: Any) -> tuple[int, ...]:
    """Return checked sizes or strides.

    Raises:
        PickleError: they are not a tuple of whole numbers >= 0.
    """
    if isinstance(value, Made) and value.function == "torch.Size" and len(value.arguments) == 1:
        value = value.arguments[0]
    if not isinstance(value, tuple) or not all(type(size) is int and 0 <= size < 2**63 for size in value):
        raise PickleError("a tensor's sizes are not whole numbers >= 0")
    return value


def tensor_of(function: str, arguments: tuple[Any, ...]) -> TensorEntry:
    """Return the tensor that a rebuild call would create, if it fits its storage.

    Raises:
        PickleError: it does not fit.
    """
    storage, offset, size, stride = arguments[:4]
    if not isinstance(storage, Storage):
        raise PickleError("a tensor has no storage")
    sizes, strides = sizes_of(size), sizes_of(stride)
    (first,) = sizes_of((offset,))
    dtype = _NAMES.get(storage.kind, storage.kind.lower())
    width = _ITEM_SIZES[storage.kind]
    if function == "_rebuild_tensor_v3":
        dtype = dtype_name(arguments[6])
        width = _DTYPES[f"torch.{dtype}"]
    if len(sizes) != len(strides):
        raise PickleError(f"a tensor has {len(sizes)} sizes and {len(strides)} strides")
    numel = math.prod(sizes)
    available = storage.numel * _ITEM_SIZES[storage.kind] // width
    last = first + sum((count - 1) * step for count, step in zip(sizes, strides, strict=True))
    if (numel and (last >= available or numel > available)) or first > available:
        raise PickleError(
            f"a tensor of shape {shortened(str(list(sizes)))} reaches outside its storage of {available:,} elements"
        )
    return TensorEntry(sizes, dtype, numel * width)


def dtype_name(value: Any) -> str:
    """Return the name of a dtype without ``torch.``.

    Raises:
        PickleError: it is not a dtype.
    """
    if not isinstance(value, Named) or value.name not in _DTYPES:
        raise PickleError("a tensor's dtype is unknown to torch")
    return value.name.removeprefix("torch.")
