"""Conversion of checkpoints between single files and folders of shards, exact to the bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from treadle.checkpoint.files import FORMAT_NAME
from treadle.checkpoint.find_step import states_in
from treadle.checkpoint.shard_manifest import has_shards
from treadle.checkpoint.store import find_latest, load_checkpoint, save_checkpoint
from treadle.errors import CheckpointError, ConfigError
from treadle.errors.arguments import checked


@checked
def convert_checkpoint(
    source: str | os.PathLike[str],
    to: Literal["file", "folder"],
    *,
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
) -> Path:
    """Write the whole training state of a checkpoint in the other format; a run resumes from either.

    Args:
        source: a file, a folder of shards, or a run folder, whose newest intact checkpoint is used.
        to: ``"file"``: one file; ``"folder"``: a folder of shards.
        out: the output path; None: in a folder ``export`` next to the checkpoint.
        force: replace an existing file.

    Returns:
        The path that was written.

    Raises:
        ConfigError: there is no such source, or ``out`` already exists.
        CheckpointError: the source cannot be used or is not a checkpoint of treadle, or the target cannot be written.

    Example:
        >>> save_checkpoint({"format": {"name": "treadle", "version": 1}, "model": {}}, "last.pt").name
        'last.pt'
        >>> convert_checkpoint("last.pt", "folder", out="last").name
        'last'
    """
    path = Path(source)
    if not os.path.lexists(path):
        raise ConfigError(f"{str(path)!r}: no such file or folder; pass a checkpoint or a run folder")
    found = None
    if path.is_dir() and not has_shards(path):
        found = find_latest(states for folder in (path, path / "checkpoints") for states in states_in(folder))
        if found is None:
            raise ConfigError(f"{str(path)!r}: the folder has no checkpoint")
    path, tree = found or (path, load_checkpoint(path))
    if (tree.get("format") or {}).get("name") != FORMAT_NAME:
        raise CheckpointError(f"{str(path)!r} is not a treadle checkpoint, so it has no training state to convert")
    name = path.resolve().name.removesuffix(".pt")
    target = Path(out) if out is not None else path.parent / "export" / (f"{name}.pt" if to == "file" else name)
    if os.path.lexists(target) and not force:
        raise ConfigError(
            " already exists; choose another name, or pass force (--force)", argument="out", value=str(target)
        )
    if target.exists() and target.is_dir() != (to == "folder"):
        raise ConfigError(
            f" is a {'folder' if target.is_dir() else 'file'}; choose another name", argument="out", value=str(target)
        )
    if to == "file":
        return save_checkpoint(tree, target)
    from treadle.checkpoint.sharded import save_sharded

    return save_sharded(tree, target)
