"""Content of the files that ``torch.save`` writes, for plain trees of hundreds of tensors: in a third of its time.

``torch.save`` calls Python many times for each tensor and holds the interpreter while it sums and writes, for which all
other runs of a process wait. Here sums and writes of large tensors run without the interpreter.
"""

from __future__ import annotations

import functools
import pickle
import struct
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treadle.device.one_piece import bytes_of_piece

_MOST = 1 << 31  # bytes; torch writes larger files in another form
_ALIGNED = 64  # bytes, of each record
_HEADER = struct.Struct("<4s5H3I2H")
_SUM = struct.Struct("<4s3I")  # after each record
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LONG_END = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")
_FLAGS = 0x800, 0x808  # a name in UTF-8, and a sum after the content, if any
_PADDINGS = [b"FB" + struct.pack("<H", size) + b"Z" * size for size in range(_ALIGNED)]
_STORAGES = {
    torch.float64: "Double", torch.float32: "Float", torch.float16: "Half", torch.bfloat16: "BFloat16",
    torch.int64: "Long", torch.int32: "Int", torch.int16: "Short", torch.int8: "Char", torch.uint8: "Byte",
    torch.bool: "Bool",
}  # fmt: skip


class _Unusual(Exception):
    """Value that only ``torch.save`` can write."""


def pieces_of(tree: Mapping[str, Any]) -> list[Any] | None:
    """Return the content of a file with a tree, in pieces whose memory is partly that of its tensors.

    Returns:
        None if the tree holds more than dicts, lists, numbers, strings and plain CPU tensors that share all or none of
        their memory, or is too large.

    Example:
        >>> import io
        >>> torch.load(io.BytesIO(b"".join(pieces_of({"weight": torch.ones(2)}))))
        {'weight': tensor([1., 1.])}
    """
    written = _TreePickle()
    try:
        written.add(dict(tree))
        written.end()
    except _Unusual:
        return None
    records: list[tuple[str, Any]] = [
        ("data.pkl", b"".join(written.parts)),
        (".format_version", b"1"),
        (".storage_alignment", b"%d" % _ALIGNED),
        ("byteorder", sys.byteorder.encode()),
        *((f"data/{number}", content) for number, content in enumerate(written.contents)),
        ("version", b"3\n"),
    ]
    return _archived(records) if sum(map(_size, written.contents)) < _MOST else None


def _size(content: Any) -> int:
    return content.nbytes if type(content) is np.ndarray else len(content)


def _archived(records: Sequence[tuple[str, Any]]) -> list[Any]:
    """Return the pieces of a zip archive of records, in torch's layout."""
    at = 0
    pieces: list[Any] = []
    table: list[bytes] = []
    for short, content in records:
        name, size, total = f"archive/{short}".encode(), _size(content), zlib.crc32(content)
        padding = _PADDINGS[-(at + _HEADER.size + len(name) + 4) % _ALIGNED]
        flags = _FLAGS[size > 0]
        header = _HEADER.pack(b"PK\3\4", 0, flags, 0, 0, 0, 0, 0, 0, len(name), len(padding))
        entry = _ENTRY.pack(b"PK\1\2", 0, 0, flags, 0, 0, 0, total, size, size, len(name), 0, 0, 0, 0, 0, at)
        end = _SUM.pack(b"PK\7\x08", total, size, size) if size else b""
        pieces += (header, name, padding, content, end)
        table += (entry, name)
        at += len(header) + len(name) + len(padding) + size + len(end)
    directory, count = b"".join(table), len(records)
    return [
        *pieces,
        directory,
        _LONG_END.pack(b"PK\6\6", 44, 0x31E, 45, 0, 0, count, count, len(directory), at),
        _LOCATOR.pack(b"PK\6\7", 0, at + len(directory), 1),
        _END.pack(b"PK\5\6", 0, 0, count, count, len(directory), at, 0),
    ]


