"""Graph batches with a few static shapes, so that a step can be captured as one CUDA graph.

Shapes: G = graphs, R = rows of node slots, S = slots per row, N = R·S, E = edge slots, P = pair slots.

The last graph contains all padding nodes and no real ones. Padding edges and pairs are self-loops of padding nodes, so
they reach no real node; ``target_mask`` excludes their outputs. All indices are valid, so any model that does not mix
graphs gives correct outputs for the real graphs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treadle.device.one_piece import in_one_piece
from treadle.errors import ConfigError, MissingExtraError
from treadle.errors.arguments import checked
from treadle.graphs.buckets import PadBucket, columns
from treadle.graphs.inputs import graphs_of, needed
from treadle.graphs.masks import masks_in
from treadle.graphs.model_options import TASKS


@dataclass(frozen=True)
class PaddedGraphBatch:
    """Batch whose shapes depend only on its bucket; built by `pad_batch`.

    It has the attributes of a ``torch_geometric`` batch that the model reads, and masks, True = real.
    """

    num_graphs: int
    """G, including empty ones."""
    row_length: int
    """S; the nodes of a graph are consecutive within one row."""
    x: Tensor
    """(N,), (N, 1) or (N, F)."""
    batch: Tensor
    """(N,) the graph of each node."""
    edge_index: Tensor
    """(2, E)."""
    node_mask: Tensor
    """(N,) bool."""
    edge_mask: Tensor
    """(E,) bool."""
    graph_mask: Tensor
    """(G,) bool."""
    target_mask: Tensor
    """(G,), (N,) or (pairs,) bool: real rows of the outputs and of ``y``."""
    target_order: Tensor
    """Indices of those rows: the real ones first, in the order of the unpadded batch."""
    y: Tensor | None = None
    """(rows of the outputs, …); padding is NaN in float targets, so that forgetting the mask is noticed, and 0 in
    integer ones. In a loss, select before computing: ``torch.where(target_mask[:, None], outputs - y, 0)``."""
    edge_attr: Tensor | None = None
    node_pe: Tensor | None = None
    edge_pe_index: Tensor | None = None
    """(2, P)."""
    edge_pe: Tensor | None = None
    """(P, R); 0 at padding."""
    pair_index: Tensor | None = None
    """(2, target pairs)."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the batch by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> PaddedGraphBatch:
        """Return the batch on a device."""
        return self._with({name: value.to(device, non_blocking=non_blocking) for name, value in self.tensors().items()})

    def pin_memory(self) -> PaddedGraphBatch:
        """Return the batch in one block of pinned memory; called by a ``DataLoader`` with ``pin_memory=True``."""
        tensors = self.tensors()
        return self._with(dict(zip(tensors, in_one_piece(list(tensors.values()), pin_memory=True), strict=True)))

    def clone(self) -> PaddedGraphBatch:
        """Return a copy with cloned tensors."""
        return self._with({name: value.clone() for name, value in self.tensors().items()})

    def _with(self, tensors: dict[str, Any]) -> PaddedGraphBatch:
        return dataclasses.replace(self, **tensors)

    def copy_(self, other: PaddedGraphBatch) -> PaddedGraphBatch:
        """Copy the values of another batch of the same bucket into this batch's tensors, and return this batch.

        This fills the static buffers of a captured step.

        Raises:
            ValueError: the tensors or shapes of the other batch differ.
        """
        own, new = self.tensors(), other.tensors()
        if {name: value.shape for name, value in own.items()} != {name: value.shape for name, value in new.items()}:
            raise ValueError("the batches have different tensors or shapes; pad both into the same bucket")
        for name, value in own.items():
            value.copy_(new[name], non_blocking=True)
        return self

    def real(self, outputs: Tensor) -> Tensor:
        """Return the outputs of real graphs, nodes or pairs, in the order of the unpadded batch.

        Reads their number on the host, so it cannot be used in a captured step.
        """
        return outputs[self.target_order[: int(self.target_mask.sum())]]


