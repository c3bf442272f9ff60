"""The engine's weights equal those of a hand-written loop, bit for bit."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from treadle.engine import Engine
from treadle.seed import set_seed
from treadle.task import StepOutput


class MeanSquare:
    def step(self, model, batch, totals=None, generator=None):
        x, y = batch
        return StepOutput(nn.functional.mse_loss(model(x).float(), y))


def make_parts(clip_seed=0):
    set_seed(clip_seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(torch.randn(50, 6), torch.randn(50, 2)), batch_size=8, shuffle=True)
    return model, optimizer, loader


def hand_loop(model, optimizer, loader, *, epochs, clip, k, bf16):
    for _ in range(epochs):
        batches = list(loader) if k > 1 else loader
        size = len(loader)
        for i, (x, y) in enumerate(batches):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = nn.functional.mse_loss(model(x).float(), y)
            window = min(k, size - i // k * k)
            (loss / window).backward()
            if (i + 1) % k == 0 or i + 1 == size:
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_weights_equal_a_hand_written_loop(clip, k, bf16):
    model, optimizer, loader = make_parts()
    hand_loop(model, optimizer, loader, epochs=3, clip=clip, k=k, bf16=bf16)
    after_hand = random.random(), float(np.random.rand()), torch.rand(1).item()
    ours, optimizer, loader = make_parts()
    engine = Engine(
        ours, optimizer, MeanSquare(), device="cpu", precision="bf16" if bf16 else None, grad_clip=clip,
        accumulation_steps=k,
    )  # fmt: skip
    engine.run(loader, epochs=3)
    for a, b in zip(model.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a, b)
    assert engine.step == 3 * -(-7 // k)
    assert (random.random(), float(np.random.rand()), torch.rand(1).item()) == after_hand
