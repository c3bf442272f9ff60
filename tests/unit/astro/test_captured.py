"""Captured steps of the astronomy face, with a graph that runs its work anew: a loss of one's own, and no other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from astro_trainer_kit import VOCAB, codebooks, model, sequences
from capture_kit import Rerun, capture_on_the_cpu
from helpers import differences
from treadle import ConfigError, ReproducibilityContext
from treadle.astro import AstroTrainer, collate_sequences


class NextToken(AstroTrainer):
    def compute_loss(self, logits, targets):
        rows, wanted = logits.flatten(0, 1), targets.flatten()  # of three dimensions there is no deterministic kernel
        loss = nn.functional.cross_entropy(rows, wanted, ignore_index=VOCAB.pad_id)
        return loss, {"loss_ce": loss.detach()}


def of_one_length(count=12, length=24):
    """Batches of four; padded to one length, since each shape takes a recording of its own."""
    batches = []
    for start in range(0, count, 4):
        batch = collate_sequences(sequences(count)[start : start + 4])
        missing = length - batch["tokens"].shape[1]
        batches.append({name: nn.functional.pad(part, (0, missing)) for name, part in batch.items()})
    return batches


def trained(cls, capture, *, device="cpu", **settings):
    network = model().to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=torch.tensor(0.01), fused=True)
    config = {"warmup_steps": 2, "total_steps": 20, "log_every": 0, **settings}
    trainer = cls(
        network,
        VOCAB,
        of_one_length(),
        config,
        **codebooks(),
        device=device,
        use_amp=False,
        optimizer=optimizer,
        capture=capture,
    )
    trainer.train(num_epochs=4)
    return trainer


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_loss_of_ones_own_is_captured_with_the_numbers_of_eager_steps(monkeypatch, accumulation):
    capture_on_the_cpu(monkeypatch)
    eager, captured = (trained(NextToken, capture, grad_accum_steps=accumulation) for capture in (False, True))
    assert Rerun.made >= 1
    a, b = (trainer._engine.state_dict() for trainer in (eager, captured))
    assert [key for key in ("model", "optimizer", "rng", "progress") if differences(a[key], b[key])] == []
    losses = [[record["train_loss_total"] for record in trainer.history] for trainer in (eager, captured)]
    assert losses[0] == losses[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_loss_of_ones_own_is_one_cuda_graph():
    with ReproducibilityContext(0, deterministic=True):
        eager, captured = (trained(NextToken, capture, device="cuda") for capture in (False, True))
        assert len(captured._engine.steps._steps) == 1
        a, b = (trainer._engine.state_dict() for trainer in (eager, captured))
        assert [key for key in ("model", "optimizer", "rng", "progress") if differences(a[key], b[key])] == []


def test_its_weight_is_known_to_the_host():
    trainer = trained(NextToken, False)
    for batch in of_one_length():
        prepared, weight = trainer._task.prepare_batch(trainer.model, batch)
        assert prepared is batch
        assert weight == float((batch["tokens"][:, 1:] != VOCAB.pad_id).sum())
        assert weight == trainer._task.step(trainer.model, batch).weight


def test_the_packs_own_loss_is_refused_with_the_reason(monkeypatch):
    capture_on_the_cpu(monkeypatch)
    with pytest.raises(ConfigError, match="the terms of the loss are counted on the host in each step"):
        trained(AstroTrainer, True)