def pad_batch(batch: Any, buckets: PadBucket | Sequence[PadBucket], *, level: str = "graph") -> PaddedGraphBatch:
    """Pad a batch to the first bucket that holds it; intended for the host, before the batch is moved.

    Args:
        batch: any object with ``x``, ``edge_index``, ``batch`` and ``num_graphs``; ``edge_attr``, ``node_pe``,
            ``edge_pe_index`` with ``edge_pe``, ``pair_index`` and ``y`` (or ``target``) are padded if present. Other
            attributes are dropped.
        buckets: tried in order; put small ones first.
        level: level of the rows of ``y``: ``"graph"``, ``"node"`` or ``"edge"`` (a pair of ``pair_index``).

    Raises:
        ConfigError: no bucket holds the batch, the level is unknown, or ``y`` does not have one row per graph, node or
            pair.

    Example:
        >>> from types import SimpleNamespace
        >>> edges = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])
        >>> two = SimpleNamespace(x=torch.ones(4, 1), edge_index=edges, batch=torch.tensor([0, 0, 1, 1]), num_graphs=2)
        >>> padded = pad_batch(two, PadBucket(graphs=3, rows=2, row_length=3, edges=6))
        >>> padded.batch.tolist(), padded.edge_index.tolist()
        ([0, 0, 3, 1, 1, 3], [[0, 1, 3, 4, 2, 5], [1, 0, 4, 3, 2, 5]])
    """
    if level not in TASKS:
        raise ConfigError(f" is unknown; known: {', '.join(TASKS)}", argument="level", value=level)
    if masks_in(batch):
        raise ConfigError(
            "the batch has split masks, which padded batches do not support, so targets of all "
            "splits would count; train without padding, or set the targets of other splits to NaN",
            argument=masks_in(batch)[0],
        )
    graph_N, num_graphs = graphs_of(batch)
    sizes = torch.bincount(graph_N, minlength=num_graphs)
    bucket, starts = _first_that_holds(batch, sizes.tolist(), [buckets] if isinstance(buckets, PadBucket) else buckets)
    order = graph_N.argsort(stable=True)
    position = torch.empty_like(order)
    position[order] = torch.arange(len(order)) - (sizes.cumsum(0) - sizes)[graph_N[order]]
    slot_N = torch.tensor(starts, dtype=torch.long)[graph_N] + position
    return PaddedGraphBatch(
        num_graphs=bucket.graphs + 1,
        row_length=bucket.row_length,
        graph_mask=torch.arange(bucket.graphs + 1) < num_graphs,
        **_inputs(batch, bucket, slot_N, graph_N),
        **_targets(batch, bucket, slot_N, num_graphs, level=level),
    )


def _first_that_holds(batch: Any, sizes: list[int], buckets: Sequence[PadBucket]) -> tuple[PadBucket, list[int]]:
    """Return the first bucket that holds the batch, and the first slot of each graph in it."""
    edges, pairs, target_pairs = (columns(batch, name) for name in ("edge_index", "edge_pe_index", "pair_index"))
    for bucket in buckets:
        if edges <= bucket.edges and pairs <= bucket.pairs and target_pairs <= bucket.target_pairs:
            starts = bucket.place(sizes)
            if starts is not None:
                return bucket, starts
    raise ConfigError(
        f"no bucket holds a batch of {len(sizes)} graphs, {sum(sizes)} nodes (at most {max(sizes, default=0)} in a "
        f"graph), {edges} edges, {pairs} pairs and {target_pairs} target pairs; the buckets are {list(buckets)}. "
        "Add a larger one"
    )


