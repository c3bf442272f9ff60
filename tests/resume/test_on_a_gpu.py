"""On one GPU: stop after any step and go on in new objects, equal to the bit with deterministic kernels."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from helpers import Snapshots, differences
from treadle import EmaHook, Engine, LoggingHook, ReproducibilityContext, StepOutput, set_seed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class MeanSquare:
    def step(self, model, batch, totals=None, generator=None):
        x, y = (tensor.cuda() for tensor in batch)
        return StepOutput(nn.functional.mse_loss(model(x).float(), y), weight=float(len(x)))


def make(seed, precision, fused):
    set_seed(seed)
    data = torch.randn(36, 16, generator=torch.Generator().manual_seed(1))
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    snapshots = Snapshots()
    engine = Engine(
        model, optimizer, MeanSquare(), scheduler=LambdaLR(optimizer, lambda step: 1 / (1 + step)), device="cuda",
        precision=precision, grad_clip=0.5, accumulation_steps=2, hooks=[snapshots, EmaHook(0.9), LoggingHook(3)],
    )  # fmt: skip
    return engine, snapshots, DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=4, shuffle=True)


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
@pytest.mark.parametrize("fused", [True, False])
def test_stopping_after_any_step_changes_nothing_on_a_gpu(precision, fused):
    with ReproducibilityContext(0, deterministic=True):
        engine, snapshots, loader = make(0, precision, fused)
        engine.run(loader, epochs=3)
        expected = engine.state_dict()
        assert engine.guard.deferred == fused
        for cut in sorted(snapshots.states):
            resumed, _, loader = make(1, precision, fused)
            resumed.load_state_dict(snapshots.states[cut])
            resumed.run(loader, epochs=3)
            assert differences(expected, resumed.state_dict()) == [], f"stopped after step {cut}"
