"""Tensors in a folder of shards, read block by block with PyTorch's reader, without unpickling foreign classes.

The folder's ``.metadata`` is a pickle, as ``torch.distributed.checkpoint`` writes it. It is read with an allow-list of
the few classes that such a file needs, and its content must fit the files that the marker names.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from treadle.checkpoint.files import STORED, first_line
from treadle.checkpoint.safe.claims import shortened
from treadle.checkpoint.shard_manifest import METADATA
from treadle.errors import CheckpointError

Stat = Callable[[], tuple[bytes, Mapping[str, int]]]
_CLASSES: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        Metadata, TensorStorageMetadata, TensorProperties, ChunkStorageMetadata, MetadataIndex, StorageMeta,
        _MEM_FORMAT_ENCODING, _StorageInfo,
    )
}  # fmt: skip
_CLASSES |= {("torch", name): kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)}
_CLASSES |= {("torch", "Size"): torch.Size, ("torch.serialization", "_get_layout"): lambda name: torch.strided}


class StoredTensor:
    """Tensor in a folder of shards; :meth:`read` loads a block of it.

    Attributes:
        shape: shape of the whole tensor.
        dtype: dtype of the tensor.
    """

    def __init__(self, folder: ShardFolder, key: str):
        self._folder = folder
        self.key = key
        described = folder.tensors[key]
        self.shape = described.size
        self.dtype = described.properties.dtype

    def read(self, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a block on the CPU.

        Raises:
            CheckpointError: it cannot be read, or the folder does not contain all of it.
        """
        return self._folder.read(self.key, offsets, sizes)

    def __repr__(self) -> str:
        return f"StoredTensor({self.key!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


class ShardFolder:
    """Index of the tensors of a folder.

    Args:
        path: the folder, for messages.
        stat: returns the content of ``.metadata``, and the size of each file that the marker names.
        reader: reader of the files.

    Raises:
        CheckpointError: its metadata is damaged, holds foreign classes, or does not fit the files.
    """

    def __init__(self, path: str | os.PathLike[str], stat: Stat, reader: FileSystemReader):
        self.path = os.fspath(path)
        metadata = _read_metadata(self.path, stat)
        self.tensors: Mapping[str, TensorStorageMetadata] = metadata.state_dict_metadata  # type: ignore[assignment]
        self._reader = reader
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)

    @classmethod
    def on_disk(cls, path: str | os.PathLike[str], files: Collection[str]) -> ShardFolder:
        """Open a local folder, with the files that its marker names."""
        folder = Path(path)

        def stat() -> tuple[bytes, Mapping[str, int]]:
            return (folder / METADATA).read_bytes(), {name: os.stat(folder / name).st_size for name in files}

        return cls(folder, stat, FileSystemReader(folder))

    def read(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a block of one tensor."""
        described = self.tensors[key]
        block = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        target = torch.empty(tuple(sizes), dtype=described.properties.dtype)
        if target.numel() == 0:
            return target
        items = create_read_items_for_chunk_list(key, described, [block])
        if sum(math.prod(item.lengths) for item in items) != target.numel():
            raise CheckpointError(f"checkpoint {self.path!r}: parts of {key!r} are missing from its files")
        try:
            self._reader.read_data(LoadPlan(items), _Into(target)).wait()
        except Exception as error:
            raise CheckpointError(f"checkpoint {self.path!r}: {key!r} cannot be read: {first_line(error)}") from error
        return target


class _Into(LoadPlanner):
    """Load planner that reads into one tensor."""

    def __init__(self, target: Tensor):
        self._target = target

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None: ...

    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        raise NotImplementedError

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        raise NotImplementedError

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise NotImplementedError

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        where = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self._target[tuple(slice(start, start + length) for start, length in where)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None: ...


def with_stored(tree: Any, folder: ShardFolder, made: dict[str, StoredTensor] | None = None) -> Any:
    """Return the tree of ``state.pt`` with stored tensors filled in; tied ones are the same object.

    Raises:
        CheckpointError: a tensor is missing in the folder.
    """
    made = {} if made is None else made
    if isinstance(tree, Mapping):
        if STORED not in tree:
            return {key: with_stored(value, folder, made) for key, value in tree.items()}
        key = tree[STORED]
        if key not in folder.tensors:
            raise CheckpointError(f"checkpoint {folder.path!r} has no tensor {key!r}")
        return made.setdefault(key, StoredTensor(folder, key))
    if isinstance(tree, list):
        return [with_stored(value, folder, made) for value in tree]
    return tree


def in_memory(tree: Any, read: dict[str, Tensor] | None = None) -> Any:
    """Return a tree with every stored tensor read to the CPU; tied ones share memory."""
    read = {} if read is None else read
    if isinstance(tree, StoredTensor):
        if tree.key not in read:
            read[tree.key] = tree.read([0] * len(tree.shape), tree.shape)
        return read[tree.key]
    if isinstance(tree, Mapping):
        return {key: in_memory(value, read) for key, value in tree.items()}
    if isinstance(tree, list):
        return [in_memory(value, read) for value in tree]
    return tree


# -- the metadata -------------------------------------------------------------------------------------------------


class _Restricted(pickle.Unpickler):
    """Unpickler that allows only the classes of such metadata."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        if (module, name) == ("builtins", "getattr"):  # Python 3.11 pickles an Enum this way
            return _encoding
        raise CheckpointError(
            f"it holds pickled objects ({shortened(f'{module}.{name}')}), which metadata never contains and which "
            "could run code"
        )


def _encoding(kind: Any, name: str) -> Any:
    if kind is not _MEM_FORMAT_ENCODING:
        raise CheckpointError("it looks up attributes, which no metadata does")
    return kind[name]


def _read_metadata(folder: str, stat: Stat) -> Metadata:
    try:
        data, sizes = stat()
        metadata = _Restricted(io.BytesIO(data)).load()
        _check(metadata, sizes)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {folder!r}: {METADATA} is refused: {error}") from None
    except Exception as error:
        raise CheckpointError(
            f"checkpoint {folder!r}: {METADATA} is damaged ({type(error).__name__}: {first_line(error)})"
        ) from error
    found: Metadata = metadata
    return found


def _check(metadata: Any, sizes: Mapping[str, int]) -> None:
    """Raise CheckpointError unless all tensors are plain blocks within the files of the folder."""
    for key, described in metadata.state_dict_metadata.items():
        if type(key) is not str or type(described) is not TensorStorageMetadata:
            raise CheckpointError(f"{shortened(str(key))} is not a tensor")
        for chunk in described.chunks:
            bounds = zip(chunk.offsets, chunk.sizes, described.size, strict=True)
            if any(offset < 0 or size < 0 or offset + size > most for offset, size, most in bounds):
                raise CheckpointError(f"a part of {shortened(key)} is outside its bounds")
    for index, where in metadata.storage_data.items():
        if type(index) is not MetadataIndex or type(where) is not _StorageInfo:
            raise CheckpointError("it locates something that is not part of a tensor")
        if getattr(where, "transform_descriptors", None):
            raise CheckpointError("its tensors are packed in a way that treadle never uses")
        if where.relative_path not in sizes:
            raise CheckpointError(f"it refers to {shortened(str(where.relative_path))}, which the marker does not name")
        if where.offset < 0 or where.length < 0 or where.offset + where.length > sizes[where.relative_path]:
            raise CheckpointError(f"{shortened(where.relative_path)} is shorter than its header states")
