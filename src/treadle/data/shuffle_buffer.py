"""Resumable shuffle buffer, whose state is the stream's position when it was last filled."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from treadle.checkpoint.introspection import has_state
from treadle.checkpoint.schema import to_plain
from treadle.data.indexed import seed_worker
from treadle.data.ranks import rank_and_worker
from treadle.data.stream_check import CpuRngState
from treadle.data.streamed import ResumableStream
from treadle.errors import ConfigError
from treadle.errors.arguments import check_least, checked
from treadle.seed import mix_seed


class ShuffleBuffer(ResumableStream):
    """Shuffle buffer over a stream with state; the buffer has state as well.

    It reads ``size`` samples, yields them in another order, and reads the next ones. The state holds no samples: a
    resume rereads those of the current buffer, at most ``size``. The stream must not have a shuffle buffer itself; for
    example, use ``datasets.IterableDataset`` with shuffled shards only.

    Args:
        stream: stream with ``state_dict`` and ``load_state_dict``, which shards itself over ranks and workers.
        size: samples to shuffle together, >= 2.
        seed: seed of the orders, and of what the stream draws from the global RNG while the buffer is filled.

    Raises:
        ConfigError: the stream has no state, or ``size`` is below 2.

    Example:
        >>> from treadle.data import ShardedStream
        >>> try:
        ...     ShuffleBuffer([1, 2, 3], 2)
        ... except ConfigError as error:
        ...     print(str(error)[:38])
        stream: a list has no state_dict and l
    """

    @checked
    def __init__(self, stream: Any, size: int, *, seed: int = 0):
        if not has_state(stream):
            raise ConfigError(
                f": a {type(stream).__name__} has no state_dict and load_state_dict, so its position cannot be saved; "
                "pass a stream that has both, such as datasets.IterableDataset",
                argument="stream",
            )
        check_least(2, size=size)
        self.stream = stream
        self.size = size
        self.seed = seed
        self.epoch = 0
        self._fill = 0  # number of earlier fills of the buffer
        self._given = 0  # samples yielded from it
        self._before: Any = None  # state of the stream before it was filled
        self._entered = False

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, and of the stream; called by the engine."""
        self.epoch = epoch
        if callable(getattr(self.stream, "set_epoch", None)):
            self.stream.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the sample that was given last."""
        return {"epoch": self.epoch, "fill": self._fill, "given": self._given, "before": self._before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass begin where ``state`` was taken, if it is one of the same epoch."""
        self._fill, self._given, self._before = int(state["fill"]), int(state["given"]), state["before"]
        self._entered = int(state["epoch"]) == self.epoch

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples of the stream in shuffled order."""
        entered, self._entered = self._entered, False
        if not entered:
            self._fill, self._given, self._before = 0, 0, None
        elif self._before is not None:
            self.stream.load_state_dict(to_plain(self._before, "stream"))
        return self._samples(rank_and_worker()[0])

    def _samples(self, reader: int) -> Iterator[Any]:
        iterator, fill, given = iter(self.stream), self._fill, self._given
        while True:
            before = None if fill == 0 else to_plain(self.stream.state_dict(), "stream")
            with _drawing_from(mix_seed(self.seed, self.epoch, reader, fill)):
                buffer = list(itertools.islice(iterator, self.size))
                order = torch.randperm(len(buffer)).tolist()
            if not buffer:
                return
            for number in range(given, len(buffer)):
                self._fill, self._given, self._before = fill, number + 1, before
                yield buffer[order[number]]
            fill, given = fill + 1, 0


@contextlib.contextmanager
def _drawing_from(seed: int) -> Iterator[None]:
    """Seed the CPU generators inside the block, and restore them afterwards."""
    outside = CpuRngState()
    seed_worker(seed)
    try:
        yield
    finally:
        outside.restore()
