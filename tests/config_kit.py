"""Small project that trains from a configuration: a module with a trainer, and a YAML file."""

from __future__ import annotations

from pathlib import Path

MODULE = """
from __future__ import annotations

import queue
import random
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from treadle import BaseTrainer
from treadle.builder import REGISTRY, build_from_cfg

COUNTS = queue.SimpleQueue()

class Data(Dataset):
    def __init__(self, size):
        self.x = torch.randn(size, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index]
        {item}
        return x + 0.1 * torch.rand(1) + 0.1 * random.random() + 0.1 * float(np.random.rand()), x.sum()

@REGISTRY.register()
class Net(nn.Module):
    def __init__(self, width, dropout=0.3):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 1))
        self.scale = torch.ones(1)

    def forward(self, x):
        {forward}
        return self.layers(x)[:, 0]

@REGISTRY.register()
class Fit(BaseTrainer):
    def __init__(self, data_cfg, model_cfg, optimizer_cfg, hooks_cfg=(), **kwargs):
        super().__init__(**kwargs)
        self.data_cfg, self.model_cfg = data_cfg, model_cfg
        self.optimizer_cfg, self.hooks_cfg = optimizer_cfg, hooks_cfg

    def build_data_loader(self):
        return DataLoader(Data(self.data_cfg["size"]), batch_size=self.data_cfg["batch_size"], shuffle=True)

    def build_model(self):
        return build_from_cfg(self.model_cfg)

    def build_optimizer(self):
        return build_from_cfg(self.optimizer_cfg, params=self.model.parameters())

    def build_hooks(self):
        return build_from_cfg(list(self.hooks_cfg), recursive=True)

    def forward(self, input):
        x, y = input
        {step}
        return nn.functional.mse_loss(self.model(x), y), {{"size": len(x)}}, len(x)
"""

CONFIG = """
{seed}
imports: [parts.py]
trainer: {{type: Fit, max_steps: 12, workspace: {workspace}, device: cpu, grad_clip: 1.0}}
data: {{size: 40, batch_size: 4}}
model: {{type: Net, width: 8}}
optimizer: {{type: torch.optim.AdamW, lr: 0.01}}
hooks:
  - {{type: treadle.StepLogHook, interval: 1}}
  - {{type: treadle.EmaHook, decay: 0.9}}
  - {{type: treadle.CheckpointingHook, interval: 4, keep_previous: null, exit_signals: 15}}
"""


def write_project(
    folder: Path, *, item: str = "pass", forward: str = "pass", step: str = "pass", seed: str = "seed: 0"
) -> Path:
    """Write ``parts.py`` and ``fit.yaml`` with some placeholders filled; return the path of the YAML file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "parts.py").write_text(MODULE.format(item=item, forward=forward, step=step))
    config = folder / "fit.yaml"
    config.write_text(CONFIG.format(seed=seed, workspace=folder / "run"))
    return config
