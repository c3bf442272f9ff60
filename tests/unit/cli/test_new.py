"""`treadle new`: what it writes runs as it is."""

from __future__ import annotations

import re
import runpy
import sys

import pytest

from command_kit import read, treadle
from treadle import open_run
from treadle.cli.new import FACES

# torch_geometric compiles functions with torch.jit.script when it is imported, which torch calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

SHORT = {
    "mini": ["--max-steps", "60"],
    "functional": ["--epochs", "2"],
    "spectra": ["--epochs", "1"],
    "graphs": ["--epochs", "1", "--count", "40"],
    "astro": ["--epochs", "1", "--rows", "60"],
    "text": ["--epochs", "1", "--count", "8"],
}
SAYS = {
    "mini": r"test accuracy after 60 steps: 0\.[5-9]",
    "functional": r"loss [\d.]+ after 2 epochs",
    "spectra": r"latents \(215, 16\)",
    "graphs": r"mean absolute error [\d.]+ on 8 graphs",
    "astro": r"cross-entropy [\d.]+ after 1 epochs",
    "text": r"loss [\d.]+ per token after 1 epochs",
}


@pytest.fixture
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "train", raising=False)
    yield tmp_path
    sys.modules.pop("train", None)


@pytest.mark.parametrize("face", SHORT)
def test_the_script_of_a_face_runs_as_it_is(inside, monkeypatch, capsys, face):
    assert treadle("new", face) == 0
    assert f"cd {face} && python train.py" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setattr(sys, "argv", ["train.py", *SHORT[face]])
    runpy.run_path(f"{face}/train.py", run_name="__main__")
    assert re.search(SAYS[face], capsys.readouterr().out)
    assert (inside / "runs/mine").is_dir()


@pytest.mark.parametrize("face", ["spectra", "graphs", "astro", "text"])
def test_the_configuration_of_a_pack_has_settings_that_exist(inside, capsys, face):
    assert treadle("new", face, ".") == 0
    assert treadle("train", "run.yaml", "--show-settings") == 0
    assert "epochs=" in capsys.readouterr().out


def test_a_configuration_trains_goes_on_is_evaluated_and_predicts(inside, capsys):
    assert treadle("new", "config", "mine") == 0
    short = ["train", "mine/run.yaml", "data.batch_size=256", "--trackers", "jsonl"]
    assert treadle(*short, "trainer.max_steps=10") == 0
    assert treadle(*short, "trainer.max_steps=20") == 0
    told = capsys.readouterr().err.splitlines()
    assert sum(line == "training starts" for line in told) == 2
    assert any("step 10, epoch" in line for line in told)
    at = next(number for number, line in enumerate(told) if line.startswith("trained to step 20, 3 whole epochs"))
    assert told[at + 1].split()[0] == "loss"
    assert told[at + 2].split() == ["files", str(inside / "runs/mine")]
    assert '"train/loss"' in (inside / "runs/mine/metrics.jsonl").read_text().splitlines()[-1]
    assert treadle("evaluate", "runs/mine") == 0
    opened = open_run("runs/mine", device="cpu")
    assert opened.test(opened.build_eval_data_loader()) == read("runs/mine/eval_results_test.json")["metrics"]
    assert "accuracy" in capsys.readouterr().out
    assert 0 < read("runs/mine/eval_results_test.json")["metrics"]["accuracy"] <= 1
    assert treadle("predict", "runs/mine", "--out", "digits.csv") == 0
    lines = (inside / "digits.csv").read_text().splitlines()
    assert (lines[0], len(lines)) == ("digit,true", 361)
    hits = sum(line.split(",")[0] == line.split(",")[1] for line in lines[1:]) / 360
    assert hits == pytest.approx(read("runs/mine/eval_results_test.json")["metrics"]["accuracy"], abs=1e-6)
    assert treadle("predict", "runs/mine", "--batch-size", "3") == 2
    assert "the trainer's own data loader" in " ".join(capsys.readouterr().err.split())
    for command in ("evaluate", "predict"):
        assert treadle(command, "runs/mine", "--split", "val") == 2
        assert "has no splits" in " ".join(capsys.readouterr().err.split())


def test_a_trainer_that_does_not_say_how_to_predict_is_told_what_it_lacks(inside, capsys):
    assert treadle("new", "config", ".") == 0
    script = (inside / "train.py").read_text().replace("build_predict_data_loader =", "other =")
    (inside / "train.py").write_text(script)
    assert treadle("train", "run.yaml", "trainer.max_steps=1", "data.batch_size=1024") == 0
    assert treadle("predict", "runs/mine") == 2
    assert "MyTrainer: has no build_predict_data_loader()" in " ".join(capsys.readouterr().err.split())


def test_files_that_are_there_stay(inside, capsys):
    (inside / "train.py").write_text("mine")
    assert treadle("new", "mini", ".") == 2
    assert "pass --force" in capsys.readouterr().err
    assert (inside / "train.py").read_text() == "mine"
    assert treadle("new", "mini", ".", "--force") == 0
    assert "class MyTrainer" in (inside / "train.py").read_text()


def test_a_script_is_under_80_lines_and_every_face_has_one(inside):
    for face in FACES:
        assert treadle("new", face) == 0
        assert len((inside / face / "train.py").read_text().splitlines()) < 80
