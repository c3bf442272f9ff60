"""Captured steps of the functional face, with a graph that runs its work anew: the host counts what a step weighs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from capture_kit import Rerun, capture_on_the_cpu
from functional_kit import Tagger
from helpers import differences
from treadle import Trainer, set_seed

IGNORED = -100


@pytest.fixture
def on_the_cpu(monkeypatch):
    capture_on_the_cpu(monkeypatch)


def batches(own_loss, *, none_counts_in=()):
    draw = torch.Generator().manual_seed(1)
    made = []
    for number in range(8):
        x = torch.randn(4, 6, 3, generator=draw)
        labels = torch.randint(0, 5, (4, 6), generator=draw)
        labels[torch.rand(4, 6, generator=draw) < number / 10] = IGNORED
        if number in none_counts_in:
            labels[:] = IGNORED
        made.append({"x": x, "labels": labels} if own_loss else (x, labels))
    return made


def counts(data):
    labels = [batch["labels"] if isinstance(batch, dict) else batch[1] for batch in data]
    return [float((one != IGNORED).sum()) for one in labels]


def fit(capture, data, *, own_loss, accumulation=1):
    set_seed(0)
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True)
    training = {"log_interval": None, "gradient_accumulation_steps": accumulation, "ema_decay": 0.9}
    loss_fn = None if own_loss else nn.CrossEntropyLoss()
    trainer = Trainer(model, optimizer, loss_fn, {"training": training}, "cpu", capture=capture)
    history = trainer.train(data, 4)
    return trainer, history


@pytest.mark.parametrize("own_loss", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_labels_that_do_not_count_weigh_the_same_in_captured_steps(on_the_cpu, own_loss, accumulation):
    data = batches(own_loss, none_counts_in=[5])
    (eager, one), (captured, other) = (
        fit(capture, data, own_loss=own_loss, accumulation=accumulation) for capture in (False, True)
    )
    assert Rerun.made <= 2  # where two micro-batches weigh the same, and where they do not, however they vary
    assert one["train_loss"] == other["train_loss"]
    a, b = (trainer._engine.state_dict() for trainer in (eager, captured))
    assert [key for key in ("model", "optimizer", "rng", "ema", "progress") if differences(a[key], b[key])] == []


@pytest.mark.parametrize("own_loss", [False, True])
def test_the_host_knows_the_weight_of_every_batch_after_the_first(own_loss):
    data = batches(own_loss, none_counts_in=[2])
    trainer, _ = fit(False, data[:1], own_loss=own_loss)
    task = trainer._engine.task
    prepared = [task.prepare_batch(trainer.model, batch) for batch in data]
    assert [weight for _, weight in prepared] == counts(data)
    assert all(mine is theirs for (mine, _), theirs in zip(prepared, data))
    assert [task.step(trainer.model, batch).weight for batch in data] == counts(data)


def test_what_the_host_cannot_know_before_the_model_ran_is_left_to_the_step():
    class Own(Trainer):
        def _loss_weight(self, inputs, outputs, targets):
            return float(outputs.abs().sum() > 0)

    model = Tagger()
    own = Own(model, None, nn.CrossEntropyLoss(), device="cpu")
    fresh = Trainer(model, None, None, device="cpu")
    summed, _ = fit(False, batches(False)[:1], own_loss=False)
    summed.loss_fn.reduction = "sum"
    for trainer, batch in ((own, batches(False)[0]), (fresh, batches(True)[0]), (summed, batches(False)[0])):
        assert trainer._engine.task.prepare_batch(model, batch) == (batch, None)
