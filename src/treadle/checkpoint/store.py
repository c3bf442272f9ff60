"""The checkpoint store: whole files or none, verified when written and when read, never worse than before.

``torch.save`` makes a zip archive with a CRC-32 for each record; torch does not check these, so every read here does.
It does not check the sizes that a file claims either, so every read here does that too. Nothing is ever unpickled:
a file that needs it is refused.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treadle.checkpoint.archive import ArchiveError, read_archive
from treadle.checkpoint.files import (
    first_line,
    link_checkpoint,
    make_folder,
    point_to,
    replacing,
    reported,
    save_tensor,
    sync_folder,
    write_bytes,
    write_text,
)
from treadle.checkpoint.pickled import walk_pickle
from treadle.checkpoint.retention import Retention, write_order
from treadle.checkpoint.schema import check_format, non_finite_names
from treadle.errors import CheckpointError

__all__ = [
    "Retention",
    "check_written",
    "find_latest",
    "link_checkpoint",
    "load_checkpoint",
    "load_weights",
    "point_to",
    "replacing",
    "save_checkpoint",
    "save_tensor",
    "scored_weights",
    "sync_folder",
    "verify_checkpoint",
    "write_bytes",
    "write_text",
]

_log = logging.getLogger("treadle.checkpoint")
_ASIDE = ".nonfinite"


def verify_checkpoint(path: str | os.PathLike[str]) -> list[str]:
    """Returns the problems found in a checkpoint file; an empty list means it is intact and holds no code.

    Checks that the file is a whole archive of the kind that ``torch.save`` writes, that every record's CRC-32 is
    right, that its pickle names nothing but tensors and plain values, and that every tensor lies inside its storage.
    One pass; nothing in the file is executed.

    Example:
        >>> verify_checkpoint("no_such_file.pt")
        ['no such file']
    """
    try:
        archive = read_archive(path)
    except ArchiveError as error:
        return [str(error)]
    return [f"refused: {reason}" for reason in walk_pickle(archive.pickle, archive.storages).refused]


def check_written(path: Path) -> list[str]:
    """Returns the problems of a file this process has just written: whether the disk holds every byte of it."""
    try:
        read_archive(path)
    except ArchiveError as error:
        return [str(error)]
    return []


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a checkpoint to the CPU after checking every byte of it.

    Args:
        path: the file.

    Returns:
        The tree that was saved.

    Raises:
        CheckpointError: the file is missing, damaged, holds pickled code, or is of a newer format.
    """
    problems = verify_checkpoint(path)
    if problems:
        raise CheckpointError(f"checkpoint {os.fspath(path)!r} cannot be used: {'; '.join(problems[:3])}")
    try:
        with torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
            tree = torch.load(path, map_location="cpu", weights_only=True)
        check_format(tree, f"checkpoint {os.fspath(path)!r}")
        return dict(tree)
    except CheckpointError:
        raise
    except Exception as error:  # whatever torch's reader trips over
        raise CheckpointError(f"checkpoint {os.fspath(path)!r} cannot be read: {first_line(error)}") from error


def save_checkpoint(tree: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Writes a state tree to a file, atomically and verified.

    A model with a non-finite value never replaces a file: it goes to ``<stem>.nonfinite.pt`` with a warning.

    Args:
        tree: what :func:`treadle.checkpoint.schema.to_plain` returned.
        path: the target; its folder is created.

    Returns:
        The file that was written.

    Raises:
        CheckpointError: the disk is full, the folder is read-only, or what was written does not verify. The old
            file under the same name is intact then.
    """
    target = Path(path)
    bad = non_finite_names(tree)
    if bad:
        aside = target.with_name(f"{target.stem}{_ASIDE}{target.suffix}")
        _log.warning(
            "not writing %s: %d tensors are not finite (first: %s); the state goes to %s and no file is pruned",
            target.name, len(bad), bad[0], aside.name,
        )  # fmt: skip
        target = aside

    with reported(target):
        make_folder(target.parent)
        with replacing(target) as temporary:
            with open(temporary, "wb") as file:
                torch.save(dict(tree), file)
                file.flush()
                os.fsync(file.fileno())
            problems = check_written(temporary)
            if problems:
                raise CheckpointError(f"checkpoint {target} was not written: {'; '.join(problems)}; the disk may fail")
    return target


def find_latest(candidates: Iterable[Path], *, prefer: Path | None = None) -> tuple[Path, dict[str, Any]] | None:
    """Returns the newest intact checkpoint by write time and its tree, naming each damaged one it passes over.

    States that were put aside because they are not finite are passed over too.

    Args:
        candidates: files that may exist. A link whose file is gone counts as a state that was lost.
        prefer: the one to try first, whatever its write time; a link stands for its file.

    Returns:
        (path, tree), or None when no candidate exists.

    Raises:
        CheckpointError: files are present but none is intact.
    """
    present = {os.path.realpath(path): path for path in reversed(list(candidates)) if os.path.lexists(path)}
    first = None if prefer is None else os.path.realpath(prefer)
    newest_first = sorted(present.items(), key=lambda item: (item[0] == first, write_order(item[1])), reverse=True)
    for _, path in newest_first:
        if path.stem.endswith(_ASIDE):
            continue
        try:
            return path, load_checkpoint(path)
        except CheckpointError as error:
            _log.warning("%s; looking for an older one", error)
    if present:
        raise CheckpointError(
            f"no intact checkpoint among {_listed([path for _, path in newest_first])}; "
            "starting afresh must be asked for: remove the files, or resume from nothing"
        )
    return None


def _listed(paths: list[Path]) -> str:
    shown = ", ".join(str(path) for path in paths[:5])
    return shown if len(paths) <= 5 else f"{shown} and {len(paths) - 5:,} more"


def load_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Returns the scored weights of any treadle file: a checkpoint or a weights-only export.

    Args:
        path: the file.

    Returns:
        A plain state dict. Of a checkpoint whose averaged weights were validated, the averaged ones; of a run with
        adapters, without the frozen base.

    Raises:
        CheckpointError: the file is missing, damaged, or holds no weights.
    """
    tree = load_checkpoint(path)
    if not isinstance(tree.get("model"), Mapping):
        if all(isinstance(value, Tensor) for value in tree.values()):
            return tree
        raise CheckpointError(f"checkpoint {os.fspath(path)!r} holds no weights: its keys are {sorted(tree)}")
    return scored_weights(tree)


def scored_weights(tree: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the weights of a loaded checkpoint that were validated: the averaged ones, or the raw ones."""
    model: Mapping[str, Tensor] = tree["model"]
    described = tree.get("format") or {}
    averages = tree.get("ema") or {}
    if described.get("scored") == "ema" and averages:
        shadow: Mapping[str, Tensor] = next(iter(averages.values()))["shadow"]
        return {name: value.to(model[name].dtype) for name, value in shadow.items()}
    return dict(model)
