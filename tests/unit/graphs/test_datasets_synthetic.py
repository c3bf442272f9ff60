"""Generated graphs: every family with every task at its own level, the definitions, and the seeds."""

from __future__ import annotations

import logging

import networkx as nx
import numpy as np
import pytest
import torch

from graph_data_kit import fields
from treadle.errors import ConfigError
from treadle.graphs.datasets import get_dataset
from treadle.graphs.datasets.families import FAMILIES, draw_graph
from treadle.graphs.datasets.tasks import TASKS, make_task

PATH = torch.tensor([[0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6], [1, 0, 2, 1, 3, 2, 4, 3, 5, 4, 6, 5]])
LEVELS = {
    "diffusion_source": ("node", "classification"),
    "distance_regression": ("edge", "regression"),
    "local_vs_global": ("graph", "classification"),
    "pairwise_distance_classification": ("edge", "edge_prediction"),
    "pe_capacity": ("edge", "classification"),
    "structural_role": ("node", "classification"),
}


def label(task, edge_index, num_nodes, seed=0, **params):
    return make_task(task, params).label(edge_index, num_nodes, np.random.default_rng(seed))


def synthetic(tmp_path, family="tree", **settings):
    return get_dataset(f"synthetic_{family}", tmp_path, **{"num_graphs": 10, "num_workers": 0, **settings})


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_goes_with_every_task_at_its_own_level(family, task, tmp_path):
    data = synthetic(tmp_path, family, task=task)
    assert [len(split) for split in data.get_splits()] == [8, 1, 1]
    assert (data.level, data.task_type) == LEVELS[task]
    graph = data.train[0]
    assert graph.x.shape == (graph.num_nodes, data.num_features)
    assert data.num_edge_features is None
    assert graph.is_undirected()
    assert not graph.has_self_loops()
    if data.level == "edge":
        first, second = graph.pair_index
        assert (first < second).all(), "a pair of a node with itself, or listed twice"
        assert len(set(map(tuple, graph.pair_index.T.tolist()))) == len(first)
    owners = {"graph": 1, "node": graph.num_nodes, "edge": graph.get("pair_index", graph.edge_index).shape[1]}
    assert graph.y.shape == (owners[data.level],)
    if data.task_type == "classification":
        assert graph.y.dtype == torch.int64
        assert 0 <= int(graph.y.min()) <= int(graph.y.max()) < data.num_classes
    else:
        assert graph.y.dtype == torch.float32
        assert data.num_classes == 1


def test_distances_of_pairs_are_hops():
    found = label("distance_regression", PATH, 7)
    first, second = found["pair_index"]
    assert len(found["y"]) == 21, "all pairs, since there are fewer than num_pairs"
    assert torch.equal(found["y"], (second - first).float())


def test_pairs_without_a_path_are_far_and_have_no_distance():
    two_parts = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])
    assert label("distance_regression", two_parts, 4)["pair_index"].tolist() == [[0, 2], [1, 3]]
    near = label("pairwise_distance_classification", two_parts, 4, distance_threshold=9)
    assert near["y"].sum() == 2
    assert len(near["y"]) == 6


def test_a_pair_is_near_up_to_the_threshold():
    found = label("pairwise_distance_classification", PATH, 7)
    first, second = found["pair_index"]
    assert torch.equal(found["y"], (second - first <= 3).float())
    assert label("pairwise_distance_classification", PATH, 7, num_pairs=5)["y"].shape == (5,)


def test_capacity_asks_for_distances_from_nodes_that_look_alike():
    found = label("pe_capacity", PATH, 7, max_distance=4)
    first, second = found["pair_index"]
    assert torch.equal(found["y"], (second - first).clamp(max=4) - 1)
    assert torch.equal(found["x"], torch.ones(7, 1))


def test_a_role_is_the_core_number_cut_at_the_last_class():
    clique_with_tail = nx.lollipop_graph(5, 2)
    edge_index = torch.tensor([[a, b] for e in clique_with_tail.edges for a, b in (e, e[::-1])]).T
    cores = torch.tensor([nx.core_number(clique_with_tail)[node] for node in range(7)])
    assert torch.equal(label("structural_role", edge_index, 7, num_classes=9)["y"], cores)
    assert torch.equal(label("structural_role", edge_index, 7)["y"], cores.clamp(max=3))


@pytest.mark.parametrize(("scope", "asked"), [("local", lambda d: d <= 3), ("global", lambda d: d >= 5)])
def test_local_and_global_ask_for_the_sign_of_the_mean_signal_there(scope, asked):
    answers = set()
    for seed in range(20):
        found = label("local_vs_global", PATH, 7, seed, scope=scope)
        signal, mark = found["x"].T
        marked = int(mark.argmax())
        assert mark.sum() == 1
        there = asked((torch.arange(7) - marked).abs())
        assert found["y"].tolist() == [int(signal[there].mean() > 0)]
        answers.add(int(found["y"]))
    assert answers == {0, 1}


def test_a_graph_without_far_nodes_is_drawn_again_and_an_impossible_wish_ends_with_an_error(tmp_path):
    assert label("local_vs_global", PATH, 7, global_threshold=7) is None
    with pytest.raises(ConfigError, match="none of 100 graphs of the family ring"):
        synthetic(tmp_path, "ring", task="local_vs_global", graph_params={"num_nodes": 9})


