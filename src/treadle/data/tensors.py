"""TensorLoader: in-memory tensors read in vectorised batches, resumed in O(1)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from treadle.data.order import GlobalOrder
from treadle.data.rows import LastRows, Read, RowLoader, noted, one_number_of_rows
from treadle.data.sharing import deduplicated
from treadle.device.handover import run_off_turn
from treadle.errors import ConfigError
from treadle.errors.arguments import checked


class TensorLoader(RowLoader):
    """Loader of batches of rows of one or several tensors.

    The order of an epoch depends only on the seed and the epoch, and is the same on every device. Nothing is drawn from
    the global RNG. The state is an epoch and a position.

    On several ranks, every rank reads all rows unless ``distributed`` or ``rank`` is set: then each reads its part of
    every batch, as with :class:`RankBatchSampler`, and needs all rows in its memory.

    With ``num_buffers``, batches are written in turn into that many sets of tensors, whose addresses never change,
    without allocation: batch t of an epoch goes into set t modulo ``num_buffers``. A short batch is the first rows of
    its set. A batch is then valid only until ``num_buffers`` more are drawn: to keep one, in a hook for example, copy
    it. Accumulation over k micro-batches needs k sets; fewer are refused. With one set and a shuffled order, a captured
    step gathers its own batch when it runs.

    Args:
        tensors: tensors (N, ...) with equal first dimensions, of any dtypes; or one mapping of names to such tensors.
        batch_size: rows in a batch of one rank, >= 1.
        shuffle: a new order for each epoch.
        seed: seeds the orders.
        drop_last: leave a short last batch out.
        device: device of the tensors and batches; None leaves them where they are.
        num_buffers: number of sets of tensors that batches are written into, >= 1; None allocates new tensors.
        global_batch_size: instead of ``batch_size``, rows in a batch over all ranks.
        distributed: share the rows among all ranks of the process group.
        rank: which part is read here, instead of the process group's.
        num_replicas: how many share the rows, instead of the process group's.

    Yields:
        A tensor (B, ...) if there is one; otherwise a tuple of tensors, or a dict with the names of the mapping.

    Raises:
        ConfigError: there are no tensors, their numbers of rows differ, or a number is outside its range.

    Example:
        >>> loader = TensorLoader(torch.arange(5), batch_size=2)
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3], [4]]
    """

    @checked
    def __init__(
        self,
        *tensors: Tensor | Mapping[str, Tensor],
        batch_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        device: torch.device | str | None = None,
        num_buffers: int | None = None,
        global_batch_size: int | None = None,
        distributed: bool = False,
        rank: int | None = None,
        num_replicas: int | None = None,
    ):
        self.names, found = named_or_not(tensors, owner="TensorLoader")
        super().__init__(
            one_number_of_rows([len(tensor) for tensor in found], owner="TensorLoader"),
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            distributed=distributed,
            rank=rank,
            num_replicas=num_replicas,
        )
        _check_buffers(num_buffers, found)
        self.tensors = tuple(deduplicated(tensor if device is None else tensor.to(device)) for tensor in found)
        self.num_buffers = num_buffers
        self._buffers: dict[int, tuple[Tensor, ...]] = {}
        self._apart = len({tensor.device for tensor in self.tensors}) > 1
        self._gather: RowGather | None = None

    def gather(self) -> RowGather | None:
        """Return the gather of whole batches, for use inside a CUDA graph; None if impossible.

        From now on it gathers, with one set of buffers for a shuffled order.
        """
        if self._gather is None and self.num_buffers == 1 and self.shuffle and not self._apart:
            order, rank = self.order, self._rank_of()[0]
            outs = self._outs(len(order.part(0, rank)), order)
            if outs is not None:
                spare = MAX_OVERRUN * order.global_batch_size
                self._gather = RowGather(self.tensors, outs, self.names, num_rows=self.num_rows, spare=spare)
        return self._gather

    def skip(self, count: int) -> None:
        """Advance by whole batches of a pass that a CUDA graph has gathered itself."""
        assert self._gather is not None
        self.position += count
        stride, part = self.order.global_batch_size, self._last.part
        self._last = LastRows(self._last.rows, range(part.start + count * stride, part.stop + count * stride))
        self._gather.skip(count)

    def settle(self) -> None:
        """Gather the last batch, if that was deferred to the training step."""
        if self._gather is not None:
            self._gather.settle()

    @contextlib.contextmanager
    def _reading(self, order: GlobalOrder, ahead: Iterator[range]) -> Iterator[Read]:
        # On the CPU, so that the order is the same on every device; other runs continue meanwhile.
        drawn = run_off_turn(lambda: order.rows(self.epoch)) if order.shuffle else None
        rows = None if drawn is None else drawn.to(self.tensors[0].device, non_blocking=True)
        if self._gather is not None:
            self._gather.begin()

        def read(part: range) -> Any:
            if self._gather is not None and rows is not None and len(part) == self._gather.count:
                self._last = LastRows(drawn, part)
                return self._gather.give(rows, part.start, stride=order.global_batch_size)
            batch = self._batch(rows, part, order)
            self._last = LastRows(drawn, part, noted(batch))
            return packed(self.names, batch)

        yield read

    def _batch(self, rows: Tensor | None, part: range, order: GlobalOrder) -> list[Tensor]:
        outs = self._outs(len(part), order)
        if rows is None:
            batch = [tensor[part.start : part.stop] for tensor in self.tensors]
            if outs is not None:
                batch = [out.copy_(piece) for out, piece in zip(outs, batch, strict=True)]
        else:
            picked = rows[part.start : part.stop]
            indices = [picked.to(tensor.device) if self._apart else picked for tensor in self.tensors]
            places: Sequence[Tensor | None] = [None] * len(indices) if outs is None else outs
            pairs = zip(self.tensors, indices, places, strict=True)
            batch = [torch.index_select(tensor, 0, index, out=out) for tensor, index, out in pairs]
        return batch

    def _outs(self, count: int, order: GlobalOrder) -> list[Tensor] | None:
        """Return the output buffers of the next batch: a whole set, or its first rows."""
        if self.num_buffers is None:
            return None
        number = self.position % self.num_buffers
        if number not in self._buffers:
            # In an uneven batch, or a short one merged with the previous one, a rank may get an extra row.
            most = -(-(order.global_batch_size + order.num_replicas - 1) // order.num_replicas)
            self._buffers[number] = tuple(tensor.new_empty((most, *tensor.shape[1:])) for tensor in self.tensors)
        return [buffer[:count] for buffer in self._buffers[number]]


MAX_OVERRUN = 16
"""Batches that may be gathered after the one that was given last where nothing comes of it: also beyond the epoch."""


class RowGather:
    """Gather of batches of one size into fixed memory, in the loader or deferred to the training step.

    In a CUDA graph, consecutive batches need nothing from the host: the order of the epoch and the positions of the
    next batch are on the device, and :meth:`advance` moves them forward.

    Args:
        tensors: source tensors.
        outs: output tensors of the batch's size.
        names: names of the tensors in a batch, or None.
        num_rows: rows of an epoch's order.
        spare: extra positions after them that may be gathered from.

    Attributes:
        count: rows per batch.
        batch: batch in the fixed memory; always the same object, unless its tensors have names.
        is_left: whether the last batch is still to be gathered.

    Example:
        >>> gather = RowGather([torch.arange(4)], [torch.zeros(2, dtype=torch.long)], None, num_rows=4)
        >>> order = torch.tensor([3, 0, 1, 2])
        >>> gather.give(order, 0, stride=2)
        tensor([3, 0])
        >>> gather.run(); gather.advance(); gather.leave_next()
        >>> batch = gather.give(order, 2, stride=2)
        >>> gather.is_left
        True
        >>> gather.run(); batch
        tensor([1, 2])
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        outs: Sequence[Tensor],
        names: tuple[str, ...] | None,
        *,
        num_rows: int,
        spare: int = 0,
    ):
        device = tensors[0].device
        self.count = len(outs[0])
        self.batch = packed(names, outs)
        self.is_left = False
        self._names = names
        self._outs = outs
        self._pairs = list(zip(tensors, outs, strict=True))
        self._order = torch.zeros(num_rows + spare, dtype=torch.long, device=device)
        self._from_0 = torch.arange(self.count, device=device)
        self._places = torch.zeros_like(self._from_0)
        self._rows = torch.zeros_like(self._from_0)
        self._of: Tensor | None = None  # tensor that the order is a copy of
        self._start = self._stride = 0  # of the last batch
        self._expected: int | None = None  # where the next batch must start to be deferred
        self._is_new = False  # whether the loader has not advanced since a batch was returned

    def begin(self) -> None:
        """Begin a pass: its first batch is gathered when it is returned."""
        self._expected, self.is_left = None, False

    def give(self, order: Tensor, start: int, *, stride: int) -> Any:
        """Return a batch, gathered unless deferred by :meth:`leave_next`.

        Args:
            order: order of the epoch.
            start: position of the batch in the order.
            stride: distance between the starts of two batches.
        """
        self.is_left = start == self._expected
        self._expected, self._start, self._stride = None, start, stride
        self._is_new = True
        if not self.is_left:
            if order is not self._of:
                self._order[: len(order)].copy_(order, non_blocking=True)
                self._of = order
            self.rewind()
            self.run()
        return self.batch if self._names is None else packed(self._names, self._outs)

    def gives(self, batch: Any) -> bool:
        """Return whether a batch is the last one returned and the loader has not advanced since."""
        if not self._is_new:
            return False
        if batch is self.batch:
            return True
        named = self._names is not None and type(batch) is dict and tuple(batch) == self._names
        return named and all(tensor is out for tensor, out in zip(batch.values(), self._outs, strict=True))

    def run(self) -> None:
        """Gather the batch at the current positions."""
        torch.index_select(self._order, 0, self._places, out=self._rows)
        for tensor, out in self._pairs:
            torch.index_select(tensor, 0, self._rows, out=out)

    def advance(self) -> None:
        """Set the positions of the next batch."""
        self._places.add_(self._stride)

    def rewind(self) -> None:
        """Set the positions of the last batch."""
        torch.add(self._from_0, self._start, out=self._places)

    def leave_next(self) -> None:
        """Defer the next batch, if it follows the last, to the step that gathered that one and advanced."""
        self.is_left = self._is_new = False
        self._expected = self._start + self._stride

    @property
    def leaves_next(self) -> bool:
        """Whether the next batch is deferred to the step that gathered the last one and advanced."""
        return self._expected is not None

    def skip(self, count: int) -> None:
        """Record that a number of batches after the last one were gathered elsewhere."""
        self._start += count * self._stride
        self._expected = self._start + self._stride

    def settle(self) -> None:
        """Gather the last batch, if it was deferred."""
        if self.is_left:
            self.run()
            self.is_left = False

    def whole(self) -> Any:
        """Return the last batch as new tensors over its memory, gathered if it was deferred."""
        self.settle()
        return packed(self._names, [out.detach() for out in self._outs])


