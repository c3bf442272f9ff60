"""Attention within each graph of a batch.

Shapes: N = nodes of the batch, G = graphs, S = node slots of a graph, P = listed pairs, D = width, H = heads, C = D /
H, R = width of a pair encoding.

Nodes are laid out densely as (G, S). One graph of 200 nodes among 100 graphs of 20 would make S = 200 for all of them,
so graphs of different sizes are processed separately: there are never more than 2·Σ nᵢ² dense pairs, for any sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from treadle.errors import ConfigError

_BLOCK = 64  # keys in the smallest block of torch's memory-efficient kernel


class AttentionLayout(NamedTuple):
    """Positions of the nodes in the dense attention tensors.

    Nodes are arranged in rows and attend to nodes of the same row. Groups of rows are concatenated: group k has G_k
    rows of S_k slots each, hence G_k·S_k² pairs.

    Attributes:
        groups: (G_k, S_k) of each group.
        slot_N: (N,) slot of each node; None if the nodes are already in their slots.
        row_start_N: (N,) index of the pair (node, first slot of its row) among all pairs of the layout.
        position_N: (N,) 0-based position of the node in its row.
        masks: for each group None (attend everywhere), a bool (G_k, 1, 1 or S_k, S_k), True = may be attended to, or a
            float (G_k, H, S_k, S_k) that is added to the logits.
    """

    groups: tuple[tuple[int, int], ...]
    slot_N: Tensor | None
    row_start_N: Tensor
    position_N: Tensor
    masks: tuple[Tensor | None, ...]

    @property
    def num_pairs(self) -> int:
        """Number of elements of the attention matrices of one head: Σ G_k·S_k²."""
        return sum(graphs * size * size for graphs, size in self.groups)


def group_sizes(sizes: Sequence[int]) -> list[int]:
    """Return the number of slots for each graph: the nodes of the largest graph in its group.

    Padding at most doubles the pairs, Σ slots² ≤ 2·Σ sizes². Within this bound there are few groups, since each costs
    separate kernel launches; graphs of similar size share a group.

    Example:
        >>> group_sizes([3, 4, 4]), group_sizes([3, 4, 90, 80])
        ([4, 4, 4], [4, 4, 90, 90])
    """
    nodes = [max(1, size) for size in sizes]
    largest = max(nodes, default=1)
    # Graphs whose pair counts differ by less than a factor of two.
    bands = [(largest**2 // size**2).bit_length() for size in nodes]
    slots = {band: max(size for size, other in zip(nodes, bands, strict=True) if other == band) for band in set(bands)}
    spare = 2 * sum(size**2 for size in nodes) - sum(slots[band] ** 2 for band in bands)
    count = 0
    ascending = sorted(slots, reverse=True)
    for band, above in itertools.pairwise(ascending):
        count += bands.count(band)
        cost = count * (slots[above] ** 2 - slots[band] ** 2)
        if cost > spare:
            count = 0
            continue
        spare -= cost
        slots |= {other: slots[above] for other, size in slots.items() if size == slots[band]}
    return [slots[band] for band in bands]


def batch_layout(graph_N: Tensor, num_graphs: int, sizes: Sequence[int] | None = None) -> AttentionLayout:
    """Lay out a batch of graphs of any sizes; reads the sizes on the host once, unless given.

    Args:
        graph_N: (N,) integer, the graph of each node, in any order.
        num_graphs: G; graphs without nodes are allowed.
        sizes: nodes of each graph; if given, or if there is one graph, nothing is read on the host.

    Raises:
        ValueError: the sizes do not match the numbers of graphs and nodes.

    Example:
        >>> layout = batch_layout(torch.tensor([0, 0, 0, 1, 1]), 2)
        >>> layout.groups, layout.slot_N.tolist(), layout.masks[0].flatten(1).tolist()
        (((2, 3),), [0, 1, 2, 3, 4], [[True, True, True], [True, True, False]])
    """
    sizes_G = graph_N.new_zeros(num_graphs).index_add_(0, graph_N, torch.ones_like(graph_N))
    if sizes is None:
        sizes = [len(graph_N)] if num_graphs == 1 else sizes_G.tolist()
    elif len(sizes) != num_graphs or sum(sizes) != len(graph_N):
        raise ConfigError(
            f"{sum(sizes)} nodes in {len(sizes)} graphs, and not {len(graph_N)} in {num_graphs}", argument="sizes"
        )
    groups, starts_3G = _starts(group_sizes(sizes), graph_N.device)
    slot_start_G, row_start_G, slots_G = starts_3G

    order = graph_N.argsort(stable=True)
    rank_N = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
    position_N = rank_N - (sizes_G.cumsum(0) - sizes_G).index_select(0, graph_N)
    slot_N = slot_start_G.index_select(0, graph_N) + position_N
    row_start_N = row_start_G.index_select(0, graph_N) + position_N * slots_G.index_select(0, graph_N)

    num_slots = sum(graphs * size for graphs, size in groups)
    masks: tuple[Tensor | None, ...] = (None,) * len(groups)
    if num_slots > len(graph_N):
        real = torch.zeros(num_slots, dtype=torch.bool, device=graph_N.device).index_fill_(0, slot_N, True)
        parts = torch.split(real, [graphs * size for graphs, size in groups])
        masks = tuple(key_mask(part.view(group)) for part, group in zip(parts, groups, strict=True))
    return AttentionLayout(groups, slot_N, row_start_N, position_N, masks)


def _starts(slots: Sequence[int], device: torch.device) -> tuple[tuple[tuple[int, int], ...], Tensor]:
    """Return (G_k, S_k) of each group, and the first slot, first pair and number of slots of each graph, (3, G)."""
    if len(slots) == 1:  # in a captured step, a copy from the host would read memory that has been freed
        start = torch.zeros(3, 1, dtype=torch.long, device=device)
        start[2].fill_(slots[0])
        return ((1, slots[0]),), start
    starts, groups = torch.empty(3, len(slots), dtype=torch.long), []
    first_slot = first_pair = 0
    for size in sorted(set(slots)):
        members = torch.tensor([index for index, other in enumerate(slots) if other == size])
        rank = torch.arange(len(members))
        starts[:, members] = torch.stack(
            [first_slot + rank * size, first_pair + rank * size**2, torch.full_like(rank, size)]
        )
        groups.append((len(members), size))
        first_slot += len(members) * size
        first_pair += len(members) * size**2
    return tuple(groups), starts.to(device, non_blocking=True)


def padded_layout(graph_RS: Tensor) -> AttentionLayout:
    """Lay out nodes that are already in rows; reads nothing on the host, and all shapes are static.

    Args:
        graph_RS: (R, S) integer, the graph of the node in each slot. The nodes of a graph are in one row; the padding
            of all rows forms one more graph, and attends to itself.

    Example:
        >>> padded_layout(torch.tensor([[0, 0, 1]])).masks[0].int().tolist()
        [[[[1, 1, 0], [1, 1, 0], [0, 0, 1]]]]
    """
    rows, length = graph_RS.shape
    slot_N = torch.arange(rows * length, device=graph_RS.device)
    is_same_R1SS = (graph_RS[:, :, None] == graph_RS[:, None, :])[:, None]
    return AttentionLayout(((rows, length),), None, slot_N * length, slot_N % length, (is_same_R1SS,))


def key_mask(real_GS: Tensor) -> Tensor:
    """Return the mask (G, 1, 1, S) of slots that may be attended to: the real ones, and always the first.

    The first slot of a graph is real unless the graph is empty; attending to nothing would give 0/0 = NaN.
    """
    first_S = torch.arange(real_GS.shape[1], device=real_GS.device) == 0
    return (real_GS | first_S)[:, None, None, :]


class PairBias(nn.Module):
    """Additive attention bias from encodings of listed pairs, shared by all layers.

    Unlisted pairs and pairs with zero encoding add 0; a pair listed twice is added twice.

    Example:
        >>> layout = batch_layout(torch.tensor([0, 0, 0]), 1)
        >>> biased = PairBias(4, num_heads=2)(layout, torch.tensor([[0], [2]]), torch.ones(1, 4))
        >>> (biased.masks[0] != 0).nonzero().tolist()
        [[0, 0, 0, 2], [0, 1, 0, 2]]
    """

    def __init__(self, relative_pe_dim: int, *, num_heads: int) -> None:
        super().__init__()
        self.proj = nn.Linear(relative_pe_dim, num_heads, bias=False)

    def forward(self, layout: AttentionLayout, pair_index_2P: Tensor, pair_pe_PR: Tensor) -> AttentionLayout:
        """Return the layout with a float mask: −∞ at padding, else the bias of the pairs.

        Args:
            layout: layout of the batch, with bool masks.
            pair_index_2P: (2, P) nodes of the batch; row 0 attends to row 1.
            pair_pe_PR: (P, R) encodings.
        """
        values_PH = self.proj(pair_pe_PR.to(self.proj.weight.dtype))
        place_P = layout.row_start_N.index_select(0, pair_index_2P[0])
        place_P = place_P + layout.position_N.index_select(0, pair_index_2P[1])
        dense = values_PH.new_zeros(layout.num_pairs, values_PH.shape[1]).index_add_(0, place_P, values_PH)
        parts = torch.split(dense, [graphs * size * size for graphs, size in layout.groups])
        biases: list[Tensor] = []
        for (graphs, size), part, mask in zip(layout.groups, parts, layout.masks, strict=True):
            # The attention kernels require a contiguous last dimension.
            bias_GHSS = part.view(graphs, size, size, -1).permute(0, 3, 1, 2).contiguous()
            biases.append(bias_GHSS if mask is None else bias_GHSS.masked_fill(~mask, -torch.inf))
        return layout._replace(masks=tuple(biases))


class GraphAttention(nn.Module):
    """Multi-head attention within each graph, using ``scaled_dot_product_attention``.

    Args:
        hidden_dim: D, a multiple of ``num_heads``.
        num_heads: H.
        dropout: dropout of the attention probabilities in training.

    Example:
        >>> attention = GraphAttention(8, num_heads=2)
        >>> attention(torch.randn(5, 8), batch_layout(torch.tensor([0, 0, 0, 1, 1]), 2)).shape
        torch.Size([5, 8])
    """

    def __init__(self, hidden_dim: int, *, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(hidden_dim, 3 * hidden_dim)
        self.out = nn.Linear(hidden_dim, hidden_dim)

    def forward(self, nodes_ND: Tensor, layout: AttentionLayout) -> Tensor:
        """Return (N, D)."""
        qkv = self.qkv(nodes_ND)
        if layout.slot_N is not None:
            num_slots = sum(graphs * size for graphs, size in layout.groups)
            qkv = qkv.new_zeros(num_slots, qkv.shape[1]).index_copy(0, layout.slot_N, qkv)
        parts = torch.split(qkv, [graphs * size for graphs, size in layout.groups])
        mixed = [
            self._attend(part.view(*group, 3, self.num_heads, -1), mask).flatten(0, 1)
            for group, part, mask in zip(layout.groups, parts, layout.masks, strict=True)
        ]
        mixed_ND = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        if layout.slot_N is not None:
            mixed_ND = mixed_ND.index_select(0, layout.slot_N)
        out_ND: Tensor = self.out(mixed_ND)
        return out_ND

    def _attend(self, qkv_GS3HC: Tensor, mask: Tensor | None) -> Tensor:
        query_GHSC, key_GHSC, value_GHSC = qkv_GS3HC.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed_GHSC = attend(query_GHSC, key_GHSC, value_GHSC, mask, dropout)
        return mixed_GHSC.transpose(1, 2).flatten(2)


def attend(query_GHSC: Tensor, key_GHSC: Tensor, value_GHSC: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """Compute ``scaled_dot_product_attention`` with a deterministic gradient on a GPU.

    In torch's memory-efficient kernel, several blocks add to the gradient of one query in any order, unless each has
    all the keys.
    """
    args = query_GHSC, key_GHSC, value_GHSC
    trains = query_GHSC.is_cuda and torch.is_grad_enabled() and query_GHSC.requires_grad
    if not (trains and _is_split(*args, mask, dropout)):
        return F.scaled_dot_product_attention(*args, attn_mask=mask, dropout_p=dropout)
    bias = None if mask is None else _bias(mask, query_GHSC)
    mixed: Tensor = _WholeRows.apply(*args, bias, dropout)[0]  # type: ignore[no-untyped-call]
    return mixed


def _is_split(query_GHSC: Tensor, key_GHSC: Tensor, value_GHSC: Tensor, mask: Tensor | None, dropout: float) -> bool:
    """Return whether torch uses the memory-efficient kernel and there are more keys than fit in one block."""
    if key_GHSC.shape[2] <= _BLOCK or torch.compiler.is_compiling():
        return False
    chosen: int = torch._fused_sdp_choice(query_GHSC, key_GHSC, value_GHSC, mask, dropout)
    return chosen == SDPBackend.EFFICIENT_ATTENTION.value


def _bias(mask: Tensor, query_GHSC: Tensor) -> Tensor:
    """Return a mask as an additive bias on the logits, (G, H, S, S), in the memory layout the kernel requires."""
    graphs, heads, size = query_GHSC.shape[:3]
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query_GHSC.dtype).masked_fill(~mask, -torch.inf)
    return F.pad(mask.to(query_GHSC.dtype), (0, -size % 16))[..., :size].expand(graphs, heads, size, size)


class _WholeRows(torch.autograd.Function):
    """Memory-efficient attention of torch, with all keys of a query in one block in the backward pass."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: float) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, dropout
        )
        return made

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.dropout = inputs[4]
        ctx.save_for_backward(*inputs[:4], *output)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, mixed, log_sums, seed, offset = ctx.saved_tensors
        *parts, of_bias = torch.ops.aten._efficient_attention_backward(
            *(each.transpose(1, 2) for each in (grad, query, key, value)), bias, mixed.transpose(1, 2), None, None,
            query.shape[2], key.shape[2], log_sums, ctx.dropout, seed, offset, 0, ctx.needs_input_grad[3],
            num_splits_key=1,
        )  # fmt: skip
        return *(part.transpose(1, 2) for part in parts), of_bias if ctx.needs_input_grad[3] else None, None
