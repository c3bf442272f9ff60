"""Captured steps of replicas: what the ranks agree on, with a graph that runs its work anew; NCCL is tried on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from capture_kit import Rerun, capture_on_the_cpu, refuse_on_the_device
from helpers import differences
from ranks import run_on_ranks
from treadle import Engine, StepOutput, TensorLoader
from treadle.capture.step import CapturedStep
from treadle.hooks import BaseHook, EmaHook


class Fit:
    def step(self, model, batch, totals=None, generator=None):
        x, y = batch
        gap = (model(x) - y).square().mean()
        return StepOutput(gap, {"double": gap * 2}, weight=float(len(x)), num_samples=len(x))


class Losses(BaseHook):
    def __init__(self):
        self.kept = []

    def on_after_step(self, trainer):
        trainer.losses.append([*map(float, trainer.step_info["loss"]), float(trainer.step_info["grad_norm"])])


def run(capture, *, rows=52, steps=20, until=None):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
    engine = Engine(
        model, optimizer, Fit(), scheduler=schedule, device="cpu", grad_clip=1.0, capture=capture,
        hooks=[EmaHook(0.9), Losses(), *(until or [])],
    )  # fmt: skip
    engine.losses = []
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(rows, 8, generator=generator), torch.randn(rows, 1, generator=generator)
    engine.run(TensorLoader(x, y, batch_size=4, shuffle=True, distributed=True), max_steps=steps)
    return engine


def same(one, other):
    a, b = one.state_dict(), other.state_dict()
    for key in ("model", "optimizer", "rng", "progress", "scheduler", "ema"):
        assert not differences(a[key], b[key]), key
    assert one.losses == other.losses
    return True


def compared(rows, later, spoil=None):
    with pytest.MonkeyPatch.context() as patch:
        eager = run(False, rows=rows)
        capture_on_the_cpu(patch)
        if later:
            refuse_on_the_device(patch)
        if spoil is not None and torch.distributed.get_rank() == 1:
            spoil(patch)
        captured = run("auto", rows=rows)
        assert same(eager, captured)
        return len(captured.steps._steps), captured.steps._off, Rerun.made


@pytest.mark.parametrize("rows", [48, 52, 53])  # whole batches; a short one on both ranks; ranks with unequal ones
@pytest.mark.parametrize("later", [False, True])
def test_captured_steps_of_replicas_have_the_bits_of_eager_ones(rows, later):
    found = run_on_ranks(compared, 2, rows, later)
    assert found[0] == found[1]
    assert found[0][0] >= 1
    assert not found[0][1]


def fails_to_record(patch):
    def fail(self, *args, **kwargs):
        raise RuntimeError("no memory for a graph")

    made = CapturedStep.__init__

    def after_warming_up(self, *args, **kwargs):
        made(self, *args, **kwargs)
        fail(self)

    patch.setattr(CapturedStep, "__init__", after_warming_up)


def differs(patch):
    patch.setattr("treadle.capture.steps.what_differs", differing)


def differing(*args, largest, **kwargs):
    from treadle.capture.check import what_differs

    return what_differs(*args, largest=largest, **kwargs) or "a captured step gives other numbers"


def cannot(patch):
    patch.setattr(
        "treadle.capture.steps._reason_against", lambda engine: "a hook acts before" if engine.step > 1 else None
    )


@pytest.mark.parametrize("spoil", [fails_to_record, differs, cannot])
def test_a_rank_that_cannot_capture_leaves_no_other_waiting(spoil):
    assert [each[:2] for each in run_on_ranks(compared, 2, 48, False, spoil)] == [(0, True)] * 2


class Stop(BaseHook):
    def on_after_step(self, trainer):
        if trainer.step == 11 and torch.distributed.get_rank() == 1:
            trainer.should_stop = True


def stopped():
    with pytest.MonkeyPatch.context() as patch:
        eager = run(False, until=[Stop()])
        capture_on_the_cpu(patch)
        captured = run("auto", until=[Stop()])
        assert captured.steps._steps
        return eager.step, captured.step


def test_a_stop_on_one_rank_stops_all_at_the_same_captured_step():
    first, other = run_on_ranks(stopped, 2)
    assert first == other
    assert first[0] == first[1]
