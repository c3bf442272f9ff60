"""Encodings of nodes against closed forms, against brute force, and under what must not change them."""

from __future__ import annotations

import math

import networkx as nx
import pytest
import torch

from graph_shapes import (
    adjacency,
    complete,
    cycle,
    edgeless,
    normalised_laplacian,
    path,
    random_graph,
    star,
    union,
)
from treadle.errors import ConfigError
from treadle.graphs import compute_node_pe, core_numbers, hks_pe, lap_pe, role_pe, rwse_pe

TIMES = [0.1, 1.0, 5.0]
STEPS = [1, 2, 3, 4, 7, 16]
RANDOM = [random_graph(n, share, seed) for seed, (n, share) in enumerate([(7, 0.4), (12, 0.2), (20, 0.15), (20, 0.5)])]
ENCODINGS = {"lap": lap_pe, "rwse": rwse_pe, "hks": hks_pe, "role": role_pe}


def close(found, expected, tolerance=1e-6):
    expected = torch.as_tensor(expected, dtype=torch.float64).float()
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= tolerance, (found, expected)


def path_spectrum(n):
    """λ = 1 - cos θ with θ = πk/(n-1), φ(i) ∝ √dᵢ cos(iθ): the walk on a path is that on a cycle of 2(n-1), folded."""
    degrees = torch.tensor([1.0, *[2.0] * (n - 2), 1.0], dtype=torch.float64)
    angles = math.pi * torch.arange(n, dtype=torch.float64) / (n - 1)
    vectors = degrees.sqrt()[:, None] * torch.cos(torch.arange(n)[:, None] * angles)
    return 1 - angles.cos(), vectors / vectors.norm(dim=0)


# Laplacian eigenvectors


@pytest.mark.parametrize("n", [2, 3, 5, 9])
def test_lap_on_a_path_is_a_cosine(n):
    _, vectors = path_spectrum(n)
    close(lap_pe(*path(n), k=n - 1), vectors[:, 1:].abs())
    close(lap_pe(*path(n), k=n - 1, sign_invariant="square"), vectors[:, 1:].square())


def test_lap_on_a_path_of_5_gives_the_numbers_of_the_specification():
    found = lap_pe(*path(5), k=2)
    close(found, [[0.5, 0.5], [0.5, 0.0], [0.0, 2**-0.5], [0.5, 0.0], [0.5, 0.5]])


@pytest.mark.parametrize("shape", [cycle(6), cycle(7), complete(5)])
def test_square_on_a_graph_that_looks_alike_from_every_node_is_one_over_n(shape):
    # Σφ² over an eigenspace of multiplicity m is m/n at every node, whatever basis was found.
    n = shape[1]
    close(lap_pe(*shape, k=n - 1, sign_invariant="square"), torch.full((n, n - 1), 1 / n))


def test_square_on_a_star_has_the_mean_of_each_eigenspace():
    # λ = 1 (m - 1 times): 0 in the middle, (1 - 1/m)/(m - 1) = 1/m at a leaf. λ = 2: 1/2 and 1/(2m).
    m = 5
    leaf = [1 / m] * (m - 1) + [1 / (2 * m)]
    close(lap_pe(*star(m), k=m, sign_invariant="square"), [[0.0] * (m - 1) + [0.5], *[leaf] * m])


def test_square_takes_the_whole_eigenspace_also_where_columns_cut_it():
    n = 6
    close(lap_pe(*complete(n), k=2, sign_invariant="square"), torch.full((n, 2), 1 / n))


def test_lap_leaves_out_one_zero_for_each_component_and_fills_with_zeros():
    found = lap_pe(*union(path(3), path(3)), k=8)
    assert found.abs().sum(0).gt(1e-3).tolist() == [True] * 4 + [False] * 4
    assert torch.equal(found[:, 4:], torch.zeros(6, 4))


