"""``scripts/train.py`` and ``scripts/evaluate.py`` as they are written in the seed document, on a small data set."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import graph_data_kit  # noqa: F401  (lets the warnings of torch_geometric's import through)
from helpers import differences
from processes import python
from treadle.checkpoint import load_checkpoint

SCRIPTS = Path(__file__).parents[3] / "scripts"
CHOICES = ["dataset=synthetic/tree", "model=graph_transformer", "pe=default"]
SMALL = [
    "dataset.num_graphs=20", "dataset.num_workers=0", "training.epochs=2", "training.batch_size=8",
    "training.scheduler.warmup_epochs=1", "model.hidden_dim=8", "model.num_layers=1", "model.num_heads=2",
]  # fmt: skip


def command(script: str, folder: Path, *arguments: str, threads: int = 1) -> str:
    """Run a script in a new interpreter, from another folder than the repository's; return what it said."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / script), *arguments],
        capture_output=True, text=True, cwd=folder, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a script in this process, as one of its own takes seconds to start; return what it said."""

    def inside(script: str, folder: Path, *arguments: str, code: int = 0) -> str:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        left: object = 0
        try:
            runpy.run_path(str(SCRIPTS / script), run_name="__main__")
        except SystemExit as error:
            left = error.code
        said = "".join(capsys.readouterr())
        assert left == code, said
        return said

    return inside


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    done = python(str(SCRIPTS / "train.py"), *CHOICES, *SMALL, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_training_writes_what_the_specification_lists_and_nothing_elsewhere(trained: Path) -> None:
    out = trained / "logs" / "experiment"
    for name in ("config.yaml", "checkpoints/best.pt", "checkpoints/last.pt", "checkpoints/history.json"):
        assert (out / name).stat().st_size > 0
    assert read(out / "test_results.json").keys() == {"test_metrics", "best_epoch", "best_val_metric", "seed"}
    assert {path.name for path in trained.iterdir()} == {"logs", "data"}


def test_evaluation_rebuilds_the_run_and_gives_its_metrics_to_the_bit(trained: Path) -> None:
    # Two threads are offered, which would sum in another order: the run's own number is taken.
    said = command("evaluate.py", trained, "checkpoint=logs/experiment/checkpoints/best.pt", threads=2)
    out = trained / "logs" / "experiment"
    assert "equal to the bit to logs/experiment/test_results.json" in said
    assert read(out / "eval_results_test.json")["metrics"] == read(out / "test_results.json")["test_metrics"]


def test_evaluation_takes_nothing_but_its_own_options(trained: Path, run: Callable[..., str]) -> None:
    given = "checkpoint=logs/experiment/checkpoints/best.pt"
    assert "Could not override 'seed'" in run("evaluate.py", trained, given, "seed=1", code=1)
    said = run("evaluate.py", trained, given, "+model.hidden_dim=4", code=2)
    assert "model, data and encodings are those of the checkpoint: unknown key 'model'" in said
    assert "checkpoint: is missing" in run("evaluate.py", trained, code=2)


def test_resume_goes_on_to_the_absolute_number_of_epochs(trained: Path, run: Callable[..., str]) -> None:
    said = run("train.py", trained, *CHOICES, *SMALL, "resume=true", "training.epochs=3", "threads=1")
    assert "resumes from logs/experiment/checkpoints/last.pt: epoch 2 of 3" in said
    history = read(trained / "logs" / "experiment" / "checkpoints" / "history.json")
    assert [record["epoch"] for record in history["train"]] == [1, 2, 3]


def test_a_checkpoint_gives_the_weights_that_another_run_starts_from(
    trained: Path, tmp_path: Path, run: Callable[..., str]
) -> None:
    best = trained / "logs" / "experiment" / "checkpoints" / "best.pt"
    rates = ("training.optimizer.lr=1e-30", "training.scheduler.min_lr=0")
    arguments = (f"checkpoint={best}", *rates, "training.epochs=1")
    said = run("train.py", tmp_path, *CHOICES, *SMALL, *arguments)
    assert f"with the weights of {best}" in said
    last, given = (load_checkpoint(path) for path in (tmp_path / "logs/experiment/checkpoints/last.pt", best))
    assert last["epoch"] == 1
    assert differences(last["model"], given["model"]) == []


def test_a_sweep_gives_every_run_a_folder_and_its_own_result(tmp_path: Path, run: Callable[..., str]) -> None:
    run("train.py", tmp_path, "-m", "seed=0,1", *CHOICES, *SMALL, "experiment_name=sweep")
    results = [read(tmp_path / "logs" / "sweep" / number / "test_results.json") for number in "01"]
    assert [result["seed"] for result in results] == [0, 1]
    assert results[0]["test_metrics"] != results[1]["test_metrics"]
    run("train.py", tmp_path, "seed=1", *CHOICES, *SMALL, "experiment_name=alone")
    assert read(tmp_path / "logs" / "alone" / "test_results.json") == results[1]


def test_a_second_sweep_sets_the_runs_of_the_first_aside_whole(tmp_path: Path, run: Callable[..., str]) -> None:
    run("train.py", tmp_path, "-m", "seed=0,1", *CHOICES, *SMALL, "experiment_name=sweep")
    folders = [tmp_path / "logs" / "sweep" / number for number in "01"]
    first = [read(folder / "test_results.json") for folder in folders]
    shown = run("train.py", tmp_path, "-m", "seed=2,1", "resume=true", *CHOICES, *SMALL, "experiment_name=sweep")
    assert "holds a run of another sweep, now moved aside" in " ".join(shown.split())
    assert read(folders[0] / "test_results.json")["seed"] == 2
    assert read(folders[0] / "earlier.1" / "test_results.json") == first[0]
    for name in ("run.json", "metrics.json", "page.html", "checkpoints/best.pt"):
        assert (folders[0] / "earlier.1" / name).exists(), name
    assert read(folders[1] / "test_results.json") == first[1]  # of the same settings: it is finished
    assert not (folders[1] / "earlier.1").exists()


@pytest.mark.parametrize(("base", "name"), [("synthetic/ring", "synthetic_ring"), ("nci", "nci")])
def test_a_file_of_ones_own_builds_on_a_choice_of_the_package(
    base: str, name: str, tmp_path: Path, run: Callable[..., str]
) -> None:
    (tmp_path / "own" / "dataset").mkdir(parents=True)
    (tmp_path / "own" / "dataset" / "mine.yaml").write_text(f"defaults: [{base}, _self_]\nroot: elsewhere\n")
    shown = run("train.py", tmp_path, "--config-dir", "own", "dataset=mine", "--cfg", "job", "--package", "dataset")
    values = OmegaConf.create(shown)
    assert (values.name, values.root, values.splits) == (name, "elsewhere", "official")
    assert "synthetic" not in values


def test_a_key_that_is_none_is_refused(tmp_path: Path, run: Callable[..., str]) -> None:
    assert "Could not override 'model.foo'" in run("train.py", tmp_path, *CHOICES, "model.foo=1", code=1)
    assert "unknown setting 'training.foo'" in run("train.py", tmp_path, *CHOICES, "+training.foo=1", code=2)
    assert "training.loss.multilabel=bce: has no effect" in run(
        "train.py", tmp_path, *CHOICES, *SMALL, "training.loss.multilabel=bce", code=2
    )
    assert "resume=3: must be true or false" in run("train.py", tmp_path, *CHOICES, "resume=3", code=2)
