"""Encodings of pairs against closed forms, against brute force, and under what must not change them."""

from __future__ import annotations

import math

import networkx as nx
import pytest
import torch

from graph_shapes import complete, cycle, edgeless, normalised_laplacian, path, random_graph, star, union
from treadle.errors import ConfigError
from treadle.graphs import bfs_pe, compute_relative_pe, diffusion_pe, hop_distances, landmark_pe, resistance_pe, spd_pe

TIMES = [0.1, 1.0, 10.0]
RANDOM = [random_graph(n, share, seed) for seed, (n, share) in enumerate([(7, 0.4), (12, 0.2), (20, 0.15), (20, 0.5)])]
ENCODINGS = {
    "spd": spd_pe,
    "bfs": bfs_pe,
    "diffusion": diffusion_pe,
    "resistance": resistance_pe,
    "landmark": landmark_pe,
}


def dense(encoding, n):
    """(N, N, D), zero where a pair is not listed."""
    pairs, values = encoding
    assert pairs.dtype == torch.int64
    assert values.dtype == torch.float32
    assert pairs.shape == (2, len(values))
    table = torch.zeros(n, n, values.shape[1])
    table[pairs[0], pairs[1]] = values
    return table


def numbers(rule, n):
    return torch.tensor([[rule(i, j) for j in range(n)] for i in range(n)], dtype=torch.float64)


def close(found, expected, tolerance=1e-6):
    assert (found.double() - expected).abs().max() <= tolerance


DISTANCES = {
    "path": (path(6), lambda i, j: abs(i - j)),
    "cycle": (cycle(7), lambda i, j: min(abs(i - j), 7 - abs(i - j))),
    "complete": (complete(5), lambda i, j: int(i != j)),
    "star": (star(4), lambda i, j: 0 if i == j else 1 if 0 in (i, j) else 2),
}


# Hop distances


@pytest.mark.parametrize("name", DISTANCES)
def test_distances_in_closed_form(name):
    shape, rule = DISTANCES[name]
    assert torch.equal(hop_distances(*shape), numbers(rule, shape[1]).long())


@pytest.mark.parametrize("shape", [*RANDOM, union(random_graph(30, 0.06, 3), path(4)), cycle(60)])
def test_distances_equal_networkx(shape):
    graph = nx.Graph()
    graph.add_nodes_from(range(shape[1]))
    graph.add_edges_from(shape[0].T.tolist())
    known = dict(nx.all_pairs_shortest_path_length(graph))
    assert torch.equal(hop_distances(*shape), numbers(lambda i, j: known[i].get(j, -1), shape[1]).long())


@pytest.mark.parametrize(
    ("buckets", "most", "expected"),
    [
        (32, 10, [0, 3, 6, 9, 12, 15, 18, 21, 24, 27, 31, 31, 31]),
        (16, 5, [0, 3, 6, 9, 12, 15, 15, 15]),
    ],
)
def test_spd_buckets(buckets, most, expected):
    n = len(expected)
    table = dense(spd_pe(*path(n), num_buckets=buckets, max_distance=most), n)
    assert table.shape == (n, n, buckets)
    assert torch.equal(table.sum(-1), torch.ones(n, n))
    assert table[0].argmax(-1).tolist() == expected


def test_spd_lists_all_pairs_in_order_and_a_pair_of_two_components_has_zeros():
    shape = union(path(3), edgeless(1))
    pairs, values = spd_pe(*shape)
    assert pairs.T.tolist() == [[i, j] for i in range(4) for j in range(4)]
    table = dense((pairs, values), 4)
    assert table[3].abs().sum() == table[3, 3].sum() == 1
    assert table[:3, :3].sum() == 9


