"""Sharded checkpoints in an object store, written and read by every rank without a shared folder.

``torch.distributed.checkpoint`` writes the tensors through fsspec, each rank its own. Names are never reused; the
marker with the size and CRC-32 of every file is written last, so a checkpoint is complete or ignored.

    00000040-000002-9f31c2d4/__0_0.distcp, __1_0.distcp, .metadata, state.pt, WHOLE.json
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import tempfile
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader

from treadle.checkpoint.objects import ObjectStore
from treadle.checkpoint.order import StateProgress
from treadle.checkpoint.ranks import on_all_ranks, together, writers_group
from treadle.checkpoint.shard_files import ChecksummedStreams, write_shard
from treadle.checkpoint.shard_manifest import MARKER, METADATA, STATE, Marker, checksum_of, marker_text, parse_marker
from treadle.checkpoint.sharded import own_part
from treadle.checkpoint.store import load_checkpoint
from treadle.checkpoint.stored import ShardFolder, with_stored
from treadle.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as FsspecFiles
else:
    try:  # names in torch 2.15
        from torch.distributed.checkpoint.fsspec_filesystem import _FileSystem as FsspecFiles
    except ImportError:
        from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as FsspecFiles

_log = logging.getLogger("treadle.checkpoint")
_NAME = re.compile(r"(\d{8,})-(\d{6,})-[0-9a-f]{8}")


class RemoteShards:
    """Sharded checkpoints below a URL.

    Args:
        store: the URL; nothing else may be below it.

    Example:
        >>> shards = RemoteShards(ObjectStore("memory://shards"))
        >>> name = shards.save({"model": {"w": torch.ones(2)}, "global_step": 4}, StateProgress(4, 0))
        >>> shards.whole() == [name], shards.open(name)["model"]["w"].read([0], [2])
        (True, tensor([1., 1.]))
    """

    def __init__(self, store: ObjectStore):
        self.store = store

    # -- writing --------------------------------------------------------------------------------------------------

    def save(self, tree: Mapping[str, Any], reach: StateProgress, *, equal: Collection[str] = ()) -> str | None:
        """Write a state tree; every rank calls it with its own parts.

        Args:
            tree: see :func:`treadle.checkpoint.sharded.save_sharded`.
            reach: step and epoch of the state.
            equal: names of weights that are equal on all ranks.

        Returns:
            The name of the checkpoint below the URL; None, with a warning, if a value is not finite: it is not written.

        Raises:
            CheckpointError: some rank could not write its part; raised on all ranks.
        """
        group = writers_group()
        rank = 0 if group is None else dist.get_rank(group)
        tensors, rest, bad = own_part(tree, equal, group)
        if bad:
            if rank == 0:
                _log.warning("step %d is not saved: not finite: %s", reach.step, ", ".join(bad[:5]))
            return None
        name = together(group, lambda: f"{reach.step:08d}-{reach.epoch:06d}-{uuid.uuid4().hex[:8]}")[0]
        files = _ChecksummedObjects(self.store)
        written = write_shard(tensors, self.store.path(name), group, files)
        entries = together(group, lambda: self._finish_part(name, written, rest if rank == 0 else None))
        together(group, lambda: self._publish(name, entries) if rank == 0 else None)
        return name

    def _finish_part(
        self, name: str, written: Mapping[str, Mapping[str, Any]], rest: Mapping[str, Any] | None
    ) -> dict[str, Mapping[str, Any]]:
        entries = dict(written)
        if rest is not None:
            packed = io.BytesIO()
            torch.save(dict(rest), packed)
            self.store.put(f"{name}/{STATE}", packed.getvalue())
            packed.seek(0)
            entries[STATE] = checksum_of(packed)
        return entries

    def _publish(self, name: str, entries: list[dict[str, Mapping[str, Any]]]) -> None:
        files = {file: entry for part in entries for file, entry in part.items()}
        self._check_sizes(name, files)
        if not self.store.create(f"{name}/{MARKER}", marker_text(files, ranks=len(entries)).encode()):
            raise CheckpointError(f"{self.store.url}/{name} was written by another process")

    def prune(self, keep: int | None) -> None:
        """Delete all but the furthest checkpoints, and leftovers of unfinished ones; markers are deleted first.

        Args:
            keep: number of checkpoints to keep; None keeps all complete ones.
        """
        whole = self.whole()
        kept = set(whole if keep is None else whole[:keep])
        gone = [key for key in self.store.sizes() if _NAME.fullmatch(top := key.partition("/")[0]) and top not in kept]
        self.store.delete(sorted(gone, key=lambda key: not key.endswith(f"/{MARKER}")))

    # -- reading --------------------------------------------------------------------------------------------------

    def whole(self) -> list[str]:
        """Return the names of the published checkpoints, furthest first."""
        names = {key.partition("/")[0] for key in self.store.sizes() if key.endswith(f"/{MARKER}")}
        return sorted(filter(_NAME.fullmatch, names), key=self.reach, reverse=True)

    @staticmethod
    def reach(name: str) -> StateProgress:
        """Return step and epoch of a checkpoint.

        Example:
            >>> RemoteShards.reach("00000040-000002-9f31c2d4")
            StateProgress(step=40, epoch=2)
        """
        step, epoch, _ = name.split("-")
        return StateProgress(int(step), int(epoch))

    def open(self, name: str, *, share: tuple[int, int] = (0, 1)) -> dict[str, Any]:
        """Read a checkpoint except its tensors, which are read lazily.

        Args:
            name: name below the URL.
            share: (index, count): check the content of every count-th file only.

        Raises:
            CheckpointError: it is unfinished or damaged.
        """
        marker, problems = self._marker(name)
        if marker is None:
            raise CheckpointError(f"checkpoint {self.store.url}/{name} cannot be used: {'; '.join(problems)}")
        self._check_sizes(name, marker.files)
        for number, (file, entry) in enumerate(sorted(marker.files.items())):
            if number % share[1] == share[0] and self._checksum(f"{name}/{file}") != dict(entry):
                raise CheckpointError(f"checkpoint {self.store.url}/{name}: {file} fails its CRC-32 check")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, STATE)
            path.write_bytes(self.store.get(f"{name}/{STATE}"))
            rest = load_checkpoint(path)
        sizes = {file: int(entry["size"]) for file, entry in marker.files.items()}
        reader: Any = FileSystemReader(self.store.path(name))
        reader.fs, reader.path = _ChecksummedObjects(self.store), self.store.path(name)
        where = f"{self.store.url}/{name}"
        shards = ShardFolder(where, lambda: (self.store.get(f"{name}/{METADATA}"), sizes), reader)
        tree: dict[str, Any] = with_stored(rest, shards)
        return tree

    def open_on_ranks(self, name: str, rank: int, ranks: int) -> dict[str, Any]:
        """Open a checkpoint on every rank; each rank checks its share of the files.

        Raises:
            CheckpointError: some rank found it damaged; raised on all ranks.
        """
        tree: dict[str, Any] = {}
        on_all_ranks(lambda: tree.update(self.open(name, share=(rank, ranks))))
        return tree

    def _marker(self, name: str) -> tuple[Marker | None, list[str]]:
        try:
            return parse_marker(self.store.get(f"{name}/{MARKER}"))
        except FileNotFoundError:
            return None, [f"it has no {MARKER}, so some rank may not have written its part"]

    def _check_sizes(self, name: str, files: Mapping[str, Mapping[str, Any]]) -> None:
        sizes = self.store.sizes(f"{name}/")
        for file, entry in files.items():
            found = sizes.get(f"{name}/{file}")
            if found != entry["size"]:
                problem = "is missing" if found is None else f"has {found:,} bytes instead of {entry['size']:,}"
                raise CheckpointError(f"checkpoint {self.store.url}/{name}: {file} {problem}")

    def _checksum(self, key: str) -> dict[str, Any]:
        with contextlib.closing(self.store.files.open(self.store.path(key), "rb")) as file:
            return checksum_of(file)


class _ChecksummedObjects(ChecksummedStreams, FsspecFiles):
    """Objects of a store."""

    def __init__(self, store: ObjectStore):
        super().__init__()
        self.fs = store.files
