"""``treadle train spectra`` from the first line on the terminal to the files it leaves."""

from __future__ import annotations

import json
import operator
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from processes import Forked
from treadle import load_weights
from treadle.cli.main import main
from treadle.errors import ConfigError
from treadle.runs.folder import describe_changes
from treadle.runs.settings import changes
from treadle.spectra import report as spectra_report
from treadle.spectra import runs as spectra_run
from treadle.spectra.run_config import FREE, SpectraConfig

TINY = [
    "epochs=2", "data.max_rows=420", "model.d_model=8", "model.nhead=2", "model.num_layers=1",
    "model.dim_feedforward=8", "model.n_mask=28", "schedule.warmup_epochs=1",
]  # fmt: skip
PICTURES = ("few_labels.png", "training_curves.png", "reconstructions.png", "latent_map.png", "cluster_map.png")


def run(out: Path, *arguments: str, settings: list[str] = TINY) -> int:
    """Run the command in this process and return its exit code."""
    own = {argument.partition("=")[0] for argument in arguments}
    kept = [setting for setting in settings if setting.partition("=")[0] not in own]
    with pytest.raises(SystemExit) as left:
        main(["train", "spectra", *kept, "--out", str(out), "--device", "cpu", *arguments])
    return left.value.code if isinstance(left.value.code, int) else 0


