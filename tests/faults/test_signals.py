"""A signal at any moment: a verified checkpoint of the last step, the right exit code, and an exact resume."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import differences
from processes import Forked
from treadle import verify_checkpoint
from treadle.checkpoint import load_checkpoint

CHILD = Path(__file__).with_name("signal_child.py")
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def start(workspace, where):
    command = [sys.executable, str(CHILD), str(workspace), where]
    pipe = subprocess.PIPE
    return Forked(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=ENV)


def finish(workspace):
    """Run to the end in this process, which knows nothing of the one that was stopped."""
    spec = importlib.util.spec_from_file_location("signal_child", CHILD)
    module = importlib.util.module_from_spec(spec)
    sys.modules["signal_child"] = module
    spec.loader.exec_module(module)
    module.run(workspace)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    finish(folder)
    return load_checkpoint(folder / "end.pt")


CASES = [
    ("step", [signal.SIGTERM]),
    ("validation", [signal.SIGTERM]),
    ("start", [signal.SIGTERM]),
    ("save", [signal.SIGTERM]),
    ("loader", [signal.SIGTERM]),
    ("step", [signal.SIGINT]),
    ("step", [signal.SIGUSR1]),
    ("save", [signal.SIGTERM, signal.SIGTERM]),
]


@pytest.mark.parametrize(("where", "signals"), CASES, ids=lambda value: str(value).replace(" ", ""))
def test_a_signal_saves_leaves_with_its_own_code_and_resumes_exactly(tmp_path, straight, where, signals):
    child = start(tmp_path, where)
    assert child.stdout.readline() == "READY\n"
    for number in signals:
        child.send_signal(number)
        assert child.stdout.readline() == "HEARD\n"
    out, err = child.communicate(timeout=60)
    assert child.returncode == 128 + signals[0], err
    assert "finished" not in out
    latest = tmp_path / "checkpoints" / "checkpoint_latest.pt"
    assert verify_checkpoint(latest) == []
    tree = load_checkpoint(latest)
    assert tree["global_step"] == tree["progress"]["applied_steps"]
    assert all(set(record) == {"epoch", "train_loss", "val_loss", "lr"} for record in tree["history"])
    finish(tmp_path)
    assert differences(straight, load_checkpoint(tmp_path / "end.pt")) == []


def test_a_third_signal_leaves_at_once(tmp_path):
    child = start(tmp_path, "step")
    assert child.stdout.readline() == "READY\n"
    for _ in range(2):
        child.send_signal(signal.SIGTERM)
        assert child.stdout.readline() == "HEARD\n"
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == -signal.SIGTERM
    child.communicate()


def test_without_named_signals_the_default_action_stays(tmp_path):
    script = (
        "import sys, torch, treadle\n"
        "class Slow(treadle.BaseTrainer):\n"
        "    def build_data_loader(self): return [torch.ones(1, 1)] * 9\n"
        "    def build_model(self): return torch.nn.Linear(1, 1)\n"
        "    def build_optimizer(self): return torch.optim.SGD(self.model.parameters(), 0.1)\n"
        "    def forward(self, input):\n"
        "        print('READY', flush=True); sys.stdin.readline()\n"
        "        return self.model(input).mean(), {}\n"
        "Slow(9, device='cpu').train()\n"
    )
    child = Forked([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENV)
    assert child.stdout.readline() == "READY\n"
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGTERM
