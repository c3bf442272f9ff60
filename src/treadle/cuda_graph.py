"""Work recorded as a CUDA graph, and the memory that a graph reads from and writes to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from treadle.nested import map_nested_tensor

_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_WARM_UPS = 3


class CudaGraph:
    """Records what a function launches and launches it again, all at once.

    Graphs that are made one after another and replayed one at a time may share their memory.

    Args:
        share: another graph, whose memory this one uses too.
    """

    def __init__(self, share: CudaGraph | None = None):
        self._graph = torch.cuda.CUDAGraph()
        self._pool = None if share is None else share._graph.pool()

    def record(self, function: Callable[[], Any], *, prepare: Callable[[], None]) -> Any:
        """Calls a function a few times to warm up and once to record it; returns what the last call returned.

        Tensors in it, and whatever else the function wrote, hold what the latest replay left there.

        Args:
            function: launches work on the current stream and reads nothing from the device.
            prepare: called before each call, outside the recording.

        Raises:
            RuntimeError: something in the function cannot be recorded.
        """
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(_WARM_UPS):
                prepare()
                function()
        torch.cuda.current_stream().wait_stream(beside)
        prepare()
        # Threads of data loaders and of background saves may talk to the device meanwhile.
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            return function()

    def replay(self) -> None:
        """Launches what was recorded."""
        self._graph.replay()


@contextlib.contextmanager
def capturable(optimizer: Optimizer) -> Iterator[None]:
    """Tells an optimizer that its step is being recorded, if it is; a fused one has its state on the device anyway."""
    recording = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    groups = [group for group in optimizer.param_groups if recording and "capturable" in group]
    before = [group["capturable"] for group in groups]
    for group in groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group, value in zip(groups, before, strict=True):
            group["capturable"] = value


def shape_of(batch: Any) -> tuple[Any, ...] | str:
    """Returns what a recorded step depends on besides the values of a batch's tensors: shapes, types, plain values.

    Returns:
        Something that can be compared, or the name of a type in the batch whose insides are not known.

    Example:
        >>> shape_of((torch.zeros(2), 3)) == shape_of((torch.ones(2), 3)), shape_of([set()])
        (True, 'set')
    """
    found: list[Any] = []

    def note(value: Any) -> Any:
        if isinstance(value, _PLAIN):
            found.append(value)
        return NotImplemented

    def note_tensor(tensor: Tensor) -> Tensor:
        found.append((tensor.shape, tensor.dtype))
        return tensor

    unknown: list[str] = []

    def look(value: Any) -> Any:
        note(value)
        known = isinstance(value, (*_PLAIN, dict, list, tuple)) or hasattr(value, "__dataclass_fields__")
        if not known:
            unknown.append(type(value).__name__)
        return NotImplemented

    map_nested_tensor(note_tensor, batch, special=look)
    return unknown[0] if unknown else tuple(found)


class FixedBatch:
    """Fixed memory that batches of one shape are copied into.

    Args:
        batch: the first of them.
        device: where the memory lies.
        in_place: the batch's own tensors on the device are the memory: whoever made them writes the next ones there.

    Attributes:
        batch: as given, its tensors in fixed memory.

    Example:
        >>> place = FixedBatch({"x": torch.zeros(2)}, torch.device("cpu"))
        >>> place.fill({"x": torch.ones(2)}); place.batch
        {'x': tensor([1., 1.])}
    """

    def __init__(self, batch: Any, device: torch.device, *, in_place: bool = False):
        def fixed(tensor: Tensor) -> Tensor:
            if in_place and tensor.device == device:
                return tensor.detach()
            return tensor.detach().to(device, copy=True)

        self._tensors: list[Tensor] = []
        self.batch = map_nested_tensor(fixed, batch)
        map_nested_tensor(self._tensors.append, self.batch)

    def fill(self, batch: Any) -> None:
        """Copies the tensors of another batch of the same shape there."""
        fixed = iter(self._tensors)

        def copy(tensor: Tensor) -> None:
            target = next(fixed)
            if target.data_ptr() != tensor.data_ptr():
                target.copy_(tensor, non_blocking=True)

        map_nested_tensor(copy, batch)


class Results:
    """Small tensors that each replay leaves behind, packed by type, so that one copy each saves them from the next.

    Args:
        nested: any nesting; made while the graph is recorded. Tensors of the CPU are taken for constants.

    Example:
        >>> results = Results({"loss": torch.tensor(2.0), "n": 3})
        >>> results.read()
        {'loss': tensor(2.), 'n': 3}
    """

    def __init__(self, nested: Any, *, device: torch.device | None = None):
        self._nested = nested
        self._by_type: dict[torch.dtype, list[Tensor]] = {}
        self._where: list[tuple[torch.dtype, int] | None] = []
        map_nested_tensor(lambda tensor: self._note(tensor, device), nested)
        self._packed = {
            dtype: torch.cat([tensor.reshape(-1) for tensor in tensors]) for dtype, tensors in self._by_type.items()
        }

    def _note(self, tensor: Tensor, device: torch.device | None) -> None:
        if device is not None and tensor.device.type != device.type:
            self._where.append(None)
            return
        same = self._by_type.setdefault(tensor.dtype, [])
        self._where.append((tensor.dtype, len(same)))
        same.append(tensor)

    def read(self) -> Any:
        """Returns the nesting with copies of what the latest replay left."""
        parts = {
            dtype: packed.clone().split_with_sizes([tensor.numel() for tensor in self._by_type[dtype]])
            for dtype, packed in self._packed.items()
        }
        places = iter(self._where)

        def part(tensor: Tensor) -> Tensor:
            place = next(places)
            return tensor if place is None else parts[place[0]][place[1]].view(tensor.shape)

        return map_nested_tensor(part, self._nested)
