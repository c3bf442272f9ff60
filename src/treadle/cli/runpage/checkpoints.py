"""The checkpoints of a run folder: sizes, paths, and values readable without loading tensors."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treadle.checkpoint.retention import write_order
from treadle.checkpoint.safe.inspect import glance
from treadle.cli.runpage.files import Row, weight_files
from treadle.errors import CheckpointError

_MOST = 200
# Values that a page shows; states of optimizers and generators are not needed.
_KEPT = re.compile(r"(config|history|selection|versions|data|format)\.|(epoch|global_step|best_metric|best_epoch)$")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint or a file of weights.

    Attributes:
        name: its path inside the run folder.
        size: in bytes; for a folder, of all its files.
        written: seconds since 1970.
        link: the target, if it is a link.
        step: optimizer steps; None for weights alone.
        epoch: epochs completed.
        kind: the kind of file.
        problem: why it cannot be read, or "".
        values: plain values in it, by dotted key.
    """

    name: str
    size: int
    written: float
    link: str | None = None
    step: int | None = None
    epoch: int | None = None
    kind: str = ""
    problem: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)


def read_checkpoints(run: Path, *, newest_only: bool = False) -> list[Checkpoint]:
    """Return the checkpoints of a run, newest first, the newest 200 at most.

    Args:
        run: the run folder.
        newest_only: return only the newest that has a step, which bare weights do not.
    """
    paths = sorted(weight_files(run), key=write_order, reverse=True)[:_MOST]
    if not newest_only:
        return [_read(path, run) for path in paths]
    newest = next((one for one in (_read(path, run) for path in paths) if one.step is not None), None)
    return [] if newest is None else [newest]


def epochs_of(values: Mapping[str, Any]) -> list[Row]:
    """Return the history stored in a checkpoint's values.

    Example:
        >>> epochs_of({"history.0.epoch": 1, "history.0.val_loss": 0.5})
        [{'epoch': 1, 'val_loss': 0.5}]
    """
    rows: dict[int, Row] = {}
    for key, value in values.items():
        found = re.fullmatch(r"history\.(\d+)\.(.+)", key)
        if found:
            rows.setdefault(int(found[1]), {})[found[2]] = value
    return [row for _, row in sorted(rows.items()) if type(row.get("epoch")) is int]


def _read(path: Path, run: Path) -> Checkpoint:
    name, link = path.relative_to(run).as_posix(), os.readlink(path) if path.is_symlink() else None
    try:
        size, written = _size(path), write_order(path)[0]
    except OSError as error:  # removed meanwhile, or a dangling link
        return Checkpoint(name, 0, 0.0, link, problem=error.strerror or "cannot be read")
    found: Mapping[str, Any] = {"kind": "safetensors file"}
    if path.suffix != ".safetensors":
        found = _glance(path, written, size)
    return Checkpoint(
        name, size, written / 1e9, link, step=found.get("step"), epoch=found.get("epoch"), kind=found.get("kind", ""),
        problem="; ".join(found.get("problems", [])), values=found.get("values", {}),
    )  # fmt: skip


@functools.lru_cache(maxsize=512)
def _glance(path: Path, written: int, size: int) -> Mapping[str, Any]:
    """Read a file once and cache the result until the file is rewritten."""
    try:
        found = glance(path)
    except CheckpointError as error:
        return {"kind": "unknown file", "problems": [str(error)]}
    kept = {key: value for key, value in found["values"].items() if _KEPT.match(key)}
    return {**{key: found.get(key) for key in ("kind", "step", "epoch", "problems")}, "values": kept}


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir()) if path.is_dir() else path.stat().st_size
