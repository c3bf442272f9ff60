"""Collective checkpoint writing: a failure on one rank raises on all, at the same point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from treadle import distributed
from treadle.checkpoint.buffers import HostBuffers, NoBuffers
from treadle.checkpoint.ranks import on_rank_0
from treadle.checkpoint.writer import CheckpointWriter, Tree
from treadle.device.garbage import ShortCollections


class RankWriter(CheckpointWriter):
    """Writer of one state at a time for all ranks: a file from rank 0, or a folder of shards from every rank.

    All ranks call every method at the same point. Errors of a background write are raised by :meth:`wait`; when to call
    it, every rank knows from the notices of a step: see :meth:`ended`.

    Attributes:
        in_flight: output of a background write that was not waited for yet; the same on all ranks.

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
        self._collections = ShortCollections()

    def notice(self) -> float:
        """Return the number that this rank sends in a step: 1.0 during a background write, else 0.0."""
        return float(self.writing)

    def ended(self, notices: Sequence[float]) -> bool:
        """Return whether a background write has ended on all ranks and was not waited for yet.

        Args:
            notices: notices of all ranks, from a step that began after the write.

        Example:
            >>> RankWriter().ended([0.0])
            False
        """
        return self.in_flight is not None and not any(notices)

    def save_file(
        self, collect: Callable[[HostBuffers], Tree], write: Callable[[Tree], object], *, background: bool
    ) -> None:
        """Wait for the previous write, collect the state on all ranks, and write it on rank 0.

        Args:
            collect: collects the state; called on every rank.
            write: writes it; called on rank 0.
            background: whether training continues during the write; False waits for rank 0.

        Raises:
            CheckpointError: this or the previous write failed; raised on all ranks.
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
        """Wait for the previous write, collect this rank's parts of the state, and write them.

        Args:
            collect: collects the parts.
            write: writes the parts together with the other ranks, and agrees on errors itself.
            background: whether training continues during the write.

        Raises:
            CheckpointError: this or the previous write failed.
        """
        if background:
            self._collections.begin()  # planning a folder creates many objects, in the writing thread
        self.save(collect, write, background=background, collective=distributed.world_size() > 1)
        self.in_flight = "folder" if background else None

    def wait(self) -> None:
        """Wait for the current write.

        Raises:
            CheckpointError: the write failed; raised once, on all ranks.
        """
        kind, self.in_flight = self.in_flight, None
        if kind == "file":
            on_rank_0(super().wait)
        else:
            super().wait()

    def close(self, failure: BaseException | None = None) -> None:
        """Close like :meth:`CheckpointWriter.close`; after a failure, without communication."""
        if failure is not None:
            self.in_flight = None
        self._collections.end()
        super().close(failure)


def _nothing() -> None:
    """No-op of the other ranks while rank 0 writes."""