@pytest.mark.parametrize("buckets", [254, 255, 300])
def test_many_buckets(buckets):
    table = dense(spd_pe(*path(3), num_buckets=buckets, max_distance=2), 3)
    assert table[0].argmax(-1).tolist() == [0, (buckets - 1) // 2, buckets - 1]


def test_bfs_lists_near_pairs_only():
    pairs, values = bfs_pe(*path(5), max_distance=2)
    assert pairs.shape == (2, 14)
    everything = dense(spd_pe(*path(5), max_distance=2), 5)
    assert torch.equal(values, everything[pairs[0], pairs[1]])
    distances = hop_distances(*path(5))[pairs[0], pairs[1]]
    assert set(distances.tolist()) == {1, 2}


# Diffusion


def test_diffusion_gives_the_numbers_of_the_specification():
    close(dense(diffusion_pe(*complete(3), scales=[1.0]), 3)[0, 1], torch.tensor([0.258957]))
    table = dense(diffusion_pe(*path(3), scales=[1.0]), 3)[..., 0]
    close(table[0, 1], 0.305705)
    close(table[0, 2], 0.099894)


def test_diffusion_in_closed_form():
    n, m = 6, 5
    for place, t in enumerate(TIMES):
        rest = math.exp(-t * n / (n - 1))
        expected = numbers(lambda i, j: (1 + (n - 1) * rest) / n if i == j else (1 - rest) / n, n)
        close(dense(diffusion_pe(*complete(n), scales=TIMES), n)[..., place], expected)

        def on_a_cycle(i, j):
            angles = [2 * math.pi * k / n for k in range(n)]
            return sum(math.exp(-t * (1 - math.cos(a))) * math.cos(a * (i - j)) for a in angles) / n

        close(dense(diffusion_pe(*cycle(n), scales=TIMES), n)[..., place], numbers(on_a_cycle, n))

        # λ = 0, 1, 2 with projections as in the test of the heat kernel signature.
        even, odd = (1 + math.exp(-2 * t)) / 2, (1 - math.exp(-2 * t)) / 2

        def on_a_star(i, j):
            if 0 in (i, j):
                return even if i == j else odd / math.sqrt(m)
            return even / m + math.exp(-t) * ((i == j) - 1 / m)

        close(dense(diffusion_pe(*star(m), scales=TIMES), m + 1)[..., place], numbers(on_a_star, m + 1))


@pytest.mark.parametrize("shape", RANDOM)
def test_diffusion_is_the_matrix_exponential(shape):
    table = dense(diffusion_pe(*shape, scales=TIMES), shape[1])
    for place, t in enumerate(TIMES):
        close(table[..., place], torch.matrix_exp(-t * normalised_laplacian(*shape)))


# Resistance


@pytest.mark.parametrize(
    ("shape", "rule"),
    [
        (path(5), lambda i, j: abs(i - j)),
        (complete(3), lambda i, j: 2 / 3 * (i != j)),
        (complete(5), lambda i, j: 0.4 * (i != j)),
        (cycle(4), lambda i, j: abs(i - j) * (4 - abs(i - j)) / 4),
        (cycle(6), lambda i, j: abs(i - j) * (6 - abs(i - j)) / 6),
        (star(4), lambda i, j: 0 if i == j else 1 if 0 in (i, j) else 2),
    ],
)
def test_resistance_in_closed_form(shape, rule):
    # Of a ring, d and n - d edges in parallel: d(n - d)/n.
    close(dense(resistance_pe(*shape), shape[1])[..., 0], numbers(rule, shape[1]))


def test_resistance_of_a_long_path_is_exact():
    close(dense(resistance_pe(*path(400)), 400)[0, :, 0], torch.arange(400).double(), 1e-4)


@pytest.mark.parametrize("shape", [*RANDOM, union(cycle(5), path(4)), union(path(3), edgeless(2))])
def test_resistance_equals_the_pseudoinverse_and_never_exceeds_the_hops(shape):
    n = shape[1]
    degrees_minus_edges = torch.zeros(n, n, dtype=torch.float64)
    for i, j in shape[0].T.tolist():
        degrees_minus_edges[[i, j], [i, j]] += 1
        degrees_minus_edges[[i, j], [j, i]] -= 1
    inverse = torch.linalg.pinv(degrees_minus_edges, hermitian=True)
    own = inverse.diagonal()
    hops = hop_distances(*shape)
    found = dense(resistance_pe(*shape), n)[..., 0]
    close(found, (own[:, None] + own - 2 * inverse) * (hops >= 0))
    assert (found <= hops + 1e-5).logical_or(hops < 0).all()


# Landmarks


def test_landmark_differences_by_hand():
    table = dense(landmark_pe(*path(5), landmarks=[0]), 5)
    assert table[1, 3].tolist() == [2, 2, 2]
    table = dense(landmark_pe(*path(5), landmarks=[0, 2]), 5)
    assert table[1, 3].tolist() == [0, 2, 1]
    assert table[1, 1].tolist() == [0, 0, 0]


def test_landmarks_of_other_components_do_not_count():
    shape = union(path(4), path(3))
    table = dense(landmark_pe(*shape, landmarks=[0, 5]), 7)
    assert torch.equal(table[:4, :4], dense(landmark_pe(*path(4), landmarks=[0]), 4))
    assert torch.equal(table[4:, 4:], dense(landmark_pe(*path(3), landmarks=[1]), 3))
    assert table[:4, 4:].abs().sum() == table[4:, :4].abs().sum() == 0
    assert dense(landmark_pe(*shape, landmarks=[0]), 7)[4:, 4:].abs().sum() == 0


def test_landmarks_come_from_the_seed_and_from_no_global_generator():
    shape = random_graph(20, 0.15, 1)
    before = torch.get_rng_state()
    first, again, other = (landmark_pe(*shape, seed=seed)[1] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


def test_more_landmarks_than_nodes_are_all_nodes():
    assert torch.equal(landmark_pe(*path(3), num_landmarks=9)[1], landmark_pe(*path(3), landmarks=[0, 1, 2])[1])


def test_a_reduction_keeps_its_place():
    three = landmark_pe(*RANDOM[2], reduce=["mean", "min", "max"])[1]
    assert torch.equal(three, landmark_pe(*RANDOM[2])[1][:, [2, 0, 1]])


# What must not change an encoding, and what it does at the edges


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("shape", RANDOM)
def test_loops_doubles_and_directions_do_not_matter(name, shape):
    edges, n = shape
    messy = torch.cat([edges.flip(0), torch.arange(n).repeat(2, 1), edges, edges], dim=1)
    for one, other in zip(ENCODINGS[name](messy, n), ENCODINGS[name](edges, n), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("shape", [*RANDOM, union(cycle(6), complete(4))])
def test_the_numbering_of_the_nodes_does_not_matter(name, shape):
    edges, n = shape
    order = torch.randperm(n, generator=torch.Generator().manual_seed(5))
    marks = [{}, {}]
    if name == "landmark":
        marks = [{"landmarks": [0, 3]}, {"landmarks": order[[0, 3]].tolist()}]
    before = dense(ENCODINGS[name](edges, n, **marks[0]), n)
    after = dense(ENCODINGS[name](order[edges], n, **marks[1]), n)
    close(after[order][:, order], before)


@pytest.mark.parametrize("name", ENCODINGS)
def test_pairs_of_two_components_have_the_zero_vector(name):
    table = dense(ENCODINGS[name](*union(complete(4), path(3))), 7)
    assert torch.equal(table[:4, 4:], torch.zeros_like(table[:4, 4:]))
    assert torch.equal(table[4:, :4], torch.zeros_like(table[4:, :4]))
    assert table[:4, :4].abs().sum() > 0


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("shape", [edgeless(1), edgeless(3)])
def test_nodes_without_an_edge(name, shape):
    n = shape[1]
    pairs, values = ENCODINGS[name](*shape)
    assert pairs.shape[1] == (0 if name == "bfs" else n * n)
    own = {"spd": 1.0, "diffusion": 3.0}.get(name, 0.0)
    assert torch.equal(dense((pairs, values), n).sum(-1), torch.eye(n) * own)


@pytest.mark.parametrize(
    "call",
    [
        lambda: spd_pe(*path(3), num_buckets=1),
        lambda: spd_pe(*path(3), max_distance=0),
        lambda: bfs_pe(*path(3), max_distance=1.5),
        lambda: diffusion_pe(*path(3), scales=[-1.0]),
        lambda: landmark_pe(*path(3), landmarks=[3]),
        lambda: landmark_pe(*path(3), landmarks=[]),
        lambda: landmark_pe(*path(3), reduce=["median"]),
        lambda: landmark_pe(*path(3), num_landmarks=0),
        lambda: resistance_pe(torch.tensor([[0], [9]]), 3),
        lambda: compute_relative_pe(*path(3), {"type": "landmarks"}),
    ],
)
def test_a_setting_outside_its_range_is_refused(call):
    with pytest.raises(ConfigError):
        call()
