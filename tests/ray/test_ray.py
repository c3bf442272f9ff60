"""examples/ray on a local cluster: a worker is killed and the group resumes to the bit; trials of Tune resume."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from helpers import differences
from ranks import run_on_ranks

EXAMPLES = Path(__file__).parents[2] / "examples" / "ray"
STEPS = 300
pytestmark = [
    pytest.mark.slow,  # a minute to start a cluster
    # this folder is a namespace package "ray"
    pytest.mark.skipif(importlib.util.find_spec("ray.train") is None, reason="needs ray[train,tune]"),
]


def started(script, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, **pipe)


def workers():
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cmdline").read_bytes().startswith(b"ray::RayTrainWorker"):
                found.append(int(process.name))
    return sorted(found)


def undisturbed(folder):
    sys.path.insert(0, str(EXAMPLES))
    import train

    train.set_seed(0)
    train.Fit(STEPS, workspace=folder, device="cpu").train()


def starts(folder):
    """The steps at which the run was started."""
    events = [json.loads(line) for line in (folder / "sessions.jsonl").read_text().splitlines()]
    return [event["step"] for event in events if event["event"] == "start"]


def end_of(folder):
    tree = torch.load(folder / "checkpoints" / f"checkpoint_step_{STEPS}.pt", weights_only=True)
    return {key: tree[key] for key in ("model", "optimizer", "rng", "global_step", "epoch")}


def test_a_group_that_lost_a_worker_resumes_and_ends_as_undisturbed(tmp_path):
    run_on_ranks(undisturbed, 2, str(tmp_path / "straight"))
    process = started("train.py", "--steps", str(STEPS), "--workspace", str(tmp_path / "run"))
    deadline = time.monotonic() + 300
    while not (tmp_path / "run" / "checkpoints" / "checkpoint_step_20.pt").exists():
        assert process.poll() is None, process.communicate()[0][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(workers()[-1], signal.SIGKILL)
    told = process.communicate(timeout=600)[0]
    assert process.returncode == 0, told[-3000:]
    assert starts(tmp_path / "run") == [0, 20]
    assert differences(end_of(tmp_path / "straight"), end_of(tmp_path / "run")) == []


def test_trials_of_tune_are_told_the_losses_and_resume_where_they_were(tmp_path):
    said, written = [], []
    for epochs in ("3", "5"):
        process = started("tune.py", "--epochs", epochs, "--workspace", str(tmp_path))
        said.append(process.communicate(timeout=600)[0])
        assert process.returncode == 0, said[-1][-3000:]
        written.append([path.stat().st_mtime_ns for path in sorted(tmp_path.glob("lr_*/checkpoint_epoch_1.pt"))])
    assert re.search(r"best: lr=0\.03, eval_loss=\d", said[1])
    assert written[0] == written[1]
    assert len(written[0]) == 3
    for rate in ("0.003", "0.01", "0.03"):
        tree = torch.load(tmp_path / f"lr_{rate}" / "checkpoint_epoch_5.pt", weights_only=True)
        assert (tree["epoch"], tree["global_step"]) == (5, 40)
