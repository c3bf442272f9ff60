"""Sums of messages by the node that they reach, with the same bits in every run.

Shapes: M = values, such as the messages of all edges; R = rows, such as nodes.

``index_add_`` adds in the same order each time on the CPU, where it is used. On CUDA it adds with atomics, in any
order. There the values are sorted by their row, once for a forward pass, and added one after the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

_PIECE = 32  # values that one thread adds where a row may have many
_FEW = 8  # values of a row on average
_SMALL = 4096  # values


class _Order(NamedTuple):
    """The values by their row.

    Attributes:
        order_M: (M,) the values of the first row, then those of the second.
        starts_R: (R + 1,) where each row starts among them, or among the pieces.
        cuts: where each piece of a row starts; None where rows are added at once.
    """

    order_M: Tensor
    starts_R: Tensor
    cuts: Tensor | None


class RowIndex:
    """The row that each of M values belongs to.

    Args:
        index_M: (M,) integer.
        num_rows: R.
        sorts: whether sums are made in sorted order, without atomics; by default on CUDA. A compiled model adds with
            atomics.

    Example:
        >>> rows = RowIndex(torch.tensor([0, 0, 2]), 3)
        >>> rows.sum(torch.tensor([[1.0], [2.0], [4.0]])).flatten().tolist()
        [3.0, 0.0, 4.0]
    """

    def __init__(self, index_M: Tensor, num_rows: int, *, sorts: bool | None = None):
        self.index_M = index_M
        self.num_rows = num_rows
        self._sorts = index_M.is_cuda and not torch.compiler.is_compiling() if sorts is None else sorts
        self._known: _Order | None = None

    def select(self, rows: Tensor) -> Tensor:
        """Return for each value its row of ``rows`` (R, …), as (M, …)."""
        if self._sorts and rows.requires_grad and torch.is_grad_enabled():
            selected: Tensor = _Select.apply(rows, self)  # type: ignore[no-untyped-call]
            return selected
        return rows.index_select(0, self.index_M)

    def sum(self, values: Tensor) -> Tensor:
        """Sum the values (M, …) of each row into (R, …), in float32 or better."""
        # The hub of a large graph sums thousands of messages: 8 bits of bf16 or the range of fp16 would not hold them.
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        if self._sorts:
            summed: Tensor = _Sum.apply(wide, self)  # type: ignore[no-untyped-call]
            return summed
        return wide.new_zeros((self.num_rows, *values.shape[1:])).index_add_(0, self.index_M, wide)

    def softmax(self, logits: Tensor) -> Tensor:
        """Return the softmax of ``logits`` (M, H) over the values of each row; float32 or better.

        Example:
            >>> RowIndex(torch.tensor([0, 0, 1]), 2).softmax(torch.zeros(3, 1)).flatten().tolist()
            [0.5, 0.5, 1.0]
        """
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        with torch.no_grad():
            rows = self.index_M[:, None].expand_as(wide)
            peak = wide.new_zeros(self.num_rows, wide.shape[1])
            peak = peak.scatter_reduce(0, rows, wide, "amax", include_self=False)
        weights = (wide - peak.index_select(0, self.index_M)).exp()
        return weights / self.select(self.sum(weights))

    @torch.no_grad()
    def _order(self) -> _Order:
        """Return the order of the values, made by the first that asks."""
        if self._known is None:
            size = len(self.index_M)
            sorted_M, order_M = self.index_M.sort(stable=True)
            starts_R = torch.searchsorted(sorted_M, torch.arange(self.num_rows + 1, device=sorted_M.device))
            if size <= _SMALL and size <= _FEW * self.num_rows:
                self._known = _Order(order_M, starts_R, None)
            else:  # the sum of a hub, or of a whole graph, is shared by several threads
                regular = torch.arange(0, size, _PIECE, device=sorted_M.device)
                cuts = torch.cat([starts_R, regular]).sort()[0]
                self._known = _Order(order_M, torch.searchsorted(cuts, starts_R), cuts)
        return self._known

    def _sum_sorted(self, values: Tensor) -> Tensor:
        """Sum values in sorted order."""
        order = self._order()
        flat = values.flatten(1) if values.dim() > 1 else values[:, None]
        summed = flat.to(torch.promote_types(values.dtype, torch.float32)).index_select(0, order.order_M)
        if order.cuts is not None:
            summed = _sum_pieces(summed, order.cuts)
        return _sum_pieces(summed, order.starts_R).view(self.num_rows, *values.shape[1:]).to(values.dtype)


def _sum_pieces(values: Tensor, starts: Tensor) -> Tensor:
    """Sum neighbouring rows, from each start to the next; without a look at the values of the starts."""
    return torch.segment_reduce(values, "sum", offsets=starts, axis=0, unsafe=True, initial=0)


class _Sum(torch.autograd.Function):
    """Sum of the values of each row."""

    @staticmethod
    def forward(values: Tensor, rows: RowIndex) -> Tensor:
        return rows._sum_sorted(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, RowIndex], output: Tensor) -> None:
        ctx.rows = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.rows.select(grad), None


class _Select(torch.autograd.Function):
    """The row of each value; its gradient is the sum of the values of each row."""

    @staticmethod
    def forward(rows: Tensor, index: RowIndex) -> Tensor:
        return rows.index_select(0, index.index_M)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, RowIndex], output: Tensor) -> None:
        ctx.rows = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grad, ctx.rows), None  # type: ignore[no-untyped-call]
