"""A graph has the same encodings, to the bit, alone, among others, in any order and from any number of processes."""

from __future__ import annotations

import pytest
import torch

from graph_shapes import complete, cycle, edgeless, path, random_graph, star, union
from treadle.graphs import compute_node_pe, compute_relative_pe, encode_graphs, get_dataset, lap_pe

SHAPES = [
    *(star(leaves) for leaves in (3, 6, 12, 13, 20)),
    *(cycle(n) for n in (3, 5, 7, 12, 13, 21)),
    *(complete(n) for n in (4, 5, 7, 13)),
    *(path(n) for n in (2, 9, 13)),
    *(random_graph(n, 0.2, seed) for seed, n in enumerate([13, 13, 21, 7, 7, 13, 33, 65])),
    edgeless(7),
    union(cycle(5), star(7)),
]  # several of one size, most of them odd: matrices of odd size are not all aligned alike within a stack
NODES = {
    "everything": {"type": "combined", "dim": 64, "rwse": {"scales": list(range(1, 21))}},
    "square": {"type": "lap", "dim": 16, "lap": {"sign_invariant": "square"}},
    "flip": {"type": "lap", "dim": 16, "lap": {"sign_invariant": "flip"}},
    "standardised": {"type": "rwse", "dim": 20, "rwse": {"scales": list(range(1, 21))}, "normalize": "graph"},
}
PAIRS = ("spd", "bfs", "diffusion", "resistance", "landmark")
CONFIGS = [
    *({"node": node, "relative": {"type": "none"}} for node in NODES.values()),
    *({"node": {"type": "none"}, "relative": {"type": kind}} for kind in PAIRS),
]


def same(one, other):
    return all(
        (a is None and b is None) or (a.dtype == b.dtype and torch.equal(a, b)) for a, b in zip(one, other, strict=True)
    )


def shuffled(graphs, seed):
    order = torch.randperm(len(graphs), generator=torch.Generator().manual_seed(seed)).tolist()
    return order, [graphs[number] for number in order]


def check(graphs, config, *, num_workers=0):
    """Compare every graph among all, backwards, shuffled and among copies with the same graph alone."""
    alone = [encode_graphs([graph], config)[0] for graph in graphs]
    for order in (
        list(range(len(graphs))),
        list(range(len(graphs)))[::-1],
        shuffled(graphs, 0)[0],
        shuffled(graphs, 1)[0],
    ):
        together = encode_graphs([graphs[number] for number in order], config, num_workers=num_workers)
        wrong = [number for place, number in enumerate(order) if not same(together[place], alone[number])]
        assert wrong == []


@pytest.mark.parametrize("config", CONFIGS, ids=[*NODES, *PAIRS])
def test_graphs_of_many_symmetries(config):
    check(SHAPES, config)
    check(SHAPES, config, num_workers=2)


@pytest.mark.parametrize("config", CONFIGS, ids=[*NODES, *PAIRS])
def test_the_functions_of_one_graph_give_the_same_bits_whatever_the_threads(config):
    together = encode_graphs(SHAPES, config)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for graph, found in zip(SHAPES, together, strict=True):
                pairs, values = compute_relative_pe(*graph, config)
                node = compute_node_pe(*graph, config)
                assert found.node_pe is None or torch.equal(node, found.node_pe)
                assert found.edge_pe is None or torch.equal(pairs, found.edge_pe_index)
                assert found.edge_pe is None or torch.equal(values, found.edge_pe)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_copies_of_one_star_have_one_encoding():
    graph = star(12)
    encoded = encode_graphs([graph] * 9, CONFIGS[0])
    assert all(torch.equal(encoded[number].node_pe, encoded[0].node_pe) for number in range(9))


@pytest.mark.parametrize("shape", [star(6), star(12), cycle(7), cycle(8), complete(5), union(cycle(5), cycle(5))])
def test_absolute_values_do_not_depend_on_the_numbering_where_eigenvalues_repeat(shape):
    # Nor, with it, on the basis that an implementation of LAPACK finds.
    edge_index, n = shape
    found = lap_pe(edge_index, n, k=n)
    for seed in range(5):
        new = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
        assert torch.allclose(lap_pe(new[edge_index], n, k=n)[new], found, atol=1e-6)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # by torch_geometric
def test_molecules(tmp_path):
    pytest.importorskip("rdkit")
    data = get_dataset("nci", tmp_path, num_workers=0)
    molecules = [(graph.edge_index, graph.num_nodes) for part in data.get_splits() for graph in part]
    config = {"node": NODES["everything"], "relative": {"type": "none"}}
    forward, order = encode_graphs(molecules, config), list(range(len(molecules)))[::-1]
    backward = encode_graphs([molecules[number] for number in order], config)
    wrong = [
        number
        for place, number in enumerate(order)
        if not torch.equal(backward[place].node_pe, forward[number].node_pe)
    ]
    assert wrong == []
    for number in range(0, len(molecules), 25):
        assert torch.equal(encode_graphs([molecules[number]], config)[0].node_pe, forward[number].node_pe)
