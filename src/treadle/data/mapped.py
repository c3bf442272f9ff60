"""MappedLoader: rows of larger-than-memory arrays, read in chunks by a thread, resumed without reading."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from treadle.data.order import GlobalOrder
from treadle.data.rows import LastRows, Read, RowLoader, one_number_of_rows
from treadle.data.tensors import named_or_not, packed
from treadle.data.window_reader import RowArray, WindowReader
from treadle.data.windows import WindowedOrder, Windows
from treadle.device import get_device
from treadle.errors.arguments import check_least, checked

_CHUNK_BYTES = 2**20


class MappedLoader(RowLoader):
    """Loader of batches of rows from arrays on disk, read one window ahead by a thread.

    The rows are divided into chunks of neighbours, since a disk reads neighbours many times faster than single rows. A
    window consists of several chunks; at most two windows are in memory: the one that batches are taken from and the
    one being read. Batches may span windows.

    With ``shuffle`` the chunks come in a new order each epoch, and the rows are shuffled within each window. This is
    weaker than a shuffle of all rows: rows of one chunk stay within one window. If neighbours are similar (sorted by
    class, or cut from one recording), small chunks and many of them in a window mix better but read slower. The order
    depends only on the seed and the epoch; nothing is drawn from the global RNG.

    The state is an epoch and a position; a resume reads only the window of its position. On several ranks it shards
    rows like :class:`TensorLoader`; each rank reads whole windows.

    Args:
        arrays: arrays (N, ...) with equal first dimensions: NumPy arrays, ``np.memmap``, CPU tensors such as from
            ``torch.from_file``, slices of safetensors files, or other arrays with a shape and row slicing; or one
            mapping of names to such arrays.
        batch_size: rows in a batch of one rank, >= 1.
        chunk_rows: rows per read, >= 1; None takes about 1 MiB.
        window_chunks: chunks per window, >= 1.
        shuffle: whether to use a new order for each epoch.
        seed: seeds the orders.
        drop_last: whether to drop a short last batch.
        device: device of windows and batches; None is the CPU.
        global_batch_size: instead of ``batch_size``, rows in a batch of all ranks together.
        distributed: whether to shard the rows over all ranks of the process group.
        rank: rank of this reader, in place of the process group's.
        num_replicas: number of readers that share the rows, in place of the process group's.

    Yields:
        New tensors (B, ...), in the form of :class:`TensorLoader`. Errors while reading are raised at the batch that
        needs the data.

    Raises:
        ConfigError: there are no arrays, their numbers of rows differ, a dtype is not supported by torch, or a setting
            is outside its range.

    Example:
        >>> import numpy as np
        >>> loader = MappedLoader(np.arange(5), batch_size=2, chunk_rows=3, window_chunks=1)
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3], [4]]
    """

    in_background = True  # the cursor ends the thread when training ends

    @checked
    def __init__(
        self,
        *arrays: Any,
        batch_size: int | None = None,
        chunk_rows: int | None = None,
        window_chunks: int = 16,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        device: torch.device | str | None = None,
        global_batch_size: int | None = None,
        distributed: bool = False,
        rank: int | None = None,
        num_replicas: int | None = None,
    ):
        self.names, found = named_or_not(arrays, owner="MappedLoader")
        self.arrays = [RowArray.of(array, f"array {number}") for number, array in enumerate(found)]
        super().__init__(
            one_number_of_rows([array.num_rows for array in self.arrays], owner="MappedLoader"),
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            distributed=distributed,
            rank=rank,
            num_replicas=num_replicas,
        )
        self.chunk_rows = _rows_of_a_chunk(self.arrays) if chunk_rows is None else chunk_rows
        self.window_chunks = window_chunks
        check_least(1, chunk_rows=self.chunk_rows, window_chunks=window_chunks)
        self.device = get_device("cpu" if device is None else device)  # with an index: each thread has its own default
        self._reader: WindowReader | None = None

    def _order_of(self, size: int, replicas: int) -> GlobalOrder:
        if not self.shuffle:  # the order 0, 1, 2, ... is independent of the chunks
            return super()._order_of(size, replicas)
        settings = (self.num_rows, size, replicas, self.shuffle, self.seed, self.drop_last)
        return WindowedOrder(*settings, chunk_rows=self.chunk_rows, window_chunks=self.window_chunks)

    def _refers_to(self) -> dict[str, Any]:
        chunks = {"chunk_rows": self.chunk_rows, "window_chunks": self.window_chunks} if self.shuffle else {}
        return super()._refers_to() | chunks

    def close(self) -> None:
        """End the pass and its thread. The position is kept, and the next pass continues from it."""
        self._passes += 1
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    @contextlib.contextmanager
    def _reading(self, order: GlobalOrder, ahead: Iterator[range]) -> Iterator[Read]:
        windows = Windows(
            self.num_rows, chunk_rows=self.chunk_rows, window_chunks=self.window_chunks, shuffle=self.shuffle,
            seed=self.seed, epoch=self.epoch,
        )  # fmt: skip
        asked = (number for part in ahead for number, _ in windows.spans(part))
        needed = (number for number, _ in itertools.groupby(asked))
        with contextlib.closing(WindowReader(self.arrays, windows, needed, self.device)) as reader:
            self._reader = reader
            yield lambda part: self._batch(reader, windows, part)
        self._reader = None

    def _batch(self, reader: WindowReader, windows: Windows, part: range) -> Any:
        taken = [reader.take(number, span) for number, span in windows.spans(part)]
        self._last = LastRows(_joined([rows for _, rows in taken]), range(len(part)))
        return packed(self.names, [_joined(pieces) for pieces in zip(*(tensors for tensors, _ in taken), strict=True)])


def _joined(pieces: Any) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def _rows_of_a_chunk(arrays: list[RowArray]) -> int:
    widest = max((array.dtype.itemsize * torch.Size(array.shape).numel() for array in arrays), default=1)
    return max(1, _CHUNK_BYTES // max(1, widest))
