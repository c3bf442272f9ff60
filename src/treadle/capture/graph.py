"""CUDA graphs, and the memory that they read from and write to."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from treadle.data.tensors import MAX_OVERRUN
from treadle.device import keep_garbage_from_forks
from treadle.device.handover import host_is_shared, launch_times
from treadle.device.one_piece import bytes_of_piece, offsets_in_one_piece, views_of_piece
from treadle.engine.block import MOST
from treadle.nested import map_nested_tensor

_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_WARM_UPS = 3
STEPS_PER_GRAPH = MAX_OVERRUN  # steps in a graph of several steps
_PLACES = 64  # steps whose results share one allocation


class CudaGraph:
    """Captured work of a function, replayed with one launch.

    Graphs captured one after another and replayed one at a time may share memory.

    Args:
        share: another graph whose memory pool to share.
    """

    def __init__(self, share: CudaGraph | None = None):
        keep_garbage_from_forks()
        self._graph = torch.cuda.CUDAGraph()
        self._pool = None if share is None else share._graph.pool()

    def record(self, function: Callable[[], Any], *, prepare: Callable[[], None], warm_ups: int = _WARM_UPS) -> Any:
        """Call a function a few times to warm up and once to capture it; return the result of the last call.

        Tensors in it, and others that the function wrote to, hold the results of the latest replay.

        Args:
            function: launches work on the current stream and reads nothing from the device.
            prepare: called before each call, outside the capture.
            warm_ups: calls before the capture; none if all its kernels were launched before.

        Raises:
            RuntimeError: something in the function cannot be captured.
        """
        usual = torch.cuda.current_stream()
        # A run on a separate stream is captured there: kernels write into per-stream workspaces, so two graphs captured
        # on one stream cannot be replayed concurrently.
        alone = usual != torch.cuda.default_stream()
        recording_stream = usual if alone else _recording_stream(torch.cuda.current_device())
        recording_stream.wait_stream(usual)
        with torch.cuda.stream(recording_stream):
            for _ in range(warm_ups):
                prepare()
                function()
        usual.wait_stream(recording_stream)
        prepare()
        reason: list[BaseException] = []
        try:
            # Threads of data loaders and of background saves may use the device meanwhile.
            recording = torch.cuda.graph(
                self._graph, pool=self._pool, stream=recording_stream, capture_error_mode="thread_local"
            )
            with _without_collection(), recording, _first_error_kept(reason):
                return function()
        except BaseException as error:  # noqa: BLE001  # it is raised again, or what led to it
            torch.cuda.set_stream(usual)  # torch does not restore the stream if a capture fails
            _end_broken_recording(recording_stream)
            raise (reason or [error])[0] from None  # the error of the capture names no cause

    def replay(self) -> None:
        """Launch the captured work."""
        self._graph.replay()

    def drop(self) -> None:
        """Free the captured work, also if something still refers to this object; it cannot be replayed any more."""
        self._graph.reset()

    def seconds(self, *, prepare: Callable[[], None]) -> float:
        """Replay a few times, and return the shortest device time."""
        took: list[float] = []
        for _ in range(_WARM_UPS):
            prepare()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            self.replay()
            end.record()
            end.synchronize()
            took.append(begin.elapsed_time(end) / 1e3)
        return min(took)


@functools.cache
def _recording_stream(device: int) -> torch.cuda.Stream:
    """Return the capture stream of a device; torch's default belongs to the device that was used first."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Keep Python from collecting garbage: the end of an earlier graph among it would break a recording."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def _first_error_kept(reason: list[BaseException]) -> Iterator[None]:
    """Keep the error of the block, which the end of a failed capture would replace."""
    try:
        yield
    except BaseException as error:
        reason.append(error)
        raise


def _end_broken_recording(stream: torch.cuda.Stream) -> None:
    """Capture nothing successfully, to reset the random generator's capture state."""
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        torch.zeros(1, device="cuda")


