"""The trainer and the model that ``fit.yaml`` describes."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from treadle import BaseTrainer
from treadle.builder import build_from_cfg


class Data(Dataset):
    """Rows with random augmentation from three generators."""

    def __init__(self, size):
        self.x = torch.randn(size, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, number):
        x = self.x[number]
        return x + 0.1 * torch.rand(1) + 0.1 * random.random() + 0.1 * float(np.random.rand()), x.sum()


class Net(nn.Module):
    """Two layers with dropout."""

    def __init__(self, width, dropout=0.3):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 1))

    def forward(self, x):
        return self.layers(x)[:, 0]


class Fit(BaseTrainer):
    """Builds its parts from the configuration."""

    def __init__(self, data_cfg, model_cfg, optimizer_cfg, hooks_cfg=(), **kwargs):
        super().__init__(**kwargs)
        self.data_cfg, self.model_cfg = data_cfg, model_cfg
        self.optimizer_cfg, self.hooks_cfg = optimizer_cfg, hooks_cfg

    def build_data_loader(self):
        return DataLoader(Data(self.data_cfg["size"]), batch_size=self.data_cfg["batch_size"], shuffle=True)

    def build_eval_data_loader(self):
        return DataLoader(Data(8), batch_size=4)

    def build_model(self):
        return build_from_cfg(self.model_cfg)

    def build_optimizer(self):
        return build_from_cfg(self.optimizer_cfg, params=self.model.parameters())

    def build_hooks(self):
        return build_from_cfg(list(self.hooks_cfg), recursive=True)

    def forward(self, input):
        x, y = input
        return nn.functional.mse_loss(self.model(x), y), {"size": len(x)}, len(x)
