"""Checkpoint store: atomic files, verified on write and on read, never worse than before.

``torch.save`` writes a zip archive with a CRC-32 for each record; torch checks neither these nor the sizes that a file
claims, so every read here checks both. Nothing is ever unpickled: a file that needs it is refused.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from treadle import distributed
from treadle.checkpoint.files import (
    copy_file,
    first_line,
    link_sibling,
    make_folder,
    replacing,
    reported,
    same_contents,
    save_tensor,
    sync_folder,
    write_bytes,
    write_text,
)
from treadle.checkpoint.order import NONFINITE, by_progress, is_moved_aside, non_finite_name
from treadle.checkpoint.retention import Retention, date_last
from treadle.checkpoint.safe.archive import ArchiveError, check_last_record, read_archive
from treadle.checkpoint.safe.pickled import walk_pickle
from treadle.checkpoint.schema import check_format, non_finite_names, sizes_of
from treadle.checkpoint.shard_manifest import STATE, folder_problems, read_marker
from treadle.checkpoint.tree_file import pieces_of
from treadle.device.handover import run_off_turn
from treadle.errors import CheckpointError, PickledCodeError
from treadle.errors.arguments import checked

__all__ = [
    "Retention",
    "check_written",
    "copy_checkpoint",
    "find_latest",
    "link_sibling",
    "load_checkpoint",
    "load_weights",
    "open_checkpoint",
    "replacing",
    "save_checkpoint",
    "save_tensor",
    "scored_weights",
    "sync_folder",
    "verify_checkpoint",
    "write_bytes",
    "write_text",
]

_IN_MEMORY = 1 << 26  # bytes of tensors
_SMALL = 1 << 16  # mean bytes of a tensor
_log = logging.getLogger("treadle.checkpoint")
_Opened = Callable[[Path], dict[str, Any]]


@checked
def verify_checkpoint(path: str | os.PathLike[str]) -> list[str]:
    """Return the problems of a checkpoint; an empty list means that it is intact and free of code.

    For a file, check that it is a complete archive as written by ``torch.save``, that every record's CRC-32 is correct,
    that its pickle names only tensors and plain values, and that every tensor is inside its storage. This takes one
    pass; nothing in the file is executed. For a folder of shards, check every byte of every file, and that its metadata
    only locates tensors in them.

    Example:
        >>> verify_checkpoint("no_such_file.pt")
        ['no such file']
    """
    return _problems_of_folder(Path(path)) if os.path.isdir(path) else _problems_of_file(path)[0]


def _problems_of_file(path: str | os.PathLike[str]) -> tuple[list[str], bool]:
    """Return the problems of a file, and whether it holds pickled objects that could run code."""
    try:
        archive = read_archive(path)
    except ArchiveError as error:
        return [str(error)], False
    walk = walk_pickle(archive.pickle, archive.storages)
    return [f"refused: {reason}" for reason in walk.refused], bool(walk.foreign)


def _problems_of_folder(folder: Path) -> list[str]:
    problems = folder_problems(folder) or [f"{STATE}: {problem}" for problem in verify_checkpoint(folder / STATE)]
    if not problems:
        try:
            open_checkpoint(folder, share=(1, 1))
        except CheckpointError as error:
            problems.append(str(error))
    return problems


def check_written(path: Path, content: bytes | None = None) -> list[str]:
    """Return the problems of a file that this process has just written: whether the disk holds every byte.

    Args:
        path: the file.
        content: what was written; None checks the sums in the archive instead.
    """
    try:
        if content is not None:
            check_last_record(content)
            return [] if path.read_bytes() == content else ["its content differs from what was written"]
        read_archive(path)
    except ArchiveError as error:
        return [str(error)]
    return []


@checked
def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a checkpoint to the CPU after checking the CRC-32 of each of its records.

    Args:
        path: the file, or the folder of shards, which gives the same tree in one process, without a process group.

    Returns:
        The tree that was saved.

    Raises:
        CheckpointError: it is missing, damaged, unfinished, holds pickled code, or has a newer format.

    Example:
        >>> import tempfile; path = Path(tempfile.mkdtemp(), "weights.pt")
        >>> save_checkpoint({"model": {"weight": torch.ones(2)}}, path).name
        'weights.pt'
        >>> load_checkpoint(path)
        {'model': {'weight': tensor([1., 1.])}}
    """
    if os.path.isdir(path):
        from treadle.checkpoint.stored import in_memory

        tree: dict[str, Any] = in_memory(open_checkpoint(path))
        return tree
    problems, holds_code = _problems_of_file(path)
    if problems:
        kind = PickledCodeError if holds_code else CheckpointError
        raise kind(f"checkpoint {os.fspath(path)!r} cannot be used: {'; '.join(problems[:3])}")
    try:
        with torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
            tree = torch.load(path, map_location="cpu", weights_only=True)
        check_format(tree, f"checkpoint {os.fspath(path)!r}")
        return dict(tree)
    except CheckpointError:
        raise
    except Exception as error:  # any error of torch's reader
        raise CheckpointError(f"checkpoint {os.fspath(path)!r} cannot be read: {first_line(error)}") from error