def files(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "spectra"
    assert run(out) == 0
    return out


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the slow part of the evaluation, which one full run shows already."""
    monkeypatch.setattr(spectra_report, "_probe", lambda *args: {})
    monkeypatch.setattr(spectra_report, "_few_labels", lambda *args: {})
    monkeypatch.setattr(spectra_report, "_MOST_CLUSTERS", 3)


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_the_run_folder_is_complete(finished: Path) -> None:
    for name in ("config.json", "training_history.json", "best_model.pt", "metrics.json", "checkpoints/last.pt"):
        assert (finished / name).stat().st_size > 0
    for name in PICTURES:
        assert (finished / "pictures" / name).read_bytes().startswith(b"\x89PNG")
    assert [record["epoch"] for record in json.loads((finished / "training_history.json").read_text())] == [1, 2]
    assert json.loads((finished / "config.json").read_text())["model"]["d_model"] == 8


def test_metrics_hold_the_honest_figures(finished: Path) -> None:
    metrics = json.loads((finished / "metrics.json").read_text())
    history = json.loads((finished / "training_history.json").read_text())
    assert metrics["val_loss"] == min(record["val_loss"] for record in history)  # the scored weights, to the bit
    assert metrics["baselines"]["row_mean"] == 255 / 256
    for fill in ("gaussian", "pca", "nearest"):  # better than the mean spectrum, on both parts
        for part in ("val", "test"):
            assert 0 < metrics["baselines"][f"{fill}_{part}"] < metrics["baselines"][f"mean_spectrum_{part}"]
    curves = metrics["few_labels"]
    assert list(curves) == ["chemomae", "pca8", "pca16", "pca64", "raw", "untrained", "regression"]
    assert curves.pop("regression")["labels"] == [20, 50, 100, 200]
    for curve in curves.values():
        assert curve["labels"][:4] == [20, 50, 100, 200]
        assert curve["labels"] == sorted(curve["labels"])
        assert [len(draws) for draws in curve["draws"].values()] == [50] * (len(curve["labels"]) - 1) + [1]
    assert list(metrics["probe"]) == ["chemomae", "pca64", "untrained"]
    for scores in metrics["probe"].values():
        assert scores["num_features"] == 64
        assert len(scores["j_minus_k_r2"]["folds"]) == 5
        assert 0 <= scores["spectral_class_balanced_accuracy"]["mean"] <= 1
    assert metrics["rows"]["train"] + metrics["rows"]["val"] + metrics["rows"]["test"] == metrics["rows"]["all"] == 420


def test_a_rerun_of_a_finished_run_shows_the_table_and_touches_nothing(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(copied)
    capsys.readouterr()
    assert run(copied) == 0
    shown = capsys.readouterr()
    assert "ChemoMAE latent" in shown.out
    assert "is finished" in shown.err
    assert files(copied) == before


@pytest.mark.usefixtures("quick")
def test_more_epochs_go_on_from_the_checkpoint_and_say_so(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(copied, "epochs=3") == 0
    shown = capsys.readouterr()
    assert "epochs was 2 and is now 3" in shown.err
    assert "epoch 2 of 3" in shown.err
    assert "epoch 3: train_loss" not in shown.err  # the bar says it
    history = json.loads((copied / "training_history.json").read_text())
    assert [record["epoch"] for record in history] == [1, 2, 3]
    assert json.loads((copied / "metrics.json").read_text())["config"]["epochs"] == 3


def test_another_model_is_refused_and_nothing_is_lost(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(copied)
    assert run(copied, "model.d_model=16", "optimizer.lr=0.1") == 2
    error = capsys.readouterr().err
    for words in ("model.d_model was 8 and is now 16", "optimizer.lr was", "--out", "--no-resume"):
        assert words in error
    assert files(copied) == before


@pytest.mark.usefixtures("quick")
def test_no_resume_starts_afresh(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = load_weights(copied / "best_model.pt")
    assert run(copied, "--no-resume", "seed=1") == 0
    assert "start     fresh" in capsys.readouterr().err
    assert (copied / "earlier.1" / "training_history.json").exists()
    after = load_weights(copied / "best_model.pt")
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.usefixtures("quick")
def test_evaluation_is_repeated_when_only_it_is_missing(copied: Path) -> None:
    stored = json.loads((copied / "metrics.json").read_text())
    (copied / "metrics.json").unlink()
    weights = (copied / "best_model.pt").read_bytes()
    assert run(copied) == 0
    again = json.loads((copied / "metrics.json").read_text())
    for left_out in ("probe", "few_labels", "clusters"):
        del stored[left_out], again[left_out]
    assert again == stored
    assert (copied / "best_model.pt").read_bytes() == weights


@pytest.mark.usefixtures("quick")
def test_a_damaged_last_checkpoint_is_named_and_passed_over(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = copied / "checkpoints" / "last.pt"
    last.write_bytes(last.read_bytes()[:-100])
    assert run(copied, "epochs=3") == 0
    assert "last.pt' cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model.d_modle=8", ["unknown setting", "'model.d_model'"]),
        ("lr=0.1", ["'optimizer.lr'"]),
        ("epochs=many", ["epochs=many", "must be int"]),
        ("epochs=0", ["epochs=0", "at least 1"]),
        ("model.nhead=3", ["model.", "nhead=3"]),
        ("optimizer.lr=-1.0", ["optimizer.lr=-1.0"]),
        ("trainer.reduction=max", ["trainer.reduction=max"]),
        ("trainer.out_dir=x", ["--out"]),
        ("epochs", ["key=value"]),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(
    setting: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run(out, setting) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for word in words:
        assert word in error
    assert not out.exists()


def test_an_unwritable_place_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    assert run(tmp_path / "file" / "run") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--out" in error
    assert "is not a folder" in error


def test_a_device_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["train", "spectra", "--device", "cuda:99", "--out", str(tmp_path)])
    assert left.value.code == 2
    assert "available: cpu" in capsys.readouterr().err


def test_a_run_that_diverges_is_one_line_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare = spectra_run.prepare_data

    def damaged(config):
        data = prepare(config)
        data.x[data.train[5]] = value
        return data

    value = np.nan
    monkeypatch.setattr(spectra_run, "prepare_data", damaged)
    assert run(tmp_path / "damaged") == 2
    assert "the first of them in row 5, column 0 (nan)" in capsys.readouterr().err
    value = 1e30
    assert run(tmp_path / "run") == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: the gradient of step")
    assert "batch" in last


def test_an_unexpected_error_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spectra_run, "prepare_data", operator.itemgetter("a fault of ours"))
    with pytest.raises(TypeError, match="not subscriptable"):
        main(["train", "spectra", "--out", str(tmp_path)])


def test_piped_output_has_no_control_characters(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "treadle", "train", "spectra", *TINY, "data.max_rows=60"]
    command += ["--out", str(tmp_path), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=_environment(FORCE_COLOR="1"))
    for text in (done.stdout, done.stderr):
        assert not [character for character in text if ord(character) < 32 and character != "\n"]
    assert "Masked reconstruction" in done.stdout
    assert "epoch 2/2 step" in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_the_rerun_goes_on(number: int, code: int, tmp_path: Path) -> None:
    long = [setting for setting in TINY if not setting.startswith("epochs")] + ["epochs=100000"]
    command = [sys.executable, "-m", "treadle", "train", "spectra", *long, "--out", str(tmp_path), "--device", "cpu"]
    process = Forked(command, stderr=subprocess.PIPE, text=True, env=_environment())
    waited = time.monotonic()
    while not (tmp_path / "checkpoints" / "last.pt").exists() and time.monotonic() - waited < 120:
        time.sleep(0.05)
    process.send_signal(number)
    _, error = process.communicate(timeout=120)
    assert process.returncode == code, error
    assert "the same command resumes from here" in error
    assert (tmp_path / "checkpoints" / "last.pt").exists()


def _environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def test_what_may_change_on_the_way() -> None:
    old, new = SpectraConfig(), SpectraConfig(epochs=7)
    new.schedule.min_lr_scale = 0.5
    sentences = describe_changes(changes(old.to_dict(), new.to_dict()), "runs/x", free=FREE)
    assert len(sentences) == 2
    assert all("new schedule" in sentence for sentence in sentences)
    new.data.split_seed = 1
    with pytest.raises(ConfigError, match=r"data\.split_seed was 0 and is now 1"):
        describe_changes(changes(old.to_dict(), new.to_dict()), "runs/x", free=FREE)
    assert changes(old.to_dict(), json.loads(json.dumps(old.to_dict()))) == {}


def test_version_help_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in {
        ("--version",): ["treadle 0."],
        ("--help",): ["train", "Examples:"],
        ("train", "spectra", "--help"): ["--no-resume", "Examples:\n", "  treadle train spectra epochs=20"],
        ("train", "spectra", "--show-settings", "epochs=7"): ["epochs=7", "model.latent_dim=64", "trainer.amp="],
    }.items():
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code in (0, None)
        shown = capsys.readouterr().out
        for word in words:
            assert word in shown
