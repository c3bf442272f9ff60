"""``treadle train graphs`` and ``treadle evaluate`` from the first line on the terminal to the files they leave."""

from __future__ import annotations

import base64
import json
import logging
import re
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rdkit import RDConfig

import graph_data_kit  # noqa: F401  (lets the warnings of torch_geometric's import through)
from command_kit import Killed, Stop, files, interrupt, kill, read, treadle
from helpers import differences
from treadle import load_weights
from treadle.checkpoint import load_checkpoint
from treadle.cli.main import main
from treadle.engine.observers import observing
from treadle.graphs import RandomSignFlip, get_dataset
from treadle.graphs import report as graphs_report
from treadle.graphs.run_config import GraphsConfig

TINY = [
    "training.epochs=2", "training.batch_size=16", "training.scheduler.warmup_epochs=1", "model.hidden_dim=8",
    "model.num_layers=1", "model.num_heads=2", "model.dropout=0.1", "pe=light", "dataset.num_workers=0",
]  # fmt: skip
STEPS = 8
PICTURES = ["contributions.png", "encodings.png", "molecules.png", "predictions.png", "training_curves.png"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The first 80 molecules in place of RDKit's file, and the folder of what is made of them."""
    folder = tmp_path_factory.mktemp("molecules")
    (folder / "NCI").mkdir()
    with (Path(RDConfig.RDDataDir) / "NCI" / "first_5K.smi").open() as file:
        (folder / "NCI" / "first_5K.smi").write_text("".join(islice(file, 80)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RDConfig, "RDDataDir", str(folder))
        yield folder / "data"


def run(root: Path, out: Path, *arguments: str) -> int:
    return treadle("train", "graphs", *TINY, f"dataset.root={root}", "--out", out, "--device", "cpu", *arguments)


def evaluate(*arguments: object) -> int:
    return treadle("evaluate", *arguments, "--device", "cpu")


@pytest.fixture(scope="module")
def finished(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "graphs"
    assert run(root, out) == 0
    return out


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run", symlinks=True))


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the page and its slow pictures out, which the full run draws."""
    monkeypatch.setattr(graphs_report, "draw", lambda *args: [])


# -- what a run leaves --------------------------------------------------------------------------------------------


def test_the_run_folder_is_complete(finished: Path) -> None:
    files = ("config.yaml", "metrics.json", "test_results.json", "held_out.npz")
    for name in (*files, "checkpoints/best.pt", "checkpoints/last.pt"):
        assert (finished / name).stat().st_size > 0
    for name in PICTURES:
        assert (finished / "pictures" / name).read_bytes().startswith(b"\x89PNG")
    history = read(finished, "checkpoints", "history.json")
    assert [record["epoch"] for record in history["val"]] == [1, 2]
    lines = (finished / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1))


def shown(page: Path) -> list[bytes]:
    """The pictures inside a page, in its order."""
    text = page.read_text(encoding="utf-8")
    return [base64.b64decode(data) for data in re.findall(r'src="data:image/png;base64,([^"]+)"', text)]


def test_the_page_shows_every_picture_and_the_table(finished: Path) -> None:
    pictures = {path.name: path.read_bytes() for path in (finished / "pictures").iterdir()}
    assert sorted(pictures) == PICTURES  # of eight test molecules no distance has enough
    assert sorted(shown(finished / "page.html")) == sorted(pictures.values())
    text = (finished / "page.html").read_text(encoding="utf-8")
    metrics = read(finished, "metrics.json")
    for name in ("mean", "ridge_atom_counts", "ridge_atom_features"):
        assert f"<td>{metrics['baselines'][name]['mae']:.4f}</td>" in text
    assert f"<td>{metrics['test']['mae']:.4f}</td>" in text
    assert "ridge on all atom features in mae" in text  # two epochs on 64 molecules are not enough


def test_a_table_names_the_metrics_in_which_a_baseline_is_not_beaten(tmp_path: Path) -> None:
    config = {"model": {"name": "mpnn"}, "dataset": {"name": "smiles_csv"}}
    metrics = {
        "config": config, "graphs": {"test": 9}, "best_epoch": 1, "epochs": 2, "metric_for_best": "loss",
        "test": {"loss": 0.1, "accuracy": 0.9, "roc_auc": 0.8, "ap": None},
        "baselines": {
            "frequencies": {"accuracy": 0.8, "roc_auc": 0.5, "ap": None},
            "ridge_atom_counts": {"accuracy": 0.7, "roc_auc": 0.8, "ap": None},
        },
    }  # fmt: skip
    (table,) = graphs_report.results(metrics, tmp_path).tables
    assert list(table.columns) == ["", "accuracy", "roc_auc", "ap"]
    assert list(table.notes) == [
        "The model is ahead of every baseline in accuracy.",
        "The model is not ahead of ridge on atom counts in roc_auc.",
    ]


def test_several_targets_have_a_table_in_their_units(tmp_path: Path) -> None:
    errors = {"model": {"logP": 0.5, "weight": 20.0}, "mean": {"logP": 0.6, "weight": None}}
    errors["ridge_atom_counts"] = {"logP": 0.7, "weight": 10.0}
    metrics = {
        "config": {"model": {"name": "mpnn"}, "dataset": {"name": "smiles_csv", "file": "lab/own.csv"}},
        "graphs": {"test": 9}, "best_epoch": 1, "epochs": 2, "metric_for_best": "loss", "test": {"mae": 9.0},
        "baselines": {"mean": {"mae": 8.0}}, "target_mae": errors,
    }  # fmt: skip
    found = graphs_report.results(metrics, tmp_path)
    assert found.title == "mpnn on own.csv"
    assert [list(row) for row in found.tables[1].rows] == [
        ["mpnn, epoch 1", "0.5", "20"],
        ["ridge on atom counts", "0.7", "10"],
        ["mean of the training targets", "0.6", "undefined"],
    ]
    assert list(found.tables[1].notes) == ["The model is ahead of every baseline in 1 of these 2."]
    labels = {"model": {"a": 0.9, "b": None}, "frequencies": {"a": 0.5, "b": None}}
    (_, table) = graphs_report.results(
        {**{k: v for k, v in metrics.items() if k != "target_mae"}, "target_roc_auc": labels}, tmp_path
    ).tables
    assert [list(row) for row in table.rows] == [
        ["mpnn, epoch 1", "0.9", "undefined"],
        ["frequencies of the training labels", "0.5", "undefined"],
    ]
    assert list(table.notes) == ["The model is ahead of every baseline in 1 of these 2."]


def test_a_run_on_pairs_shows_its_error_by_distance(root: Path, tmp_path: Path) -> None:
    settings = ["dataset=synthetic/tree", "dataset.num_graphs=20", "dataset.task=distance_regression"]
    assert run(root, tmp_path, *settings, "training.epochs=1", "training.scheduler.warmup_epochs=0") == 0
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {"distances.png", "training_curves.png"}
    assert shown(tmp_path / "page.html")[0] == (tmp_path / "pictures" / "distances.png").read_bytes()
    assert "mean absolute error by the hops between the two nodes" in (tmp_path / "page.html").read_text()


def test_metrics_are_of_the_scored_weights_with_baselines_beside_them(finished: Path, root: Path) -> None:
    metrics, results = read(finished, "metrics.json"), read(finished, "test_results.json")
    history = read(finished, "checkpoints", "history.json")
    assert metrics["best_val_metric"] == min(record["loss"] for record in history["val"])
    assert results == {
        "test_metrics": metrics["test"], "best_epoch": metrics["best_epoch"],
        "best_val_metric": metrics["best_val_metric"], "seed": 42,
    }  # fmt: skip
    data = get_dataset("nci", root)
    train, test = (np.array([float(graph.y) for graph in part]) for part in (data.train, data.test))
    assert metrics["graphs"] == {"train": 64, "val": 8, "test": 8}
    assert metrics["baselines"]["mean"]["mae"] == pytest.approx(np.abs(test - train.mean()).mean())
    assert list(metrics["baselines"]) == ["mean", "ridge_atom_counts", "ridge_atom_features"]
    counts = metrics["baselines"]["ridge_atom_counts"]["num_features"]
    assert counts < metrics["baselines"]["ridge_atom_features"]["num_features"]
    elements = {atom for graph in data.train for atom in graph.x[:, :14].argmax(1).tolist()}
    assert counts == len(elements)


def test_the_checkpoint_says_how_to_build_the_run_again(finished: Path) -> None:
    tree = load_checkpoint(finished / "checkpoints" / "best.pt")
    config = GraphsConfig.from_values(tree["config"]["run"])
    assert config.to_dict() == read(finished, "metrics.json")["config"]
    assert config.model["hidden_dim"] == 8
    assert tree["global_step"] == tree["epoch"] * STEPS / 2


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    ("task", "level", "baselines"),
    [
        ("diffusion_source", "node", ["frequencies"]),
        ("local_vs_global", "graph", ["frequencies", "ridge_node_features"]),
        ("pe_capacity", "pair", ["frequencies"]),
        ("distance_regression", "pair", ["mean"]),
    ],
)
def test_other_levels_and_tasks_train_and_are_evaluated(
    task: str, level: str, baselines: list[str], root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["dataset=synthetic/tree", "dataset.num_graphs=20", f"dataset.task={task}"]
    assert run(root, tmp_path, *settings) == 0
    assert f"of each {level}" in capsys.readouterr().err
    assert evaluate(tmp_path) == 0
    assert "equal to the bit" in capsys.readouterr().out
    assert list(read(tmp_path, "metrics.json")["baselines"]) == baselines


# -- going on -----------------------------------------------------------------------------------------------------


def the_end(out: Path) -> dict[str, object]:
    """Return every file of a run that shows what it computed, durations left out."""
    history = read(out, "checkpoints", "history.json")
    trees = {name: load_checkpoint(out / "checkpoints" / name) for name in ("best.pt", "last.pt")}
    for records in (history["train"], *(tree["history"] for tree in trees.values())):
        for record in records:
            del record["time"]
    steps = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    return {"history": history, "metrics": read(out, "metrics.json"), "steps": steps, **trees}


PLACES_TO_STOP = {
    "first step, nothing saved": ("on_before_optimizer_step", 1),
    "first epoch evaluated, not written": ("on_after_epoch", 4),
    "inside the second epoch": ("on_before_optimizer_step", 6),
    "trained, not reported": ("on_after_train", STEPS),
}


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("place", PLACES_TO_STOP.values(), ids=PLACES_TO_STOP.keys())
def test_killed_anywhere_the_same_command_ends_the_same(
    place: tuple[str, int], finished: Path, root: Path, tmp_path: Path
) -> None:
    with observing(Stop(*place, kill)), pytest.raises(Killed):
        run(root, tmp_path / "graphs")
    assert not (tmp_path / "graphs" / "metrics.json").exists()
    assert run(root, tmp_path / "graphs") == 0
    assert differences(the_end(finished), the_end(tmp_path / "graphs")) == []


@pytest.mark.usefixtures("no_pictures")
def test_ctrl_c_saves_at_the_step_and_the_rerun_goes_on_from_it(
    finished: Path, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with observing(Stop("on_before_step", 6, interrupt)):
        assert run(root, tmp_path / "graphs") == 130
    assert "saved at step 6; the same command resumes from here" in capsys.readouterr().err
    assert run(root, tmp_path / "graphs") == 0
    assert "last.pt: epoch 1 of 2, step 6" in capsys.readouterr().err
    assert differences(the_end(finished), the_end(tmp_path / "graphs")) == []


def test_a_rerun_of_a_finished_run_shows_the_table_and_touches_nothing(
    copied: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(copied)
    assert run(root, copied) == 0
    shown = capsys.readouterr()
    assert "ridge on atom counts" in shown.out
    assert "is finished" in shown.err
    assert files(copied) == before


@pytest.mark.usefixtures("no_pictures")
def test_more_epochs_go_on_and_say_so(copied: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(root, copied, "training.epochs=3") == 0
    shown = capsys.readouterr().err
    assert "training.epochs was 2 and is now 3: the learning rate follows the new schedule" in shown
    assert [record["epoch"] for record in read(copied, "checkpoints", "history.json")["val"]] == [1, 2, 3]


def test_another_model_or_encoding_is_refused_and_nothing_is_lost(
    copied: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(copied)
    assert run(root, copied, "model.hidden_dim=16", "pe.node.rwse.scales=[1,2]") == 2
    error = capsys.readouterr().err
    for words in ("model.hidden_dim was 8 and is now 16", "pe.node.rwse.scales was", "--out", "--no-resume"):
        assert words in error
    assert files(copied) == before


@pytest.mark.usefixtures("no_pictures")
def test_no_resume_starts_afresh_and_sets_the_whole_old_run_aside(
    copied: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = load_weights(copied / "checkpoints" / "best.pt")
    before = {path.name: path.read_bytes() for path in copied.iterdir() if path.is_file()}
    with observing(Stop("on_before_optimizer_step", 3, kill)), pytest.raises(Killed):
        run(root, copied, "seed=1", "--no-resume")
    assert "start     fresh" in capsys.readouterr().err
    assert differences(load_weights(copied / "earlier.1" / "checkpoints" / "best.pt"), old) == []
    for name in ("metrics.json", "test_results.json", "page.html", "run.json"):
        assert (copied / "earlier.1" / name).read_bytes() == before[name], name
    assert run(root, copied, "seed=1") == 0  # the killed fresh start, not the finished run that was here before
    assert differences(load_weights(copied / "checkpoints" / "best.pt"), old) != []


@pytest.mark.usefixtures("no_pictures")
def test_a_damaged_last_checkpoint_is_named_and_passed_over(
    copied: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = copied / "checkpoints" / "last.pt"
    content = last.read_bytes()
    last.unlink()  # it may be the same file as best.pt
    last.write_bytes(content[:-100])
    assert run(root, copied, "training.epochs=3") == 0
    assert "last.pt' cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["model.hiden_dim=8"], ["'model.hidden_dim'"]),
        (["model.num_heads=3"], ["hidden_dim=8", "num_heads=3"]),
        (["model.use_global=false"], ["pe.relative.enabled=false"]),
        (["model.use_local=false", "model.mpnn_type=gcn"], ["mpnn_type='gcn' has no effect"]),
        (["training.loss.regression=cross_entropy"], ["training.loss='cross_entropy'"]),
        (["training.metric_for_best=auc"], ["auc", "mae"]),
        (["training.optimizer.type=adamm"], ["'adamm'", "'adam'"]),
        (["training.scheduler.type=cosin"], ["'cosin'", "'cosine'"]),
        (["dataset.splits=official", "dataset.seed=3"], ["seed"]),
        (["pe.node.dim=2"], ["node.dim=2"]),
        (["pe.node.lap.k=4"], ["pe.node.lap.k=4", "pe.node.type is 'rwse'"]),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(
    settings: list[str], words: list[str], root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run(root, out, *settings) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    for word in words:
        assert word in error
    assert not (out / "checkpoints" / "last.pt").exists()


def test_a_data_set_that_cannot_be_had_names_those_that_can(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(*args: object, **kwargs: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("torch_geometric.datasets.zinc.download_url", unreachable)
    assert run(root, tmp_path / "run", "dataset=zinc") == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    for word in ("dataset=zinc", "no network", "'nci'", "'zinc_clean_leads'"):
        assert word in error


def test_the_lines_of_epochs_are_back_after_the_run(finished: Path) -> None:
    assert logging.getLogger("treadle.graphs.epochs").level == logging.NOTSET


def test_help_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in {
        ("train", "graphs", "--help"): ["--no-resume", "  treadle train graphs pe=none"],
        ("evaluate", "--help"): ["--split", "  treadle evaluate runs/graphs"],
        ("train", "graphs", "--show-settings", "pe=light"): [
            "training.epochs=40", "pe.node.dim=16", "model.hidden_dim=56", "training.early_stopping=null",
        ],
    }.items():  # fmt: skip
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code in (0, None)
        shown = capsys.readouterr().out
        for word in words:
            assert word in shown


@pytest.mark.usefixtures("no_pictures")
def test_a_configuration_file_may_name_the_pack(root: Path, tmp_path: Path) -> None:
    values: dict[str, Any] = {"face": "graphs", "out": str(tmp_path / "run"), "device": "cpu", "seed": 3}
    values |= {"dataset": "nci", "dataset.root": str(root), "training": {"early_stopping": None, "epochs": 1}}
    file = tmp_path / "molecules.py"
    file.write_text(f"config = {values!r}\n")
    with pytest.raises(SystemExit) as left:
        main(["train", str(file), *TINY[1:]])
    assert left.value.code in (0, None)
    config = read(tmp_path, "run", "metrics.json")["config"]
    assert (config["seed"], config["training"]["epochs"], config["model"]["hidden_dim"]) == (3, 1, 8)


# -- evaluation ---------------------------------------------------------------------------------------------------


def test_the_evaluation_equals_the_results_of_the_run_to_the_bit(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(copied) == 0
    assert "equal to the bit to" in capsys.readouterr().out
    assert read(copied, "eval_results_test.json")["metrics"] == read(copied, "test_results.json")["test_metrics"]


def test_predictions_have_the_error_that_the_evaluation_measures(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert treadle("predict", copied, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    with np.load(found["path"]) as opened:
        arrays = dict(opened)
    assert {name: list(arrays[name].shape) for name in arrays} == found["arrays"]
    error = np.abs(arrays["prediction"].astype(float) - arrays["target"]).mean()
    assert error == pytest.approx(read(copied, "test_results.json")["test_metrics"]["mae"], rel=1e-5)


def test_molecules_of_a_file_are_predicted_by_several_runs(
    finished: Path, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = torch.load(copied / "checkpoints" / "best.pt", weights_only=False)
    for tensor in weights["model"].values():
        if tensor.is_floating_point():
            tensor.mul_(1.1)
    torch.save(weights, copied / "checkpoints" / "best.pt")
    file, out = tmp_path / "molecules.csv", tmp_path / "predicted.csv"
    file.write_text("name,smiles\nethanol,CCO\nring,C1CC\nbenzene,c1ccccc1\n")
    command = ["predict", finished, "--smiles", file, "--out", out, "--device", "cpu"]
    assert treadle(*command) == 0
    alone = [line.split(",") for line in out.read_text().splitlines()]
    assert alone[0] == ["name", "smiles", "penalised_logp_mean"]
    assert treadle(*command, "--member", copied) == 0
    assert "C1CC" in capsys.readouterr().err  # it gives no graph
    rows = [line.split(",") for line in out.read_text().splitlines()]
    assert rows[0] == ["name", "smiles", "penalised_logp_mean", "penalised_logp_std"]
    assert [row[1] for row in rows[1:]] == ["CCO", "C1CC", "c1ccccc1"]
    assert rows[2][2:] == ["", ""]
    assert float(rows[1][3]) > 0
    assert rows[1][2] != alone[1][2]
    file.write_text("name\nethanol\n")
    assert treadle(*command) == 2
    assert "no columns with 'smiles'" in " ".join(capsys.readouterr().err.split())
    assert treadle("predict", finished, "--member", copied) == 2


def test_other_splits_are_evaluated_as_in_training(copied: Path) -> None:
    assert evaluate(copied / "checkpoints" / "last.pt", "--split", "val") == 0
    found = read(copied, "eval_results_val.json")
    record = read(copied, "checkpoints", "history.json")["val"][-1]
    assert {**found["metrics"], "epoch": found["epoch"]} == record
    assert evaluate(copied, "--split", "train", "--batch-size", "5") == 0
    assert read(copied, "eval_results_train.json")["graphs"] == 64


@pytest.mark.usefixtures("no_pictures")
def test_signs_are_drawn_in_training_and_never_in_an_evaluation(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[object] = []
    flip = RandomSignFlip.__call__
    monkeypatch.setattr(RandomSignFlip, "__call__", lambda self, data: (drawn.append(1), flip(self, data))[1])
    settings = [
        "dataset=synthetic/tree",
        "dataset.num_graphs=20",
        "pe.node.type=lap",
        "pe.node.lap.sign_invariant=flip",
    ]
    assert run(root, tmp_path, *settings, "training.epochs=1", "training.scheduler.warmup_epochs=0") == 0
    assert len(drawn) >= 16
    drawn.clear()
    assert evaluate(tmp_path, "--split", "train") == 0
    assert drawn == []


def test_results_that_are_not_those_of_the_run_are_called_so(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = read(copied, "test_results.json")
    results["test_metrics"]["mae"] += 1e-7
    (copied / "test_results.json").write_text(json.dumps(results))
    assert evaluate(copied) == 0
    assert "not equal to the bit to" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--split", "tset"], "did you mean 'test'"),
        (["--batch-size", "0"], "batch_size=0"),
        (["--num-workers", "-1"], "num_workers=-1"),
    ],
)
def test_a_wrong_option_is_refused(
    arguments: list[str], words: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(finished, *arguments) == 2
    assert words in capsys.readouterr().err


def test_what_is_no_run_of_graphs_is_refused(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from treadle.checkpoint import save_checkpoint

    assert evaluate(tmp_path) == 2
    assert "is neither a checkpoint nor a folder with one of" in capsys.readouterr().err
    tree = load_checkpoint(finished / "checkpoints" / "best.pt")
    save_checkpoint({**tree, "format": {**tree["format"], "face": "functional"}}, tmp_path / "best.pt")
    assert evaluate(tmp_path) == 2
    assert "of the face functional" in capsys.readouterr().err
    del tree["config"]["run"]
    save_checkpoint(tree, tmp_path / "best.pt")
    assert evaluate(tmp_path) == 2
    assert "call eval_epoch" in capsys.readouterr().err


# -- replay -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [3, 7])
def test_any_step_of_a_run_is_run_again_and_equals_its_record(
    step: int, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(copied)
    with pytest.raises(SystemExit) as left:
        main(["replay", str(copied), "--step", str(step), "--device", "cpu", "--json"])
    assert left.value.code in (0, None)
    shown = json.loads(capsys.readouterr().out)
    assert shown["equal"] is True
    assert shown["step"] == step
    assert files(copied) == before
