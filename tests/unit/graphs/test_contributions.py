"""What an atom adds to a prediction is the prediction less that without the atom's features."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import graph_data_kit  # noqa: F401  (lets the warnings of torch_geometric's import through)
from treadle.errors import ConfigError
from treadle.graphs import AddPositionalEncodings, atom_contributions, get_model
from treadle.graphs.contributions import plot_contributions, typical_and_worst
from treadle.graphs.datasets.base import GraphDataset

pytest.importorskip("rdkit")
from treadle.graphs.datasets.molecules import graph_from_smiles

CAFFEINE = "Cn1cnc2c1c(=O)n(C)c(=O)n2C"


class SumOfAtoms(nn.Module):
    """A model of which every atom's term is known."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(40, 2)

    def forward(self, batch):
        out = self.linear(batch.x)
        return torch.zeros(batch.num_graphs, 2).index_add(0, batch.batch, out)


@pytest.mark.parametrize("batch_size", [64, 4])
def test_a_sum_over_atoms_gives_each_its_own_term(batch_size):
    torch.manual_seed(0)
    model, graph = SumOfAtoms().train(), graph_from_smiles(CAFFEINE)
    before = graph.x.clone()
    found = atom_contributions(model, graph, batch_size=batch_size)
    expected = (graph.x @ model.linear.weight.T).double()
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.equal(graph.x, before)
    assert model.training


def test_atoms_that_are_alike_add_the_same_and_encodings_stay():
    torch.manual_seed(0)
    benzene = AddPositionalEncodings("default")(graph_from_smiles("c1ccccc1"))
    model = get_model(
        "gps", 40, hidden_dim=8, num_layers=2, num_heads=2, num_edge_features=6, mpnn_type="gatedgcn",
        node_pe_dim=benzene.node_pe.shape[1], relative_pe_dim=benzene.edge_pe.shape[1],
    )  # fmt: skip
    found = atom_contributions(model, benzene)
    assert found.shape == (6, 1)
    assert found.abs().min() > 0
    assert torch.allclose(found, found[:1].expand(6, 1), atol=1e-5)


def test_types_of_atoms_are_refused():
    graph = graph_from_smiles("CCO")
    graph.x = graph.x.argmax(1)
    with pytest.raises(ConfigError, match=r"graph=has x of torch.int64|must have floats"):
        atom_contributions(SumOfAtoms(), graph)


def test_typical_and_largest_errors_leave_unknown_ones_out():
    chosen = typical_and_worst(np.array([np.nan, 5.0, 1.0, 2.0, 3.0, 4.0]))
    assert {name: rows.tolist() for name, rows in chosen.items()} == {
        "typical errors": [4, 3, 5, 1],
        "largest errors": [1, 5, 4, 3],
    }


def test_the_page_shows_each_target_with_its_unit(tmp_path, monkeypatch):
    from treadle.graphs import page

    graphs = [graph_from_smiles(text) for text in ("CCO", "c1ccccc1C", CAFFEINE)]
    for number, graph in enumerate(graphs):
        graph.y = torch.tensor([[float(number), torch.nan]])
    data = GraphDataset(
        "graph", "regression", 40, 2, 6, name="smiles_csv", train=graphs, val=graphs, test=graphs,
        target_names=("solubility", "unknown"),
    )  # fmt: skip
    drawn = []
    monkeypatch.setattr(page, "plot_contributions", lambda rows, path, *, unit: drawn.append((rows, unit)) or path)
    model = SumOfAtoms()

    class Trainer:
        pass

    trainer = Trainer()
    trainer.model = model
    pictures = page._contributions(data, trainer, torch.zeros(3, 2), tmp_path)
    assert [picture.title for picture in pictures] == ["Contributions of atoms to solubility"]
    rows, unit = drawn[0]
    assert unit == "in units of solubility"
    smiles, caption, values = rows["largest errors"][0]
    assert (smiles, caption) == (CAFFEINE, "true 2, predicted 0")
    np.testing.assert_allclose(values, (graphs[2].x @ model.linear.weight.T)[:, 0].detach(), atol=1e-5)


@pytest.mark.parametrize("known", [2, 0])
def test_predictions_are_drawn_of_the_test_graphs_whose_target_is_known(known, tmp_path, monkeypatch):
    graphs = [graph_from_smiles(text) for text in ("CCO", "CCN", CAFFEINE)]
    for number, graph in enumerate(graphs):
        graph.y = torch.tensor([[float(number) if number < known else torch.nan]])
    data = GraphDataset(
        "graph", "regression", 40, 1, 6, name="smiles_csv", train=graphs, val=graphs, test=graphs,
        target_names=("solubility",),
    )  # fmt: skip
    from treadle.graphs import page

    drawn = []
    for name in ("plot_predictions", "plot_molecules"):
        plot = getattr(page, name)
        monkeypatch.setattr(
            page, name, lambda *args, _plot=plot, **named: drawn.append((args, named)) or _plot(*args, **named)
        )
    pictures = page._predictions(data, torch.tensor([[0.5], [1.5], [2.5]]), tmp_path)
    assert len(pictures) == len(drawn) == known
    if known:
        (true, guessed, sizes, _), named = drawn[0]
        assert (true.tolist(), guessed.tolist(), sizes.tolist()) == ([0, 1], [0.5, 1.5], [3, 3])
        assert named == {"what": "solubility"}
        assert drawn[1][0][0] == ["CCO", "CCN"]


def test_a_picture_has_one_scale(tmp_path):
    rows = {
        "typical errors": [("CCO", "true 1, predicted -1", np.array([0.1, -0.2, 0.9]))],
        "largest errors": [(CAFFEINE, "true 1, predicted 2", np.linspace(-3, 3, 14))],
    }
    path = plot_contributions(rows, tmp_path / "contributions.png", unit="in units of logP")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_encodings_that_the_kind_of_model_does_not_read_are_neither_drawn_nor_named(tmp_path):
    from treadle.graphs.page import _encodings
    from treadle.graphs.report import _encodings_line
    from treadle.graphs.run_config import read_settings

    config = read_settings(["model=gatedgcn"])
    graph = AddPositionalEncodings(config.encodings)(graph_from_smiles(CAFFEINE))
    data = GraphDataset("graph", "regression", 40, 1, 6, name="nci", train=[graph], val=[graph], test=[graph])
    (picture,) = _encodings(config, data, tmp_path)
    assert "pairs" not in picture.caption
    assert "of pairs none" in _encodings_line(config)