@pytest.mark.parametrize("shape", RANDOM)
def test_flip_gives_eigenvectors_with_their_largest_entry_positive_and_never_both_signs(shape):
    k = shape[1]
    found = lap_pe(*shape, k=k, sign_invariant="flip")
    assert found.shape == (shape[1], k)
    used = found.abs().sum(0) > 0
    assert torch.equal(
        found[:, used].gather(0, found[:, used].abs().argmax(0, keepdim=True)).sign().unique(), torch.ones(1)
    )
    values = torch.linalg.eigvalsh(normalised_laplacian(*shape))
    laplacian, wanted = normalised_laplacian(*shape).float(), values[values > 1e-6].float()
    assert torch.allclose(laplacian @ found[:, used], found[:, used] * wanted, atol=1e-5)


def test_flip_takes_the_first_of_equally_large_entries_as_positive():
    # On a path of 5, |φ₁| is .5 at four nodes; rounding must not choose between them.
    assert lap_pe(*path(5), k=1, sign_invariant="flip")[0, 0] > 0


# Random walks


def test_rwse_of_a_triangle_and_a_path_gives_the_numbers_of_the_specification():
    close(rwse_pe(*complete(3), scales=[1, 2, 3, 4]), [[0, 0.5, 0.25, 0.375]] * 3, 0)
    ends, centre = [0, 0.5, 0, 0.5], [0, 1, 0, 1]
    close(rwse_pe(*path(3), scales=[1, 2, 3, 4]), [ends, centre, ends], 0)


def test_one_edge_with_self_loops_is_walked_without_them():
    with_loops = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1]])
    close(rwse_pe(with_loops, 2, scales=[1, 2]), [[0, 1], [0, 1]], 0)


@pytest.mark.parametrize("n", [2, 4, 7])
def test_rwse_on_a_complete_graph(n):
    # P has the eigenvalues 1 and, n - 1 times, -1/(n - 1).
    expected = [(1 + (n - 1) * (-1 / (n - 1)) ** t) / n for t in STEPS]
    close(rwse_pe(*complete(n), scales=STEPS), [expected] * n)


@pytest.mark.parametrize("n", [3, 6, 9])
def test_rwse_on_a_cycle(n):
    expected = [sum(math.cos(2 * math.pi * k / n) ** t for k in range(n)) / n for t in STEPS]
    close(rwse_pe(*cycle(n), scales=STEPS), [expected] * n)


def test_rwse_on_a_star():
    m = 6
    centre = [float(t % 2 == 0) for t in STEPS]
    close(rwse_pe(*star(m), scales=STEPS), [centre, *[[value / m for value in centre]] * m])


def test_rwse_on_a_path():
    values, vectors = path_spectrum(6)
    powers = torch.stack([(1 - values) ** t for t in STEPS], dim=1)
    close(rwse_pe(*path(6), scales=STEPS), vectors.square() @ powers)


@pytest.mark.parametrize("shape", RANDOM)
def test_rwse_is_the_diagonal_of_the_powers(shape):
    dense = adjacency(*shape)
    walk = dense / dense.sum(1, keepdim=True).clamp(min=1)
    expected = [torch.linalg.matrix_power(walk, t).diagonal() for t in STEPS]
    close(rwse_pe(*shape, scales=STEPS), torch.stack(expected, dim=1))


def test_scales_keep_their_order():
    forward, backward = rwse_pe(*RANDOM[0], scales=[2, 3, 8]), rwse_pe(*RANDOM[0], scales=[8, 3, 2])
    assert torch.equal(forward, backward.flip(1))


# Heat


def test_hks_gives_the_numbers_of_the_specification():
    close(hks_pe(*complete(3), scales=[1.0]), [[0.482087]] * 3)
    close(hks_pe(*path(3), scales=[1.0]), [[0.467774], [0.567668], [0.467774]])


