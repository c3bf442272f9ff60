"""Models of torch_geometric, the peers of our graph models: its GPS example, and GINE and GatedGCN networks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, cat, nn

WALK_WIDTH = 8  # of the nodes' width, for the return probabilities


class PeerInput(nn.Module):
    """Features of nodes, with their return probabilities, and of edges, as in examples/graph_gps.py.

    Args:
        nodes: from ``batch.x`` to (N, width - WALK_WIDTH).
        edges: from ``batch.edge_attr`` to (E, width).
        walk: columns of ``batch.node_pe``.
    """

    def __init__(self, nodes: nn.Module, edges: nn.Module, *, walk: int) -> None:
        super().__init__()
        self.node_emb, self.edge_emb = nodes, edges
        self.pe_norm = nn.BatchNorm1d(walk)
        self.pe_lin = nn.Linear(walk, WALK_WIDTH)

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        nodes = cat([self.node_emb(batch.x), self.pe_lin(self.pe_norm(batch.node_pe))], 1)
        return nodes, self.edge_emb(batch.edge_attr)


def _head(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, width // 2), nn.ReLU(), nn.Linear(width // 2, width // 4), nn.ReLU(), nn.Linear(width // 4, 1)
    )


class PeerGPS(nn.Module):
    """GPSConv layers with GIN-E and batch normalisation, as in examples/graph_gps.py.

    Args:
        nodes: from ``batch.x`` to (N, width - WALK_WIDTH).
        edges: from ``batch.edge_attr`` to (E, width).
        width: of the layers.
        layers: how many.
        heads: of the attention.
        walk: columns of ``batch.node_pe``.
    """

    def __init__(self, nodes: nn.Module, edges: nn.Module, *, width: int, layers: int, heads: int, walk: int) -> None:
        super().__init__()
        from torch_geometric.nn import GINEConv, GPSConv

        self.input = PeerInput(nodes, edges, walk=walk)
        self.convs = nn.ModuleList()
        for _ in range(layers):
            inner = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            self.convs.append(GPSConv(width, GINEConv(inner), heads=heads, attn_kwargs={"dropout": 0.5}))
        self.mlp = _head(width)

    def forward(self, batch: Any) -> Tensor:
        from torch_geometric.nn import global_add_pool

        nodes, edges = self.input(batch)
        for conv in self.convs:
            nodes = conv(nodes, batch.edge_index, batch.batch, edge_attr=edges)
        outputs: Tensor = self.mlp(global_add_pool(nodes, batch.batch, batch.num_graphs))
        return outputs


class PeerGNN(nn.Module):
    """Layers of h + ReLU(BatchNorm(conv(h))) with the input and the head of the GPS example.

    Args:
        kind: ``"gine"`` (GINEConv) or ``"gatedgcn"`` (ResGatedGraphConv).
        nodes: from ``batch.x`` to (N, width - WALK_WIDTH).
        edges: from ``batch.edge_attr`` to (E, width).
        width: of the layers.
        layers: how many.
        walk: columns of ``batch.node_pe``.
    """

    def __init__(self, kind: str, nodes: nn.Module, edges: nn.Module, *, width: int, layers: int, walk: int) -> None:
        super().__init__()
        from torch_geometric.nn import GINEConv, ResGatedGraphConv

        def conv() -> nn.Module:
            if kind == "gatedgcn":
                gated: nn.Module = ResGatedGraphConv(width, width, edge_dim=width)
                return gated
            gine: nn.Module = GINEConv(nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)))
            return gine

        self.input = PeerInput(nodes, edges, walk=walk)
        self.convs = nn.ModuleList(conv() for _ in range(layers))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(layers))
        self.mlp = _head(width)

    def forward(self, batch: Any) -> Tensor:
        from torch_geometric.nn import global_add_pool

        nodes, edges = self.input(batch)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            nodes = nodes + norm(conv(nodes, batch.edge_index, edge_attr=edges)).relu()
        outputs: Tensor = self.mlp(global_add_pool(nodes, batch.batch, batch.num_graphs))
        return outputs
