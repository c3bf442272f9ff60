"""The functional face's weights equal those of a hand-written loop, bit for bit; so do its losses."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

import treadle
from treadle import BaseHook


class Losses(BaseHook):
    def __init__(self):
        self.steps = []

    def on_after_step(self, trainer):
        self.steps.append([loss.item() for loss in trainer.step_info["loss"]])


def parts(task):
    treadle.set_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.3), nn.BatchNorm1d(16), nn.Linear(16, 3))
    x, floats, labels = torch.randn(50, 6), torch.randn(50, 3), torch.randint(0, 3, (50,))
    targets, loss_fn = (floats, nn.MSELoss()) if task == "regression" else (labels, nn.CrossEntropyLoss())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, loss_fn, DataLoader(TensorDataset(x, targets), batch_size=8, shuffle=True)


def schedule(optimizer, per_batch):
    return CosineAnnealingLR(optimizer, 30) if per_batch else StepLR(optimizer, 1, 0.5)


def hand_loop(task, *, epochs, clip, k, bf16, per_batch):
    model, optimizer, loss_fn, loader = parts(task)
    scheduler, losses = schedule(optimizer, per_batch), []
    for _ in range(epochs):
        batches = iter(loader)
        while window := list(itertools.islice(batches, k)):
            optimizer.zero_grad()
            losses.append([])
            for x, y in window:
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    out = model(x)
                loss = loss_fn(out.float(), y)
                losses[-1].append(loss.item())
                (loss / len(window)).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if per_batch:
                scheduler.step()
        if not per_batch:
            scheduler.step()
    return model, losses


@pytest.mark.parametrize("task", ["regression", "classification"])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("clip", "k", "per_batch"), [(None, 1, False), (0.1, 1, True), (0.1, 3, False)])
def test_weights_and_losses_equal_a_hand_written_loop(task, bf16, clip, k, per_batch):
    expected, losses = hand_loop(task, epochs=2, clip=clip, k=k, bf16=bf16, per_batch=per_batch)
    after_hand = torch.rand(3)
    model, optimizer, loss_fn, loader = parts(task)
    hook = Losses()
    training = {
        "max_grad_norm": clip, "gradient_accumulation_steps": k, "scheduler_step_per_batch": per_batch,
        "mixed_precision": "bf16" if bf16 else None,
    }  # fmt: skip
    trainer = treadle.Trainer(
        model, optimizer, loss_fn, {"training": training}, "cpu", schedule(optimizer, per_batch), hooks=[hook]
    )
    if k == 3:  # the last window of an epoch is a batch of 2 alone, as in the loop by hand
        assert len(loader) == 7
    trainer.train(loader, 2)
    assert torch.equal(after_hand, torch.rand(3))
    assert hook.steps == losses
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name]), name


def test_steps_one_by_one_equal_a_hand_written_loop():
    model, optimizer, loss_fn, loader = parts("classification")
    batches = list(loader)
    treadle.set_seed(1)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    ours, optimizer, loss_fn, _ = parts("classification")
    trainer = treadle.Trainer(ours, optimizer, loss_fn, device="cpu")
    treadle.set_seed(1)
    assert [trainer.train_step(batch)["loss"] for batch in batches] == losses
    for a, b in zip(model.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a, b)
