"""Writing of this rank's tensors with ``torch.distributed.checkpoint``, with CRC-32 of the intended data."""

from __future__ import annotations

import contextlib
import io
import os
import re
import warnings
import zlib
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from treadle.checkpoint.files import first_line, reported
from treadle.checkpoint.ranks import WriterLostError
from treadle.checkpoint.shard_manifest import METADATA
from treadle.distributed.shards import LocalShard
from treadle.errors import CheckpointError

_COPY_AHEAD = 10_000_000  # bytes copied from the device ahead; torch's default


def write_shard(
    tensors: Mapping[str, Tensor | LocalShard],
    folder: Path | str,
    group: dist.ProcessGroup | None,
    files: ChecksummedStreams | None = None,
) -> dict[str, dict[str, Any]]:
    """Write tensors to an empty folder, with one copy of those that several ranks hold; collective.

    Args:
        tensors: tensors of this rank, by key.
        folder: existing folder.
        group: group of the writing ranks; None for a single process.
        files: file system of ``folder``; None for the local one, where files are synced.

    Returns:
        Size and CRC-32 of each file of this rank, as passed to the system.

    Raises:
        CheckpointError: it failed on some rank, which is named; raised on all ranks.
    """
    parts = {key: value if isinstance(value, LocalShard) else _all_of(value) for key, value in tensors.items()}
    summed = files or _ChecksummedFiles()
    on_host = all(part.local.device.type == "cpu" for part in parts.values())
    # With 0, torch does not wait for the stream on which training continues.
    writer = _Writer(folder, summed, sync=files is None, copy_ahead=0 if on_host else _COPY_AHEAD)
    try:
        with warnings.catch_warnings() if group is None else contextlib.nullcontext():
            if group is None:
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as intended
            save({}, storage_writer=writer, planner=_Planner(parts), process_group=group)
    except CheckpointException as error:
        rank, (cause, _) = next(iter(sorted(error.failures.items())))
        named = str(cause) if isinstance(cause, CheckpointError) else f"{type(cause).__name__}: {first_line(cause)}"
        raise CheckpointError(f"rank {rank}: {named}" if group is not None else named) from cause
    except CheckpointError:
        raise
    except Exception as error:
        raise WriterLostError(f"a rank was lost while writing a checkpoint: {first_line(error)}") from error
    return summed.sums


def _all_of(tensor: Tensor) -> LocalShard:
    return LocalShard(tensor.resolve_conj().resolve_neg(), (0,) * tensor.dim(), tuple(tensor.shape))


class _Planner(DefaultSavePlanner):
    """Planner of unchanged parts at their offsets; torch's own would log every key."""

    def __init__(self, parts: Mapping[str, LocalShard]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = parts

    def create_local_plan(self) -> SavePlan:
        """Return one item for each non-empty part."""
        items = [_item(key, part) for key, part in self._parts.items() if part.local.numel() or 0 in part.shape]
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the tensor of a part."""
        return self._parts[write_item.index.fqn].local.detach()


def _item(key: str, part: LocalShard) -> WriteItem:
    offsets = torch.Size(part.offsets)
    return WriteItem(
        index=MetadataIndex(key, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=part.local.shape),
            properties=TensorProperties(dtype=part.local.dtype),
            size=torch.Size(part.shape),
        ),
    )


class _Writer(FileSystemWriter):
    """Storage writer that names the file in errors and keeps the folder's path out of the metadata."""

    def __init__(self, folder: Path | str, files: Any, *, sync: bool, copy_ahead: int):
        super().__init__(
            folder, single_file_per_rank=True, sync_files=sync, thread_count=1, per_thread_copy_ahead=copy_ahead
        )
        self.fs = files
        self.path = folder

    def storage_meta(self) -> StorageMeta:
        """Return the metadata that identifies this save."""
        return StorageMeta(save_id=self.save_id)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the file of this rank."""
        with reported(f"{self.path}/{plan.storage_data.prefix}0.distcp"):
            return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata, on rank 0."""
        with reported(f"{self.path}/{METADATA}"):
            super().finish(metadata, results)


class ChecksummedStreams:
    """File system mixin that records size and CRC-32 of the written data.

    Attributes:
        sums: size and CRC-32 of each file by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, dict[str, Any]] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """Open a file."""
        with super().create_stream(path, mode) as stream:  # type: ignore[misc]
            if mode != "wb":
                yield stream
                return
            summed = _Summed(stream)
            yield summed
            name = re.sub(r"\.tmp$", "", os.path.basename(path))  # the metadata file is renamed afterwards
            self.sums[name] = {"size": summed.size, "crc32": f"{summed.crc:08x}"}


class _ChecksummedFiles(ChecksummedStreams, FileSystem):
    """Local file system with sums."""


class _Summed(io.BufferedIOBase):
    """File that tracks the CRC-32 of written data."""

    def __init__(self, raw: Any):
        self._raw = raw
        self.size = 0
        self.crc = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        count: int = self._raw.write(data)
        self.crc = zlib.crc32(data, self.crc)
        self.size += count
        return count

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        if not self._raw.closed:
            self._raw.flush()

    def fileno(self) -> int:
        self.flush()  # a caller wants to sync, which would miss data still in memory
        number: int = self._raw.fileno()
        return number

    def close(self) -> None:
        self._raw.close()
        super().close()
