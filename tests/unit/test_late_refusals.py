"""Steps that the device refuses and the host hears of later; the CPU's fused optimizer stands in for that of a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import treadle.engine.session
from helpers import differences
from treadle import Engine, NonFiniteError, StepOutput, TensorLoader
from treadle.hooks import BaseHook, EmaHook, LoggingHook
from treadle.optim.late_flags import LateFlags, StepLocation


@pytest.fixture(autouse=True)
def skipping_on_the_cpu(monkeypatch):
    monkeypatch.setattr(treadle.engine.session, "skips_on_device", lambda optimizer, device: True)


class Fit:
    def step(self, model, batch, totals=None, generator=None):
        x, y = batch
        return StepOutput((model(x) - y).square().mean())


def engine_of(**options):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    return Engine(model, optimizer, Fit(), device="cpu", grad_clip=1.0, **options)


def loader_of(bad=None, steps=200):
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(4 * steps, 4, generator=draw), torch.randn(4 * steps, 1, generator=draw)
    if bad is not None:
        x[4 * (bad - 1)] = float("nan")
    return TensorLoader(x, y, batch_size=4)


def straight(steps):
    engine = engine_of()
    engine.run(loader_of(), max_steps=steps)
    return engine


@pytest.mark.parametrize("bad", [1, 2, 7, 8, 9, 16, 17, 60])
def test_the_error_names_the_step_and_comes_soon_and_nothing_has_changed_since(bad):
    engine = engine_of()
    with pytest.raises(NonFiniteError) as caught:
        engine.run(loader_of(bad), max_steps=200)
    assert (caught.value.step, caught.value.batch_index) == (bad, bad)
    assert bad < engine.step <= bad + 25
    assert engine.applied_steps == bad - 1
    before = straight(bad - 1)
    assert not differences(before.model.state_dict(), engine.model.state_dict())
    if bad > 1:
        steps, found = (each.optimizer.state_dict()["state"] for each in (before, engine))
        assert not differences(steps, found)


@pytest.mark.parametrize("end", [5, 8, 11, 30])
def test_it_is_known_at_the_end_of_the_run_and_before_a_state_is_made(end):
    engine = engine_of()
    with pytest.raises(NonFiniteError) as caught:
        engine.run(loader_of(5), max_steps=end)
    assert caught.value.step == 5

    class Saves(BaseHook):
        def on_after_step(self, trainer):
            if trainer.step == 6:
                trainer.state_dict()

    engine = engine_of(hooks=[Saves()])
    with pytest.raises(NonFiniteError) as caught:
        engine.run(loader_of(5), max_steps=50)
    assert (caught.value.step, engine.step) == (5, 6)


def test_it_is_known_before_an_evaluation():
    class Evaluates(BaseHook):
        def on_after_step(self, trainer):
            if trainer.step == 7:
                trainer.evaluate(loader_of(steps=2))

    engine = engine_of(hooks=[Evaluates()])
    with pytest.raises(NonFiniteError):
        engine.run(loader_of(5), max_steps=50)
    assert engine.step == 7


def test_it_is_known_before_anything_is_reported(caplog):
    engine = engine_of(hooks=[LoggingHook(6)])
    with caplog.at_level("INFO"), pytest.raises(NonFiniteError):
        engine.run(loader_of(8), max_steps=50)
    assert engine.step == 12
    assert "nan" not in caplog.text


def test_a_run_without_such_steps_has_the_bits_of_one_that_looks_at_each(monkeypatch):
    engine = engine_of(hooks=[EmaHook(0.9)])
    engine.run(loader_of(), max_steps=100)
    monkeypatch.setattr(treadle.engine.session, "skips_on_device", lambda optimizer, device: False)
    looks = engine_of(hooks=[EmaHook(0.9)])
    looks.run(loader_of(), max_steps=100)
    assert engine.guard.deferred
    assert not looks.guard.deferred
    for part in ("model", "optimizer", "ema"):
        assert not differences(engine.state_dict()[part], looks.state_dict()[part])


def test_few_steps_are_remembered():
    engine = engine_of()
    engine.run(loader_of(), max_steps=1)
    late = engine.guard.late

    class Counts(BaseHook):
        most = 0

        def on_after_step(self, trainer):
            self.most = max(self.most, len(late._steps))

    counts = Counts()
    engine.hooks.append(counts)
    engine.run(loader_of(), max_steps=150)
    assert 8 <= counts.most <= 24


def test_ranks_hear_of_it_at_the_same_step_since_each_flag_has_a_place_of_its_own():
    flags, raised = LateFlags(torch.device("cpu")), []
    for step in range(1, 60):
        norm = torch.tensor(float("nan") if step == 9 else 1.0)
        flags.raise_for(norm)
        flags.note(StepLocation(step, 0, step, 1, 1), norm)
        raised.append(flags.raised)
        if flags.raised:
            break
    assert step == 32  # step 16 sent the flag; what 8 had sent is read at 24, and what 16 had sent at 32
    refusal = flags.late_refusal()
    assert (refusal.place.step, refusal.undone) == (9, 24)
    assert flags.late_refusal() is None
