"""Trains a BaseTrainer, as a script of a user does: ``python base.py FOLDER STEPS``."""

from __future__ import annotations

import signal
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import treadle
from treadle import BaseTrainer, CheckpointingHook, EmaHook, JsonlHook, LoggingHook, NonFiniteHook, StepLogHook


class Fit(BaseTrainer):
    """Fits a small net; the loss of one row is not a number, and its steps are skipped."""

    def build_data_loader(self):
        x = torch.randn(20, 3, generator=torch.Generator().manual_seed(2))
        y = x.sum(1, keepdim=True)
        y[12] = float("nan")
        return DataLoader(TensorDataset(x, y), batch_size=3, shuffle=True)

    def build_model(self):
        return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def build_optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def forward(self, input):
        x, y = input
        return nn.functional.mse_loss(self.model(x), y), {}

    def build_hooks(self):
        hooks = [NonFiniteHook("skip"), StepLogHook(), EmaHook(0.9), LoggingHook(1), JsonlHook()]
        return [*hooks, CheckpointingHook(5, None, exit_signals=signal.SIGINT)]


if __name__ == "__main__":
    treadle.set_seed(0)
    Fit(int(sys.argv[2]), workspace=sys.argv[1], device="cpu", grad_clip=1.0).train()