@pytest.mark.parametrize("n", [2, 4, 7])
def test_hks_on_a_complete_graph(n):
    close(hks_pe(*complete(n), scales=TIMES), [[(1 + (n - 1) * math.exp(-t * n / (n - 1))) / n for t in TIMES]] * n)


@pytest.mark.parametrize("n", [3, 6, 9])
def test_hks_on_a_cycle(n):
    expected = [sum(math.exp(-t * (1 - math.cos(2 * math.pi * k / n))) for k in range(n)) / n for t in TIMES]
    close(hks_pe(*cycle(n), scales=TIMES), [expected] * n)


def test_hks_on_a_star():
    # φ² is 1/2 in the middle and 1/(2m) at a leaf for λ = 0 and 2; for λ = 1 it sums to 0 and 1 - 1/m.
    m = 6
    centre = [(1 + math.exp(-2 * t)) / 2 for t in TIMES]
    leaf = [(1 + math.exp(-2 * t)) / (2 * m) + (1 - 1 / m) * math.exp(-t) for t in TIMES]
    close(hks_pe(*star(m), scales=TIMES), [centre, *[leaf] * m])


@pytest.mark.parametrize("shape", RANDOM)
def test_hks_is_the_diagonal_of_the_matrix_exponential(shape):
    laplacian = normalised_laplacian(*shape)
    close(
        hks_pe(*shape, scales=TIMES), torch.stack([torch.matrix_exp(-t * laplacian).diagonal() for t in TIMES], dim=1)
    )


# Roles


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (complete(3), [[math.log(3), 1, 2]] * 3),
        (complete(6), [[math.log(6), 1, 5]] * 6),
        (cycle(6), [[math.log(3), 0, 2]] * 6),
        (star(4), [[math.log(5), 0, 1], *[[math.log(2), 0, 1]] * 4]),
        (path(4), [[math.log(2), 0, 1], *[[math.log(3), 0, 1]] * 2, [math.log(2), 0, 1]]),
        (edgeless(2), [[0, 0, 0]] * 2),
    ],
)
def test_role_of_known_graphs(shape, expected):
    close(role_pe(*shape), expected)


@pytest.mark.parametrize("shape", [*RANDOM, union(complete(4), star(5)), union(path(9), edgeless(2))])
def test_role_equals_networkx(shape):
    graph = nx.Graph()
    graph.add_nodes_from(range(shape[1]))
    graph.add_edges_from(shape[0].T.tolist())
    clustering, cores = nx.clustering(graph), nx.core_number(graph)
    expected = [[math.log1p(graph.degree[node]), clustering[node], cores[node]] for node in range(shape[1])]
    close(role_pe(*shape), expected)
    assert core_numbers(*shape).tolist() == [cores[node] for node in range(shape[1])]


# What must not change an encoding, and what it does at the edges


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("shape", RANDOM)
def test_loops_doubles_and_directions_do_not_matter(name, shape):
    edges, n = shape
    loops = torch.arange(n).repeat(2, 1)
    messy = torch.cat([edges.flip(0), loops, edges, edges], dim=1)
    assert torch.equal(ENCODINGS[name](messy, n), ENCODINGS[name](edges, n))
    assert torch.equal(ENCODINGS[name](messy.int(), n), ENCODINGS[name](edges, n))


@pytest.mark.parametrize(
    "encoding", [rwse_pe, hks_pe, role_pe, lambda *shape: lap_pe(*shape, k=19, sign_invariant="square")]
)
@pytest.mark.parametrize("shape", [*RANDOM, star(6), union(cycle(6), complete(4))])
def test_the_numbering_of_the_nodes_does_not_matter(encoding, shape):
    edges, n = shape
    order = torch.randperm(n, generator=torch.Generator().manual_seed(5))
    close(encoding(order[edges], n)[order], encoding(edges, n))


@pytest.mark.parametrize("encoding", [rwse_pe, hks_pe, role_pe])
def test_a_component_does_not_see_the_others(encoding):
    together = encoding(*union(cycle(5), star(3)))
    close(together, torch.cat([encoding(*cycle(5)), encoding(*star(3))]))


