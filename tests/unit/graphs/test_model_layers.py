"""Message passing beside torch_geometric's layers where the mathematics coincide, and by hand where they do not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from treadle.graphs.attention import GraphAttention, batch_layout
from treadle.graphs.layers import GatedGCNLayer, GATLayer, GCNLayer, GINELayer, GraphLayer, Structure
from treadle.graphs.row_index import RowIndex

WIDTH, NODES, EDGES = 8, 7, 15


@pytest.fixture
def graph():
    torch.manual_seed(0)
    source = torch.randint(0, NODES - 1, (EDGES,))
    target = (source + torch.randint(1, NODES - 1, (EDGES,))) % (NODES - 1)  # no loops; the last node has no edge
    owner = torch.zeros(NODES, dtype=torch.long)
    structure = Structure.of(torch.stack([source, target]), owner, 1, layout=batch_layout(owner, 1))
    return torch.randn(NODES, WIDTH), torch.randn(EDGES, WIDTH), structure


def index_of(structure):
    return torch.stack([structure.source_E.index_M, structure.target_E.index_M])


def copy_weights(pairs):
    with torch.no_grad():
        for ours, theirs in pairs:
            ours.copy_(theirs.view_as(ours))


def test_gin_is_gine(graph):
    torch_geometric = pytest.importorskip("torch_geometric.nn")
    nodes, edges, structure = graph
    ours = GINELayer(WIDTH)
    theirs = torch_geometric.GINEConv(ours.mlp)
    torch.testing.assert_close(ours(nodes, edges, structure)[0], theirs(nodes, index_of(structure), edges))


def test_gcn_with_edges_of_zero_is_gcn(graph):
    torch_geometric = pytest.importorskip("torch_geometric.nn")
    nodes, edges, structure = graph
    ours, theirs = GCNLayer(WIDTH), torch_geometric.GCNConv(WIDTH, WIDTH)
    nn.init.normal_(theirs.bias)
    copy_weights([(ours.node.weight, theirs.lin.weight), (ours.bias, theirs.bias)])
    expected = theirs(nodes, index_of(structure))
    torch.testing.assert_close(ours(nodes, torch.zeros_like(edges), structure)[0], expected)


def test_gat_is_gat_with_the_edge_in_the_message(graph):
    torch_geometric = pytest.importorskip("torch_geometric.nn")
    nodes, edges, structure = graph
    ours = GATLayer(WIDTH, num_heads=2, dropout=0.0)
    theirs = torch_geometric.GATConv(WIDTH, WIDTH // 2, heads=2, edge_dim=WIDTH, add_self_loops=False)
    nn.init.normal_(theirs.bias)
    copy_weights(
        [
            (ours.node.weight, theirs.lin.weight),
            (ours.edge.weight, theirs.lin_edge.weight),
            (ours.key, theirs.att_src),
            (ours.query, theirs.att_dst),
            (ours.edge_key, theirs.att_edge),
            (ours.bias, theirs.bias),
        ]
    )
    expected, (_, shares) = theirs(nodes, index_of(structure), edges, return_attention_weights=True)
    messages = ours.edge(edges).unflatten(1, (2, -1)) * shares[..., None]
    expected = expected + structure.target_E.sum(messages).flatten(1)
    torch.testing.assert_close(ours(nodes, edges, structure)[0], expected)


@pytest.mark.parametrize("update_edges", [True, False])
def test_gatedgcn_by_hand(update_edges, graph):
    nodes, edges, structure = graph
    layer = GatedGCNLayer(WIDTH, update_edges=update_edges)
    own, value, to, sent = layer.node(nodes).chunk(4, dim=1)
    expected, gates = own.clone(), []
    for i in range(NODES):
        above, below = torch.zeros(WIDTH), torch.full((WIDTH,), 1e-6)
        for e in range(EDGES):
            if structure.target_E.index_M[e] == i:
                share = (to[i] + sent[structure.source_E.index_M[e]] + layer.edge(edges)[e]).sigmoid()
                above, below = above + share * value[structure.source_E.index_M[e]], below + share
        expected[i] = expected[i] + above / below
    for e in range(EDGES):
        gates.append(to[structure.target_E.index_M[e]] + sent[structure.source_E.index_M[e]] + layer.edge(edges)[e])
    updated, state = layer(nodes, edges, structure)
    torch.testing.assert_close(updated, expected)
    if update_edges:
        torch.testing.assert_close(state, edges + layer.edge_norm(torch.stack(gates)).relu())
    else:
        assert state is edges


def test_a_layer_without_message_passing_is_gps_without_it(graph):
    torch_geometric = pytest.importorskip("torch_geometric.nn")
    nodes, edges, _ = graph
    owner = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    structure = Structure.of(torch.zeros(2, 0, dtype=torch.long), owner, 2, layout=batch_layout(owner, 2))
    theirs = torch_geometric.GPSConv(WIDTH, None, heads=2, act="gelu", norm=None).eval()
    ours = GraphLayer(
        None,
        GraphAttention(WIDTH, num_heads=2),
        hidden_dim=WIDTH, ffn_dim=2 * WIDTH, dropout=0.0, drop_path=0.0,
    ).eval()  # fmt: skip
    ours.norm1 = ours.norm2 = nn.Identity()
    copy_weights(
        [
            (ours.attention.qkv.weight, theirs.attn.in_proj_weight),
            (ours.attention.qkv.bias, theirs.attn.in_proj_bias),
            (ours.attention.out.weight, theirs.attn.out_proj.weight),
            (ours.attention.out.bias, theirs.attn.out_proj.bias),
            *((ours.ffn[i].weight, theirs.mlp[i].weight) for i in (0, 3)),
            *((ours.ffn[i].bias, theirs.mlp[i].bias) for i in (0, 3)),
        ]
    )
    expected = theirs(nodes, torch.zeros(2, 0, dtype=torch.long), owner)
    torch.testing.assert_close(ours(nodes, edges[:0], structure)[0], expected)


def test_a_layer_adds_message_passing_and_attention_of_the_same_normed_nodes(graph):
    nodes, edges, structure = graph
    local, attention = GINELayer(WIDTH), GraphAttention(WIDTH, num_heads=2)
    layer = GraphLayer(local, attention, hidden_dim=WIDTH, ffn_dim=9, dropout=0.0, drop_path=0.0)
    normed = layer.norm1(nodes)
    mixed = nodes + local(normed, edges, structure)[0] + attention(normed, structure.layout)
    torch.testing.assert_close(layer(nodes, edges, structure)[0], mixed + layer.ffn(layer.norm2(mixed)))


def test_sums_of_half_precision_do_not_lose_their_small_parts():
    ones = torch.ones(3000, 1, dtype=torch.bfloat16)
    assert RowIndex(torch.zeros(3000, dtype=torch.long), 1).sum(ones).item() == 3000
    large = torch.full((100, 1), 1000.0, dtype=torch.float16)
    assert RowIndex(torch.zeros(100, dtype=torch.long), 1).sum(large).item() == 100_000


def test_the_softmax_over_an_index_survives_large_logits():
    shares = RowIndex(torch.tensor([0, 0, 1]), 2).softmax(torch.tensor([[1e4], [1e4], [-1e4]]))
    assert shares.flatten().tolist() == [0.5, 0.5, 1.0]
