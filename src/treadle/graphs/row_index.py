"""Deterministic sums of messages by target node.

Shapes: M = values, such as the messages of all edges; R = rows, such as nodes.

``index_add_`` adds in a fixed order on the CPU, where it is used. On CUDA it adds with atomics, in any order; there the
values are sorted by row, once per forward pass, and summed sequentially.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

_PIECE = 32  # values that one thread adds if a row may have many
_FEW = 8  # average number of values per row
_SMALL = 4096  # values


class _Order(NamedTuple):
    """Values sorted by row.

    Attributes:
        order_M: (M,) indices of the values of the first row, then of the second, and so on.
        starts_R: (R + 1,) start of each row among the sorted values, or among the pieces.
        cuts: start of each piece of a row; None if rows are summed in one piece.
    """

    order_M: Tensor
    starts_R: Tensor
    cuts: Tensor | None


class RowIndex:
    """Row assignment of M values, with deterministic reductions.

    Args:
        index_M: (M,) integer.
        num_rows: R.
        sorts: whether to sum in sorted order, without atomics; default on CUDA. A compiled model sums with atomics.

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
        """Return the row of ``rows`` (R, …) for each value, as (M, …)."""
        if self._sorts and rows.requires_grad and torch.is_grad_enabled():
            selected: Tensor = _Select.apply(rows, self)  # type: ignore[no-untyped-call]
            return selected
        return rows.index_select(0, self.index_M)

    def sum(self, values: Tensor) -> Tensor:
        """Sum the values (M, …) of each row into (R, …), in at least float32."""
        # The hub of a large graph sums thousands of messages, beyond the precision of bf16 and the range of fp16.
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        if self._sorts:
            summed: Tensor = _Sum.apply(wide, self)  # type: ignore[no-untyped-call]
            return summed
        return wide.new_zeros((self.num_rows, *values.shape[1:])).index_add_(0, self.index_M, wide)

    def softmax(self, logits: Tensor) -> Tensor:
        """Return the softmax of ``logits`` (M, H) over the values of each row, in at least float32.

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
        """Return the order of the values, computed on first use."""
        if self._known is None:
            size = len(self.index_M)
            sorted_M, order_M = self.index_M.sort(stable=True)
            starts_R = torch.searchsorted(sorted_M, torch.arange(self.num_rows + 1, device=sorted_M.device))
            if size <= _SMALL and size <= _FEW * self.num_rows:
                self._known = _Order(order_M, starts_R, None)
            else:  # the sum of a hub, or of a whole graph, is split over several threads
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
    """Sum consecutive rows, from each start to the next, without reading the starts on the host."""
    return torch.segment_reduce(values, "sum", offsets=starts, axis=0, unsafe=True, initial=0)


class _Sum(torch.autograd.Function):
    """Autograd function for the sum of the values of each row."""

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
    """Autograd function that gathers the row of each value; its gradient sums the values of each row."""

    @staticmethod
    def forward(rows: Tensor, index: RowIndex) -> Tensor:
        return rows.index_select(0, index.index_M)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, RowIndex], output: Tensor) -> None:
        ctx.rows = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grad, ctx.rows), None  # type: ignore[no-untyped-call]
