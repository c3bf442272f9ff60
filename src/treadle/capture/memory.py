"""Fixed memory of captured steps: their batches and their results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from treadle.data.tensors import MAX_OVERRUN
from treadle.device.handover import launch_times
from treadle.device.one_piece import bytes_of_piece, offsets_in_one_piece, views_of_piece
from treadle.engine.block import MOST
from treadle.nested import map_nested_tensor

STEPS_PER_GRAPH = MAX_OVERRUN  # steps in a graph of several steps
_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_USUAL = frozenset(_PLAIN)
_PLACES = 64  # steps whose results share one allocation


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
    kind: Any = type(value)
    if kind is Tensor or (kind not in _USUAL and isinstance(value, Tensor)):
        tensors.append(value)
        found.append((value.shape, value.dtype))
    elif kind in _USUAL or isinstance(value, _PLAIN):
        found.append(value)
    elif (names := _fields_of(kind)) is not None:
        found.append(kind)
        for name in names:
            if hasattr(value, name):
                _collect_parts(getattr(value, name), tensors, found, unknown)
    elif isinstance(value, (list, tuple)):
        found.append((kind, len(value)))
        for item in value:
            _collect_parts(item, tensors, found, unknown)
    elif isinstance(value, Mapping):
        found.append((kind, *value))
        for item in value.values():
            _collect_parts(item, tensors, found, unknown)
    else:
        unknown.append(kind.__name__)


@functools.cache
def _fields_of(kind: type[Any]) -> tuple[str, ...] | None:
    """Return the names of the fields of a dataclass that is no collection; None for other classes."""
    collects = issubclass(kind, (list, tuple)) or issubclass(kind, Mapping)
    if collects or not dataclasses.is_dataclass(kind):
        return None
    return tuple(field.name for field in dataclasses.fields(kind))


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
        whole = self._whole
        if whole is not None and (self._is_alike(given, whole) or offsets_in_one_piece(given) == self._offsets):
            whole.copy_(bytes_of_piece(given), non_blocking=True)
            return
        for target, tensor in zip(self._tensors, given, strict=True):
            if target is not tensor and target.data_ptr() != tensor.data_ptr():
                target.copy_(tensor, non_blocking=True)

    def _is_alike(self, given: Sequence[Tensor], whole: Tensor) -> bool:
        """Return whether tensors of the same shapes are known at a glance to be one piece, without empty ones."""
        first = given[0].untyped_storage()
        start = first.data_ptr()
        return (
            [tensor.data_ptr() - start for tensor in given] == self._offsets and given[0].is_cpu
            and all(map(Tensor.is_contiguous, given)) and first.nbytes() == whole.nbytes
            and given[-1].untyped_storage().data_ptr() == start
        )  # fmt: skip


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
        self._sizes = [[self._shapes[number].numel() for number in numbers] for numbers in by_type.values()]
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
        found: list[Any] = [None] * len(self._shapes)
        for (packed, numbers), sizes in zip(self._packed, self._sizes, strict=True):
            pieces = [packed.clone()] if len(sizes) == 1 else packed.clone().split_with_sizes(sizes)
            for number, piece in zip(numbers, pieces, strict=True):
                shape = self._shapes[number]
                found[number] = piece if len(shape) == 1 else piece.view(shape)
        return found

    def _make_places(self) -> None:
        """Allocate memory for the copies of several steps at once: one by one it costs as much as the copy."""
        packed = self._packed[0][0]
        block = packed.new_empty(_PLACES, len(self._shapes))
        numbers = [column.unbind() for column in block.unbind(1)]
        self._places = list(zip(block.unbind(), zip(*numbers, strict=True), strict=True))
