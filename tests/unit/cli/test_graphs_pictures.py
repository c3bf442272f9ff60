"""What the pictures of graph runs show is what the model was given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import graph_data_kit  # noqa: F401  (lets the warnings of torch_geometric's import through)
from treadle.graphs import AddPositionalEncodings, GraphDataset, hop_distances, parse_pe_config, pictures
from treadle.graphs.datasets.molecules import graph_from_smiles
from treadle.graphs.page import _predictions
from treadle.graphs.pictures import (
    _node_columns,
    _relative_column,
    is_molecule,
    plot_encodings,
    plot_molecules,
    plot_predictions,
)

CAFFEINE = "Cn1cnc2c1c(=O)n(C)c(=O)n2C"


@pytest.mark.parametrize(
    "relative",
    [{"type": "spd"}, {"type": "spd", "num_buckets": 16, "max_distance": 5}, {"type": "bfs"}],
    ids=["default", "light", "bfs"],
)
def test_hops_are_decoded_from_their_buckets(relative: dict[str, object]) -> None:
    config = parse_pe_config({"relative": relative}).relative
    assert config is not None
    graph = AddPositionalEncodings({"relative": relative})(graph_from_smiles(CAFFEINE))
    name, values = _relative_column(graph, config)
    hops = hop_distances(graph.edge_index, graph.num_nodes)[0].clamp(max=config.max_distance).double()
    if config.type == "bfs":
        hops[0] = torch.nan  # the pair of an atom with itself is not listed
    assert name == "hops from one atom"
    np.testing.assert_array_equal(values, hops.numpy())


def test_a_number_of_a_pair_is_shown_as_it_is() -> None:
    config = parse_pe_config({"relative": {"type": "resistance"}}).relative
    assert config is not None
    graph = AddPositionalEncodings({"relative": {"type": "resistance"}})(graph_from_smiles("CCO"))
    name, values = _relative_column(graph, config)
    assert name == "resistance from one atom"
    np.testing.assert_allclose(values, [0, 1, 2], atol=1e-6)


def test_the_columns_are_those_of_the_model_under_their_names() -> None:
    config = parse_pe_config("combined").node
    assert config is not None
    graph = AddPositionalEncodings("combined")(graph_from_smiles(CAFFEINE))
    found = _node_columns(graph.node_pe, config, 7)
    assert len(found) == 7
    starts = {"|eigenvector 1|": 0, "walk back after 2 steps": 17, "heat kept until 5": 25, "core number": 28}
    shown = dict(found)
    for name, column in starts.items():
        np.testing.assert_array_equal(shown[name], graph.node_pe[:, column].double().numpy())
    assert "walk back after 1 steps" not in shown  # never on a graph without loops: a constant tells nothing


def test_pictures_of_few_graphs_are_drawn_too(tmp_path: Path) -> None:
    true, predicted = np.array([1.0, 2.0]), np.array([1.5, 2.0])
    plot_predictions(true, predicted, np.array([3, 3]), tmp_path / "predictions.png", what="number")
    plot_molecules(["CCO", "unreadable"], true, predicted, tmp_path / "molecules.png")
    graph = AddPositionalEncodings({"relative": {"type": "spd"}})(graph_from_smiles("C"))
    plot_encodings(graph, parse_pe_config({"relative": {"type": "spd"}}), tmp_path / "encodings.png")
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 3


def test_a_graph_that_is_not_atom_by_atom_its_smiles_is_told_from_one_that_is() -> None:
    graph = graph_from_smiles(CAFFEINE)
    assert is_molecule(graph)
    other = graph.clone()
    other.edge_index = graph.num_nodes - 1 - graph.edge_index
    assert not is_molecule(other)  # the atoms are in another order
    for smiles in ("[H]C([H])([H])[H]", "not a molecule"):
        other.smiles = smiles
        assert not is_molecule(other)
    del other.smiles
    assert not is_molecule(other)


def test_several_targets_have_a_panel_each_of_the_graphs_whose_value_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_geometric.data import Data

    drawn = []
    monkeypatch.setattr(pictures, "save_figure", lambda figure, path: drawn.append(figure) or path)
    graphs = [Data(y=torch.tensor([[float(n), -n if n % 2 else torch.nan, torch.nan]])) for n in range(6)]
    data = GraphDataset(
        "graph", "regression", 1, 3, 0, name="own", train=(), val=(), test=graphs, target_names=("a", "b", "c")
    )
    (picture,) = _predictions(data, torch.cat([graph.y for graph in graphs]).nan_to_num() + 1, tmp_path)
    assert picture.path == tmp_path / "predictions.png"
    panels = drawn[0].axes
    assert [panel.get_xlabel() for panel in panels] == ["true a", "true b", ""]
    assert panels[2].get_title(loc="left") == "c: no test graph has a value"
    for panel, expected in ((panels[0], range(6)), (panels[1], (-1, -3, -5))):
        points = np.asarray(panel.collections[0].get_offsets())
        assert points.tolist() == [[n, n + 1] for n in expected]
