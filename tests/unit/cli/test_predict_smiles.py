"""`treadle predict RUN... --smiles FILE`: a file of molecules in, predictions with uncertainty out."""

from __future__ import annotations

import csv
import dataclasses
import json
import math

import numpy as np
import pytest
import torch

import graph_data_kit  # noqa: F401  (lets the warnings of torch_geometric's import through)
from command_kit import treadle
from treadle.checkpoint.store import load_checkpoint
from treadle.errors import ConfigError
from treadle.graphs.run_config import GraphsConfig

pytest.importorskip("rdkit")
from treadle.graphs.calibration import HeldOut, calibrate
from treadle.graphs.smiles_runs import load_stored_model, predict_file

RINGS = ["c1ccccc1", "C1CCCCC1", "c1ccncc1", "C1CCCC1"]
SMALL = ["model=gatedgcn", "model.hidden_dim=8", "model.num_layers=1", "training.epochs=1", "threads=1"]
pytestmark = pytest.mark.filterwarnings("ignore")


def train(out, file, *settings, resume=True):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("treadle.graphs.report.draw", lambda *args: [])
        command = ["train", "graphs", "dataset=smiles_csv", f"dataset.file={file}", "dataset.split=random", *SMALL]
        settings = [*settings, *(() if resume else ("--no-resume",))]
        assert treadle(*command, f"dataset.root={out.parent}/data", *settings, "--device", "cpu", "--out", out) == 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run for each of two seeds; the file that they were trained on is gone."""
    folder = tmp_path_factory.mktemp("smiles")
    file = folder / "known.csv"
    rows = [(ring + "C" * n, n / 2, "" if n % 3 == 0 else n) for n in range(1, 7) for ring in RINGS]
    file.write_text("smiles,solubility,boiling point\n" + "".join(f"{a},{b},{c}\n" for a, b, c in rows))
    for seed in (0, 1):
        train(folder / "seeds" / str(seed), file, f"seed={seed}")
    file.unlink()
    return folder / "seeds"


def test_a_run_refuses_a_file_whose_contents_have_changed(tmp_path, capsys):
    file = tmp_path / "known.csv"
    rows = [(ring + "C" * n, n / 2) for n in range(1, 7) for ring in RINGS]
    file.write_text("smiles,solubility\n" + "".join(f"{a},{b}\n" for a, b in rows))
    train(tmp_path / "run", file)
    train(tmp_path / "run", file)  # finished: nothing to do
    file.write_text("smiles,solubility\n" + "".join(f"{a},{b + 1}\n" for a, b in rows))
    command = ["train", "graphs", "dataset=smiles_csv", f"dataset.file={file}", "dataset.split=random", *SMALL]
    command += [f"dataset.root={tmp_path}/data", "--device", "cpu", "--out", tmp_path / "run"]
    for more in ((), ("training.epochs=2",)):  # of the finished run, and to train it further
        assert treadle(*command, *more) != 0
        assert "its contents have changed since the run in" in capsys.readouterr().err
    for reads in (["evaluate"], ["evaluate", "--split", "val"], ["predict"], ["replay", "--step", "1"]):
        assert treadle(reads[0], tmp_path / "run", *reads[1:], "--device", "cpu") == 2
        assert "its contents have changed since the run in" in " ".join(capsys.readouterr().err.split())
    assert not list((tmp_path / "run").glob("eval_results*"))
    train(tmp_path / "run", file, "training.epochs=1", "seed=3", resume=False)


@pytest.fixture
def molecules(tmp_path):
    path = tmp_path / "molecules.csv"
    path.write_text("id,SMILES\na,CCO\n\nb,C1CC\nc,c1ccccc1C\n,\n", encoding="utf-8")
    return path


def rows_of(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_one_run_predicts_the_molecules_of_a_file(runs, molecules, capsys):
    assert treadle("predict", runs / "0", "--smiles", molecules, "--device", "cpu") == 0
    rows = rows_of(runs / "0" / "predictions_smiles.csv")
    assert list(rows[0]) == ["id", "SMILES", "solubility_mean", "boiling point_mean"]
    assert [row["id"] for row in rows] == ["a", "b", "c", ""]
    assert [bool(row["solubility_mean"]) for row in rows] == [True, False, True, False]
    warned = " ".join(capsys.readouterr().err.split())
    assert warned.count("2 of 4 rows have no prediction") == 1
    assert "line 4, 'C1CC': RDKit cannot read it; line 6, '': no atoms" in warned


def test_several_runs_and_a_folder_of_them_are_one_ensemble(runs, molecules, tmp_path, capsys):
    assert treadle("predict", runs, "--smiles", molecules, "--out", tmp_path / "both.csv", "--device", "cpu") == 0
    command = ["predict", runs / "0", runs / "1", "--smiles", molecules, "--device", "cpu"]
    assert treadle(*command, "--out", tmp_path / "both.npz", "--json") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(found["checkpoints"]) == 2
    single = []
    for seed in "01":
        assert treadle("predict", runs / seed, "--smiles", molecules, "--out", tmp_path / "one.csv") == 0
        single.append([float(row["solubility_mean"]) for row in rows_of(tmp_path / "one.csv")[::2]])
    rows = rows_of(tmp_path / "both.csv")
    assert list(rows[0])[2:] == ["solubility_mean", "solubility_std", "boiling point_mean", "boiling point_std"]
    pair = torch.tensor(single, dtype=torch.float64)
    for name, expected in (("mean", pair.mean(0)), ("std", pair.std(0))):
        values = [float(row[f"solubility_{name}"]) for row in rows[::2]]
        assert values == pytest.approx(expected.tolist(), abs=1e-6)
        with np.load(tmp_path / "both.npz") as arrays:
            assert arrays[f"solubility_{name}"][::2].tolist() == values
            assert math.isnan(arrays[f"solubility_{name}"][1])
    assert rows[1]["solubility_std"] == ""


def test_the_deviation_is_calibrated_on_the_validation_molecules_of_the_runs(runs, molecules, caplog):
    stored = [opened(runs / seed) for seed in "01"]
    assert all(each.held_out is not None for each in stored)  # of too few molecules
    before = predict_file(stored, molecules, device="cpu").arrays
    assert "solubility_std is not calibrated: fewer than 10 known validation values" in caplog.text
    rng = np.random.default_rng(0)
    target = rng.normal(size=(50, 2))
    held_out = [HeldOut(target + rng.normal(size=(50, 2)), target, target, target) for _ in stored]
    calibrated = [dataclasses.replace(each, held_out=one) for each, one in zip(stored, held_out, strict=True)]
    with caplog.at_level("INFO", "treadle.cli"):
        after = predict_file(calibrated, molecules, device="cpu").arrays
    for name, each in zip(stored[0].targets, calibrate(held_out), strict=True):
        np.testing.assert_allclose(after[f"{name}_std"], each.factor * before[f"{name}_std"])
        assert (
            f"{name}_std: the deviation of 2 runs times {each.factor:.3g}; mean ± std covers 68 % of 50" in caplog.text
        )
    caplog.clear()
    last = dataclasses.replace(stored[1], held_out=None)
    assert predict_file([stored[0], last], molecules, device="cpu").arrays["solubility_std"][0] > 0
    assert "standard deviations are not calibrated" in caplog.text


def test_targets_may_be_in_any_units(tmp_path):
    file = tmp_path / "known.csv"
    rows = [(ring + "C" * n, 5000 + 300 * n, n / 1000) for n in range(1, 7) for ring in RINGS]
    file.write_text("smiles,kelvin,molar\n" + "".join(f"{a},{b},{c}\n" for a, b, c in rows))
    train(tmp_path / "run", file)
    assert treadle("predict", tmp_path / "run", "--smiles", file, "--out", tmp_path / "found.csv") == 0
    found = rows_of(tmp_path / "found.csv")
    assert all(5000 < float(row["kelvin_mean"]) < 7000 for row in found)
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["target_mae"]["model"]["molar"] < 0.01 < metrics["target_mae"]["model"]["kelvin"]
    assert metrics["best_val_metric"] < 5  # in deviations


def test_labels_are_predicted_as_probabilities(runs, molecules):
    stored = [opened(runs / seed) for seed in "01"]
    outputs = [predict_file([each], molecules, device="cpu").arrays["solubility_mean"] for each in stored]
    labels = [dataclasses.replace(each, task_type="multilabel") for each in stored]
    found = predict_file(labels, molecules, device="cpu").arrays
    probabilities = torch.from_numpy(np.stack(outputs)).sigmoid()
    np.testing.assert_allclose(found["solubility_mean"], probabilities.mean(0))
    np.testing.assert_allclose(found["solubility_std"], probabilities.std(0))


def opened(run, **changed):
    """Return the model of a run, by a checkpoint that may have changed."""
    path = run / "checkpoints" / "best.pt"
    tree = load_checkpoint(path)
    return load_stored_model(GraphsConfig.from_values(tree["config"]["run"]), path, tree | changed)


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        (None, [], "cannot be read"),
        ("a,b\n1,2\n", [], "has no columns with 'smiles' in their names; choose one with --smiles-column: a, b"),
        ("smiles_1,smiles_2\nC,C\n", [], "has 2 columns with 'smiles'"),
        ("smiles\nC\n", ["--smiles-column", "smile"], "did you mean 'smiles'"),
        ("smiles\n", [], "no molecules"),
        ("smiles,x\nC\n", [], "line 2 has 1 fields"),
        ("smiles,solubility_mean\nC,1\n", [], "has columns with names of the output: solubility_mean"),
        ("smiles\nC\n", ["--split", "val"], "--split val: does not apply with --smiles"),
        ("smiles\nC\n", ["--out", "p.txt"], "must end in .npz or .csv"),
    ],
)
def test_what_is_wrong_is_one_line(runs, tmp_path, capsys, content, options, words):
    path = tmp_path / "m.csv"
    if content is not None:
        path.write_text(content)
    assert treadle("predict", runs / "0", "--smiles", path, *options) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_several_runs_need_smiles(runs, capsys):
    assert treadle("predict", runs / "0", runs / "1") == 2
    assert "2 runs: only allowed with --smiles FILE" in capsys.readouterr().err
    assert treadle("predict", runs / "0", "--smiles-column", "x") == 2
    assert "--smiles-column x: only allowed with --smiles FILE" in capsys.readouterr().err


def test_runs_of_other_graphs_and_other_targets_are_refused(runs):
    stored = opened(runs / "0")
    assert stored.targets == ("solubility", "boiling point")
    trained = load_checkpoint(stored.path)["config"]
    other = opened(runs / "0", config={**trained, "targets": ["a", "b"]})
    with pytest.raises(ConfigError, match="has other targets than"):
        predict_file([stored, other], "absent.csv")
    of_before = opened(runs / "0", config={name: value for name, value in trained.items() if name != "targets"})
    assert of_before.targets == ("target_0", "target_1")
    stored.config.dataset["name"] = "synthetic_tree"
    with pytest.raises(ConfigError, match="was trained on synthetic_tree, whose graphs are not made of SMILES"):
        load_stored_model(stored.config, stored.path, load_checkpoint(stored.path))


def test_a_file_of_lines_is_read_too(runs, tmp_path):
    path = tmp_path / "molecules.smi"
    path.write_text("CCO ethanol\n\nc1ccccc1\n", encoding="utf-8")
    assert treadle("predict", runs / "0", "--member", runs / "1", "--smiles", path, "--out", tmp_path / "p.csv") == 0
    rows = rows_of(tmp_path / "p.csv")
    assert [row["smiles"] for row in rows] == ["CCO", "c1ccccc1"]
    assert float(rows[0]["solubility_std"]) > 0
