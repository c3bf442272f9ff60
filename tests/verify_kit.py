"""Small training script, and changes that break its resume, for the tests of ``treadle verify``."""

from __future__ import annotations

from pathlib import Path

_SCRIPT = """
from __future__ import annotations

import random, sys, time
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from treadle import BaseHook, BaseTrainer, CheckpointingHook, EmaHook, LoggingHook, set_seed

class Data(Dataset):
    def __init__(self):
        self.x = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
        self.reads = 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index]
        {item}
        return x + 0.1 * torch.rand(1) + 0.1 * random.random() + 0.1 * float(np.random.rand()), x.sum()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
        self.calls = 0
        self.scale = torch.ones(1)

    def forward(self, x):
        {forward}
        return self.layers(x)[:, 0]

class Watch(BaseHook):
    def __init__(self):
        self.count = 0

    {hook}

class Fit(BaseTrainer):
    def build_data_loader(self):
        {loader}

    def build_model(self):
        return Net()

    def build_optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def build_lr_scheduler(self):
        return torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + 0.1 * step))

    def forward(self, input):
        x, y = input
        return nn.functional.mse_loss(self.model(x), y), {{"size": len(x)}}, len(x)

    def build_hooks(self):
        return [Watch(), EmaHook(0.9), LoggingHook(5), {saves}]

if __name__ == "__main__":
    {start}
    Fit({steps}, workspace={workspace!r}, device="cpu", gradient_accumulation_steps=2, grad_clip=1.0).train()
    open({workspace!r} + ".reached", "w").write("what comes after training ran")
"""


def write_script(folder: Path, **changes: str) -> Path:
    """Write the script with some placeholders filled; without any, it resumes exactly."""
    places = {
        "item": "pass",
        "forward": "pass",
        "hook": "pass",
        "loader": "return DataLoader(Data(), batch_size=4, shuffle=True)",
        "saves": "CheckpointingHook(10)",
        "start": "set_seed(0)",
        "steps": "100",
        "workspace": str(folder / "users_own_run"),
    }
    unknown = set(changes) - set(places)
    assert not unknown, unknown
    path = folder / "train.py"
    path.write_text(_SCRIPT.format(**{**places, **changes}))
    return path
