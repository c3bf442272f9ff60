"""Inspection of a folder of shards: like a single file, with the size that each rank wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treadle.checkpoint.files import STORED
from treadle.checkpoint.shard_manifest import folder_problems, read_marker
from treadle.errors import CheckpointError


def inspect_shards(folder: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report on a folder of shards.

    Args:
        folder: folder of one checkpoint, complete or not.
        state: the report on its ``state.pt``.

    Returns:
        The report of a single file with the same state, with ``shards`` (number of files with tensors) and ``ranks``
        (number of ranks that wrote the folder).
    """
    marker, _ = read_marker(folder)
    problems = folder_problems(folder) + list(state["problems"])
    places = {
        name.removesuffix(f".{STORED}"): key for name, key in state["values"].items() if name.endswith(f".{STORED}")
    }
    stored: list[dict[str, Any]] = []
    if marker is not None and not problems:
        try:
            stored = _described(folder, marker.files, places)
        except CheckpointError as error:
            problems.append(str(error))
    return {
        **state,
        "path": str(folder),
        "size": 0 if marker is None else marker.size,
        "problems": problems,
        "tensors": [*stored, *state["tensors"]],
        "values": {name: value for name, value in state["values"].items() if not name.endswith(f".{STORED}")},
        "shards": None if marker is None else marker.shards,
        "ranks": None if marker is None else marker.ranks,
    }


def _described(folder: Path, files: Mapping[str, Any], places: Mapping[str, str]) -> list[dict[str, Any]]:
    from treadle.checkpoint.stored import ShardFolder

    tensors = ShardFolder.on_disk(folder, files).tensors
    missing = [name for name, key in places.items() if key not in tensors]
    if missing:
        raise CheckpointError(f"the tensor {missing[0]} is in none of the files")
    entries = []
    for name, key in places.items():
        shape, dtype = tensors[key].size, tensors[key].properties.dtype
        described = {"name": name, "shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
        entries.append({**described, "bytes": shape.numel() * dtype.itemsize})
    return entries
