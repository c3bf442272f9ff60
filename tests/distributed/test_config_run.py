"""``torchrun -m treadle train FILE``: the command starts the process group, and one rank writes."""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from torch.utils.data import DistributedSampler

MODULE = """
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from treadle import BaseTrainer, CheckpointingHook, StepLogHook

class Fit(BaseTrainer):
    def build_data_loader(self):
        x = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))
        data = TensorDataset(x, x.sum(1, keepdim=True))
        return DataLoader(data, batch_size=2, sampler=DistributedSampler(data))

    def build_model(self):
        return nn.parallel.DistributedDataParallel(nn.Linear(3, 1))

    def build_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def forward(self, input):
        assert dist.get_world_size() == 2
        return nn.functional.mse_loss(self.model(input[0]), input[1]), {}, len(input[0])

    def build_hooks(self):
        return [CheckpointingHook(2), StepLogHook()]
"""


def torchrun(folder):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "treadle"]
    return subprocess.run(
        [*command, "train", str(folder / "fit.yaml")], capture_output=True, text=True, cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}, timeout=240,
    )  # fmt: skip


def test_two_ranks_train_one_model_and_one_of_them_writes(tmp_path):
    (tmp_path / "ranks.py").write_text(MODULE)
    (tmp_path / "fit.yaml").write_text("seed: 0\ntrainer: {type: ranks.Fit, max_steps: 4, workspace: run}\n")
    done = torchrun(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("trained to step 4") == 1
    assert "2 (process group gloo), this is rank 0" in done.stderr
    tree = torch.load(tmp_path / "run" / "checkpoints" / "checkpoint_step_4.pt", weights_only=True)
    assert len((tmp_path / "run" / "steps.jsonl").read_text().splitlines()) == 4
    # By hand, in one process over both ranks' batches.
    weight, bias = tree["model"]["weight"].double(), tree["model"]["bias"].double()
    by_hand = _by_hand(steps=4)
    assert torch.allclose(weight, by_hand[0], atol=1e-5)
    assert torch.allclose(bias, by_hand[1], atol=1e-5)


def _by_hand(steps):
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 1).double()
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(1)).double()
    orders = [list(DistributedSampler(x, num_replicas=2, rank=rank)) for rank in range(2)]
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(steps):
        rows = [row for order in orders for row in order[2 * step : 2 * step + 2]]
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(layer(x[rows]), x[rows].sum(1, keepdim=True)).backward()
        optimizer.step()
    return layer.weight.detach(), layer.bias.detach()