class _TreePickle:
    """Pickle of a tree in the form of ``torch.save``.

    Attributes:
        parts: the pickle so far.
        contents: bytes of each storage, in the order of their names.
    """

    def __init__(self) -> None:
        self.parts = [b"\x80\x02"]
        self.contents: list[Any] = []
        self._records: dict[int, tuple[int, int, torch.dtype]] = {}  # number, size and dtype, by address
        self._memo: dict[bytes, bytes] = {}
        self._around: dict[Any, tuple[bytes, bytes]] = {}  # pickles around the names of storages, by kind of tensor

    def add(self, value: Any) -> None:
        """Add a value."""
        kind, parts = type(value), self.parts
        if kind is Tensor:
            self._add_tensor(value)
        elif kind is dict:
            parts.append(b"}(")
            for key, item in value.items():
                parts.append(_key(key) if type(key) is str else _scalar(key))
                self.add(item)
            parts.append(b"u")
        elif kind is list:
            parts.append(b"](")
            for item in value:
                self.add(item)
            parts.append(b"e")
        else:
            parts.append(_scalar(value))

    def end(self) -> None:
        """End the pickle.

        Raises:
            _Unusual: tensors share a part of their memory.
        """
        self.parts.append(b".")
        last = 0
        for start in sorted(self._records):
            if start < last:
                raise _Unusual
            last = start + self._records[start][1]

    def _add_tensor(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided or tensor.requires_grad or tensor.is_neg() or vars(tensor):
            raise _Unusual
        dtype, shape, stride, offset = tensor.dtype, tensor.shape, tensor.stride(), 0
        if tensor.is_contiguous():
            start, size = tensor.data_ptr(), tensor.nbytes
        else:
            storage, offset = tensor.untyped_storage(), int(tensor.storage_offset())
            start, size = storage.data_ptr(), storage.nbytes()
        number, length, known = self._records.get(start) or self._add_record(tensor, start, size)
        if length != size or dtype is not known:
            raise _Unusual
        kind = dtype, shape, stride, offset, size
        begin, end = self._around.get(kind) or self._describe(kind)
        self.parts += (begin, _key(str(number)), end)

    def _add_record(self, tensor: Tensor, start: int, size: int) -> tuple[int, int, torch.dtype]:
        if tensor.device.type != "cpu" or tensor.dtype not in _STORAGES:
            raise _Unusual
        added = len(self.contents), size, tensor.dtype
        if size:  # else it has no address
            self._records[start] = added
        if not tensor.is_contiguous():
            tensor = bytes_of_piece([tensor])
        elif tensor.dtype is torch.bfloat16:  # which NumPy does not have
            tensor = tensor.view(torch.int16)
        self.contents.append(tensor.numpy())
        return added

    def _describe(self, kind: Any) -> tuple[bytes, bytes]:
        """Return the pickle of a tensor before and after the name of its storage."""
        dtype, shape, stride, offset, size = kind
        seen = len(self._memo)
        begin = self._known(b"ctorch._utils\n_rebuild_tensor_v2\n") + b"((" + self._known(_scalar("storage"))
        begin += self._known(f"ctorch\n{_STORAGES[dtype]}Storage\n".encode())
        end = self._known(_scalar("cpu")) + _scalar(size // dtype.itemsize) + b"tQ" + _scalar(offset)
        end += b"".join(b"(%bt" % b"".join(map(_scalar, each)) for each in (shape, stride))
        end += b"\x89" + self._known(b"ccollections\nOrderedDict\n") + b")RtR"
        if len(self._memo) == seen:  # else this names what the others repeat
            self._around[kind] = begin, end
        return begin, end

    def _known(self, value: bytes) -> bytes:
        """Return a pickled value that is named where it first occurs, or that name."""
        name = self._memo.get(value)
        if name is not None:
            return b"h" + name
        name = self._memo[value] = bytes([len(self._memo)])
        return value + b"q" + name


def _scalar(value: Any) -> bytes:
    """Return a pickled number, string or None."""
    kind = type(value)
    if kind is str:
        text: bytes = value.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(text)) + text
    if kind in (int, float, bool, type(None)):
        return pickle.dumps(value, 2)[2:-1]
    raise _Unusual


_key: Callable[[Any], bytes] = functools.lru_cache(maxsize=1 << 13)(_scalar)  # those of every save are the same
