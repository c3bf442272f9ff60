"""Molecules end to end: a file of SMILES with targets that may be unknown, and predictions with uncertainty."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import graph_data_kit  # noqa: F401  (lets the warnings of torch_geometric's import through)
from treadle.errors import ConfigError
from treadle.graphs import (
    GraphTrainer,
    get_dataset,
    get_loss_fn,
    get_model,
    get_optimizer,
    graph_statistics,
    predict_smiles,
    set_seed,
)

pytest.importorskip("rdkit")
from treadle.graphs.datasets import smiles_csv

RINGS = ["c1ccccc1", "C1CCCCC1", "c1ccncc1", "C1CCCC1", "c1ccoc1", "c1ccsc1"]
SMILES = [ring + "C" * tail for tail in range(1, 8) for ring in RINGS]


def table(folder, columns, rows):
    path = folder / "molecules.csv"
    path.write_text("\n".join([",".join(columns), *(",".join(map(str, row)) for row in rows)]) + "\n", encoding="utf-8")
    return path


def two_targets(folder, *, labels=False):
    rows = []
    for number, text in enumerate(SMILES):
        first = len(text) % 2 if labels else len(text) / 10
        second = int("c" in text) if labels else number % 5
        rows.append((text, first, "" if number % 3 == 0 else second))
    return table(folder, ["smiles", "size", "other"], [*rows, ("C1CC", 1, 1)])


def test_a_file_is_read_with_unknown_targets_and_split_by_scaffold(tmp_path, caplog):
    from treadle.graphs.datasets.molecules import murcko_scaffold

    data = get_dataset("smiles_csv", tmp_path, file=two_targets(tmp_path), num_workers=0)
    assert (data.num_classes, data.task_type, data.level) == (2, "regression", "graph")
    parts = data.get_splits()
    assert sum(map(len, parts)) == len(SMILES)
    assert "1 of 43 SMILES left out" in caplog.text
    scaffolds = [{murcko_scaffold(graph.smiles) for graph in part} for part in parts]
    assert len(set.union(*scaffolds)) == sum(map(len, scaffolds))
    every = {graph.smiles: graph.y for part in parts for graph in part}
    assert every[SMILES[0]][0, 1].isnan()
    assert every[SMILES[1]].tolist() == [[pytest.approx(len(SMILES[1]) / 10), 1.0]]


@pytest.mark.parametrize("task", ["regression", "multilabel"])
def test_targets_that_are_partly_unknown_are_learned_and_predicted_with_uncertainty(task, tmp_path):
    file = two_targets(tmp_path, labels=task == "multilabel")
    data = get_dataset("smiles_csv", tmp_path, "default", file=file, task=task, split="random", num_workers=0)
    from torch_geometric.loader import DataLoader

    models = []
    for seed in range(2):
        set_seed(seed)
        model = get_model(
            "mpnn", data.num_features, data.num_classes, 16, 2, dropout=0.0, num_edge_features=data.num_edge_features,
            node_pe_dim=data.node_pe_dim, mpnn_type="gatedgcn", statistics=graph_statistics(data.train),
        )  # fmt: skip
        trainer = GraphTrainer(
            model, get_optimizer(model, lr=1e-2), None, get_loss_fn(task), device="cpu", task_type=task, log_every=None
        )
        losses = [trainer.train_epoch(DataLoader(data.train, 8))["loss"] for _ in range(6)]
        assert losses[-1] < losses[0]
        models.append(model)
    found = predict_smiles(models, [SMILES[0], "C1CC", SMILES[8]], task_type=task, device="cpu")
    assert found.mean.shape == found.deviation.shape == (3, 2)
    assert found.mean[1].isnan().all()
    assert found.deviation[[0, 2]].gt(0).all()
    assert found.unusable == ["number 2, 'C1CC': RDKit cannot read it"]
    assert task == "regression" or bool(((found.mean[[0, 2]] > 0) & (found.mean[[0, 2]] < 1)).all())
    alone = predict_smiles(models, [SMILES[8]], task_type=task, device="cpu")
    assert torch.allclose(alone.mean[0], found.mean[2], atol=1e-6)
    assert predict_smiles(models[:1], [SMILES[0]], task_type=task, device="cpu").deviation.isnan().all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"file": None}, "needs a file"),
        ({"file": "absent.csv"}, "cannot be read"),
        ({"smiles": "SMILE"}, "has no such column; known: other, size, smiles"),
        ({"targets": ["sizes"]}, "did you mean 'size'"),
        ({"task": "multi"}, "task='multi'"),
        ({"task": "multilabel"}, "must be 0, 1 or empty"),
        ({"split": "scafold"}, "did you mean 'scaffold'"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(options, words, tmp_path):
    given = {"file": two_targets(tmp_path), **options}
    with pytest.raises(ConfigError, match=words):
        get_dataset("smiles_csv", tmp_path, num_workers=0, **given)


def test_a_target_that_is_no_number_is_named_with_its_line(tmp_path):
    path = table(tmp_path, ["smiles", "y"], [("CCO", 1.0), ("CC", "many")])
    with pytest.raises(ConfigError, match="'y' has 'many' in line 3"):
        get_dataset("smiles_csv", tmp_path, file=path, num_workers=0)


def test_a_column_of_names_is_passed_over_by_one_target_and_smiles_are_found_in_capitals(tmp_path):
    path = table(tmp_path, ["compound", "SMILES", "y"], [(f"no {n}", "C" * n, n) for n in range(1, 12)])
    with pytest.raises(ConfigError, match=r"'compound' has 'no 1' in line 2.* name the columns to predict"):
        get_dataset("smiles_csv", tmp_path, file=path, num_workers=0)
    data = get_dataset("smiles_csv", tmp_path, file=path, targets="y", split="random", num_workers=0)
    assert (data.num_classes, data.target_names) == (1, ("y",))
    path = table(tmp_path, ["canonical_smiles", "isomeric_smiles", "y"], [("C", "C", 1)])
    with pytest.raises(ConfigError, match=r"2 columns with 'smiles' in their names; choose one with dataset\.smiles"):
        get_dataset("smiles_csv", tmp_path, file=path, num_workers=0)


def test_the_ridges_of_one_target_leave_out_graphs_whose_target_is_unknown(tmp_path):
    from treadle.graphs.report import _baselines

    rows = [(text, len(text) / 10 + 0.1 * text.count("n")) for text in SMILES]
    whole = get_dataset("smiles_csv", tmp_path, file=table(tmp_path, ["smiles", "y"], rows), num_workers=0)
    gaps = [(text, value if number % 4 else "") for number, (text, value) in enumerate(rows)]
    some = get_dataset("smiles_csv", tmp_path, file=table(tmp_path, ["smiles", "y"], gaps), num_workers=0)
    found = _baselines(some)
    assert list(found) == list(_baselines(whole)) == ["mean", "ridge_atom_counts", "ridge_atom_features"]
    known = [[graph for graph in part if not graph.y.isnan()] for part in some.get_splits()]
    alone = dataclasses.replace(some, train=known[0], val=known[1], test=known[2])
    assert found == _baselines(alone)


def test_labels_with_gaps_have_their_frequencies_and_ridges_as_baselines(tmp_path):
    from treadle.graphs.report import _baselines

    molecules = ["C" * n + ring for n in range(1, 13) for ring in ("C1CCC1", "C1CCN1", "C1CCO1", "C1CNO1")]
    rows = [(text, int("N" in text), int("O" in text) if number % 3 else "") for number, text in enumerate(molecules)]
    path = table(tmp_path, ["smiles", "nitrogen", "oxygen"], rows)
    data = get_dataset("smiles_csv", tmp_path, file=path, task="multilabel", split="random", num_workers=0)
    found = _baselines(data)
    train, test = (torch.cat([graph.y for graph in part]) for part in (data.train, data.test))
    label = (train.nanmean(0) > 0.5).float().expand_as(test)
    known = ~test.isnan()
    assert found["frequencies"]["accuracy"] == pytest.approx(float((label == test)[known].double().mean()))
    assert found["frequencies"]["roc_auc"] == 0.5
    assert list(found) == ["frequencies", "ridge_atom_counts", "ridge_atom_features"]
    assert found["ridge_atom_counts"]["roc_auc"] > 0.9  # nitrogen is an atom count


def test_lines_are_counted_right_behind_empty_ones(tmp_path, caplog):
    path = tmp_path / "molecules.csv"
    path.write_text("smiles,y\nCCO,1\n\nC1CC,2\n\n\nCC,many\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="'y' has 'many' in line 7"):
        get_dataset("smiles_csv", tmp_path, file=path, num_workers=0)
    path.write_text(path.read_text().replace("many", "3") + "".join(f"C{'C' * n},{n}\n" for n in range(2, 12)))
    get_dataset("smiles_csv", tmp_path, file=path, split="random", num_workers=0)
    assert "line 4, 'C1CC': RDKit cannot read it" in caplog.text


def test_scaffolds_go_to_one_part_each_and_the_largest_to_training():
    from treadle.graphs.datasets.base import scaffold_split

    names = ["big"] * 50 + ["b"] * 20 + ["c"] * 10 + [f"single {n}" for n in range(20)]
    train, val, test = scaffold_split(names)
    assert sorted([*train, *val, *test]) == list(range(100))
    assert (len(train), len(val), len(test)) == (80, 10, 10)
    assert set(range(80)) == set(train.tolist())
    assert math.isclose(len(val), 10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; its first line"),
        ("smiles;y\nCCO;1\n", "separated by ';'"),
        ("smiles\ty\nCCO\t1\n", r"'\\t'"),
        ("smiles,y\n", "has 0 rows and no molecule"),
        ("smiles,y\nC1CC,1\n", "has 1 rows and no molecule"),
        ("smiles,y\nCCO,1\nCCC,2\n", "the 2 molecules of .* do not fill .* dataset.split=random"),
        ("smiles,y,y\nCCO,1,2\n", "two columns named 'y'"),
        ("smiles,y\nCCO,1,2\n", "line 2 has 3 fields, but the first line has 2"),
        ("smiles,y\nCCO\n", "line 2 has 1 fields, but the first line has 2"),
        ("smiles,y,z\nCCO,1,\nCC,2,\n", "'z' has no value in any row"),
        ("smiles,y\nCCO,1e39\n", "'1e39' in line 2; it must be empty or finite in float32"),
        ("smiles,y\nCCO,1_000\n", "'1_000' in line 2, which is not a number"),
    ],
)
def test_what_is_no_comma_separated_file_is_named(text, message, tmp_path):
    file = tmp_path / "molecules.csv"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        get_dataset("smiles_csv", file=file)


def test_targets_like_identifiers_or_labels_are_named(tmp_path, caplog):
    rows = [[text, 1000 + n, n % 2, n / 2] for n, text in enumerate(SMILES)]
    file = table(tmp_path, ["smiles", "id", "active", "logP"], rows)
    get_dataset("smiles_csv", tmp_path, file=file, num_workers=0)
    assert "'id' has a different whole number in every row" in caplog.text
    assert "dataset.targets=[active,logP]" in caplog.text
    assert "'active' has no values but 0 and 1" in caplog.text
    caplog.clear()
    get_dataset("smiles_csv", tmp_path, file=file, targets=["id", "logP"], num_workers=0)  # which somebody wants
    assert not caplog.text


def test_deviations_are_calibrated_on_graphs_with_known_targets(tmp_path):
    rows = [(text, len(text) / 10, number % 5 if number < 5 else "") for number, text in enumerate(SMILES)]
    file = table(tmp_path, ["smiles", "size", "rare"], rows)
    data = get_dataset("smiles_csv", tmp_path, "light", file=file, split="random", num_workers=0)
    size = {"num_edge_features": data.num_edge_features, "node_pe_dim": data.node_pe_dim}
    models = [get_model("mpnn", data.num_features, 2, 8, 1, **size) for _ in range(3)]
    texts = [graph.smiles for graph in data.train]
    options = {"pe_config": "light", "device": "cpu"}
    plain, found = (predict_smiles(models, texts, **options, **more) for more in ({}, {"calibrate_on": data.train}))
    assert plain.factors is None
    assert found.factors[1] == 1  # of which fewer than ten values are known
    assert torch.equal(found.mean, plain.mean)
    assert torch.equal(found.deviation, plain.deviation * found.factors)
    error = (found.mean - torch.stack([graph.y.flatten() for graph in data.train])).abs()[:, 0]
    assert 0.65 < (error <= found.deviation[:, 0] * (1 + 1e-9)).double().mean() < 0.75
    with pytest.raises(ConfigError, match="regression by 1; pass None"):
        predict_smiles(models[:1], texts, **options, calibrate_on=data.val)


def test_names_of_columns_are_stripped_and_one_without_a_name_is_no_target(tmp_path, caplog):
    rows = [(number, text, number) for number, text in enumerate(SMILES)]
    data = get_dataset("smiles_csv", file=table(tmp_path, ["", " smiles", " y "], rows))
    assert data.target_names == ("y",)
    assert "a column without a name" in caplog.text


def test_a_file_of_repeats_has_no_molecule_in_two_splits(tmp_path):
    rows = [(text, number) for number, text in enumerate(SMILES[:31])] * 3
    source = smiles_csv.load_smiles_csv(
        "m", tmp_path, num_workers=0, file=table(tmp_path, ["smiles", "y"], rows), split="random"
    )
    for parts in (source.official, source.redrawn(1), source.redrawn(2)):
        assert sum(len(set(source.molecules[part])) for part in parts) == 31
        assert sum(map(len, parts)) == 93
