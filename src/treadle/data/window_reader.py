"""Reader of windows of rows from larger-than-memory arrays, one window ahead in a thread."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treadle.data.windows import Windows
from treadle.errors import ConfigError


@dataclass(frozen=True)
class RowArray:
    """Row slices of a NumPy array, a memory map, a tensor, or a slice of a safetensors file.

    Attributes:
        array: the array to slice.
        num_rows: number of rows N.
        shape: shape of one row.
        dtype: dtype of the tensors that rows are read into.

    Example:
        >>> RowArray.of(np.zeros((4, 2), dtype=np.float32), "array 0").dtype
        torch.float32
    """

    array: Any
    num_rows: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, array: Any, name: str) -> RowArray:
        """Inspect an array, without reading more than one row.

        Raises:
            ConfigError: it cannot be sliced, or torch does not support its dtype.
        """
        # A slice of a safetensors file has no attribute `shape`.
        shape = tuple(array.get_shape() if hasattr(array, "get_shape") else getattr(array, "shape", ()))
        if not shape or not hasattr(array, "__getitem__"):
            raise ConfigError(
                f"{name} is a {type(array).__name__} without rows: pass a NumPy array or memory map, a tensor, a slice "
                "of a safetensors file, or another array with a shape and slices of rows"
            )
        if isinstance(array, Tensor):
            return cls(array, shape[0], shape[1:], array.dtype)
        sample = array[0:1]
        return cls(array, shape[0], shape[1:], sample.dtype if isinstance(sample, Tensor) else _dtype_of(sample, name))

    def read_into(self, out: Tensor, rows: range) -> None:
        """Copy neighbouring rows into ``out``, a contiguous CPU tensor.

        Raises:
            OSError: the array returns a different number of rows.
        """
        piece = self.array[rows.start : rows.stop]
        if len(piece) != len(rows):
            raise OSError(
                f"rows {rows.start} to {rows.stop - 1} were requested and {len(piece)} returned; is it truncated?"
            )
        # NumPy copies without the GIL, and without an extra thread pool for this thread.
        if isinstance(piece, Tensor):
            np.copyto(_bytes(out), _bytes(piece.detach().contiguous()))
        else:
            np.copyto(out.numpy(), piece)


def _dtype_of(sample: NDArray[Any], name: str) -> torch.dtype:
    native = sample.dtype.newbyteorder("=")  # FITS files have the other byte order, which copying converts
    try:
        return torch.from_numpy(np.empty(0, native)).dtype
    except TypeError as error:
        raise ConfigError(f"{name} has dtype {sample.dtype}, which torch does not have; convert it first") from error


def _bytes(tensor: Tensor) -> NDArray[Any]:
    flat: NDArray[Any] = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat


@dataclass(frozen=True)
class _Window:
    number: int
    tensors: list[Tensor]
    rows: Tensor  # on the CPU, in the order in which they are yielded
    mixed: Tensor | None  # on the device of the tensors


class WindowReader:
    """Reader of windows of rows that prefetches the next window; it never holds more than two.

    Errors in the thread are raised when the rows are requested.

    Args:
        arrays: arrays with equal numbers of rows.
        windows: windows of an epoch.
        needed: the windows that will be requested, in this order.
        device: device of the windows.

    Example:
        >>> windows = Windows(4, chunk_rows=2, window_chunks=1, shuffle=False, seed=0, epoch=0)
        >>> reader = WindowReader([RowArray.of(np.arange(4), "array 0")], windows, iter([0, 1]), torch.device("cpu"))
        >>> reader.take(1, range(2))[0]
        [tensor([2, 3])]
        >>> reader.close()
    """

    def __init__(self, arrays: Sequence[RowArray], windows: Windows, needed: Iterator[int], device: torch.device):
        self.arrays = arrays
        self.windows = windows
        self.device = device
        self._needed = needed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="treadle-rows")
        self._closed = False
        self._current: _Window | None = None
        self._ahead: Future[_Window] | None = None
        self._to_device = None if device.type == "cpu" else _ToDevice(device)
        # One buffer is read into while batches are taken from the other; a device has separate windows.
        self._sets: list[dict[int, Tensor]] = [{}, {}] if self._to_device is None else [{}]

    def take(self, number: int, span: range) -> tuple[list[Tensor], Tensor]:
        """Return rows of a window in new tensors, with their indices.

        Args:
            number: the window; one of ``needed``, not before those already requested.
            span: positions in the window.
        """
        while self._current is None or self._current.number != number:
            self._current = None  # freed before the window after the next is read
            loaded = (self._ahead or self._begin()).result()
            self._ahead = self._begin()
            self._current = loaded
            if self._to_device is not None:
                self._to_device.hand_over(loaded)
        window = self._current
        picked = slice(span.start, span.stop)
        if window.mixed is None:
            return [tensor[picked].clone() for tensor in window.tensors], window.rows[picked]
        return [tensor.index_select(0, window.mixed[picked]) for tensor in window.tensors], window.rows[picked]

    def _begin(self) -> Any:
        number = next(self._needed, None)
        return None if number is None else self._thread.submit(self._read, number)

    def _read(self, number: int) -> _Window:
        chunks, mixed = self.windows.chunks(number), self.windows.mixed(number)
        ends = list(itertools.accumulate(map(len, chunks), initial=0))
        self._sets.append(self._sets.pop(0))
        tensors = [self._memory(index, array)[: ends[-1]] for index, array in enumerate(self.arrays)]
        for tensor, array in zip(tensors, self.arrays, strict=True):
            for chunk, start in zip(chunks, ends, strict=False):
                if self._closed:
                    raise CancelledError
                array.read_into(tensor[start : start + len(chunk)], chunk)
        window = _Window(number, tensors, self.windows.rows(number), mixed)
        return window if self._to_device is None else self._to_device.copied(window)

    def _memory(self, index: int, array: RowArray) -> Tensor:
        """Return memory for the largest window of an array, allocated only once."""
        memory = self._sets[-1]
        if index not in memory:
            rows = min(self.windows.chunk_rows * self.windows.window_chunks, self.windows.num_rows)
            memory[index] = _allocate((rows, *array.shape), array.dtype, pinned=self.device.type == "cuda")
        return memory[index]

    def close(self) -> None:
        """End the thread after its current chunk."""
        self._closed = True
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._current, self._ahead, self._sets = None, None, []


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, *, pinned: bool) -> Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=pinned)


class _ToDevice:
    """Copies of windows to an accelerator on a side stream, in the thread."""

    def __init__(self, device: torch.device):
        self.device = device
        self._stream: Any = None

    def copied(self, window: _Window) -> _Window:
        """Return the window on the device; the thread waits for the copies, so that the host memory is free again."""
        if self.device.type != "cuda":
            tensors = [tensor.to(self.device) for tensor in window.tensors]
            mixed = None if window.mixed is None else window.mixed.to(self.device)
            return _Window(window.number, tensors, window.rows, mixed)
        self._stream = self._stream or torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            tensors = [tensor.to(self.device, non_blocking=True) for tensor in window.tensors]
            mixed = None if window.mixed is None else window.mixed.to(self.device, non_blocking=True)
        self._stream.record_event().synchronize()
        return _Window(window.number, tensors, window.rows, mixed)

    def hand_over(self, window: _Window) -> None:
        """Keep the memory from being reused before the current stream is done reading."""
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            for tensor in (*window.tensors, *([] if window.mixed is None else [window.mixed])):
                tensor.record_stream(stream)
