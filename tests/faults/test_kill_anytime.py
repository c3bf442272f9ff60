"""SIGKILL at random moments of ``treadle train spectra``: every rerun resumes, the end equals the uninterrupted run."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from helpers import differences
from processes import Forked
from treadle import verify_checkpoint
from treadle.checkpoint import load_checkpoint

SETTINGS = [
    "data.max_rows=80", "epochs=20", "batch_size=16", "model.d_model=16", "model.nhead=2", "model.num_layers=1",
    "model.dropout=0.1", "schedule.warmup_epochs=1",
]  # fmt: skip
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def command(folder):
    return [sys.executable, "-m", "treadle", "train", "spectra", *SETTINGS, "--out", str(folder)]


def run_to_the_end(folder, popen=subprocess.Popen):
    with popen(command(folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV) as child:
        _, err = child.communicate(timeout=300)
    assert child.returncode == 0, err
    assert "Traceback" not in err


def kill_inside_a_save(child, folder):
    """Wait for a temporary file of a save and kill at once."""
    while child.poll() is None:
        if any((folder / "checkpoints").glob(".*treadle-tmp")) or any(folder.glob(".*treadle-tmp")):
            break
    child.send_signal(signal.SIGKILL)


def kill_at_random(child, folder, chance):
    """Wait until training has begun, then kill some time within the run."""
    begun = (folder / "config.json").stat().st_mtime_ns if (folder / "config.json").exists() else None
    while child.poll() is None and begun is None and not (folder / "config.json").exists():
        time.sleep(0.01)
    time.sleep(chance.uniform(0.0, 4.0))
    child.send_signal(signal.SIGKILL)


def the_end(folder):
    tree = load_checkpoint(folder / "checkpoints" / "last.pt")
    return {key: value for key, value in tree.items() if key not in ("config", "hooks")}


def check_equal(folder, straight):
    assert differences(the_end(straight), the_end(folder)) == []
    assert (folder / "training_history.json").read_text() == (straight / "training_history.json").read_text()
    ends = [torch.load(path / "best_model.pt", weights_only=True) for path in (straight, folder)]
    assert differences(*ends) == []


@pytest.mark.parametrize("kills", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_killed_at_random_moments_every_rerun_resumes_and_the_end_is_the_same(tmp_path, kills):
    chance = random.Random(kills)
    straight, folder = tmp_path / "straight", tmp_path / "killed"
    run_to_the_end(straight)
    killed = tries = 0
    while tries < kills or killed < kills / 2:
        assert tries < 4 * kills, "every run ends before it is killed"
        child = Forked(command(folder), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=ENV)
        if tries % 2:
            kill_inside_a_save(child, folder)
        else:
            kill_at_random(child, folder, chance)
        _, err = child.communicate(timeout=60)
        assert "Traceback" not in err, err
        tries, killed = tries + 1, killed + (child.returncode == -signal.SIGKILL)
        last = folder / "checkpoints" / "last.pt"
        assert not last.exists() or verify_checkpoint(last) == []
        if child.returncode == 0 and killed < kills / 2:  # the kill came too late, and in this folder all others would
            check_equal(folder, straight)
            shutil.rmtree(folder)
    run_to_the_end(folder, Forked)  # the straight run is that of a new interpreter
    check_equal(folder, straight)
