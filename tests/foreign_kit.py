"""A small model and its training step, for files that other frameworks write."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def plain_model(width: int = 8) -> nn.Sequential:
    """Return a model with weights, biases, floating and integer buffers."""
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1))


def batches(count: int = 4) -> DataLoader:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4 * count, 4, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


def trained(model: nn.Module | None = None, steps: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer after a few steps."""
    torch.manual_seed(0)
    model = plain_model() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, y in batches(steps):
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def fresh(width: int = 8) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of the same kind with different weights, and an optimizer without state."""
    torch.manual_seed(99)
    model = plain_model(width)
    return model, torch.optim.AdamW(model.parameters(), lr=0.5)
