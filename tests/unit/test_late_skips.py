"""Steps in fp16 that the device skips, tried on the CPU: the same run as with a host that decides on each step."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import treadle.optim.late_skips
from capture_kit import capture_on_the_cpu
from helpers import CountReads, differences
from treadle import Engine, NonFiniteError, StepLogHook, StepOutput, TensorLoader
from treadle.hooks import BaseHook, EmaHook, ProgressHook, SwaHook
from treadle.optim.precision import Precision

STEPS = 24


@pytest.fixture
def on_the_device(monkeypatch):
    """Make fused optimizers on the CPU skip steps as on CUDA."""
    monkeypatch.setattr(treadle.optim.late_skips, "skips_on_device", lambda optimizer, device: True)


class Fit:
    def step(self, model, batch, totals=None, generator=None):
        x, y = batch
        return StepOutput((model(x) - y).square().mean(), weight=float(len(x)), num_samples=len(x))


class Sees(BaseHook):
    """Looks at every step."""

    def __init__(self):
        self.rows = []

    def on_after_step(self, trainer):
        self.rows.append((trainer.step_info["applied"], trainer.applied_steps, trainer.step_info["reason"]))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=torch.tensor(0.01), momentum=0.9, fused=True)


def plain(model):
    return torch.optim.SGD(model.parameters(), lr=torch.tensor(0.01), fused=True)


def engine_of(hooks, *, schedule=None, make=adamw, scale=2.0**20, growth=5, precision="fp16", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 1))
    optimizer = make(model)
    scheduler = None
    if schedule is not None:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
        options["scheduler_interval"] = schedule
    engine = Engine(
        model, optimizer, Fit(), scheduler=scheduler, device="cpu", grad_clip=1.0, hooks=hooks, precision=precision,
        **options,
    )  # fmt: skip
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth)
    engine.precision = Precision(precision, engine.device, scaler=scaler)
    return engine


def loader_of(bad=(), num_buffers=1):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(80, 8, generator=generator), torch.randn(80, 1, generator=generator)
    x[list(bad)] = float("nan")
    return TensorLoader(x, y, batch_size=8, shuffle=True, num_buffers=num_buffers)


def run(folder, hooks=(), *, steps=STEPS, state=None, **options):
    hooks = [EmaHook(0.9), ProgressHook(10), StepLogHook(folder / "steps.jsonl", 7), *hooks]
    engine = engine_of(hooks, **options)
    if state is not None:
        engine.load_state_dict(state)
    engine.run(loader_of(num_buffers=options.get("accumulation_steps", 1)), max_steps=steps)
    return engine


def logged(folder):
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def same(one, other):
    a, b = one.state_dict(), other.state_dict()
    for key in ("model", "optimizer", "rng", "progress", "scheduler", "ema", "scaler"):
        assert not differences(a[key], b[key]), key
    return True


@pytest.fixture
def decided(tmp_path, monkeypatch):
    """Return a run whose host decides on each step."""

    def decide(**options):
        with monkeypatch.context() as patch:
            patch.setattr(treadle.optim.late_skips, "skips_on_device", lambda optimizer, device: False)
            engine = run(tmp_path / "decided", [], **options)
        assert engine.guard.skips is None
        assert 0 < engine.applied_steps < engine.step
        return engine

    (tmp_path / "decided").mkdir()
    return decide


CASES = {
    "nothing": {}, "schedule": {"schedule": "step"}, "schedule of epochs": {"schedule": "epoch"},
    "accumulation": {"accumulation_steps": 2}, "momentum": {"make": momentum}, "SGD": {"make": plain},
}  # fmt: skip


@pytest.mark.parametrize(("captured", "sees"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_a_run_that_learns_late_has_the_state_and_the_log_of_one_that_decides(
    on_the_device, decided, tmp_path, monkeypatch, options, sees, captured
):
    expected = decided(**options)
    if captured:
        capture_on_the_cpu(monkeypatch)
    seen = Sees()
    late = run(tmp_path, [seen] if sees else [], capture=captured, **options)
    assert late.guard.skips is not None
    assert not captured or late.steps._steps
    assert same(expected, late)
    assert logged(tmp_path) == logged(tmp_path / "decided")
    assert expected.train_means() == late.train_means()
    if sees:
        rows = logged(tmp_path)
        assert [(applied, reason) for applied, _, reason in seen.rows] == [(r["applied"], r["reason"]) for r in rows]
        assert [count for _, count, _ in seen.rows] == [sum(r["applied"] for r in rows[: n + 1]) for n in range(STEPS)]


@pytest.mark.parametrize("cut", [1, 9, 10, 17])
@pytest.mark.parametrize("first", [False, True])
def test_a_cut_run_goes_on_captured_or_not(on_the_device, decided, tmp_path, monkeypatch, first, cut):
    expected = decided()
    capture_on_the_cpu(monkeypatch)
    state = run(tmp_path, steps=cut, capture=first).state_dict()
    assert same(expected, run(tmp_path, state=state, capture=not first))


@pytest.mark.parametrize(
    "average", [lambda: EmaHook(0.9, update_interval=3, name="other"), lambda: SwaHook(5, name="other")]
)
def test_averages_that_the_host_counts_are_those_of_a_run_that_decides(on_the_device, tmp_path, monkeypatch, average):
    late = run(tmp_path, [average()])
    assert late.guard.skips.host_waits
    monkeypatch.setattr(treadle.optim.late_skips, "skips_on_device", lambda optimizer, device: False)
    assert same(late, run(tmp_path, [average()]))


def test_nothing_is_read_while_nobody_asks(on_the_device, tmp_path):
    engine = engine_of([EmaHook(0.9), StepLogHook(tmp_path / "steps.jsonl")], scale=2.0**10)
    reads, train_step = [], engine.train_step

    def counted(group):
        with CountReads() as mode:
            outcome = train_step(group)
        reads.append(len(mode.reads))
        return outcome

    engine.prepare()
    engine.steps = counted
    engine.run(loader_of(), max_steps=STEPS)
    assert reads[1:-1] == [0] * (STEPS - 2)
    assert engine.applied_steps == STEPS


def test_the_end_of_a_scale_that_cannot_fall_is_the_error_of_a_run_that_decides(on_the_device, monkeypatch):
    def broken(sees):
        engine = engine_of([EmaHook(0.9), *([Sees()] if sees else [])], scale=3.0, growth=100)
        with pytest.raises(NonFiniteError) as caught:
            engine.run(loader_of(bad=[0, 40]), max_steps=40)
        return engine, caught.value

    (late, error), (told, same_error) = broken(False), broken(True)
    monkeypatch.setattr(treadle.optim.late_skips, "skips_on_device", lambda optimizer, device: False)
    decided, expected = broken(False)
    assert error.step == same_error.step == expected.step
    assert error.batch_index == same_error.batch_index == expected.batch_index
    for engine in (late, told):
        assert engine.applied_steps == decided.applied_steps
        assert not differences(dict(engine.model.named_parameters()), dict(decided.model.named_parameters()))
        assert engine.precision.scaler.state_dict() == decided.precision.scaler.state_dict()
        assert engine.averages["ema"].num_updates == decided.averages["ema"].num_updates
        shadows = (dict(each.averages["ema"].module.named_parameters()) for each in (engine, decided))
        assert not differences(*shadows)


def test_a_step_of_the_users_own_loop_is_known_to_be_skipped(on_the_device):
    engine = engine_of([], scale=2.0**40)
    batch = next(iter(loader_of()))
    assert engine.step_group([batch]) is False
    assert engine.optimizer.state == {}
    assert engine.step_info["reason"] == "non-finite gradient: the fp16 scale was lowered"


class Breaks(BaseHook):
    """Ends a run without being due."""

    def on_after_step(self, trainer):
        if trainer.step == 18:
            raise ValueError

    def steps_ahead(self, trainer):
        return None


def test_steps_of_a_broken_run_change_no_state_that_is_loaded_after_it(on_the_device, tmp_path, decided):
    expected, breaks = decided(), Breaks()
    engine = engine_of([EmaHook(0.9), breaks])
    start = engine.state_dict()
    with pytest.raises(ValueError):
        engine.run(loader_of(), max_steps=STEPS)
    assert engine.guard.skips._steps
    engine.hooks.remove(breaks)
    engine.load_state_dict(start)
    engine.run(loader_of(), max_steps=STEPS)
    assert engine.applied_steps == expected.applied_steps
    assert engine.averages["ema"].num_updates == expected.averages["ema"].num_updates


def test_a_scaler_of_another_kind_is_asked_by_the_host(on_the_device):
    class Own(torch.amp.GradScaler):
        def update(self, new_scale=None):
            super().update(new_scale)

    engine = engine_of([])
    engine.precision = Precision("fp16", engine.device, scaler=Own("cpu"))
    engine.prepare()
    assert engine.guard.skips is None
