"""Small graphs with every attribute that graph models read, and a collate function without torch_geometric."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

NODE_TYPES, EDGE_TYPES, NODE_PE, PAIR_PE = 5, 3, 4, 6
# One node without edges, two isolated nodes, ordinary graphs, and one that is much larger than the others.
SIZES = (1, 2, 9, 12, 7, 40)


def make_graph(size: int, seed: int = 0) -> SimpleNamespace:
    """Return a random graph; graphs of two nodes have no edges, larger ones have some."""
    draw = torch.Generator().manual_seed(1000 * seed + size)
    one_way = (torch.rand(size, size, generator=draw) < 0.3).triu(1) if size > 2 else torch.zeros(size, size)
    source, target = one_way.nonzero().T
    edge_index = torch.stack([torch.cat([source, target]), torch.cat([target, source])])
    pairs = torch.cartesian_prod(torch.arange(size), torch.arange(size)).view(-1, 2).T
    some = torch.rand(size * size, generator=draw) < 0.7
    return SimpleNamespace(
        x=torch.randint(0, NODE_TYPES, (size,), generator=draw),
        edge_index=edge_index,
        edge_attr=torch.randint(0, EDGE_TYPES, (edge_index.shape[1],), generator=draw),
        node_pe=torch.randn(size, NODE_PE, generator=draw),
        edge_pe_index=pairs[:, some],
        edge_pe=torch.randn(int(some.sum()), PAIR_PE, generator=draw),
        pair_index=pairs[:, :5],
        y=torch.randn(1, 2, generator=draw),
    )


def make_graphs(sizes: tuple[int, ...] = SIZES, seed: int = 0) -> list[SimpleNamespace]:
    return [make_graph(size, seed + index) for index, size in enumerate(sizes)]


class GraphBatch(SimpleNamespace):
    """Batch that moves its tensors as one of torch_geometric does."""

    def to(self, device: Any, non_blocking: bool = False) -> GraphBatch:
        return GraphBatch(**{
            name: value.to(device, non_blocking=non_blocking) if isinstance(value, torch.Tensor) else value
            for name, value in vars(self).items()
        })  # fmt: skip

    def pin_memory(self) -> GraphBatch:
        return GraphBatch(**{
            name: value.pin_memory() if isinstance(value, torch.Tensor) else value for name, value in vars(self).items()
        })  # fmt: skip


def collate(graphs: list[Any]) -> GraphBatch:
    """Collate graphs as torch_geometric does: names with "index" are shifted and joined along columns."""
    names = list(vars(graphs[0]))
    starts = [0]
    for graph in graphs:
        starts.append(starts[-1] + len(graph.x))
    joined = {}
    for name in names:
        if "index" in name:
            parts = [getattr(graph, name) + start for graph, start in zip(graphs, starts, strict=False)]
            joined[name] = torch.cat(parts, dim=1)
        else:
            joined[name] = torch.cat([getattr(graph, name) for graph in graphs])
    owner = torch.cat([torch.full((len(graph.x),), index) for index, graph in enumerate(graphs)])
    return GraphBatch(**joined, batch=owner, num_graphs=len(graphs))


def renumber(graph: SimpleNamespace, new_number: torch.Tensor) -> SimpleNamespace:
    """Return the same graph with node i renumbered to ``new_number[i]``, and its edges and pairs in another order."""
    old_number = new_number.argsort()
    edges, pairs = torch.randperm(graph.edge_index.shape[1]), torch.randperm(graph.edge_pe_index.shape[1])
    return SimpleNamespace(
        x=graph.x[old_number],
        edge_index=new_number[graph.edge_index[:, edges]],
        edge_attr=graph.edge_attr[edges],
        node_pe=graph.node_pe[old_number],
        edge_pe_index=new_number[graph.edge_pe_index[:, pairs]],
        edge_pe=graph.edge_pe[pairs],
        pair_index=new_number[graph.pair_index],
        y=graph.y,
    )


def with_changes(batch: SimpleNamespace, **changes: Any) -> SimpleNamespace:
    """Return a copy of a batch with attributes replaced; None removes one."""
    kept = {**vars(batch), **changes}
    return SimpleNamespace(**{name: value for name, value in kept.items() if value is not None})


SMALL = {
    "num_features": NODE_TYPES, "num_classes": 2, "hidden_dim": 16, "num_layers": 3, "num_heads": 4,
    "num_edge_features": EDGE_TYPES, "node_pe_dim": NODE_PE, "relative_pe_dim": PAIR_PE,
}  # fmt: skip