class Branch:
    """Branch of a captured step that may run concurrently with the rest.

    Without capture everything runs in order, and also if several runs share the GPU: graphs with branches block each
    other.

    Args:
        device: device of the step.

    Example:
        >>> branch = Branch(torch.device("cpu"))
        >>> with branch.after(branch.mark()):
        ...     total = torch.ones(2).sum()
        >>> branch.join(); total
        tensor(2.)
    """

    def __init__(self, device: torch.device):
        recording = device.type == "cuda" and torch.cuda.is_current_stream_capturing() and not host_is_shared()
        self._stream = _branch_stream(torch.cuda.current_device()) if recording else None

    def mark(self) -> torch.cuda.Event | None:
        """Return a mark of the work launched so far."""
        if self._stream is None:
            return None
        mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record()
        return mark

    @contextlib.contextmanager
    def after(self, mark: torch.cuda.Event | None) -> Iterator[None]:
        """Make launches inside the block wait only for those before a mark."""
        if self._stream is None or mark is None:
            yield
            return
        self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Make later launches, and those after the step, wait for the branch."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


@functools.cache
def _branch_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def capturable(optimizer: Optimizer) -> Iterator[None]:
    """Set ``capturable`` of an optimizer during capture; a fused one has its state on the device anyway."""
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


def tensors_of(nested: Any) -> list[Tensor]:
    """Return the tensors of a nesting, in order.

    Example:
        >>> tensors_of([torch.tensor(1), {"b": torch.tensor(2)}])
        [tensor(1), tensor(2)]
    """
    plain = _plain_tensors(nested)
    if plain is not None:
        return plain
    found: list[Tensor] = []
    _collect_parts(nested, found, [], [])
    return found


def _plain_tensors(nested: Any) -> list[Tensor] | None:
    """Return the tensors of a flat sequence or dict of tensors, as most batches are, which is faster."""
    kind = type(nested)
    if kind is Tensor:
        return [nested]
    if kind is not tuple and kind is not list and kind is not dict:
        return None
    found = list(nested.values()) if kind is dict else list(nested)
    for one in found:
        if not isinstance(one, Tensor):
            return None
    return found


def shape_of(batch: Any) -> tuple[Any, ...] | str:
    """Return what a captured step depends on besides tensor values: shapes, dtypes, plain values.

    Returns:
        A comparable value, or the name of an unsupported type in the batch.

    Example:
        >>> shape_of((torch.zeros(2), 3)) == shape_of((torch.ones(2), 3)), shape_of([set()])
        (True, 'set')
    """
    plain = _plain_tensors(batch)
    if plain is not None:
        names = tuple(batch) if type(batch) is dict else ()
        return (type(batch), names, *[(tensor.shape, tensor.dtype) for tensor in plain])
    found: list[Any] = []
    unknown: list[str] = []
    _collect_parts(batch, [], found, unknown)
    return unknown[0] if unknown else tuple(found)


def _collect_parts(value: Any, tensors: list[Tensor], found: list[Any], unknown: list[str]) -> None:
    """Collect the tensors of a nesting, its shape, and unsupported types in it.

    It traverses like :func:`map_nested_tensor` but builds nothing: a step on a graph batch does it three times.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        found.append((value.shape, value.dtype))
    elif isinstance(value, _PLAIN):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        found.append((type(value), len(value)))
        for item in value:
            _collect_parts(item, tensors, found, unknown)
    elif isinstance(value, Mapping):
        found.append((type(value), *value))
        for item in value.values():
            _collect_parts(item, tensors, found, unknown)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        found.append(type(value))
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                _collect_parts(getattr(value, field.name), tensors, found, unknown)
    else:
        unknown.append(type(value).__name__)


class FixedBatch:
    """Fixed memory that batches of one shape are copied into: with one copy if their tensors are contiguous.

    Args:
        batch: the first batch.
        device: device of the memory.
        in_place: use the batch's own device tensors as the memory: their producer writes the next batch there.

    Attributes:
        batch: the batch with its tensors in fixed memory.

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

        given = tensors_of(batch)
        self._offsets = offsets_in_one_piece(given)
        self._whole: Tensor | None = None
        if self._offsets is None:
            self.batch = map_nested_tensor(fixed, batch)
        else:
            self._whole = bytes_of_piece(given).to(device, copy=True)
            views = iter(views_of_piece(self._whole, given, self._offsets))
            self.batch = map_nested_tensor(lambda tensor: next(views), batch)
        self._tensors = tensors_of(self.batch)

    def fill(self, batch: Any) -> None:
        """Copy the tensors of another batch of the same shape into the memory."""
        given = tensors_of(batch)
        if self._whole is not None and offsets_in_one_piece(given) == self._offsets:
            self._whole.copy_(bytes_of_piece(given), non_blocking=True)
            return
        for target, tensor in zip(self._tensors, given, strict=True):
            if target is not tensor and target.data_ptr() != tensor.data_ptr():
                target.copy_(tensor, non_blocking=True)


