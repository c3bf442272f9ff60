"""Collective work on checkpoints: one rank works while the others wait, or each does its share.

A failure on one rank raises the same error on all of them, at the same point, so that no rank waits forever.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist

from treadle import distributed
from treadle.checkpoint.files import first_line
from treadle.checkpoint.lock import RunLock
from treadle.checkpoint.store import open_checkpoint
from treadle.errors import CheckpointError, RankLostError

Result = TypeVar("Result")
_group: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None  # the default group and the one created for it


class WriterLostError(CheckpointError, RankLostError):
    """Error that a rank ended or did not respond, so that the state of the others is unknown."""


def writers_group() -> dist.ProcessGroup | None:
    """Return the gloo group for writing, separate from the group for training; None without a process group.

    The first call creates it and must be made on all ranks at the same point.
    """
    global _group
    default = dist.group.WORLD if distributed.is_distributed() else None
    if default is None:
        return None
    if _group is None or _group[0] is not default:
        _group = (default, dist.new_group(backend="gloo"))
    return _group[1]


def together(group: dist.ProcessGroup | None, work: Callable[[], Result]) -> list[Result]:
    """Run a function on every rank and return all results on every rank.

    Args:
        group: participating ranks; None for a single process.
        work: the function.

    Raises:
        CheckpointError: it failed on some rank; the same error is raised on all ranks.

    Example:
        >>> together(None, lambda: 1)
        [1]
    """
    if group is None:
        return [work()]
    value, problem, own = None, None, None
    try:
        value = work()
    except Exception as error:  # noqa: BLE001  (raised on all ranks below)
        own = error
        problem = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {first_line(error)}"
    gathered: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(gathered, (value, problem), group=group)
    except Exception as error:
        raise WriterLostError(
            "a rank was lost during work on a checkpoint: it failed, or it ended without calling what this rank calls. "
            f"All ranks must call train() and save, not one alone as in `if rank == 0:` ({first_line(error)})"
        ) from error
    for rank, (_, theirs) in enumerate(gathered):
        if theirs is not None:
            raise CheckpointError(f"rank {rank}: {theirs}") from own
    return [result for result, _ in gathered]


def on_rank_0(work: Callable[[], Result]) -> Result:
    """Run a function on rank 0 while the others wait, and return its result on all ranks.

    Raises:
        CheckpointError: it failed on rank 0; raised on all ranks.

    Example:
        >>> on_rank_0(lambda: 1)
        1
    """
    results = on_all_ranks(lambda: work() if distributed.rank() == 0 else None)
    return cast(Result, results[0])


@contextlib.contextmanager
def held_by_rank_0(folder: Path) -> Iterator[None]:
    """Lock a folder for a run on any number of ranks inside the block; collective.

    Raises:
        CheckpointError: another process holds the lock, or the folder is not writable; raised on all ranks.

    Example:
        >>> with held_by_rank_0(Path("run")):
        ...     os.listdir("run")
        ['.treadle-lock']
    """
    lock = RunLock()
    on_rank_0(lambda: lock.take(folder))
    try:
        yield
    finally:
        lock.release()


def on_all_ranks(work: Callable[[], Result]) -> list[Result]:
    """Run a function on every rank and return all results on every rank.

    Raises:
        CheckpointError: it failed on some rank; the same error is raised on all ranks.

    Example:
        >>> on_all_ranks(lambda: 1)
        [1]
    """
    return together(distributed.control_group() if distributed.world_size() > 1 else None, work)


def open_on_ranks(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Open a checkpoint on every rank; each rank checks its share of the files of a folder of shards.

    Args:
        path: the checkpoint; the same on all ranks.

    Raises:
        CheckpointError: some rank found it damaged; raised on all ranks.
    """
    tree: dict[str, Any] = {}

    def work() -> str:
        tree.update(open_checkpoint(path, share=(distributed.rank(), distributed.world_size())))
        return os.fspath(path)

    paths = on_all_ranks(work)
    if len(set(paths)) > 1:
        raise CheckpointError(f"the ranks would resume from different checkpoints: {', '.join(sorted(set(paths)))}")
    return tree
