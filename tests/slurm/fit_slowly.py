"""A run on two ranks that takes long enough to be pre-empted."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from treadle import BaseTrainer, CheckpointingHook, parallelize
from treadle.data import RankBatchSampler


class Fit(BaseTrainer):
    def __init__(self, *args, pause=0.0, **settings):
        super().__init__(*args, **settings)
        self.pause = pause

    def build_data_loader(self):
        x = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
        data = TensorDataset(x, x.sum(1, keepdim=True))
        return DataLoader(data, batch_sampler=RankBatchSampler(data, global_batch_size=8, shuffle=True))

    def build_model(self):
        return parallelize(nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.Linear(16, 1)), "ddp")

    def build_optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def forward(self, input):
        time.sleep(self.pause)
        return nn.functional.mse_loss(self.model(input[0]), input[1]), {}, len(input[0])

    def build_hooks(self):
        return [CheckpointingHook(10_000, exit_signals=[15], sharded=False)]
