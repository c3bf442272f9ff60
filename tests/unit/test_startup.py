"""A run says at its start what was decided and why."""

from __future__ import annotations

import logging

import torch
from torch import nn

from treadle import BaseTrainer, CheckpointingHook, EmaHook


class Fit(BaseTrainer):
    def build_data_loader(self):
        return [torch.ones(2, 1)] * 3

    def build_model(self):
        return nn.Linear(1, 1)

    def build_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def build_hooks(self):
        return [EmaHook(0.9), CheckpointingHook(2)]

    def forward(self, input):
        return self.model(input).square().mean(), {}


def block(caplog):
    blocks = [record.getMessage() for record in caplog.records if record.getMessage().startswith("training starts")]
    caplog.clear()
    assert len(blocks) == 1
    return dict(line.strip().split(maxsplit=1) for line in blocks[0].splitlines()[1:])


def test_one_block_names_each_decision_and_its_reason(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    Fit(4, workspace=tmp_path, device="cpu", mixed_precision="bf16").train()
    said = block(caplog)
    assert said == {
        "device": "cpu (device='cpu')",
        "precision": "bf16 by autocast, no gradient scaling needed",
        "ranks": "1 (no process group)",
        "start": "fresh: no checkpoint specified or found",
        "target": "step 4",
        "non-finite": "an error at once; checking is free on the CPU",
        "hooks": "EmaHook, CheckpointingHook",
    }
    Fit(6, workspace=tmp_path, device="cpu", max_non_finite_grad_retries=3).train()
    said = block(caplog)
    assert said["start"] == f"step 4, epoch 1, from {tmp_path}/checkpoints/checkpoint_step_4.pt"
    assert said["precision"] == "full (no mixed precision requested)"
    assert said["non-finite"].startswith("up to 3 retries with fresh data")


def test_a_finished_run_says_one_line_and_no_block(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    trainer = Fit(0, workspace=tmp_path, device="cpu")
    trainer.train()
    assert [record.getMessage() for record in caplog.records] == [
        "nothing to do: at step 0, epoch 0 the target, step 0 of the whole run, is reached; a larger one trains on"
    ]
    assert list(tmp_path.iterdir()) == []