@pytest.mark.parametrize("shape", [edgeless(1), edgeless(4)])
def test_nodes_without_an_edge(shape):
    n = shape[1]
    close(lap_pe(*shape, k=3), torch.zeros(n, 3), 0)
    close(rwse_pe(*shape), torch.zeros(n, 20), 0)
    close(hks_pe(*shape), torch.ones(n, 5), 0)
    close(role_pe(*shape), torch.zeros(n, 3), 0)


def test_an_isolated_node_beside_a_path_has_the_row_zero():
    found = lap_pe(*union(path(3), edgeless(1)), k=2)
    close(found[:3], lap_pe(*path(3), k=2))
    close(found[3], [0.0, 0.0])


@pytest.mark.parametrize(
    ("edges", "n", "words"),
    [
        (torch.tensor([[0], [3]]), 3, "(0, 3)"),
        (torch.tensor([[-1], [0]]), 3, "(-1, 0)"),
        (torch.tensor([[0.0], [1.0]]), 3, "float32"),
        (torch.tensor([0, 1]), 3, "(2,)"),
        (torch.zeros(3, 2, dtype=torch.long), 3, "(3, 2)"),
        (torch.tensor([[True], [False]]), 3, "bool"),
        (torch.tensor([[0], [1]]), 0, "num_nodes=0"),
        (torch.tensor([[0], [1]]), 2.0, "num_nodes=2.0"),
    ],
)
@pytest.mark.parametrize("name", ENCODINGS)
def test_a_graph_that_is_none_is_refused(name, edges, n, words):
    with pytest.raises(ConfigError) as caught:
        ENCODINGS[name](edges, n)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda: lap_pe(*path(3), k=0),
        lambda: lap_pe(*path(3), sign_invariant="sqare"),
        lambda: rwse_pe(*path(3), scales=[]),
        lambda: rwse_pe(*path(3), scales=[0]),
        lambda: rwse_pe(*path(3), scales=[1.5]),
        lambda: rwse_pe(*path(3), scales=[2, 2]),
        lambda: hks_pe(*path(3), scales=[0.0]),
        lambda: hks_pe(*path(3), scales=[math.inf]),
        lambda: role_pe(*path(3), features=["degre"]),
        lambda: role_pe(*path(3), features="degree"),
    ],
)
def test_a_setting_outside_its_range_is_refused(call):
    with pytest.raises(ConfigError):
        call()


# Side by side


def test_combined_is_the_four_side_by_side_and_padded():
    edges, n = random_graph(24, 0.15, 9)
    found = compute_node_pe(edges, n, "combined")
    parts = [lap_pe(edges, n), rwse_pe(edges, n, scales=[1, 2, 4, 8, 16]), hks_pe(edges, n), role_pe(edges, n)]
    assert torch.equal(found, torch.cat([*parts, torch.zeros(n, 3)], dim=1))
    assert all(part.abs().sum() > 1 for part in parts)


def test_normalize_gives_mean_0_and_variance_1_and_a_constant_becomes_0():
    edges, n = random_graph(15, 0.3, 2)
    plain = compute_node_pe(edges, n, {"node": {"type": "hks", "dim": 7}})
    scaled = compute_node_pe(edges, n, {"node": {"type": "hks", "dim": 7, "normalize": "graph"}})
    close(scaled[:, :5], (plain[:, :5] - plain[:, :5].mean(0)) / plain[:, :5].std(0, correction=0), 1e-4)
    assert torch.equal(scaled[:, 5:], torch.zeros(n, 2))
    assert torch.equal(compute_node_pe(*cycle(7), {"node": {"normalize": "graph", "type": "hks"}}), torch.zeros(7, 5))
    assert torch.equal(compute_node_pe(*edgeless(1), {"node": {"normalize": "graph"}}), torch.zeros(1, 20))
