"""What all ranks do together about checkpoints: one works and the others wait, or each does its share.

A failure on one rank raises the same error on all of them, at the same point, so that no rank waits for ever.
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
_group: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None  # the default group and the one made for it


class WriterLostError(CheckpointError, RankLostError):
    """A rank ended or did not answer, so the state of the others is unknown."""


def writers_group() -> dist.ProcessGroup | None:
    """Return the gloo group of those who write, which is not the one of those who train; None without any group.

    The first call makes it, which all ranks must do at the same point.
    """
    global _group
    default = dist.group.WORLD if distributed.is_distributed() else None
    if default is None:
        return None
    if _group is None or _group[0] is not default:
        _group = (default, dist.new_group(backend="gloo"))
    return _group[1]


def together(group: dist.ProcessGroup | None, work: Callable[[], Result]) -> list[Result]:
    """Do a piece of work on every rank and return all results, on every rank.

    Args:
        group: who takes part; None for one process.
        work: what to do.

    Raises:
        CheckpointError: it failed on some rank; the same error on all of them.

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
        raise WriterLostError(f"a rank was lost while all worked on a checkpoint: {first_line(error)}") from error
    for rank, (_, theirs) in enumerate(gathered):
        if theirs is not None:
            raise CheckpointError(f"rank {rank}: {theirs}") from own
    return [result for result, _ in gathered]


def on_rank_0(work: Callable[[], Result]) -> Result:
    """Do a piece of work on rank 0 while the others wait, and return its result on all.

    Raises:
        CheckpointError: it failed there; on all ranks.

    Example:
        >>> on_rank_0(lambda: 1)
        1
    """
    results = on_all_ranks(lambda: work() if distributed.rank() == 0 else None)
    return cast(Result, results[0])


@contextlib.contextmanager
def held_by_rank_0(folder: Path) -> Iterator[None]:
    """Hold a folder for a run on any number of ranks inside the block; all ranks enter it.

    Raises:
        CheckpointError: another process holds it, or it cannot be written; on all ranks.

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
    """Do a piece of work on every rank and return all results, on every rank.

    Raises:
        CheckpointError: it failed on some rank; the same error on all.

    Example:
        >>> on_all_ranks(lambda: 1)
        [1]
    """
    return together(_deciders(), work)


def open_on_ranks(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Open a checkpoint on every rank; of a folder of shards each checks its share of the files.

    Args:
        path: the same on all ranks.

    Raises:
        CheckpointError: it is damaged, wherever that was seen; on all ranks.
    """
    tree: dict[str, Any] = {}

    def work() -> str:
        tree.update(open_checkpoint(path, share=(distributed.rank(), distributed.world_size())))
        return os.fspath(path)

    paths = on_all_ranks(work)
    if len(set(paths)) > 1:
        raise CheckpointError(f"the ranks would resume from different checkpoints: {', '.join(sorted(set(paths)))}")
    return tree


def _deciders() -> dist.ProcessGroup | None:
    return distributed.control_group() if distributed.world_size() > 1 else None
