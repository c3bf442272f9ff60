"""TransferLoader: batches copied to the GPU from pinned memory, on a separate stream, while the GPU computes."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from treadle.data.host_copies import note_host_copies, note_host_copy, tensors_by_name
from treadle.device import get_device, moves_itself, to_device
from treadle.errors import ConfigError
from treadle.errors.arguments import checked
from treadle.nested import map_nested_tensor

if TYPE_CHECKING:
    from treadle.data.source import Source

_log = logging.getLogger("treadle.data")


class TransferLoader:
    """Loader that copies batches to the GPU while the GPU still computes the previous step.

    Every CPU tensor of a batch is moved to pinned memory, unless already pinned, and copied on a separate stream;
    neither the host nor the GPU's current work waits. Containers and dataclasses are traversed; objects with methods to
    pin, move and record a stream, such as graphs of torch_geometric, use them. Other objects with a ``to`` and sparse
    tensors are moved on the stream that uses them. What trainers count in a batch, such as labels, is counted in the
    host copy, which lives as long as the batch.

    If worker processes read the data, the copy of the next batch starts before a batch is yielded. Other loaders are
    read only on demand, since prefetching would draw from the RNG before the step does; their copies overlap with
    unfinished GPU work.

    The order, the position and the checkpoint state are those of the wrapped loader: a run may resume with or without
    the wrapper. All other attributes are forwarded to the wrapped loader.

    Without a GPU it passes batches through unchanged, with a warning.

    Args:
        loader: a DataLoader or another iterable of batches. One with ``num_buffers`` would overwrite a batch that is
            being copied, and is refused.
        device: target device; None takes the current CUDA device, if there is one.

    Raises:
        ConfigError: the loader has ``num_buffers``, or the device is not available.

    Example:
        >>> loader = TransferLoader([torch.ones(2)], "cpu")
        >>> list(loader)
        [tensor([1., 1.])]
    """

    @checked
    def __init__(self, loader: Iterable[Any], device: torch.device | str | int | None = None):
        self.loader = loader
        self.device = get_device(device)
        num_buffers = getattr(loader, "num_buffers", None)
        if num_buffers is not None:
            raise ConfigError(
                f"a {type(loader).__name__} with num_buffers={num_buffers} would overwrite a batch that is being "
                "copied; pass num_buffers=None, or keep its tensors on the GPU and leave the TransferLoader out",
                argument="loader",
            )
        self.copies: Copies | None = GpuCopies(self.device) if self.device.type == "cuda" else None
        if self.copies is None:
            _log.warning(
                "TransferLoader: on %s there is no copy to overlap, so batches pass through unchanged", self.device
            )

    def __len__(self) -> int:
        """Return the number of batches of an epoch, if the wrapped loader has one."""
        return len(self.loader)  # type: ignore[arg-type]  # a TypeError, as of the wrapped loader

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the wrapped loader on the device."""
        return self.over(iter(self.loader), stateful=hasattr(self.loader, "state_dict"))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "loader" not in self.__dict__:  # looked up early by copy and pickle
            raise AttributeError(name)
        return getattr(self.loader, name)

    def over(self, batches: Iterator[Any], *, stateful: bool) -> Iterator[Any]:
        """Return an iterator that copies the batches of a pass.

        Args:
            batches: pass of the wrapped loader.
            stateful: whether the loader's own state holds the position of the pass, so that it must not prefetch.
        """
        if self.copies is None:
            return batches
        workers = self.loader.num_workers if isinstance(self.loader, DataLoader) else 0
        return InOrder(batches, self.copies, ahead=1 if workers and not stateful else 0)


class Copies(Protocol):
    """Copies of batches that are started early and received later."""

    def send(self, batch: Any) -> Any:
        """Start the copy; return the argument of :meth:`receive`."""
        ...

    def receive(self, sent: Any) -> Any:
        """Return the batch; work of the current stream on it waits for the copy."""
        ...


