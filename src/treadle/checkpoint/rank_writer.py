"""Checkpoints that all ranks ask for together: what fails on one of them raises on all, at the same point."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Literal

from treadle import distributed
from treadle.checkpoint.buffers import HostBuffers, NoBuffers
from treadle.checkpoint.ranks import on_rank_0
from treadle.checkpoint.writer import CheckpointWriter, Tree


class RankWriter(CheckpointWriter):
    """Writer of one state at a time for all ranks: a file by rank 0, a folder of shards by every rank.

    All ranks call every method at the same point. An error of a background write is raised by :meth:`wait`, for
    which every rank knows the moment from the notices of a step: see :meth:`ended`.

    Attributes:
        in_flight: what a write in the background that was not waited for yet makes; the same on all ranks.

    Example:
        >>> from treadle.checkpoint.store import load_checkpoint, save_checkpoint
        >>> writer = RankWriter()
        >>> writer.save_file(lambda buffers: {"a": 1}, lambda tree: save_checkpoint(tree, "a.pt"), background=True)
        >>> writer.wait()
        >>> load_checkpoint("a.pt")
        {'a': 1}
    """

    def __init__(self) -> None:
        super().__init__()
        self.in_flight: Literal["file", "folder"] | None = None
        self._collections = _ShortCollections()

    def notice(self) -> float:
        """Return the number that this rank shares in a step: 1.0 during a background write, else 0.0."""
        return float(self.writing)

    def ended(self, notices: Sequence[float]) -> bool:
        """Return whether a write in the background has ended on all ranks and was not waited for yet.

        Args:
            notices: of all ranks, from a step that began after the write did.

        Example:
            >>> RankWriter().ended([0.0])
            False
        """
        return self.in_flight is not None and not any(notices)

    def save_file(
        self, collect: Callable[[HostBuffers], Tree], write: Callable[[Tree], object], *, background: bool
    ) -> None:
        """Wait for the write before, make the state on all ranks, and let rank 0 write it.

        Args:
            collect: makes the state; called on every rank.
            write: writes it; called on rank 0.
            background: whether training continues meanwhile; False waits for rank 0.

        Raises:
            CheckpointError: it could not be written, or the one before could not; on all ranks.
        """
        if distributed.rank() != 0:
            self.wait()
            collect(NoBuffers())  # sharded tensors are gathered on rank 0
            if not background:
                on_rank_0(_nothing)
        elif background:
            self.save(collect, write)
        else:
            self.save(collect, lambda tree: on_rank_0(lambda: write(tree)), background=False)
        self.in_flight = "file" if background else None

    def save_folder(
        self, collect: Callable[[HostBuffers], Tree], write: Callable[[Tree], object], *, background: bool
    ) -> None:
        """Wait for the write before, make this rank's parts of the state, and write them.

        Args:
            collect: makes them.
            write: writes them together with the other ranks, and agrees on errors itself.
            background: whether training continues meanwhile.

        Raises:
            CheckpointError: they could not be written, or those before could not.
        """
        if background:
            self._collections.begin()
        self.save(collect, write, background=background, with_peers=distributed.world_size() > 1)
        self.in_flight = "folder" if background else None

    def wait(self) -> None:
        """Wait until what was asked for is written.

        Raises:
            CheckpointError: it could not be written; on all ranks. Raised once.
        """
        kind, self.in_flight = self.in_flight, None
        if kind == "file":
            on_rank_0(super().wait)
        else:
            super().wait()

    def close(self, failure: BaseException | None = None) -> None:
        """As :meth:`CheckpointWriter.close`; after a failure nothing is exchanged with other ranks any more."""
        if failure is not None:
            self.in_flight = None
        self._collections.end()
        super().close(failure)


class _ShortCollections:
    """Full garbage collections that pass over what was there before the first folder was written.

    Planning a folder makes so many objects that every few saves bring a full collection on, in the thread that writes.
    Of all objects of a process with torch it takes 0.2 s, in which no other thread runs Python, and the ranks wait for
    each other.
    """

    def __init__(self) -> None:
        self._begun = False

    def begin(self) -> None:
        """Leave out the objects there are, unless somebody has done so already."""
        if gc.isenabled() and gc.get_freeze_count() < len(gc.get_objects()):  # some are from the start of Python 3.12
            gc.collect()  # garbage would be left out too, with the memory it holds
            gc.freeze()
            self._begun = True

    def end(self) -> None:
        """Take them in again."""
        if self._begun:
            gc.unfreeze()
            self._begun = False


def _nothing() -> None:
    """What the other ranks do while rank 0 writes."""
