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
    from treadle.data.sources import Source

_log = logging.getLogger("treadle.data")


class TransferLoader:
    """Loader whose batches arrive on the GPU, copied while the GPU still computes the step before.

    Every CPU tensor of a batch is put into pinned memory, if the loader has not done so, and copied on a stream of its
    own; neither the host nor the GPU's present work waits. Containers and dataclasses are looked into, and objects
    that pin, move and record themselves, such as graphs of torch_geometric, are asked to. Other objects with a ``to``
    and sparse tensors are moved on the stream that uses them. What trainers count in a batch, as they do labels, they
    count in the copy on the host, which stays as long as the batch.

    Where worker processes read the data, the copy of the next batch is begun before a batch is handed out. Other
    loaders are asked for a batch only when it is wanted, since reading ahead would draw from the random generators
    before the step does; their copies overlap with what the GPU has not finished.

    The order, the position, and what a checkpoint holds are those of the wrapped loader: a run may resume with or
    without the wrapper. Everything else that is asked of this loader is answered by the wrapped one, too.

    Without a GPU it passes batches through unchanged, with a warning.

    Args:
        loader: a DataLoader or another iterable of batches. One with ``num_buffers`` would write over a batch that is
            being copied, and is refused.
        device: where batches go; None takes the present CUDA device, if there is one.

    Raises:
        ConfigError: the loader has ``num_buffers``, or the device is not there.

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
                f"a {type(loader).__name__} with num_buffers={num_buffers} would write over a batch that is "
                "being copied; pass num_buffers=None, or keep its tensors on the GPU and leave the TransferLoader out",
                argument="loader",
            )
        self.copies: Copies | None = GpuCopies(self.device) if self.device.type == "cuda" else None
        if self.copies is None:
            _log.warning(
                "TransferLoader: on %s there is no copy to hide: batches pass through as they are", self.device
            )

    def __len__(self) -> int:
        """Return the number of batches of an epoch, if the wrapped loader has one."""
        return len(self.loader)  # type: ignore[arg-type]  # a TypeError, as of the wrapped loader

    def __iter__(self) -> Iterator[Any]:
        """Yield what the wrapped loader yields, on the device."""
        return self.over(iter(self.loader), stateful=hasattr(self.loader, "state_dict"))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "loader" not in self.__dict__:  # copying and unpickling ask before there is one
            raise AttributeError(name)
        return getattr(self.loader, name)

    def over(self, batches: Iterator[Any], *, stateful: bool) -> Iterator[Any]:
        """Return an iterator over a pass of the wrapped loader that copies.

        Args:
            batches: of the wrapped loader.
            stateful: whether the loader's own state holds the position of the pass, so that it must not run ahead.
        """
        if self.copies is None:
            return batches
        workers = self.loader.num_workers if isinstance(self.loader, DataLoader) else 0
        return InOrder(batches, self.copies, ahead=1 if workers and not stateful else 0)


class Copies(Protocol):
    """Copies of batches that are begun early and handed out later."""

    def send(self, batch: Any) -> Any:
        """Begin the copy; return what :meth:`receive` takes."""
        ...

    def receive(self, sent: Any) -> Any:
        """Return the batch; what the present stream does with it comes after the copy."""
        ...


class InOrder:
    """Iterator over a pass, ``ahead`` copies begun before they are wanted; batches and errors come in their order.

    Args:
        batches: a pass of a loader.
        copies: copies them.
        ahead: how many.
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
    """The wrapped loader's source, copying; kind, position and state are those of the batches handed out.

    Args:
        source: of the wrapped loader.
        loader: the wrapper.
    """

    def __init__(self, source: Source, loader: TransferLoader):
        self.source = source
        self.loader = loader
        self.kind = source.kind
        self.length = source.length
        self.exact = source.exact
        self.counts_epochs = source.counts_epochs

    def open(self, *, skip: int, seed: int, state: Any) -> Iterator[Any]:
        """Open an epoch at a position; skipped batches are not copied."""
        return self.loader.over(
            self.source.open(skip=skip, seed=seed, state=state), stateful=self.source.kind in ("stateful", "streamed")
        )

    def finish(self, iterator: Iterator[Any]) -> None:
        """Let the wrapped loader find its end."""
        self.source.finish(iterator.batches if isinstance(iterator, InOrder) else iterator)

    def is_over_at(self, position: int) -> bool:
        """Return whether a StopIteration after ``position`` batches can be the end of the data."""
        return self.source.is_over_at(position)

    def ids_at(self, position: int) -> Any:
        """Return what the batch after ``position`` others was read with, or None."""
        return self.source.ids_at(position)

    def state(self) -> Any:
        """Return the wrapped loader's own state, or None."""
        return self.source.state()

    def warnings(self, *, resuming: bool) -> list[str]:
        """Return what the user must know about exact resume with the wrapped loader."""
        return self.source.warnings(resuming=resuming)

    def measure(self) -> None:
        """Read the length of the wrapped loader again."""
        self.source.measure()
        self.length = self.source.length

    def close(self) -> None:
        """End what the wrapped loader runs in the background."""
        self.source.close()


class GpuCopies:
    """Copies on a side stream; the stream that uses a batch waits for it, the host does not.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._stream: Any = None  # made with the first batch: a loader may be built before processes are forked

    def send(self, batch: Any) -> tuple[Any, Any]:
        """Begin the copy of every CPU tensor; return the batch and the event that ends it."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            sent = map_nested_tensor(self._copied, batch, special=self._copied_object)
        return sent, self._stream.record_event()

    def _copied(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return tensor  # another stream may still write it, or it cannot be pinned
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
        """Return the batch for the present stream; its memory is not used again before that stream is done with it."""
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
