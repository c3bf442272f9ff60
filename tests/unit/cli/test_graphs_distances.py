"""The error by distance counts every known answer once, at the distance it spans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graph_data_kit import Data  # lets the warnings of torch_geometric import through
from treadle.graphs.datasets.base import GraphDataset
from treadle.graphs.distances import errors_by_distance, plot_distances

nan = float("nan")


def path_graph(*y: float, pairs: list[list[int]] | None = None) -> Data:
    """A path of five nodes, 0 to 4, and a node 5 alone."""
    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
    graph = Data(x=torch.ones(6, 1), edge_index=torch.cat([edges, edges.flip(0)], 1), y=torch.tensor(y))
    if pairs is not None:
        graph.pair_index = torch.tensor(pairs).T
    return graph


def data_of(level: Any, task: Any, train: list[Data], test: list[Data]) -> GraphDataset:
    return GraphDataset(level, task, 1, 1, name="paths", train=train, val=train, test=test)


PAIRS = [[0, 1], [0, 4], [3, 1], [0, 5]]


def test_pairs_are_placed_by_the_hops_between_their_nodes() -> None:
    graph = path_graph(1.0, 4.0, nan, 2.0, pairs=PAIRS)
    data = data_of("edge", "regression", [path_graph(1.0, 3.0, nan, pairs=PAIRS[:3])], [graph, graph])
    found = errors_by_distance(data, torch.tensor([[1.5], [1.0], [9.0], [2.0]]).repeat(2, 1))
    assert found is not None
    assert found.hops.tolist() == [1, 4, -1] * 2
    assert found.error.tolist() == [0.5, 3.0, 0.0] * 2
    assert found.guess.tolist() == [1.0, 2.0, 0.0] * 2  # the mean of the known training targets is 2


@pytest.mark.parametrize(
    ("task", "outputs"),
    [
        ("edge_prediction", [[3.0], [-1.0], [0.1], [-2.0]]),
        ("classification", [[0.0, 1.0], [1.0, 0.0], [0.2, 0.3], [0.0, -1.0]]),
    ],
)
def test_of_classes_a_wrong_answer_counts_one(task: str, outputs: list[list[float]]) -> None:
    graph = path_graph(1.0, 1.0, 0.0, 0.0, pairs=PAIRS)
    data = data_of("edge", task, [path_graph(0.0, 0.0, 1.0, 0.0, pairs=PAIRS)], [graph])
    found = errors_by_distance(data, torch.tensor(outputs))
    assert found is not None
    assert found.error.tolist() == [0, 1, 1, 0]
    assert found.guess.tolist() == [1, 1, 0, 0]
    assert found.measure == "share of wrong answers"


def test_a_graph_is_placed_by_the_hops_across_it() -> None:
    data = data_of("graph", "regression", [path_graph(1.0)], [path_graph(2.0), path_graph(1.0)])
    found = errors_by_distance(data, torch.tensor([[2.0], [3.0]]))
    assert found is not None
    assert (found.hops.tolist(), found.error.tolist(), found.guess.tolist()) == ([4, 4], [0, 2], [1, 0])


def test_answers_without_a_distance_have_none() -> None:
    nodes = data_of("node", "classification", [path_graph(*[0.0] * 6)], [path_graph(*[0.0] * 6)])
    assert errors_by_distance(nodes, torch.zeros(6, 2)) is None
    several = data_of("graph", "regression", [path_graph(1.0, 2.0)], [path_graph(1.0, 2.0)])
    assert errors_by_distance(several, torch.zeros(1, 2)) is None


def test_a_distance_with_few_answers_is_left_out(tmp_path: Path) -> None:
    graph = path_graph(1.0, 4.0, 2.0, 2.0, pairs=PAIRS)
    for copies, drawn in ((9, False), (10, True)):
        data = data_of("edge", "regression", [graph], [graph] * copies)
        errors = errors_by_distance(data, torch.ones(4 * copies, 1))
        assert errors is not None
        assert (plot_distances(errors, tmp_path / f"{copies}.png") is not None) == drawn
        assert (tmp_path / f"{copies}.png").exists() == drawn
    assert np.unique(errors.hops).tolist() == [-1, 1, 2, 4]
