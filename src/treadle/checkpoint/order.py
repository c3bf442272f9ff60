"""Order of the checkpoints of a folder: by step and epoch of their content, never by file times.

Copying a folder, setting back the clock or restoring a backup changes file times but not content. A run that starts
before existing states of its folder, after a rewind or from scratch, first moves those aside under other names: so the
furthest state of a folder always belongs to its latest run.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from itertools import count, groupby
from pathlib import Path
from typing import NamedTuple

from treadle.checkpoint.files import reported, sync_folder
from treadle.checkpoint.safe.archive import ArchiveError, read_pickle
from treadle.checkpoint.safe.pickled import walk_pickle
from treadle.checkpoint.shard_manifest import STATE

_log = logging.getLogger("treadle.checkpoint")
NONFINITE, _SUPERSEDED = ".nonfinite", ".superseded"
_NUMBERED = re.compile(r"step_(\d+)")


class StateProgress(NamedTuple):
    """Progress of a state within its run.

    Attributes:
        step: optimizer steps attempted.
        epoch: epochs completed.
    """

    step: int = 0
    epoch: int = 0


def progress_of(path: Path) -> StateProgress | None:
    """Return the progress of the state in a file or a folder of shards, without reading tensors; None if unreadable.

    A state without a step counts as that of the last number in its name.

    Example:
        >>> progress_of(Path("no_such_file.pt")) is None
        True
    """
    try:
        archive = read_pickle(path / STATE if path.is_dir() else path)
    except (ArchiveError, OSError):
        return None
    tree = walk_pickle(archive.pickle, archive.storages).value
    if not isinstance(tree, dict):
        return None
    step, epoch = tree.get("global_step"), tree.get("epoch")
    if not isinstance(step, int):
        digits = re.findall(r"\d+", path.stem)
        step = int(digits[-1]) if digits else 0
    return StateProgress(step, epoch if isinstance(epoch, int) else 0)


def by_progress(paths: Iterable[Path]) -> list[Path]:
    """Return checkpoints in the order in which a resuming run should try them.

    Unreadable ones come first, so that they are reported; ties keep the given order. A step in the name is trusted,
    which avoids opening thousands of files.

    Example:
        >>> [path.name for path in by_progress([Path("checkpoint_step_9.pt"), Path("checkpoint_step_10.pt")])]
        ['checkpoint_step_10.pt', 'checkpoint_step_9.pt']
    """
    known: dict[Path, StateProgress | None] = {}

    def reach(path: Path) -> StateProgress | None:
        if path not in known:
            known[path] = progress_of(path)
        return known[path]

    def step(path: Path) -> float:
        named = _NUMBERED.search(path.stem)
        if named is not None:
            return int(named[1])
        found = reach(path)
        return float("inf") if found is None else found.step

    def epoch(path: Path) -> float:
        found = reach(path)
        return float("inf") if found is None else found.epoch

    ordered: list[Path] = []
    steps = {path: step(path) for path in paths}
    for _, equal in groupby(sorted(steps, key=lambda path: -steps[path]), key=lambda path: steps[path]):
        together = list(equal)
        ordered += together if len(together) == 1 else sorted(together, key=lambda path: -epoch(path))
    return ordered


def is_moved_aside(path: Path) -> bool:
    """Return whether a state was moved aside: it is not finite, or a later run began before it.

    Example:
        >>> [is_moved_aside(Path(name)) for name in ("best.nonfinite.pt", "best.superseded-2.pt", "best.pt")]
        [True, True, False]
    """
    return any(suffix.split("-")[0] in (NONFINITE, _SUPERSEDED) for suffix in (path.suffix, Path(path.stem).suffix))


def non_finite_name(target: Path) -> Path:
    """Return the name for a non-finite state, derived from its usual name.

    Example:
        >>> non_finite_name(Path("best.pt")).name
        'best.nonfinite.pt'
    """
    return target.with_name(f"{target.stem}{NONFINITE}{target.suffix}")


def move_aside_beyond(paths: Iterable[Path], begun: StateProgress, *, source: str | None = None) -> list[Path]:
    """Rename the checkpoints beyond the start of a run, with a warning, without deleting any.

    Args:
        paths: files, folders of shards, and links to them; links are removed.
        begun: the start of the run.
        source: the checkpoint it resumed from, for the message.

    Returns:
        The new names.

    Raises:
        CheckpointError: a checkpoint cannot be renamed.
    """
    present = [path for path in paths if os.path.lexists(path) and not is_moved_aside(path)]
    beyond = [path for path in present if not path.is_symlink() and _is_beyond(path, begun)]
    targets = {os.path.realpath(path) for path in beyond}
    links = [path for path in present if path.is_symlink() and os.path.realpath(path) in targets]
    renamed = []
    for path in links:
        with reported(path):
            path.unlink()
    for path in beyond:
        free = _free_name(path)
        with reported(free):
            os.rename(path, free)
        renamed.append(free)
    if renamed:
        sync_folder(renamed[0].parent)
        _log.warning(
            "%s: this run began at step %d, epoch %d%s, so %d later checkpoints of an earlier run were renamed (%s, "
            "...) and are not resumed from automatically; to resume from one, pass its path",
            renamed[0].parent, begun.step, begun.epoch, f" ({source})" if source else "", len(renamed), renamed[0].name,
        )  # fmt: skip
    return renamed


def _is_beyond(path: Path, begun: StateProgress) -> bool:
    named = _NUMBERED.search(path.stem)
    if named is not None and int(named[1]) < begun.step:
        return False  # without opening it
    found = progress_of(path)
    return found is not None and found > begun


def _free_name(path: Path) -> Path:
    stem, suffix = (path.name, "") if path.is_dir() else (path.stem, path.suffix)
    names = (f"{stem}{_SUPERSEDED}{'' if number == 1 else f'-{number}'}{suffix}" for number in count(1))
    return next(free for name in names if not os.path.lexists(free := path.with_name(name)))