def test_diffusion_keeps_the_mass_and_follows_the_matrix():
    star = torch.tensor([[0, 1, 0, 2, 0, 3], [1, 0, 2, 0, 3, 0]])
    found = label("diffusion_source", star, 5)  # the last node has no neighbour
    source = int(found["y"].argmax())
    assert found["y"].sum() == 1
    adjacency = torch.zeros(5, 5, dtype=torch.float64)
    adjacency[star[0], star[1]] = 1
    degrees = adjacency.sum(0)
    handed = torch.where(degrees > 0, 0.5, 0.0)
    step = torch.diag(1 - handed) + adjacency @ torch.diag(handed / degrees.clamp(min=1))
    expected = torch.linalg.matrix_power(step, 5)[:, source].float()
    assert torch.allclose(found["x"][:, 0], expected, atol=1e-7)
    assert found["x"].sum().item() == pytest.approx(1.0)


def test_a_graph_depends_on_the_seed_and_its_number_alone(tmp_path):
    few = synthetic(tmp_path, "sbm", num_graphs=10)
    many = synthetic(tmp_path, "sbm", num_graphs=30)
    assert [fields(few.train[i]) for i in range(8)] == [fields(many.train[i]) for i in range(8)]
    other = synthetic(tmp_path, "sbm", seed=43)
    assert fields(other.train[0]) != fields(few.train[0])
    assert fields(few.train[0]) != fields(few.train[1])


def test_processes_change_nothing(tmp_path):
    settings = {"task": "diffusion_source", "num_graphs": 300}
    alone = synthetic(tmp_path, "tree", **settings)
    shared = synthetic(tmp_path, "tree", **settings, num_workers=2)
    assert [fields(graph) for graph in shared.train] == [fields(graph) for graph in alone.train]


def test_generating_draws_nothing_from_the_global_generators(tmp_path):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    numpy_before = np.random.get_state()[1].copy()
    synthetic(tmp_path, "watts_strogatz", pe_config="default", num_graphs=20)
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == numpy_before).all()


def same_as(graph):
    return lambda drawn: nx.is_isomorphic(drawn, graph)


@pytest.mark.parametrize(
    ("family", "params", "holds"),
    [
        ("ring", {"num_nodes": 12}, same_as(nx.cycle_graph(12))),
        ("tree", {"num_nodes": 12}, nx.is_tree),
        ("grid_2d", {"height": 3, "width": 4}, same_as(nx.grid_2d_graph(3, 4))),
        ("grid_3d", {"height": 2, "width": 3, "depth": 2}, same_as(nx.grid_graph([2, 3, 2]))),
        ("random_regular", {"num_nodes": 11, "degree": 3}, lambda g: dict(g.degree) == dict.fromkeys(range(12), 3)),
        ("barabasi_albert", {"num_nodes": 12, "m": 2}, lambda g: g.number_of_edges() == 2 * (12 - 2)),
        ("watts_strogatz", {"num_nodes": 12, "k": 4, "p": 0.0}, same_as(nx.circulant_graph(12, [1, 2]))),
        ("erdos_renyi", {"num_nodes": 5, "p": 1.0}, same_as(nx.complete_graph(5))),
        (
            "sbm",
            {"num_blocks": 2, "block_size": 4, "p_in": 1.0, "p_out": 0.0},
            same_as(nx.disjoint_union(nx.complete_graph(4), nx.complete_graph(4))),
        ),
        ("random_geometric", {"num_nodes": 5, "radius": 1.0}, nx.is_connected),
    ],
)
def test_a_family_is_what_its_name_says(family, params, holds):
    edge_index, num_nodes = draw_graph(family, params, np.random.default_rng(1))
    graph = nx.Graph(edge_index.T.tolist())
    graph.add_nodes_from(range(num_nodes))
    assert holds(graph)


def test_sizes_are_drawn_from_their_range(tmp_path):
    data = synthetic(tmp_path, "ring", graph_params={"num_nodes": (5, 7)}, num_graphs=40)
    assert {graph.num_nodes for graph in data.train} == {5, 6, 7}


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"task": "distance_regresion"}, "distance_regression"),
        ({"graph_params": {"num_node": 5}}, "num_nodes"),
        ({"graph_params": {"num_nodes": 0}}, "graph_params.num_nodes=0"),
        ({"graph_params": {"num_nodes": (9, 5)}}, "lowest and the highest"),
        ({"task_params": {"treshold": 2}}, "distance_threshold"),
        ({"task_params": {"num_pairs": 0}}, ">= 1"),
        ({"task": "local_vs_global", "task_params": {"scope": "globel"}}, "global"),
        ({"task": "diffusion_source", "task_params": {"rate": 0}}, "task_params.rate=0"),
        ({"num_graphs": 9}, ">= 10"),
        ({"seed": -1}, "seed=-1"),
        ({"num_grahs": 10}, "num_graphs"),
        ({"num_workers": -1}, "num_workers=-1"),
    ],
)
def test_a_wrong_setting_is_named_with_its_rule(tmp_path, settings, rule):
    with pytest.raises(ConfigError, match=rule):
        get_dataset("synthetic_tree", tmp_path, **{"num_graphs": 10, **settings})


def test_settings_that_no_graph_has_are_an_error_of_the_setting(tmp_path):
    with pytest.raises(ConfigError, match="give no graph of the family random_regular"):
        synthetic(tmp_path, "random_regular", graph_params={"num_nodes": 4, "degree": 9})


def test_a_target_that_never_changes_is_said_at_once(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "treadle"):
        synthetic(tmp_path, "ring", task="structural_role")
    assert [line for line in caplog.messages if "every target is 2" in line] != []
    caplog.clear()
    synthetic(tmp_path, "sbm", task="structural_role")
    assert caplog.messages == []
