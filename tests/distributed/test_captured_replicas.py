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
from treadle.capture.steps import CapturedSteps
from treadle.hooks import BaseHook, EmaHook
from treadle.optim.precision import Precision


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


def run(capture, *, rows=52, steps=20, until=None, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
    engine = Engine(
        model, optimizer, Fit(), scheduler=schedule, device="cpu", grad_clip=1.0, capture=capture,
        hooks=[EmaHook(0.9), Losses(), *(until or [])], **options,
    )  # fmt: skip
    if "precision" in options:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=5)
        engine.precision = Precision(options["precision"], engine.device, scaler=scaler)
    engine.losses = []
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(rows, 8, generator=generator), torch.randn(rows, 1, generator=generator)
    engine.run(TensorLoader(x, y, batch_size=4, shuffle=True, distributed=True), max_steps=steps)
    return engine


def same(one, other):
    a, b = one.state_dict(), other.state_dict()
    for key in ("model", "optimizer", "rng", "progress", "scheduler", "ema", "scaler"):
        assert not differences(a[key], b[key]), key
    assert not differences(one.losses, other.losses)
    return True


def compared(rows, later, spoil=None, **options):
    with pytest.MonkeyPatch.context() as patch:
        eager = run(False, rows=rows, **options)
        capture_on_the_cpu(patch)
        if later:
            refuse_on_the_device(patch)
        if spoil is not None and torch.distributed.get_rank() == 1:
            spoil(patch)
        graphs = count_graphs(patch)
        captured = run("auto", rows=rows, **options)
        assert same(eager, captured)
        assert not captured.steps._steps  # or NCCL would not let the process end
        return graphs[-1], captured.steps._off, Rerun.made


def count_graphs(patch):
    """Return a list that gets the number of graphs at the end of each run."""
    counts, end_run = [], CapturedSteps.end_run

    def counted(steps):
        counts.append(len(steps._steps))
        end_run(steps)

    patch.setattr(CapturedSteps, "end_run", counted)
    return counts


@pytest.mark.parametrize("rows", [48, 52, 53])  # whole batches; a short one on both ranks; ranks with unequal ones
@pytest.mark.parametrize("later", [False, True])
def test_captured_steps_of_replicas_have_the_bits_of_eager_ones(rows, later):
    found = run_on_ranks(compared, 2, rows, later)
    assert found[0] == found[1]
    assert found[0][0] >= 1
    assert not found[0][1]


@pytest.mark.parametrize("rows", [53])  # a rank has a short micro-batch
def test_micro_batches_of_replicas_that_add_up_are_captured(rows):
    found = run_on_ranks(accumulated, 2, rows)
    assert found[0] == found[1]
    assert found[0][0] >= 1
    assert not found[0][1]


def accumulated(rows):
    return compared(rows, False, accumulation_steps=2)


def test_fp16_of_replicas_is_captured_and_skips_the_steps_that_a_host_skips():
    (first, applied), other = run_on_ranks(scaled, 2)
    assert (first, applied) == other
    assert first[0] >= 1
    assert 0 < applied < 20


def scaled():
    with pytest.MonkeyPatch.context() as patch:
        host = run(False, precision="fp16")
        patch.setattr("treadle.optim.late_skips.skips_on_device", lambda optimizer, device: True)
        assert same(host, run(False, precision="fp16"))
        return compared(52, False, precision="fp16"), host.applied_steps


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

    return what_differs(*args, largest=largest, **kwargs) or "a captured step differs from an eager one"


def cannot(patch):
    patch.setattr(
        "treadle.capture.steps.reason_against", lambda engine: "a hook acts before" if engine.step > 1 else None
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
        graphs = count_graphs(patch)
        captured = run("auto", until=[Stop()])
        assert graphs[-1]
        return eager.step, captured.step


def test_a_stop_on_one_rank_stops_all_at_the_same_captured_step():
    first, other = run_on_ranks(stopped, 2)
    assert first == other
    assert first[0] == first[1]
