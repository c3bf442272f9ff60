"""Order of rows read in chunks: chunks are shuffled, and rows within a window of several chunks."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.data.order import GlobalOrder
from treadle.seed import mix_seed


class Windows:
    """Rows of each window of an epoch, and their order.

    The rows are divided into chunks of neighbours. A window is the next few chunks; with ``shuffle``, the order of
    chunks, and of rows within each window, depends only on seed and epoch. Finding a position costs no more than an
    order of the chunks.

    Args:
        num_rows: number of rows N >= 0.
        chunk_rows: rows per read, >= 1; the last chunk may have fewer.
        window_chunks: chunks per window, >= 1.
        shuffle: whether to shuffle chunks, and rows within windows.
        seed: seeds the orders.
        epoch: epoch of the order.

    Attributes:
        starts: the position in the order at which each window begins, and N.

    Example:
        >>> windows = Windows(7, chunk_rows=2, window_chunks=2, shuffle=False, seed=0, epoch=0)
        >>> windows.chunks(0), windows.chunks(1), list(windows.spans(range(3, 6)))
        ([range(0, 2), range(2, 4)], [range(4, 6), range(6, 7)], [(0, range(3, 4)), (1, range(0, 2))])
    """

    def __init__(self, num_rows: int, *, chunk_rows: int, window_chunks: int, shuffle: bool, seed: int, epoch: int):
        self.num_rows = num_rows
        self.chunk_rows = chunk_rows
        self.window_chunks = window_chunks
        self.shuffle = shuffle
        self._seeds = (seed, epoch)
        count = -(-num_rows // chunk_rows)
        self._order = list(range(count))
        if shuffle:
            self._order = torch.randperm(count, generator=self._generator()).tolist()
        sizes = (sum(map(len, self.chunks(number))) for number in range(-(-count // window_chunks)))
        self.starts = list(itertools.accumulate(sizes, initial=0))

    def _generator(self, *numbers: int) -> torch.Generator:
        return torch.Generator().manual_seed(mix_seed(*self._seeds, *numbers))

    def chunks(self, number: int) -> list[range]:
        """Return the chunks of neighbouring rows of window ``number``, in order."""
        first = number * self.window_chunks
        return [
            range(chunk * self.chunk_rows, min((chunk + 1) * self.chunk_rows, self.num_rows))
            for chunk in self._order[first : first + self.window_chunks]
        ]

    def mixed(self, number: int) -> Tensor | None:
        """Return the shuffled order of the rows of a window, (rows,) int64; None for the original order."""
        if not self.shuffle:
            return None
        count = self.starts[number + 1] - self.starts[number]
        return torch.randperm(count, generator=self._generator(number + 1))

    def rows(self, number: int) -> Tensor:
        """Return the rows of a window in shuffled order, (rows,) int64."""
        standing = torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in self.chunks(number)])
        mixed = self.mixed(number)
        return standing if mixed is None else standing[mixed]

    def spans(self, part: range) -> Iterator[tuple[int, range]]:
        """Yield the windows that contain the given positions, with the positions within each."""
        place = part.start
        while place < part.stop:
            number = bisect_right(self.starts, place) - 1
            start, end = self.starts[number], min(self.starts[number + 1], part.stop)
            yield number, range(place - start, end - start)
            place = end


@dataclass(frozen=True)
class WindowedOrder(GlobalOrder):
    """Global order that is shuffled in windows; it is divided into batches like any other.

    Attributes:
        chunk_rows: as in :class:`Windows`.
        window_chunks: as in :class:`Windows`.

    Example:
        >>> order = WindowedOrder(6, 2, shuffle=True, chunk_rows=2, window_chunks=1)
        >>> sorted(order.rows(0).tolist())
        [0, 1, 2, 3, 4, 5]
    """

    chunk_rows: int = 1
    window_chunks: int = 1

    def windows(self, epoch: int) -> Windows:
        """Return the windows of an epoch."""
        return Windows(
            self.num_samples, chunk_rows=self.chunk_rows, window_chunks=self.window_chunks, shuffle=self.shuffle,
            seed=self.seed, epoch=epoch,
        )  # fmt: skip

    def rows(self, epoch: int) -> Tensor | None:
        """Return the order of a whole epoch, (num_samples,) int64; loaders use one window at a time instead."""
        if not self.shuffle:
            return None
        windows = self.windows(epoch)
        return torch.cat([windows.rows(number) for number in range(len(windows.starts) - 1)])
