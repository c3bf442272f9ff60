"""Sharded checkpoints: folders that every rank writes a part of, complete or absent whatever happens to a rank.

``torch.distributed.checkpoint`` writes the tensors, each rank its own and a share of replicated ones; rank 0 writes
``state.pt``, the tree of a single file with ``{"treadle.stored": key}`` in place of tensors. Every byte is read back by
the rank that wrote it and compared with what was written; then rank 0 publishes the marker. Every stage is collective:
a failure on one rank raises the same error on all.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from treadle.checkpoint import shard_manifest
from treadle.checkpoint.files import STORED, make_folder, reported, sync_folder
from treadle.checkpoint.ranks import WriterLostError, together, writers_group
from treadle.checkpoint.retention import date_last
from treadle.checkpoint.schema import is_finite, non_finite_names
from treadle.checkpoint.shard_files import write_shard
from treadle.checkpoint.shard_manifest import MARKER, STATE, checksum
from treadle.checkpoint.store import non_finite_path, save_checkpoint
from treadle.distributed.shards import LocalShard
from treadle.errors import CheckpointError


def save_sharded(
    tree: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    equal: Collection[str] = (),
    finish: Callable[[Path], object] | None = None,
) -> Path:
    """Write a state tree to a folder; every rank calls it with its own parts.

    A model with a non-finite value on some rank never replaces a folder: it goes to ``<name>.nonfinite``.

    Args:
        tree: result of :func:`treadle.checkpoint.schema.to_plain` with ``parts=True``, or a whole tree.
        path: the target folder; an existing one is kept until the new one is complete.
        equal: names of weights that are equal on all ranks, of which each rank writes a share. Other tensors that are
            not sharded, such as buffers, are written by rank 0.
        finish: called on rank 0 with the published folder before any rank returns; not for a folder moved aside.

    Returns:
        The path of the written folder.

    Raises:
        CheckpointError: some rank could not write its part; raised on all ranks. The previous folder is intact.
    """
    group, target = writers_group(), Path(path)
    rank = 0 if group is None else dist.get_rank(group)
    tensors, rest, bad = own_part(tree, equal, group)
    if bad:
        target = non_finite_path(target, bad)
    try:
        place = together(group, lambda: _begin(target) if rank == 0 else target)[0]
        written = write_shard(tensors, place, group)
        files = together(group, lambda: _read_back(place, written, rest if rank == 0 else None))
        together(group, lambda: _publish(target, place, files) if rank == 0 else None)
    except CheckpointError as error:
        if rank == 0 and not isinstance(error, WriterLostError):  # else another rank may still be writing there
            with contextlib.suppress(OSError):  # the next run tries again at its start
                shard_manifest.finish_replacement(target)
        raise
    together(group, lambda: _finish(target, None if bad else finish) if rank == 0 else None)
    return target


def own_part(
    tree: Mapping[str, Any], equal: Collection[str], group: dist.ProcessGroup | None
) -> tuple[dict[str, Tensor | LocalShard], dict[str, Any], list[str]]:
    """Return the tensors that this rank writes, the rest of the tree, and names non-finite on any rank."""
    tensors, rest = extract_tensors(tree)
    if group is not None and dist.get_rank(group) != 0:
        tensors = {
            key: value for key, value in tensors.items() if isinstance(value, LocalShard) or _is_equal(key, equal)
        }
    bad = {name for names in together(group, lambda: _non_finite(tensors, rest)) for name in names}
    return tensors, rest, sorted(bad)


def _is_equal(key: str, equal: Collection[str]) -> bool:
    if key.startswith("optimizer.state."):
        return True
    part, _, name = key.partition(".")
    return (name if part == "model" else name.partition(".shadow.")[2]) in equal


def _non_finite(tensors: Mapping[str, Tensor | LocalShard], rest: Mapping[str, Any]) -> list[str]:
    weights = {key: value for key, value in tensors.items() if not key.startswith("optimizer.")}
    bad = [
        key for key, value in weights.items() if not is_finite(value.local if isinstance(value, LocalShard) else value)
    ]
    return bad + non_finite_names(rest)


def _begin(target: Path) -> Path:
    with reported(target):
        make_folder(target.parent)
        return shard_manifest.begin(target)


def _read_back(
    place: Path, written: Mapping[str, Mapping[str, Any]], rest: Mapping[str, Any] | None
) -> dict[str, Mapping[str, Any]]:
    """Return size and CRC-32 of the files of this rank, read back from disk."""
    files = dict(written)
    if rest is not None:
        save_checkpoint(rest, place / STATE)
        files[STATE] = checksum(place / STATE)
    for name, expected in written.items():
        with reported(place / name):
            if checksum(place / name) != expected:
                raise CheckpointError(
                    f"{place / name} reads back differently from what was written; the disk may be failing"
                )
    sync_folder(place)
    return files


def _publish(target: Path, place: Path, files: list[dict[str, Mapping[str, Any]]]) -> None:
    with reported(target):
        shard_manifest.publish(place, {name: entry for part in files for name, entry in part.items()}, ranks=len(files))
        if place != target:
            shard_manifest.replace_published(target)
        date_last(target / MARKER, target.parent)


def _finish(target: Path, finish: Callable[[Path], object] | None) -> None:
    with contextlib.suppress(OSError):  # folders moved aside are removed at the next start at the latest
        shard_manifest.finish_replacement(target)
    if finish is not None:
        finish(target)


def extract_tensors(tree: Mapping[str, Any]) -> tuple[dict[str, Tensor | LocalShard], dict[str, Any]]:
    """Extract the tensors of model, optimizer state and averages, and sharded tensors elsewhere.

    Args:
        tree: a checkpoint tree.

    Returns:
        (the tensors by key: ``model.<name>``, ``optimizer.state.<name of the parameter>.<entry>``,
        ``ema.<name>.shadow.<name>``; the tree with ``{"treadle.stored": key}`` in their place).

    Raises:
        CheckpointError: the tree itself contains such a dict.

    Example:
        >>> tensors, rest = extract_tensors({"model": {"w": torch.zeros(1)}, "epoch": 3})
        >>> list(tensors), rest
        (['model.w'], {'model': {'w': {'treadle.stored': 'model.w'}}, 'epoch': 3})
    """
    taker = _TensorExtractor()
    rest = {}
    for name, value in tree.items():
        if name == "optimizer" and value is not None:
            rest[name] = {**value, "state": taker.take_state(value)}
        else:
            rest[name] = taker.take(value, name, whole=name in ("model", "ema"))
    return taker.tensors, rest


class _TensorExtractor:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor | LocalShard] = {}
        self._keys: dict[int, str] = {}  # by identity: tied weights are stored once

    def take(self, value: Any, path: str, *, whole: bool) -> Any:
        if isinstance(value, LocalShard) or (whole and isinstance(value, Tensor) and _is_plain(value)):
            key = self._keys.setdefault(id(value), path)
            self.tensors[key] = value
            return {STORED: key}
        if isinstance(value, Mapping):
            if STORED in value:
                raise CheckpointError(f"state at {path!r} has the key {STORED!r}, which is reserved for stored tensors")
            return {key: self.take(item, f"{path}.{key}", whole=whole) for key, item in value.items()}
        if isinstance(value, list):
            return [self.take(item, f"{path}.{number}", whole=whole) for number, item in enumerate(value)]
        return value

    def take_state(self, optimizer: Mapping[str, Any]) -> dict[Any, Any]:
        names: dict[Any, str] = {}
        for group in optimizer["param_groups"]:
            named = group.get("param_names") or [""] * len(group["params"])
            names |= {index: name or f"#{index}" for index, name in zip(group["params"], named, strict=True)}
        return {
            index: self.take(entries, f"optimizer.state.{names.get(index, f'#{index}')}", whole=True)
            for index, entries in optimizer["state"].items()
        }


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type != "meta"