def named_or_not(given: Sequence[Any], *, owner: str) -> tuple[tuple[str, ...] | None, list[Any]]:
    """Return names and values of one mapping, or None and the positional values.

    Raises:
        ConfigError: a mapping is given together with other arguments.

    Example:
        >>> named_or_not([{"x": 1}], owner="TensorLoader"), named_or_not([1, 2], owner="TensorLoader")
        ((('x',), [1]), (None, [1, 2]))
    """
    if len(given) == 1 and isinstance(given[0], Mapping):
        return tuple(given[0]), list(given[0].values())
    if any(isinstance(one, Mapping) for one in given):
        raise ConfigError(f"{owner}: give either one mapping of names to tensors, or tensors")
    return None, list(given)


def packed(names: tuple[str, ...] | None, batch: Sequence[Tensor]) -> Any:
    """Return a batch in the form of the tensors: a dict, a tensor, or a tuple.

    Example:
        >>> packed(None, [1]), packed(None, [1, 2]), packed(("x",), [1])
        (1, (1, 2), {'x': 1})
    """
    if names is not None:
        return dict(zip(names, batch, strict=True))
    return batch[0] if len(batch) == 1 else tuple(batch)


def _check_buffers(num_buffers: int | None, tensors: Sequence[Tensor]) -> None:
    if num_buffers is None:
        return
    if num_buffers < 1:
        raise ConfigError(
            "must be at least 1 set of tensors, or None for new tensors", argument="num_buffers", value=num_buffers
        )
    if any(tensor.requires_grad for tensor in tensors):
        raise ConfigError(
            f"={num_buffers}: a tensor that requires gradients cannot be written into a buffer; detach it, or pass "
            "num_buffers=None",
            argument="num_buffers",
        )
