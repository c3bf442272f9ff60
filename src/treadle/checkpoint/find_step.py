"""Search for the nearest earlier state among the checkpoints of a folder."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from treadle.checkpoint.order import is_moved_aside
from treadle.checkpoint.shard_manifest import MARKER, is_whole
from treadle.checkpoint.store import load_checkpoint
from treadle.errors import CheckpointError

_log = logging.getLogger("treadle.checkpoint")


def stamp_of(path: Path) -> tuple[str, int, int]:
    """Return a key that distinguishes a file from later ones of the same name."""
    described = (path / MARKER if path.is_dir() else path).stat()
    return str(path.resolve()), described.st_ino, described.st_mtime_ns


def states_in(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, files and folders of shards, each once, without states moved aside.

    Example:
        >>> states_in(Path("no_such_folder"))
        []
    """
    inside = [*folder.glob("*.pt"), *(path for path in folder.glob("[!.]*") if is_whole(path))]
    found = {path.resolve(): path for path in sorted(inside, key=lambda path: path.is_symlink())[::-1]}
    return [path for path in found.values() if (path.is_file() or is_whole(path)) and not is_moved_aside(path)]


def nearest_state(
    folder: Path,
    at_most: int,
    *,
    without: Collection[tuple[str, int, int]] = (),
    load: Callable[[Path], dict[str, Any]] = load_checkpoint,
) -> tuple[Path, dict[str, Any]] | None:
    """Return the checkpoint with the largest step up to ``at_most``, and its tree; damaged ones are reported.

    Args:
        folder: the folder, which is only read.
        at_most: attempted steps.
        without: stamps of checkpoints to ignore.
        load: reads a checkpoint.

    Returns:
        (path, tree), or None if there is none.
    """
    best: tuple[Path, dict[str, Any]] | None = None
    numbered, others = [], []
    for path in states_in(folder):
        digits = re.search(r"step_(\d+)$", path.stem)
        if stamp_of(path) in without or (digits is not None and int(digits[1]) > at_most):
            continue
        numbered.append((int(digits[1]), path)) if digits is not None else others.append(path)
    # Files without a number in their name must be opened; of the numbered ones, only the first intact one.
    for path in others:
        found = _opened(path, at_most, load)
        if found is not None and (best is None or _step(found[1]) > _step(best[1])):
            best = found
    for number, path in sorted(numbered, reverse=True):
        if best is not None and number <= _step(best[1]):
            break
        found = _opened(path, at_most, load)
        if found is not None:
            return found
    return best


def _step(tree: dict[str, Any]) -> int:
    return int(tree["global_step"])


def _opened(path: Path, at_most: int, load: Callable[[Path], dict[str, Any]]) -> tuple[Path, dict[str, Any]] | None:
    try:
        tree = load(path)
    except CheckpointError as error:
        _log.warning("%s; looking for another one", error)
        return None
    has_state = isinstance(tree.get("global_step"), int) and "model" in tree and tree.get("optimizer") is not None
    return (path, tree) if has_state and _step(tree) <= at_most else None
