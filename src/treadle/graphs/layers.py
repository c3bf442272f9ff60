"""Message-passing layers, and the graph layer that combines them with attention within each graph.

Shapes: N = nodes of the batch, E = directed edges, G = graphs, D = hidden width, H = heads, C = D / H.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from treadle.graphs.attention import AttentionLayout, GraphAttention
from treadle.graphs.row_index import RowIndex


class Structure(NamedTuple):
    """Connectivity of a batch.

    Attributes:
        source_E: source node of each message.
        target_E: target node of each message.
        graph_N: graph of each node.
        layout: positions of the nodes in the dense attention; None without attention.
    """

    source_E: RowIndex
    target_E: RowIndex
    graph_N: RowIndex
    layout: AttentionLayout | None

    @classmethod
    def of(
        cls, edge_index_2E: Tensor, graph_N: Tensor, num_graphs: int, *, layout: AttentionLayout | None = None
    ) -> Structure:
        """Build the structure of a batch.

        Example:
            >>> path = Structure.of(torch.tensor([[0, 1], [1, 0]]), torch.zeros(2, dtype=torch.long), 1)
            >>> path.target_E.num_rows, path.graph_N.num_rows
            (2, 1)
        """
        source_E, target_E = (RowIndex(ends_E, len(graph_N)) for ends_E in edge_index_2E)
        return cls(source_E, target_E, RowIndex(graph_N, num_graphs), layout)


class GINELayer(nn.Module):
    """GINE layer MLP(h_i + Σ_j ReLU(h_j + e_ij)) (Hu et al. 2020, "Strategies for Pre-training Graph Neural Networks").

    Example:
        >>> path = Structure.of(torch.tensor([[0, 1], [1, 0]]), torch.zeros(2, dtype=torch.long), 1)
        >>> nodes, _ = GINELayer(4)(torch.randn(2, 4), torch.randn(2, 4), path)
        >>> nodes.shape
        torch.Size([2, 4])
    """

    def __init__(self, hidden_dim: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(hidden_dim, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, hidden_dim))

    def forward(self, nodes_ND: Tensor, edges_ED: Tensor, structure: Structure) -> tuple[Tensor, Tensor]:
        """Return the local update of the nodes (N, D), and the edges (E, D) unchanged."""
        messages_ED = F.relu(structure.source_E.select(nodes_ND) + edges_ED)
        return self.mlp(nodes_ND + structure.target_E.sum(messages_ED)), edges_ED


class GCNLayer(nn.Module):
    """W h_i / d_i + Σ_j (W h_j + U e_ij) / √(d_i d_j) + b, d = 1 + number of incoming edges (Kipf & Welling 2017).

    With edge features of zero this is torch_geometric's ``GCNConv``.
    """

    def __init__(self, hidden_dim: int) -> None:
        super().__init__()
        self.node = nn.Linear(hidden_dim, hidden_dim, bias=False)
        self.edge = nn.Linear(hidden_dim, hidden_dim, bias=False)
        self.bias = nn.Parameter(torch.zeros(hidden_dim))

    def forward(self, nodes_ND: Tensor, edges_ED: Tensor, structure: Structure) -> tuple[Tensor, Tensor]:
        """Return the local update of the nodes (N, D), and the edges (E, D) unchanged."""
        source_E, target_E = structure.source_E, structure.target_E
        ones_E1 = torch.ones(len(edges_ED), 1, device=nodes_ND.device)
        scale_N1 = (1 + target_E.sum(ones_E1)).rsqrt()
        values_ND = self.node(nodes_ND)
        messages_ED = source_E.select(values_ND) + self.edge(edges_ED)
        sums_ND = target_E.sum(messages_ED * source_E.select(scale_N1))
        return scale_N1 * (sums_ND + scale_N1 * values_ND) + self.bias, edges_ED


class GATLayer(nn.Module):
    """Σ_j α_ij (W h_j + U e_ij) + b per head, α a softmax over the incoming edges of i (Veličković et al. 2018).

    The logits are those of torch_geometric's ``GATConv`` with ``edge_dim``. There an edge feature only shifts the
    logits, so it has no effect on a node with one neighbour; here it is also part of the message. A node without
    incoming edges gets only b.
    """

    def __init__(self, hidden_dim: int, *, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = nn.Dropout(dropout)
        self.node = nn.Linear(hidden_dim, hidden_dim, bias=False)
        self.edge = nn.Linear(hidden_dim, hidden_dim, bias=False)
        self.query = nn.Parameter(torch.empty(num_heads, hidden_dim // num_heads))
        self.key = nn.Parameter(torch.empty(num_heads, hidden_dim // num_heads))
        self.edge_key = nn.Parameter(torch.empty(num_heads, hidden_dim // num_heads))
        self.bias = nn.Parameter(torch.zeros(hidden_dim))
        for vector in (self.query, self.key, self.edge_key):
            nn.init.xavier_uniform_(vector)

    def forward(self, nodes_ND: Tensor, edges_ED: Tensor, structure: Structure) -> tuple[Tensor, Tensor]:
        """Return the local update of the nodes (N, D), and the edges (E, D) unchanged."""
        source_E, target_E = structure.source_E, structure.target_E
        values_NHC = self.node(nodes_ND).unflatten(1, (self.num_heads, -1))
        edges_EHC = self.edge(edges_ED).unflatten(1, (self.num_heads, -1))
        logits_EH = source_E.select((values_NHC * self.key).sum(-1))
        logits_EH = logits_EH + target_E.select((values_NHC * self.query).sum(-1))
        logits_EH = F.leaky_relu(logits_EH + (edges_EHC * self.edge_key).sum(-1), 0.2)
        share_EH = self.dropout(target_E.softmax(logits_EH))
        messages_EHC = source_E.select(values_NHC) + edges_EHC
        sums_NHC = target_E.sum(messages_EHC * share_EH.unsqueeze(-1))
        return sums_NHC.flatten(1) + self.bias, edges_ED


class GatedGCNLayer(nn.Module):
    """U h_i + Σ_j σ_ij ⊙ V h_j / (Σ_j σ_ij + 1e-6), σ_ij = sigmoid(A h_i + B h_j + C e_ij) (Bresson & Laurent 2017).

    Edges have a state, e_ij += ReLU(LN(A h_i + B h_j + C e_ij)), unless ``update_edges`` is False, as in the last layer
    of a model, where nothing reads it.
    """

    def __init__(self, hidden_dim: int, *, update_edges: bool) -> None:
        super().__init__()
        self.node = nn.Linear(hidden_dim, 4 * hidden_dim)
        self.edge = nn.Linear(hidden_dim, hidden_dim)
        self.edge_norm = nn.LayerNorm(hidden_dim) if update_edges else None

    def forward(self, nodes_ND: Tensor, edges_ED: Tensor, structure: Structure) -> tuple[Tensor, Tensor]:
        """Return the local update of the nodes (N, D), and the state of the edges (E, D)."""
        source_E, target_E = structure.source_E, structure.target_E
        own_ND, value_ND, to_ND, from_ND = self.node(nodes_ND).chunk(4, dim=1)
        gate_ED = target_E.select(to_ND) + source_E.select(from_ND) + self.edge(edges_ED)
        share_ED = gate_ED.sigmoid()
        sums_ND = target_E.sum(share_ED * source_E.select(value_ND))
        update_ND = own_ND + sums_ND / (target_E.sum(share_ED) + 1e-6)
        if self.edge_norm is not None:
            edges_ED = edges_ED + F.relu(self.edge_norm(gate_ED))
        return update_ND, edges_ED


class DropPath(nn.Module):
    """Stochastic depth: in training, a branch is dropped for random graphs and scaled by 1 / (1 − rate) for the others.

    Example:
        >>> DropPath(0.5).eval()(torch.ones(2, 1), RowIndex(torch.tensor([0, 1]), 2)).tolist()
        [[1.0], [1.0]]
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch_ND: Tensor, graph_N: RowIndex) -> Tensor:
        """Return the branch (N, D), zero at all nodes of the dropped graphs."""
        if not self.training or self.rate == 0.0:
            return branch_ND
        keep_G1 = (torch.rand(graph_N.num_rows, 1, device=branch_ND.device) >= self.rate).to(branch_ND.dtype)
        return branch_ND * graph_N.select(keep_G1 / (1.0 - self.rate))


