"""Targets for verification: one that resumes to the bit, and one whose loss depends on state outside checkpoints."""

from __future__ import annotations

import queue

import torch
from torch import nn

from treadle import BaseTrainer, set_seed


class Fit(BaseTrainer):
    """Linear model on shuffled random rows."""

    def build_data_loader(self):
        rows = torch.utils.data.TensorDataset(torch.randn(40, 3))
        return torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True)

    def build_model(self):
        return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)).to(self.device)

    def build_optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def forward(self, input):
        return self.model(input[0]).square().mean(), {}


CALLS = queue.SimpleQueue()


class Counts(Fit):
    """Trainer that counts the forward passes of its process in a global that no checkpoint holds."""

    def forward(self, input):
        CALLS.put(1)
        loss, records = super().forward(input)
        return loss * (1 + 0.1 * CALLS.qsize()), records


def train_exactly():
    """Train a model that resumes to the bit."""
    set_seed(0)
    Fit(12, device="cpu", workspace="runs/exact").train()


def train_with_a_hidden_count():
    """Train a model that does not resume to the bit."""
    set_seed(0)
    Counts(12, device="cpu", workspace="runs/hidden").train()
