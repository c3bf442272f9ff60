"""torch_geometric's GPS as in its examples/graph_gps.py: the peer of our graph transformer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, cat, nn

WALK_WIDTH = 8  # of the nodes' width, for the return probabilities


class PeerGPS(nn.Module):
    """GPSConv layers with GIN-E and batch normalisation, the return probabilities beside the features of the nodes.

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

        self.node_emb, self.edge_emb = nodes, edges
        self.pe_norm = nn.BatchNorm1d(walk)
        self.pe_lin = nn.Linear(walk, WALK_WIDTH)
        self.convs = nn.ModuleList()
        for _ in range(layers):
            inner = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            self.convs.append(GPSConv(width, GINEConv(inner), heads=heads, attn_kwargs={"dropout": 0.5}))
        self.mlp = nn.Sequential(
            nn.Linear(width, width // 2), nn.ReLU(), nn.Linear(width // 2, width // 4), nn.ReLU(),
            nn.Linear(width // 4, 1),
        )  # fmt: skip

    def forward(self, batch: Any) -> Tensor:
        from torch_geometric.nn import global_add_pool

        nodes = cat([self.node_emb(batch.x), self.pe_lin(self.pe_norm(batch.node_pe))], 1)
        edges = self.edge_emb(batch.edge_attr)
        for conv in self.convs:
            nodes = conv(nodes, batch.edge_index, batch.batch, edge_attr=edges)
        outputs: Tensor = self.mlp(global_add_pool(nodes, batch.batch, batch.num_graphs))
        return outputs