class InOrder:
    """Iterator over a pass that starts ``ahead`` copies early; batches and errors keep their order.

    Args:
        batches: a pass of a loader.
        copies: performs the copies.
        ahead: number of early copies.
    """

    def __init__(self, batches: Iterator[Any], copies: Copies, *, ahead: int):
        self.batches = batches
        self._copies = copies
        self._ahead = ahead
        self._sent: deque[Any] = deque()
        self._end: Exception | None = None

    def __iter__(self) -> InOrder:
        return self

    def __next__(self) -> Any:
        while len(self._sent) <= self._ahead and self._end is None:
            try:
                self._sent.append(self._copies.send(next(self.batches)))
            except Exception as error:  # noqa: BLE001  # raised below, once the batches before it are handed out
                self._end = error
        if not self._sent:
            assert self._end is not None
            raise self._end
        return self._copies.receive(self._sent.popleft())


class TransferredSource:
    """Source of the wrapped loader with copying; kind, position and state are those of the yielded batches.

    Args:
        source: source of the wrapped loader.
        loader: the wrapper.
    """

    def __init__(self, source: Source, loader: TransferLoader):
        self.source = source
        self.loader = loader
        self.kind = source.kind
        self.length = source.length
        self.exact = source.exact
        self.counts_epochs = source.counts_epochs

    def open(self, *, skip: int, seed: int, state: Any, cut: bool = False) -> Iterator[Any]:
        """Open an epoch at a position; skipped batches are not copied."""
        batches = self.source.open(skip=skip, seed=seed, state=state, cut=cut)
        return self.loader.over(batches, stateful=self.source.kind in ("stateful", "streamed"))

    def finish(self, iterator: Iterator[Any]) -> None:
        """Exhaust the wrapped loader."""
        self.source.finish(iterator.batches if isinstance(iterator, InOrder) else iterator)

    def is_over_at(self, position: int) -> bool:
        """Return whether a StopIteration after ``position`` batches can be the end of the data."""
        return self.source.is_over_at(position)

    def ids_at(self, position: int) -> Any:
        """Return what the batch at ``position`` was read with, or None."""
        return self.source.ids_at(position)

    def state(self) -> Any:
        """Return the wrapped loader's own state, or None."""
        return self.source.state()

    def warnings(self, *, resuming: bool) -> list[str]:
        """Return warnings about exact resume with the wrapped loader."""
        return self.source.warnings(resuming=resuming)

    def measure(self) -> None:
        """Update the length of the wrapped loader."""
        self.source.measure()
        self.length = self.source.length

    def close(self) -> None:
        """End background workers and threads of the wrapped loader."""
        self.source.close()


class GpuCopies:
    """Copies on a side stream; the stream that uses a batch waits for it, the host does not.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._stream: Any = None  # created with the first batch: a loader may be built before processes are forked

    def send(self, batch: Any) -> tuple[Any, Any]:
        """Start the copy of every CPU tensor; return the batch and the event at its end."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            sent = map_nested_tensor(self._copied, batch, special=self._copied_object)
        return sent, self._stream.record_event()

    def _copied(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return tensor  # another stream may still write to it, or it cannot be pinned
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return note_host_copy(pinned.to(self.device, non_blocking=True), pinned)

    def _copied_object(self, value: Any) -> Any:
        if not moves_itself(value):
            return NotImplemented
        if not _records_itself(value):
            return value
        # A copy, since graphs of torch_geometric change in place.
        pinned = copy.copy(value).pin_memory()
        copies = tensors_by_name(pinned)
        return note_host_copies(pinned.to(self.device, non_blocking=True), copies)

    def receive(self, sent: tuple[Any, Any]) -> Any:
        """Return the batch for the current stream; its memory is not reused before that stream is done with it."""
        batch, event = sent
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(event)

        def kept(tensor: Tensor) -> Tensor:
            if tensor.device != self.device or tensor.layout != torch.strided:
                return tensor.to(self.device, non_blocking=True)
            tensor.record_stream(stream)
            return tensor

        def kept_object(value: Any) -> Any:
            if not moves_itself(value):
                return NotImplemented
            if not _records_itself(value):
                copies = tensors_by_name(value)
                return note_host_copies(to_device(value, self.device), copies)
            value.record_stream(stream)
            return value

        return map_nested_tensor(kept, batch, special=kept_object)


def _records_itself(value: Any) -> bool:
    return callable(getattr(value, "record_stream", None)) and callable(getattr(value, "pin_memory", None))