class GraphLayer(nn.Module):
    """Pre-norm graph layer: h += local(LN h) + attention(LN h), then h += FFN(LN h).

    Message passing and attention are summed as in GPS (Rampášek et al. 2022), with layer norms instead of batch norms,
    so that a graph does not depend on the rest of the batch.

    Args:
        local: message passing from (nodes, edges, structure) to (update, edges); None for none.
        attention: attention within each graph; None for none.
        hidden_dim: D.
        ffn_dim: width of the feed-forward network.
        dropout: dropout on each of the three branches and inside the feed-forward network.
        drop_path: probability of dropping the branches for a graph in training.
    """

    def __init__(
        self,
        local: nn.Module | None,
        attention: GraphAttention | None,
        *,
        hidden_dim: int,
        ffn_dim: int,
        dropout: float,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden_dim)
        self.local = local
        self.attention = attention
        self.norm2 = nn.LayerNorm(hidden_dim)
        self.ffn = nn.Sequential(
            nn.Linear(hidden_dim, ffn_dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(ffn_dim, hidden_dim)
        )
        self.dropout = nn.Dropout(dropout)
        self.drop_path = DropPath(drop_path)

    def forward(self, nodes_ND: Tensor, edges_ED: Tensor, structure: Structure) -> tuple[Tensor, Tensor]:
        """Return the nodes (N, D) and the edges (E, D) after the layer."""
        normed_ND, branches = self.norm1(nodes_ND), []
        if self.local is not None:
            local_ND, edges_ED = self.local(normed_ND, edges_ED, structure)
            branches.append(self.dropout(local_ND))
        if self.attention is not None:
            branches.append(self.dropout(self.attention(normed_ND, structure.layout)))
        mixed_ND = functools.reduce(torch.add, branches)
        nodes_ND = nodes_ND + self.drop_path(mixed_ND, structure.graph_N)
        update_ND = self.dropout(self.ffn(self.norm2(nodes_ND)))
        return nodes_ND + self.drop_path(update_ND, structure.graph_N), edges_ED
