"""``torchrun -m treadle train FILE``: the command starts the process group, and one rank prints and writes."""

from __future__ import annotations

import sys

import pytest
import torch

from ranks import torchrun
from treadle.cli.main import main

MODULE = """
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle import BaseTrainer, CheckpointingHook, StepLogHook, parallelize
from treadle.data import RankBatchSampler

class Fit(BaseTrainer):
    def __init__(self, *args, parallel=None, fails_on=None, **settings):
        super().__init__(*args, **settings)
        self.parallel, self.fails_on = parallel, fails_on

    def build_data_loader(self):
        x = torch.randn(18, 3, generator=torch.Generator().manual_seed(1))
        data = TensorDataset(x, x.sum(1, keepdim=True))
        return DataLoader(data, batch_sampler=RankBatchSampler(data, global_batch_size=4, shuffle=True))

    def build_model(self):
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        return model if self.parallel is None else parallelize(model, self.parallel)

    def build_optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def forward(self, input):
        if self.fails_on is not None and dist.get_rank() == self.fails_on:
            raise ValueError("only here")
        return nn.functional.mse_loss(self.model(input[0]), input[1]), {}, len(input[0])

    def build_hooks(self):
        return [CheckpointingHook(2, sharded=False), StepLogHook()]
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "fit_on_ranks.py").write_text(MODULE)
    (tmp_path / "fit.yaml").write_text("seed: 0\ntrainer: {type: fit_on_ranks.Fit, max_steps: 7, device: cpu}\n")
    return tmp_path


def weights(folder, run):
    return torch.load(folder / run / "checkpoints" / "checkpoint_step_7.pt", weights_only=True)["model"]


def test_two_ranks_train_as_one_process_does_and_one_of_them_prints_and_writes(folder, monkeypatch, capsys):
    done = torchrun(
        "-m", "treadle", "train", "--rank-timeout", "90", "fit.yaml", "+trainer.parallel=fsdp",
        "+trainer.workspace=ranks", cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("trained to step 7") == 1
    assert done.stderr.count("training starts") == 1
    assert "2 (process group gloo), this is rank 0" in done.stderr
    assert len((folder / "ranks" / "steps.jsonl").read_text().splitlines()) == 7
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    with pytest.raises(SystemExit) as left:
        main(["train", "fit.yaml", "+trainer.workspace=alone"])
    assert not left.value.code
    ours, alone = weights(folder, "ranks"), weights(folder, "alone")
    for name, value in alone.items():
        assert torch.allclose(ours[name], value, rtol=0, atol=1e-5), name
    assert {path.name for path in folder.iterdir() if (path / "steps.jsonl").exists()} == {"ranks", "alone"}


def test_a_rank_that_fails_is_named_first_and_in_the_summary(folder):
    done = torchrun(
        "-m", "treadle", "train", "fit.yaml", "+trainer.parallel=ddp", "+trainer.fails_on=1",
        "+trainer.workspace=ranks", cwd=folder,
    )  # fmt: skip
    assert done.returncode == 1
    said = [done.stderr.find(text) for text in (
        "error: rank 1 of 2", "error: rank 1: ValueError: only here", "error: another rank exited first",
        "Root Cause (first observed failure)",
    )]  # fmt: skip
    if said[2] < 0:  # the launcher was quicker to end the other rank than that rank to say why it ends
        del said[2]
    assert said == sorted(said)
    assert said[0] > 0
    assert "ValueError: only here" in done.stderr[said[-1] :]