def _inputs(batch: Any, bucket: PadBucket, slot_N: Tensor, graph_N: Tensor) -> dict[str, Tensor]:
    """Place the model inputs into their slots; ``slot_N`` is the slot of each node of the batch."""
    num_slots = bucket.rows * bucket.row_length
    is_real = _real(slot_N, num_slots)
    # Spread over all padding nodes, so that none of them sums hundreds of messages.
    spare = torch.arange(num_slots)[~is_real]
    padded = {
        "x": _rows(needed(batch, "x"), slot_N, num_slots),
        "batch": torch.full((num_slots,), bucket.graphs).index_copy_(0, slot_N, graph_N),
        "edge_index": _pairs(needed(batch, "edge_index"), slot_N, bucket.edges, spare),
        "node_mask": is_real,
        "edge_mask": torch.arange(bucket.edges) < columns(batch, "edge_index"),
    }
    for name, size in (("edge_pe_index", bucket.pairs), ("pair_index", bucket.target_pairs)):
        if getattr(batch, name, None) is not None:
            padded[name] = _pairs(getattr(batch, name), slot_N, size, spare)
    for name, size in (("edge_attr", bucket.edges), ("edge_pe", bucket.pairs)):
        if getattr(batch, name, None) is not None:
            rows = getattr(batch, name)
            padded[name] = _rows(rows, torch.arange(len(rows)), size)
    if getattr(batch, "node_pe", None) is not None:
        padded["node_pe"] = _rows(batch.node_pe, slot_N, num_slots)
    return padded


def _targets(batch: Any, bucket: PadBucket, slot_N: Tensor, num_graphs: int, *, level: str) -> dict[str, Tensor]:
    """Place the targets at the rows of their outputs."""
    if level == "graph":
        where, size = torch.arange(num_graphs), bucket.graphs + 1
    elif level == "node":
        where, size = slot_N, bucket.rows * bucket.row_length
    else:
        where, size = torch.arange(columns(batch, "pair_index")), bucket.target_pairs
    is_real = _real(where, size)
    padded = {"target_mask": is_real, "target_order": torch.cat([where, torch.arange(size)[~is_real]])}
    target = getattr(batch, "y", None)
    target = getattr(batch, "target", None) if target is None else target
    if target is None:
        return padded
    if target.dim() == 0 or len(target) != len(where):
        raise ConfigError(
            f"the targets have shape {tuple(target.shape)}, but level={level!r} needs {len(where)} rows for this "
            "batch, one for each graph, node or pair; name the level that the targets belong to"
        )
    return {**padded, "y": _rows(target, where, size, fill=torch.nan if target.is_floating_point() else 0)}


def _rows(values: Tensor, where: Tensor, size: int, *, fill: float = 0) -> Tensor:
    """Return (size, …) with the rows of ``values`` at ``where``, and ``fill`` elsewhere."""
    return values.new_full((size, *values.shape[1:]), fill).index_copy_(0, where, values)


def _real(where: Tensor, size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.bool).index_fill_(0, where, True)


def _pairs(index: Tensor, slot_N: Tensor, size: int, spare: Tensor) -> Tensor:
    """Return (2, size): node pairs moved to their slots, followed by self-pairs of padding nodes."""
    missing = torch.arange(size - index.shape[1]) % len(spare)
    return torch.cat([slot_N[index], spare[missing].expand(2, -1)], dim=1)


class PaddingCollater:
    """A ``collate_fn`` for torch's ``DataLoader`` that collates graphs into a batch and pads it.

    Args:
        buckets: as for `pad_batch`.
        level: as for `pad_batch`.
        collate: collates a list of graphs; None uses that of ``torch_geometric``.

    Raises:
        ImportError: ``torch_geometric`` is needed but not installed.
    """

    @checked
    def __init__(
        self,
        buckets: Sequence[PadBucket],
        *,
        level: str = "graph",
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.buckets = list(buckets)
        self.level = level
        self.collate = _torch_geometric_collate() if collate is None else collate

    def __call__(self, graphs: list[Any]) -> PaddedGraphBatch:
        """Return the padded batch of a list of graphs."""
        return pad_batch(self.collate(graphs), self.buckets, level=self.level)


def _torch_geometric_collate() -> Callable[[list[Any]], Any]:
    try:
        from torch_geometric.data import Batch
    except ImportError as error:
        raise MissingExtraError(
            "batches of torch_geometric need the extra: pip install 'treadle[graphs]'; or pass collate="
        ) from error
    collate: Callable[[list[Any]], Any] = Batch.from_data_list
    return collate