def open_checkpoint(path: str | os.PathLike[str], *, share: tuple[int, int] = (0, 1)) -> dict[str, Any]:
    """Read a checkpoint; the tensors of a folder of shards are read lazily.

    Code that loads a state into a model accepts such tensors, and reads only what this rank needs.

    Args:
        path: a file, which is read completely, or a folder.
        share: (index, count): for a folder, check the content of every count-th file only, so that ranks can share the
            work; all sizes are checked.

    Raises:
        CheckpointError: as for :func:`load_checkpoint`.
    """
    if not os.path.isdir(path):
        return load_checkpoint(path)
    folder = Path(path)
    marker, _ = read_marker(folder)
    problems = folder_problems(folder, share=share)
    if problems or marker is None:
        raise CheckpointError(f"checkpoint {os.fspath(path)!r} cannot be used: {'; '.join(problems[:3])}")
    from treadle.checkpoint.stored import ShardFolder, with_stored

    tree: dict[str, Any] = with_stored(load_checkpoint(folder / STATE), ShardFolder.on_disk(folder, marker.files))
    return tree


@checked
def save_checkpoint(tree: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write a state tree to a file, atomically and verified.

    A model with a non-finite value never replaces a file: it goes to ``<stem>.nonfinite.pt`` with a warning.

    Args:
        tree: result of :func:`treadle.checkpoint.schema.to_plain`.
        path: the target; its folder is created.

    Returns:
        The path of the written file.

    Raises:
        CheckpointError: the disk is full, the folder is read-only, or the written file fails verification. An old file
            of the same name is then intact.

    Example:
        >>> import tempfile; path = Path(tempfile.mkdtemp(), "state.pt")
        >>> load_checkpoint(save_checkpoint({"step": 3}, path))
        {'step': 3}
    """
    target = Path(path)
    sizes = sizes_of(tree)
    small = sum(sizes) < _SMALL * len(sizes)
    # Python writes small tensors, and other runs would wait for it in each of their calls.
    run: Callable[[Callable[[], Any]], Any] = (lambda work: work()) if small else run_off_turn
    if bad := run(lambda: non_finite_names(tree)):
        target = non_finite_path(target, bad)
    with reported(target):
        # Comparing the bytes of many small records is faster than checking their sums. Large ones are summed, while
        # other threads run: copies in memory would keep the interpreter.
        pieces = pieces_of(tree) if small and sum(sizes) <= _IN_MEMORY else None
        content = None if pieces is None else b"".join(pieces)
        run_off_turn(lambda: _write(tree, target, content))
    return target


def write_tree(file: BinaryIO, tree: Mapping[str, Any], content: bytes | None) -> None:
    """Write a state, or its content if known, to a file."""
    pieces = pieces_of(tree) if content is None else [content]
    if pieces is None:
        torch.save(dict(tree), file)
    for piece in pieces or ():
        file.write(piece)


def _write(tree: Mapping[str, Any], target: Path, content: bytes | None) -> None:
    make_folder(target.parent)
    with replacing(target) as temporary:
        with open(temporary, "wb") as file:
            write_tree(file, tree, content)
            file.flush()
            date_last(temporary, target.parent)
            os.fsync(file.fileno())
        _refuse_half_written(temporary, target, content)


def copy_checkpoint(source: Path, target: Path) -> Path:
    """Copy a checkpoint file to another name, atomically and verified, with its modification time.

    Not a link: damage or writes to one of the two files must not affect the other.

    Args:
        source: a file.
        target: target path in an existing folder.

    Raises:
        CheckpointError: as for :func:`save_checkpoint`.
    """

    def copy() -> None:
        with replacing(target) as temporary:
            copy_file(source, temporary)
            if not same_contents(source, temporary):
                raise CheckpointError(
                    f"checkpoint {target} was not written: the copy differs from the original; the disk may be failing"
                )

    with reported(target):
        run_off_turn(copy)
    return target


def _refuse_half_written(temporary: Path, target: Path, content: bytes | None) -> None:
    problems = check_written(temporary, content)
    if problems:
        raise CheckpointError(f"checkpoint {target} was not written: {'; '.join(problems)}; the disk may be failing")


def non_finite_path(target: Path, bad: list[str]) -> Path:
    """Return the path for a non-finite state, and warn."""
    aside = non_finite_name(target)
    if distributed.rank() == 0:
        _log.warning(
            "not writing %s: %d tensors are not finite (first: %s); saving the state as %s and deleting no older files",
            target.name, len(bad), bad[0], aside.name,
        )  # fmt: skip
    return aside


def find_latest(
    candidates: Iterable[Path], *, prefer: Path | None = None, load: _Opened = load_checkpoint
) -> tuple[Path, dict[str, Any]] | None:
    """Return the furthest intact checkpoint and its tree, reporting each damaged one that is skipped.

    The furthest has the largest step, then the largest epoch, as stored in the files; file times do not matter. States
    that were moved aside, because they are not finite or a later run began before them, are skipped.

    Args:
        candidates: files or folders of shards that may exist; among equally far ones the first is taken. A dangling
            link counts as a lost state.
        prefer: the candidate to try first, however far it is; a link counts as its target.
        load: reads a checkpoint.

    Returns:
        (path, tree), or None when no candidate exists.

    Raises:
        CheckpointError: there are files but none is intact.
    """
    present = {os.path.realpath(path): path for path in reversed(list(candidates)) if os.path.lexists(path)}
    first = None if prefer is None else os.path.realpath(prefer)
    paths = by_progress(path for path in reversed(present.values()) if not is_moved_aside(path))
    for path in sorted(paths, key=lambda path: os.path.realpath(path) != first):
        try:
            return path, load(path)
        except CheckpointError as error:
            _log.warning("%s; looking for an older one", error)
    if present:
        aside = (
            f" (those named {NONFINITE} hold states that are not finite)"
            if any(map(is_moved_aside, present.values()))
            else ""
        )
        raise CheckpointError(
            f"no intact checkpoint among {_listed(list(present.values()))}{aside}; "
            "to start over, move these files away or turn resuming off"
        )
    return None


def _listed(paths: list[Path]) -> str:
    shown = ", ".join(str(path) for path in paths[:5])
    return shown if len(paths) <= 5 else f"{shown} and {len(paths) - 5:,} more"


@checked
def load_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the scored weights of any treadle file: a checkpoint or a weights-only export.

    Args:
        path: the file, or a folder of shards.

    Returns:
        A plain state dict: averaged weights if the checkpoint's averaged weights were validated; for a run with
        adapters, without the frozen base.

    Raises:
        CheckpointError: the file is missing, damaged, or holds no weights.

    Example:
        >>> import tempfile; path = Path(tempfile.mkdtemp(), "weights.pt")
        >>> save_checkpoint({"model": {"weight": torch.ones(2)}}, path).name
        'weights.pt'
        >>> load_weights(path)
        {'weight': tensor([1., 1.])}
    """
    tree = load_checkpoint(path)
    if not isinstance(tree.get("model"), Mapping):
        if all(isinstance(value, Tensor) or name.endswith("_extra_state") for name, value in tree.items()):
            return tree
        raise CheckpointError(f"checkpoint {os.fspath(path)!r} holds no weights: its keys are {sorted(tree)}")
    return scored_weights(tree)


def scored_weights(tree: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the validated weights of a loaded checkpoint, averaged or raw."""
    described = tree.get("format") or {}
    averaged = averaged_weights(tree) if described.get("scored") == "ema" else None
    return dict(tree["model"]) if averaged is None else averaged


def averaged_weights(tree: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """Return the averaged weights of a loaded checkpoint in the model's dtypes; None without an average."""
    averages = tree.get("ema") or {}
    if not averages:
        return None
    model: Mapping[str, Tensor] = tree["model"]
    shadow: Mapping[str, Tensor] = next(iter(averages.values()))["shadow"]
    return {name: value.to(model[name].dtype) if isinstance(value, Tensor) else value for name, value in shadow.items()}