class Rows:
    """Numbers of several replays on a device, one row each.

    Its memory is not the graph's: memory allocated during capture is overwritten by each replay.

    Args:
        width: numbers per replay.
        device: device of the numbers.

    Example:
        >>> rows = Rows(2, torch.device("cpu"))
        >>> def replay():
        ...     rows.write(torch.tensor([1.0, 2.0]))
        >>> rows.collect(replay, 2)
        tensor([[1., 2.],
                [1., 2.]])
    """

    def __init__(self, width: int, device: torch.device):
        self._next = torch.zeros(1, dtype=torch.long, device=device)
        self._numbers = torch.arange(MOST, device=device).unsqueeze(1)
        self._rows = torch.zeros(MOST, width, device=device)

    def takes(self, numbers: Tensor) -> bool:
        """Return whether the numbers of a replay have this width and dtype."""
        return numbers.shape == self._rows.shape[1:] and numbers.dtype == self._rows.dtype

    def write(self, numbers: Tensor) -> None:
        """Write the next row, also in a graph; rows beyond the last are dropped."""
        torch.where(self._numbers == self._next, numbers, self._rows, out=self._rows)
        self._next.add_(1)

    def collect(self, replay: Callable[[], None], count: int, *, several: Callable[[], None] | None = None) -> Tensor:
        """Replay several times; return a copy of their rows, (N, width).

        Args:
            replay: replays one step.
            count: number of steps.
            several: replays STEPS_PER_GRAPH steps; None replays them one by one.
        """
        self._next.zero_()
        left = count
        if several is not None:
            launch_times(several, count // STEPS_PER_GRAPH, steps=STEPS_PER_GRAPH)
            left = count % STEPS_PER_GRAPH
        launch_times(replay, left)
        return self._rows[:count].clone()


class Results:
    """Small result tensors of a replay, packed by dtype, so that one copy each preserves them.

    Args:
        tensors: tensors on one device, created during capture.
        rows: rows that replays also write to; None if they are only read one by one.

    Example:
        >>> Results([torch.tensor(2.0), torch.tensor(3), torch.tensor([4.0])]).read()
        [tensor(2.), tensor(3), tensor([4.])]
    """

    def __init__(self, tensors: Sequence[Tensor], rows: Rows | None = None):
        by_type: dict[torch.dtype, list[int]] = {}
        for number, tensor in enumerate(tensors):
            by_type.setdefault(tensor.dtype, []).append(number)
        self._shapes = [tensor.shape for tensor in tensors]
        self._packed = [
            (torch.cat([tensors[number].reshape(-1) for number in numbers]), numbers) for numbers in by_type.values()
        ]
        self._alike = len(by_type) == 1 and not any(self._shapes)  # numbers of one dtype, the usual case
        self._places: list[tuple[Tensor, tuple[Tensor, ...]]] = []  # for copies: the whole, and each number
        takes = rows is not None and self._alike and rows.takes(self._packed[0][0])
        self.rows = rows if takes else None
        if self.rows is not None:
            self.rows.write(self._packed[0][0])

    @property
    def latest(self) -> Tensor:
        """Numbers of the latest replay, of one dtype, in place."""
        return self._packed[0][0]

    def read(self) -> Sequence[Tensor]:
        """Return copies of the latest replay's results."""
        if self._alike:
            if not self._places:
                self._make_places()
            row, parts = self._places.pop()
            row.copy_(self._packed[0][0], non_blocking=True)
            return parts
        found: dict[int, Tensor] = {}
        for packed, numbers in self._packed:
            pieces = packed.clone().split_with_sizes([self._shapes[number].numel() for number in numbers])
            found.update(zip(numbers, pieces, strict=True))
        return [found[number].view(shape) for number, shape in enumerate(self._shapes)]

    def _make_places(self) -> None:
        """Allocate memory for the copies of several steps at once: one by one it costs as much as the copy."""
        packed = self._packed[0][0]
        block = packed.new_empty(_PLACES, len(self._shapes))
        numbers = [column.unbind() for column in block.unbind(1)]
        self._places = list(zip(block.unbind(), zip(*numbers, strict=True), strict=True))
