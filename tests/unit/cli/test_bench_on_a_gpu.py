"""``treadle bench`` on a GPU: times of its stream, launches, the reads of the device, and the trials that need one."""

from __future__ import annotations

import pytest
import torch

from treadle.cli.bench.target import run_bench

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # what torch's profiler and compiler say differs between its versions
]

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle import BaseHook, BaseTrainer

class Reader(BaseHook):
    def on_after_step(self, trainer):
        trainer.step_info["loss"][0].item()

class Fit(BaseTrainer):
    def build_data_loader(self):
        return DataLoader(TensorDataset(torch.randn(400, 16), torch.randn(400, 1)), batch_size=8)
    def build_model(self):
        return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)).cuda()
    def build_optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), fused=True)
    def build_hooks(self):
        return [Reader()]
    def forward(self, input):
        x, y = (part.cuda(non_blocking=True) for part in input)
        return ((self.model(x) - y) ** 2).mean(), {}

Fit(max_steps=60, device="cuda", workspace="runs", capture=CAPTURE).train()
"""


@pytest.fixture
def bench(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(capture):
        (tmp_path / "fit.py").write_text(SCRIPT.replace("CAPTURE", repr(capture)))
        return run_bench("fit.py", [], steps=6, compiles=False)

    return run


def test_an_eager_run_is_measured_and_its_settings_are_tried(bench):
    result = bench(False)
    assert (result.device, result.steps) == ("cuda:0", 6)
    assert {"data", "forward", "backward", "clip and optimizer", "hook Reader"} <= set(result.parts)
    assert all(seconds >= 0 for seconds in result.parts.values())
    assert [(line.split(" in ")[1], count) for line, count in result.host_reads.items()] == [("on_after_step", 1.0)]
    assert result.launches is None or result.launches > 5  # None: the system keeps them from the profiler
    assert result.times_floor > 0
    notes = {trial.name: trial.note for trial in result.trials if trial.seconds is None}
    assert not {"bf16", "capture", "twice the batch"} & set(notes), notes


def test_a_captured_run_is_replayed_while_it_is_measured(bench):
    result = bench(True)
    assert "captured step" in result.parts
    assert "forward" not in result.parts
    assert "capture=False" in next(trial.note for trial in result.trials if trial.name == "other settings")


def test_what_auto_does_not_capture_is_said_where_capture_is_tried(bench, monkeypatch):
    monkeypatch.setattr("treadle.capture.obstacles.can_be_recorded", lambda optimizer, device: False)
    result = bench("auto")
    assert "forward" in result.parts
    (tried,) = (trial for trial in result.trials if trial.name == "capture")
    assert tried.seconds is None
    assert "cannot be captured" in tried.note
