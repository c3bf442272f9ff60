"""``--seeds`` and settings with several values: one run for each, in folders of one, and ``treadle compare``."""

from __future__ import annotations

import json
import logging
import sys

import pytest
import torch

from command_kit import treadle
from config_kit import write_project
from treadle.builder import REGISTRY
from treadle.cli.population import Several, read_seeds, several
from treadle.config.grammar import alternatives
from treadle.errors import ConfigError, number_of


@pytest.fixture(autouse=True)
def each_project_is_the_first_of_its_process(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(REGISTRY, "_objects", dict(REGISTRY._objects))
    sys.modules.pop("parts", None)
    yield
    sys.modules.pop("parts", None)
    assert logging.getLogger("treadle").handlers == []


def test_seeds_are_read():
    assert read_seeds("0..3") == [0, 1, 2, 3]
    assert read_seeds("5, 0..1") == [5, 0, 1]
    assert read_seeds(None) is None
    for text, words in [
        ("a", "'a' is not a seed"),
        ("3..1", "names none"),
        ("0..2,1", "one is named twice"),
        ("", "''"),
    ]:
        with pytest.raises(ConfigError, match=words):
            read_seeds(text)


@pytest.mark.parametrize(
    ("raw", "parts"),
    [
        ("1,2", ["1", "2"]), ("a , b", ["a", "b"]), ("[1,2]", ["[1,2]"]), ("(1,2)", ["(1,2)"]), ("'a,b'", ["'a,b'"]),
        ("[1,2],[3]", ["[1,2]", "[3]"]), ("{a: 1, b: 2}", ["{a: 1, b: 2}"]), ("1,", ["1,"]), ("", [""]),
        ("\"x,y\",z", ["\"x,y\"", "z"]),
    ],
)  # fmt: skip
def test_commas_outside_of_quotes_and_brackets_separate(raw, parts):
    assert alternatives(raw) == parts


def test_what_is_several_and_what_is_a_list():
    known = {"lr": 0.1, "betas": [0.9, 0.99], "name": "a"}
    assert several(["lr=1"], None, known.get) is None
    assert several(["betas=0.9,0.95", "name='a,b'", "l+=1,2"], None, known.get) is None
    found = several(["lr=1,2", "name=x", "betas=0.9,0.95"], "0..1", known.get)
    assert found == Several(
        ["name=x", "betas=0.9,0.95"],
        [{"lr": lr, "seed": seed} for lr in ("1", "2") for seed in ("0", "1")],
    )
    with pytest.raises(ConfigError, match="the settings have a seed too"):
        several(["seed=3"], "0..1", known.get)
    with pytest.raises(ConfigError, match="names a value twice"):
        several(["lr=1,1"], None, known.get)


def test_runs_of_a_file_are_those_of_single_commands(tmp_path, capsys):
    config = write_project(tmp_path)
    assert treadle("train", config, "--seeds", "0..1", "optimizer.lr=0.1,0.02", "--workers", "0") == 0
    out = tmp_path / "run"
    text = capsys.readouterr().out
    assert "optimizer.lr=0.1: 2 of 2 members; loss" in text
    rows = json.loads((out / "population.json").read_text())["members"]
    names = [f"optimizer.lr={lr},seed={seed}" for lr in ("0.1", "0.02") for seed in (0, 1)]
    assert [row["name"] for row in rows] == names
    assert (out / "population.csv").read_text().count("\n") == 5
    for name in names[:2]:
        sys.modules.pop("parts", None)
        REGISTRY._objects.pop("Fit", None)
        REGISTRY._objects.pop("Net", None)
        alone = tmp_path / f"alone {name}"
        assert treadle("train", config, *name.split(","), f"trainer.workspace={str(alone)!r}") == 0
        newest = sorted((alone / "checkpoints").glob("checkpoint_step_*.pt"))[-1].name
        one, two = (torch.load(folder / "checkpoints" / newest)["model"] for folder in (out / name, alone))
        assert all(torch.equal(one[key], two[key]) for key in two)
    capsys.readouterr()
    assert treadle("runs", out) == 0
    assert f"{out}: optimizer.lr=0.1: 2 of 2 members; loss" in capsys.readouterr().out


def test_two_groups_are_compared(tmp_path, capsys):
    for name, shift in (("a", 0.0), ("b", 1.0)):
        folder = tmp_path / name
        folder.mkdir()
        rows = [
            {"name": f"seed={n}", "settings": {"seed": str(n)}, "status": "finished", "step": 3, "epoch": 1,
             "metrics": {"loss": n + shift + 0.01 * n * shift}, "seconds": 1.0, "error": None}
            for n in range(6)
        ]  # fmt: skip
        (folder / "population.json").write_text(json.dumps({"members": rows}))
    assert treadle("compare", tmp_path / "a", tmp_path / "b") == 0
    text = capsys.readouterr().out
    assert "A 2.5 ± 1.9 (6)   B 3.525" in text
    assert "(paired over 6 seeds): more than noise" in text
    assert treadle("compare", tmp_path / "a", tmp_path / "b", "--metric", "loss", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["is_real"]
    assert found["paired"]
    assert treadle("compare", tmp_path / "a", tmp_path / "b", "--metric", "accuracy") == 2
    assert treadle("compare", tmp_path / "a", tmp_path / "nothing") == 2
    for name in "ab":  # two single runs
        whole = json.loads((tmp_path / name / "population.json").read_text())
        (tmp_path / name / "population.json").write_text(json.dumps({"members": whole["members"][:1]}))
    capsys.readouterr()
    assert treadle("compare", tmp_path / "a", tmp_path / "b") == 2
    assert "treadle report" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seeds", "x"], "--seeds x: 'x' is not a seed"),
        (["optimizer.lt=1,2"], "lt"),
        (["optimizer.lr=0.1,fast"], "optimizer.lr"),
    ],
)
def test_wrong_settings_are_refused_before_a_run_starts(tmp_path, capsys, arguments, words):
    config = write_project(tmp_path)
    assert treadle("train", config, "--workers", "0", *arguments) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_pack_refuses_a_wrong_value_of_one_run(tmp_path, capsys):
    assert treadle("train", "spectra", "epochs=3,no", "--out", tmp_path / "out") == 2
    assert "epochs" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_runs_of_a_pack_are_halved_and_those_that_go_on_are_the_same_as_whole_ones(tmp_path, capsys):
    small = ["data.max_rows=80", "epochs=2", "batch_size=32", "model.d_model=16", "model.num_layers=1", "threads=1"]
    out, alone = tmp_path / "halved", tmp_path / "alone"
    options = ["--workers", "0", "--device", "cpu", "--seeds", "0..1", "--halving", "val_loss:1:2"]
    assert treadle("train", "spectra", *small, *options, "--out", out) == 0
    rows = json.loads((out / "population.json").read_text())["members"]
    assert sorted((row["epoch"], row["status"]) for row in rows) == [(1, "paused"), (2, "finished")]
    assert [(out / row["name"] / "metrics.json").exists() for row in rows] == [row["epoch"] == 2 for row in rows]
    best = next(row for row in rows if row["epoch"] == 2)
    assert treadle("train", "spectra", *small, best["name"], "--device", "cpu", "--out", alone) == 0
    one, two = (torch.load(folder / "best_model.pt") for folder in (out / best["name"], alone))
    assert all(torch.equal(one[key], two[key]) for key in two)
    logs = [(folder / "steps.jsonl").read_text() for folder in (out / best["name"], alone)]
    assert logs[0] == logs[1]


@pytest.mark.parametrize("text", ["val_loss", "val_loss:a", "most:loss:1", ":1", "loss:3,1"])
def test_a_wrong_rule_of_halving_is_refused_before_a_run_starts(tmp_path, capsys, text):
    assert treadle("train", "spectra", "--seeds", "0..1", "--halving", text, "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "is not a metric with epochs" in error or "must be rising" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", [("--workers", "2"), ("--halving", "val_loss:1,2")])
def test_options_of_several_runs_are_refused_for_one(tmp_path, capsys, option):
    project = write_project(tmp_path)
    for command in (["spectra", "epochs=1"], [project, "max_steps=1"]):
        assert treadle("train", *command, *option) == 2
        assert f"{option[0]} {option[1]}: has no effect" in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in tmp_path.rglob("run.json")] == []


def test_a_count_and_its_noun_agree():
    assert [number_of(count, "step") for count in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]


def test_an_option_of_ranks_is_named_without_torchrun(tmp_path, capsys):
    project = write_project(tmp_path)
    assert treadle("train", "--rank-timeout", "5", project, "--show-settings") == 0
    assert "--rank-timeout 5 has no effect" in capsys.readouterr().err
    assert treadle("train", project, "--show-settings") == 0
    assert "--rank-timeout" not in capsys.readouterr().err
