from __future__ import annotations

import copy
import gc
import itertools
import logging
import math
import tracemalloc

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    LambdaLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)
from torch.utils.data import DataLoader

from helpers import Augmented, MeanSquare, Scalar, Slopes, differences, scalar_engine, small_model, through_a_file
from treadle import EpochTrainer, StepOutput, Total, Weighted
from treadle.engine import Engine
from treadle.errors import ConfigError, NonFiniteError
from treadle.hooks import BaseHook, CudaMaxMemoryHook, EmaHook, HistoryHook, LoggingHook, NonFiniteHook
from treadle.optim.gradients import total_norm
from treadle.optim.optimizer import check_scheduler
from treadle.seed import set_seed

INF, NAN = math.inf, math.nan


class Infos(BaseHook):
    """Keeps what every step said about itself."""

    def __init__(self):
        self.all = []

    def on_after_step(self, trainer):
        self.all.append(dict(trainer.step_info))


class Regression:
    """The loss mean((p - y)^2) over the values of a micro-batch, weighted by their number."""

    def step(self, model, batch, totals=None, generator=None):
        y = torch.tensor(batch)
        return StepOutput(((model.weight - y) ** 2).mean(), weight=len(batch))


def gradient_of(engine, batches):
    before = engine.model.weight.item()
    engine.step_group(batches)
    return (before - engine.model.weight.item()) / engine.optimizer.param_groups[0]["lr"]


# -- weights and accumulation ------------------------------------------------------------------------------------------


def test_micro_batches_of_unequal_size_equal_one_big_batch():
    engine = scalar_engine(task=Regression(), accumulation_steps=2)
    engine.run([[1.0, 1.0, 1.0], [5.0]], epochs=1)
    assert engine.model.weight.item() == pytest.approx(4, abs=1e-6)


@pytest.mark.parametrize("weights", [(1, 3), (1.0, 3.0), (torch.tensor(1), torch.tensor(3))])
def test_a_token_counts_the_same_in_every_micro_batch(weights):
    engine = scalar_engine(accumulation_steps=2)
    assert gradient_of(engine, list(zip((8.0, 0.0), weights, strict=True))) == pytest.approx(2.0, abs=1e-6)


def test_a_missing_loss_is_left_out():
    assert gradient_of(scalar_engine(accumulation_steps=2), [3.0, None]) == 3.0
    assert gradient_of(scalar_engine(accumulation_steps=2), [None, 3.0]) == 3.0


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_short_last_group_is_flushed_and_leaks_nothing(epochs):
    engine = scalar_engine(accumulation_steps=4)
    engine.run([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], epochs=epochs)
    assert engine.step == 2 * epochs
    assert engine.model.weight.item() == pytest.approx(-8.0 * epochs, abs=1e-6)


@pytest.mark.parametrize("nothing", [None, (2.0, 0), (2.0, 0.0), (NAN, torch.tensor(0))])
def test_a_group_that_contributes_nothing_moves_neither_weights_nor_schedule_nor_average(nothing):
    infos = Infos()
    engine = scalar_engine(start=1.0, accumulation_steps=2, hooks=[EmaHook(0.5), infos])
    engine.optimizer = torch.optim.SGD(engine.model.parameters(), lr=1.0, momentum=0.9, weight_decay=0.1)
    engine.lr_scheduler = StepLR(engine.optimizer, 1, gamma=0.5)
    engine.run([nothing, nothing, 1.0], epochs=1)
    assert [info["applied"] for info in infos.all] == [False, True]
    assert infos.all[0]["reason"]
    assert (engine.step, engine.applied_steps, engine.micro_steps) == (2, 1, 3)
    assert engine.averages["ema"].num_updates == 1
    assert engine.model.weight.item() == pytest.approx(1 - 1.1)
    assert engine.optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("nothing", [None, (2.0, torch.tensor(0))])
def test_an_fp16_run_goes_on_after_a_group_that_contributes_nothing(nothing):
    engine = scalar_engine(precision="fp16")
    engine.run([nothing, 1.0, nothing, 1.0], epochs=1)
    assert engine.applied_steps == 2
    assert engine.model.weight.item() == -2.0
    assert engine.precision.scaler.get_scale() == 65536.0


def test_sums_are_added_up_in_gradient_and_epoch_value():
    class Sums(Slopes):
        def step(self, model, batch, totals=None, generator=None):
            return StepOutput(model(batch), reduction="sum", weight=7)

    engine = scalar_engine(start=1.0, lr=0.0, task=Sums(), accumulation_steps=2)
    trainer = EpochTrainer(engine)
    trainer.fit([10.0, 20.0, 5.0], [1.0, 2.0], 1)
    assert trainer.history[0]["train_loss"] == 35.0
    assert trainer.history[0]["val_loss"] == 3.0
    assert gradient_of(scalar_engine(task=Sums(), accumulation_steps=2), [3.0, 4.0]) == 7.0


class TwoTerms:
    """Two means over different counts: a over all values, b over the positive ones."""

    def weights(self, batch):
        return {"a": len(batch), "b": sum(y > 0 for y in batch)}

    def step(self, model, batch, totals=None, generator=None):
        totals = totals or self.weights(batch)
        y = torch.tensor(batch)
        a = (model.weight - y).square().sum()
        b = (model.weight * y)[y > 0].sum()
        loss = a / totals["a"] + b / max(totals["b"], 1)
        counts = self.weights(batch)
        records = {"a": Weighted(a.detach() / counts["a"], counts["a"])}
        return StepOutput(loss, records)


@pytest.mark.parametrize("split", [[4], [2, 2], [1, 3], [3, 1], [1, 1, 1, 1]])
def test_terms_with_counts_of_their_own_give_the_gradient_of_one_big_batch(split):
    values = [1.0, -2.0, -3.0, 5.0]
    batches, start = [], 0
    for size in split:
        batches.append(values[start : start + size])
        start += size
    engine = scalar_engine(start=0.5, task=TwoTerms(), accumulation_steps=4)
    expected = sum(2 * (0.5 - y) for y in values) / 4 + (1 + 5) / 2
    assert gradient_of(engine, batches) == pytest.approx(expected, abs=1e-6)
    assert engine.step_info["applied"]


@pytest.mark.parametrize("split", [[4], [1, 3], [1, 1, 1, 1]])
def test_the_reported_loss_of_a_sum_of_terms_is_that_of_the_whole_step(split):
    values, batches = [1.0, -2.0, -3.0, 5.0], []
    for size in split:
        batches.append(values[sum(map(len, batches)) :][:size])
    engine = scalar_engine(start=0.5, lr=0.0, task=TwoTerms(), accumulation_steps=4)
    trainer = EpochTrainer(engine)
    trainer.fit([*batches, *[[3.0]] * (4 - len(split)), [2.0]], None, 1)  # a short last step counts as a step
    padded = [*values, *[3.0] * (4 - len(split))]
    positive = [y for y in padded if y > 0]
    first = sum((0.5 - y) ** 2 for y in padded) / len(padded) + 0.5 * sum(positive) / len(positive)
    last = (0.5 - 2.0) ** 2 + 0.5 * 2.0
    assert trainer.history[0]["train_loss"] == pytest.approx((first + last) / 2, abs=1e-6)


def test_a_task_may_say_that_a_batch_has_no_terms():
    class NoTerms(TwoTerms):
        def weights(self, batch):
            return None

        def step(self, model, batch, totals=None, generator=None):
            assert totals is None
            return StepOutput(model(batch))

    assert gradient_of(scalar_engine(task=NoTerms(), accumulation_steps=2), [2.0, 4.0]) == 3.0


def test_any_split_of_the_same_samples_trains_the_same_weights():
    values = [float(i) for i in range(12)]
    results = []
    for sizes in ([12], [4, 4, 4], [1, 5, 6], [1] * 12, [11, 1]):
        batches, start = [], 0
        for size in sizes:
            batches.append(values[start : start + size])
            start += size
        engine = scalar_engine(lr=0.1, task=Regression(), accumulation_steps=len(sizes))
        engine.run(batches, epochs=3)
        results.append(engine.model.weight.item())
    assert results == pytest.approx([results[0]] * 5, abs=1e-5)


# -- precision, clipping, non-finite -----------------------------------------------------------------------------------


class Vector(nn.Module):
    def __init__(self, size=2):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))


class Direction:
    def step(self, model, batch, totals=None, generator=None):
        return StepOutput((model.weight * torch.tensor(batch)).sum())


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_clipping_follows_unscaling_and_the_norm_is_that_before_it(precision):
    model = Vector()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=1.0), Direction(), device="cpu", grad_clip=1.0,
                    precision=precision)  # fmt: skip
    engine.run([[3.0, 4.0]], max_steps=1)
    assert engine.step_info["grad_norm"].item() == 5.0
    assert (-model.weight).tolist() == pytest.approx([0.6, 0.8], abs=1e-5)


class Looks:
    """Looks rows up; the mean over them is weighted by their number."""

    def step(self, model, batch, totals=None, generator=None):
        return StepOutput(model(torch.tensor(batch)).square().mean(), weight=float(len(batch)))


@pytest.mark.parametrize("settings", [{}, {"grad_clip": 0.1}, {"accumulation_steps": 2}, {"precision": "fp16"}])
def test_sparse_gradients_train_the_weights_that_dense_ones_do(settings):
    engines = []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = nn.Embedding(6, 2, sparse=sparse)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engines.append(Engine(model, optimizer, Looks(), device="cpu", **settings))
        engines[-1].run([[0, 2, 2], [5], [1, 1, 1, 0]], max_steps=4)
    sparse, dense = engines
    assert sparse.applied_steps == 4
    assert torch.allclose(sparse.model.weight, dense.model.weight, rtol=1e-5)
    assert sparse.step_info["grad_norm"].item() == pytest.approx(dense.step_info["grad_norm"].item(), rel=1e-5)


def test_a_sparse_gradient_that_is_not_finite_is_refused(tmp_path):
    model = nn.Embedding(3, 1, sparse=True)
    with torch.no_grad():
        model.weight[1] = float("inf")
    hook = NonFiniteHook("skip", path=tmp_path)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), Looks(), device="cpu", hooks=[hook])
    engine.run([[1, 0]], max_steps=1)
    assert engine.applied_steps == 0
    assert '"first_parameter": "weight"' in next(tmp_path.glob("*/event.json")).read_text()


def test_a_scheduler_of_another_optimizer_is_refused_before_the_first_step():
    engine, other = scalar_engine(), scalar_engine()
    engine.lr_scheduler = StepLR(other.optimizer, 1)
    with pytest.raises(ConfigError, match="StepLR was built over another optimizer"):
        engine.run([1.0], max_steps=1)
    other.optimizer.param_groups = engine.optimizer.param_groups  # as a wrapper has those of what it wraps
    check_scheduler(engine.lr_scheduler, engine.optimizer)


def test_an_optimizer_that_wants_a_closure_is_refused_before_the_first_step():
    engine = scalar_engine()
    engine.optimizer = torch.optim.LBFGS(engine.model.parameters())
    with pytest.raises(ConfigError, match="LBFGS needs a closure"):
        engine.run([1.0], max_steps=1)
    assert engine.step == 0


@pytest.mark.parametrize("clip", [None, 0, 0.0])
def test_none_and_zero_turn_clipping_off_and_the_norm_is_still_measured(clip):
    model = Vector()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=1.0), Direction(), device="cpu", grad_clip=clip)
    engine.run([[3.0, 4.0]], max_steps=1)
    assert (-model.weight).tolist() == [3.0, 4.0]
    assert engine.step_info["grad_norm"].item() == 5.0


def test_gradients_are_final_but_for_clipping_when_hooks_see_them():
    seen = []

    class Look(BaseHook):
        def on_before_optimizer_step(self, trainer):
            seen.append(trainer.model.weight.grad.item())

    engine = scalar_engine(hooks=[Look()], accumulation_steps=2, precision="fp16", grad_clip=0.5)
    engine.run([(8.0, 1), (0.0, 3)], max_steps=1)
    assert seen == pytest.approx([2.0], abs=1e-3)
    assert engine.model.weight.item() == pytest.approx(-0.5, abs=1e-3)


class Changes(BaseHook):
    """Changes the gradient of the one weight in one of the ways that people do."""

    def __init__(self, way):
        self.way = way

    def on_before_optimizer_step(self, trainer):
        self.way(trainer.model.weight)


def replace(weight):
    weight.grad = torch.full_like(weight, NAN)


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("precision", [None, "fp16"])
@pytest.mark.parametrize("poison", [lambda w: w.grad.mul_(NAN), lambda w: w.grad.data.fill_(INF), replace],
                         ids=["in place", "data", "replaced"])  # fmt: skip
def test_a_gradient_that_a_hook_made_non_finite_does_not_reach_the_weights(poison, precision, clip):
    engine = scalar_engine(2.0, hooks=[Changes(poison)], precision=precision, grad_clip=clip)
    if precision is None:
        with pytest.raises(NonFiniteError):
            engine.run([1.0], max_steps=1)
    else:
        engine.run([1.0], max_steps=1)
        assert engine.precision.scaler.get_scale() == 32768.0
    assert (engine.model.weight.item(), engine.applied_steps) == (2.0, 0)
    assert not engine.step_info["grad_norm"].isfinite()


class LooksLikeThose(CudaMaxMemoryHook):
    def on_before_optimizer_step(self, trainer):
        trainer.model.weight.grad.data.mul_(2.0)


@pytest.mark.parametrize(("hooks", "times"), [
    ([CudaMaxMemoryHook()], 1), ([Changes(lambda w: None)], 2), ([CudaMaxMemoryHook(), Changes(lambda w: None)], 2),
    ([LooksLikeThose()], 2),
])  # fmt: skip
def test_gradients_are_measured_again_only_where_a_hook_may_have_changed_them(hooks, times, monkeypatch):
    calls = []
    for place in ("treadle.engine.loop", "treadle.engine.attempt"):
        monkeypatch.setattr(f"{place}.total_norm", lambda grads: (calls.append(1), total_norm(grads))[1])
    scalar_engine(hooks=hooks).run([1.0], max_steps=1)
    assert len(calls) == times


def test_clipping_and_the_verdict_go_by_the_gradient_that_hooks_left():
    scaled = scalar_engine(hooks=[Changes(lambda w: w.grad.mul_(8.0))], grad_clip=2.0)
    scaled.run([1.0], max_steps=1)
    assert scaled.model.weight.item() == pytest.approx(-2.0, abs=1e-5)
    assert scaled.step_info["grad_norm"].item() == 8.0
    repaired = scalar_engine(hooks=[Changes(lambda w: w.grad.nan_to_num_(0.5))])
    repaired.run([NAN], max_steps=1)
    assert repaired.model.weight.item() == -0.5
    dropped = scalar_engine(hooks=[Changes(lambda w: setattr(w, "grad", None))], grad_clip=1.0)
    dropped.run([1.0], max_steps=1)
    assert dropped.model.weight.item() == 0.0


@pytest.mark.parametrize("bad", [[INF, 1.0], [NAN, 1.0], [-INF, INF], [3e38, 3e38]])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_non_finite_update_never_reaches_the_weights(bad, clip):
    model = Vector()
    engine = Engine(model, torch.optim.Adam(model.parameters(), lr=1.0), Direction(), device="cpu", grad_clip=clip)
    engine.run([[1.0, 1.0]], max_steps=1)
    before = differences({"m": model.state_dict(), "o": engine.optimizer.state_dict()}, {})
    kept = copy.deepcopy({"m": dict(model.state_dict()), "o": engine.optimizer.state_dict()})
    with pytest.raises(NonFiniteError) as caught:
        engine.run([bad], max_steps=2)
    assert before
    assert differences({"m": dict(model.state_dict()), "o": engine.optimizer.state_dict()}, kept) == []
    error = caught.value
    assert (error.step, error.epoch, error.tries) == (2, 1, 1)
    assert not math.isfinite(error.norm)


def test_a_refused_gradient_is_tried_again_with_fresh_data():
    infos = Infos()
    engine = scalar_engine(max_non_finite_grad_retries=2, hooks=[infos])
    engine.run([NAN, 1.0, 2.0], max_steps=2)
    assert engine.model.weight.item() == -3.0
    assert [(info["retries"], info["applied"], len(info["loss"])) for info in infos.all] == [(1, True, 1), (0, True, 1)]
    assert (engine.step, engine.micro_steps) == (2, 3)


@pytest.mark.parametrize(("retries", "tries"), [(None, 1), (0, 1), (1, 2), (2, 3)])
def test_retries_end(retries, tries):
    engine = scalar_engine(max_non_finite_grad_retries=retries)
    with pytest.raises(NonFiniteError) as caught:
        engine.run([1.0] + [INF] * 9, max_steps=5)
    assert (caught.value.tries, caught.value.step, caught.value.batch_index) == (tries, 2, 1 + tries)
    assert engine.model.weight.item() == -1.0


def test_a_retry_by_steps_opens_the_next_epoch_and_by_epochs_skips_the_step(caplog):
    class FirstBad:
        """The last batch of the first epoch is bad."""

        def __init__(self):
            self.epochs = 0

        def __iter__(self):
            self.epochs += 1
            yield 1.0
            yield NAN if self.epochs == 1 else 4.0

    engine = scalar_engine(max_non_finite_grad_retries=1)
    engine.run(FirstBad(), max_steps=3)
    assert (engine.model.weight.item(), engine.step, engine.epoch) == (-6.0, 3, 1)
    infos = Infos()
    engine = scalar_engine(max_non_finite_grad_retries=1, hooks=[infos])
    trainer = EpochTrainer(engine)
    with caplog.at_level(logging.WARNING, "treadle"):
        trainer.fit(FirstBad(), None, 2)
    assert "step 2 is skipped" in caplog.text
    assert [info["applied"] for info in infos.all] == [True, False, True, True]
    assert engine.model.weight.item() == -6.0
    assert math.isfinite(trainer.history[0]["train_loss"])


def test_an_overflow_in_fp16_lowers_the_scale_and_nothing_else():
    engine = scalar_engine(start=1.0, lr=0.1, precision="fp16", hooks=[EmaHook(0.5)])
    engine.lr_scheduler = StepLR(engine.optimizer, 1, gamma=1.0)
    counted = []
    step = engine.lr_scheduler.step
    engine.lr_scheduler.step = lambda: counted.append(1) or step()
    engine.run([INF, 1.0], max_steps=1)
    assert engine.model.weight.item() == 1.0
    assert engine.precision.scaler.get_scale() == 32768.0
    assert (engine.step, engine.applied_steps, counted) == (1, 0, [])
    engine.run([INF, 1.0], max_steps=2)
    assert engine.model.weight.item() == pytest.approx(0.9)
    assert (engine.applied_steps, counted, engine.averages["ema"].num_updates) == (1, [1], 1)


def test_an_fp16_run_that_never_recovers_ends():
    engine = scalar_engine(precision="fp16")
    with pytest.raises(NonFiniteError) as caught:
        engine.run([NAN], max_steps=100)
    assert engine.step == caught.value.step == 17  # 65536 = 2^16 is halved 16 times to 1, then refused
    assert engine.model.weight.item() == 0.0


def test_accumulation_in_fp16_does_not_overflow_with_large_weights():
    engine = scalar_engine(precision="fp16", accumulation_steps=2)
    engine.run([(1.0, 1e6), (3.0, 1e6)], max_steps=1)
    assert engine.applied_steps == 1
    assert engine.model.weight.item() == -2.0


@pytest.mark.parametrize(("name", "dtype"), [(None, torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_training_and_evaluation_run_in_the_same_precision(name, dtype):
    seen = []

    class Look:
        def step(self, model, batch, totals=None, generator=None):
            out = model(torch.ones(1, 2))
            seen.append(out.dtype)
            return StepOutput(out.float().sum())

    model = nn.Linear(2, 2)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), Look(), device="cpu", precision=name)
    engine.run([0], max_steps=1)
    engine.evaluate([0])
    assert seen == [dtype, dtype]


# -- what forward may return -------------------------------------------------------------------------------------------


class Returns:
    def __init__(self, value):
        self.value = value

    def step(self, model, batch, totals=None, generator=None):
        return self.value(model)


@pytest.mark.parametrize(
    "value",
    [
        lambda m: (m.weight * 1, {"r": 1}),
        lambda m: (m.weight * 1, {"r": 1}, 3),
        lambda m: StepOutput(m.weight * 1),
        lambda m: (m.weight * 1, None),
    ],
)
def test_every_form_of_an_output_trains(value):
    engine = scalar_engine(task=Returns(value))
    engine.run([0], max_steps=1)
    assert engine.model.weight.item() == -1.0


@pytest.mark.parametrize(
    "value",
    [
        lambda m: m.weight * torch.ones(2),
        lambda m: (torch.ones(()), {}),
        lambda m: (1.0, {}),
        lambda m: "text",
        lambda m: (m.weight * torch.ones(2), {}),
        lambda m: (m.weight.detach() * 1, {}),
        lambda m: {"loss": m.weight},
    ],
)
def test_an_output_that_cannot_train_is_refused(value):
    with pytest.raises(ConfigError, match=r"loss|forward step"):
        scalar_engine(task=Returns(value)).run([0], max_steps=1)


# -- schedulers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize(("interval", "expected"), [("step", 4), ("epoch", 2)])
def test_a_schedule_moves_on_exactly_one_interval(interval, expected, k):
    engine = scalar_engine(scheduler_interval=interval, accumulation_steps=k)
    engine.lr_scheduler = LambdaLR(engine.optimizer, lambda n: 1.0)
    engine.run([1.0] * 2 * k, epochs=2)
    assert engine.lr_scheduler.last_epoch == expected


def test_an_epoch_without_an_applied_step_does_not_move_an_epoch_schedule():
    engine = scalar_engine(scheduler_interval="epoch")
    engine.lr_scheduler = StepLR(engine.optimizer, 1, gamma=0.5)

    class Loader:
        epochs = 0

        def __iter__(self):
            self.epochs += 1
            yield None if self.epochs == 1 else 1.0

    loader = Loader()
    engine.run(loader, epochs=1)
    assert engine.optimizer.param_groups[0]["lr"] == 1.0
    engine.run(loader, epochs=2)
    assert engine.optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_plateau_schedule_gets_the_metric_once_per_epoch_whatever_the_interval(interval):
    for val_loader in (None, [2.0]):
        engine = scalar_engine(start=1.0, lr=0.0, scheduler_interval=interval)
        engine.lr_scheduler = ReduceLROnPlateau(engine.optimizer, patience=1, factor=0.5, min_lr=0.0)
        seen = []
        step = engine.lr_scheduler.step
        engine.lr_scheduler.step = lambda value: seen.append(value) or step(value)
        EpochTrainer(engine).fit([1.0] * 3, val_loader, 3)
        assert seen == [1.0 if val_loader is None else 2.0] * 3
    engine = scalar_engine(start=1.0, lr=0.0, scheduler_interval=interval)
    engine.lr_scheduler = ReduceLROnPlateau(engine.optimizer)
    engine.run([1.0] * 3, max_steps=7)
    assert engine.lr_scheduler.last_epoch == 2


def schedules():
    total = 12
    return {
        "LambdaLR": lambda o: LambdaLR(o, lambda n: 1 / (n + 1)),
        "StepLR": lambda o: StepLR(o, 2, 0.5),
        "MultiStepLR": lambda o: MultiStepLR(o, [2, 5, 5, 9], 0.5),
        "OneCycleLR": lambda o: OneCycleLR(o, 1.0, total_steps=total + 1),
        "Cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, total),
        "Exponential": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        "Plateau": lambda o: ReduceLROnPlateau(o, patience=1, factor=0.5),
        "Sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3),
                torch.optim.lr_scheduler.CosineAnnealingLR(o, 9),
            ],
            [3],
        ),
        "SequentialOfMultiStep": lambda o: torch.optim.lr_scheduler.SequentialLR(
            o, [torch.optim.lr_scheduler.ConstantLR(o, 0.5, 3), MultiStepLR(o, [2, 4])], [5]
        ),
        "Cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 1.0, step_size_up=3),
        "WarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    }


class Rates(BaseHook):
    def __init__(self):
        self.seen = []

    def on_after_step(self, trainer):
        self.seen.append([float(lr) for lr in trainer.step_info["lr"]])


@pytest.mark.parametrize("name", schedules())
def test_learning_rates_go_on_as_if_nothing_had_happened(name, recwarn):
    def make():
        rates = Rates()
        engine = scalar_engine(start=1.0, lr=0.1, hooks=[rates])
        engine.optimizer = torch.optim.SGD(engine.model.parameters(), lr=0.1, momentum=0.9)
        engine.lr_scheduler = schedules()[name](engine.optimizer)
        return engine, rates

    straight, rates = make()
    straight.run([1.0, 0.0, 1.0], max_steps=12)
    for cut in range(0, 12, 2):
        first, _ = make()
        first.run([1.0, 0.0, 1.0], max_steps=cut)
        second, after = make()
        second.load_state_dict(through_a_file(first.state_dict()))
        kinds = {key: type(value) for key, value in vars(second.lr_scheduler).items()}
        assert kinds == {key: type(value) for key, value in vars(make()[0].lr_scheduler).items()}
        second.run([1.0, 0.0, 1.0], max_steps=12)
        assert after.seen == rates.seen  # a list of a hook is part of its state
        assert torch.equal(second.model.weight, straight.model.weight)


# -- evaluation --------------------------------------------------------------------------------------------------------


def trained(val=None, epochs=3, workers=0, evaluate_each_step=False, hooks=()):
    set_seed(0)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    class Evaluates(BaseHook):
        def on_after_step(self, trainer):
            trainer.evaluate(val)

    hooks = [*hooks, Evaluates()] if evaluate_each_step else list(hooks)
    engine = Engine(model, optimizer, MeanSquare(), device="cpu", hooks=hooks)
    train = DataLoader(Augmented(20), batch_size=6, shuffle=True)
    trainer = EpochTrainer(engine)
    trainer.fit(train, None if evaluate_each_step else val, epochs)
    return engine, trainer


def val_loader(**kwargs):
    return DataLoader(Augmented(10), batch_size=4, **kwargs)


@pytest.mark.parametrize("each_step", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: val_loader(),
        lambda: val_loader(shuffle=True),
        lambda: val_loader(shuffle=True, generator=torch.Generator().manual_seed(3)),
        lambda: [tuple(t) for t in val_loader()],
    ],
)
def test_an_evaluation_does_not_change_the_training_to_the_bit(make, each_step):
    plain, _ = trained()
    observed, _ = trained(make(), evaluate_each_step=each_step)
    assert differences(dict(observed.model.state_dict()), dict(plain.model.state_dict())) == []
    assert differences(observed.state_dict()["rng"], plain.state_dict()["rng"]) == []


@pytest.mark.parametrize("shuffle", [False, True])
def test_two_evaluations_of_the_same_weights_agree_to_the_bit(shuffle):
    engine, _ = trained(epochs=1)

    class Random(MeanSquare):
        def step(self, model, batch, totals=None, generator=None):
            out = super().step(model, batch)
            return StepOutput(out.loss * torch.rand(()), {"draw": torch.rand(()).item()}, weight=out.weight)

    loader = val_loader(shuffle=shuffle, generator=torch.Generator().manual_seed(1) if shuffle else None)
    first = engine.evaluate(loader, Random())
    torch.rand(7)
    assert engine.evaluate(loader, Random()) == first
    assert engine.evaluate(loader, Random()) == first


@pytest.mark.parametrize("failing", [False, True])
def test_every_module_gets_its_own_mode_back(failing):
    model = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)))
    modes_inside = []

    class Look:
        def step(self, model, batch, totals=None, generator=None):
            modes_inside.append([m.training for m in model.modules()])
            if failing:
                raise KeyError
            return StepOutput(model(batch).sum())

    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), Look(), device="cpu")
    model.train()
    model[1][0].eval()
    before = [m.training for m in model.modules()]
    if failing:
        with pytest.raises(KeyError):
            engine.evaluate([torch.ones(2, 2)])
    else:
        engine.evaluate([torch.ones(2, 2)])
    assert modes_inside == [[False] * 5]
    assert [m.training for m in model.modules()] == before
    assert torch.is_grad_enabled()


def test_an_evaluation_that_raises_leaves_the_raw_weights():
    engine = scalar_engine(start=1.0, hooks=[EmaHook(0.5)])
    engine.task = Slopes(fail_at={3: ValueError("in validation")})
    with pytest.raises(ValueError, match="in validation"):
        EpochTrainer(engine).fit([1.0, 1.0], [1.0], 1)
    assert engine.model.weight.item() == -1.0


def test_an_evaluation_weighs_batches_by_what_they_count():
    engine = scalar_engine(start=1.0)
    batches = [(1.0, 4), (2.0, 4), (4.0, 2)]
    assert engine.evaluate(batches) == {"loss": 2.0, "g": 2.0}
    assert engine.evaluate([(8.0, torch.tensor(1)), (0.0, torch.tensor(3))])["loss"] == 2.0
    assert math.isnan(engine.evaluate([(1.0, 0)])["loss"])
    assert math.isnan(engine.evaluate([None])["loss"])
    assert math.isnan(engine.evaluate([])["loss"])


def test_the_epoch_mean_weighs_batches_by_what_they_count():
    engine = scalar_engine(start=1.0, lr=0.0)
    trainer = EpochTrainer(engine)
    trainer.fit([(1.0, 4), (2.0, 4), (4.0, 2)], None, 1)
    assert trainer.history[0]["train_loss"] == 2.0


class Metrics:
    def __init__(self):
        self.pairs = []

    def reset(self):
        self.pairs = []

    def update(self, outputs):
        self.pairs.append(outputs)

    def compute(self):
        return {"count": torch.tensor(len(self.pairs)), "top": max(self.pairs), "nested": {"x": torch.ones(1)}}


def test_epoch_metrics_see_all_outputs_and_come_back_as_numbers():
    class WithMetrics(Slopes):
        def new_metrics(self):
            return Metrics()

        def step(self, model, batch, totals=None, generator=None):
            return StepOutput(model(batch), outputs=batch)

    engine = scalar_engine(task=WithMetrics())
    result = engine.evaluate([1.0, 5.0, 2.0])
    assert result == {"loss": 0.0, "count": 3.0, "top": 5.0, "nested": {"x": 1.0}}
    assert type(result["count"]) is type(result["nested"]["x"]) is float


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_another_word_as_reduction_is_refused(accumulation_steps):
    class Other(Slopes):
        def step(self, model, batch, totals=None, generator=None):
            return StepOutput(model(batch), reduction="avg")

    with pytest.raises(ConfigError, match="reduction='avg'"):
        scalar_engine(task=Other(), accumulation_steps=accumulation_steps).run([1.0, 2.0], epochs=1)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_metrics_that_take_prediction_and_target_apart_get_them_so(several, named):
    class Apart:
        def reset(self):
            self.sum = 0.0

        def update(self, prediction, target, mask=None):
            self.sum += prediction * target

        def compute(self):
            return {"sum": self.sum}

    class Collection(Apart):
        def update(self, *args, **kwargs):
            super().update(*args, **kwargs)

    class WithMetrics(Slopes):
        def new_metrics(self):
            return Collection() if several else Apart()

        def step(self, model, batch, totals=None, generator=None):
            outputs = {"target": 2.0, "prediction": batch} if named else (batch, 2.0)
            return StepOutput(model(batch), outputs=outputs)

    engine = scalar_engine(task=WithMetrics())
    assert engine.evaluate([1.0, 5.0, 2.0]) == {"loss": 0.0, "sum": 16.0}


def test_metrics_that_take_any_arguments_get_a_tensor_whole():
    class Means(Metrics):
        def compute(self):
            return {}

        def update(self, *values):
            self.pairs += [value.shape for value in values]

    class WithMetrics(Slopes):
        def step(self, model, batch, totals=None, generator=None):
            return StepOutput(model(batch), outputs=torch.tensor([batch, 3.0]))

    metrics = Means()
    WithMetrics.new_metrics = lambda self: metrics
    scalar_engine(task=WithMetrics()).evaluate([1.0, 5.0])
    assert metrics.pairs == [(2,), (2,)]


def test_a_table_among_the_metrics_reaches_history_and_checkpoint_as_lists(tmp_path):
    class Tables(Metrics):
        def compute(self):
            return {"confusion": np.eye(2), "per_class": torch.tensor([0.5, NAN]), "name": "a"}

    class WithTables(Slopes):
        def new_metrics(self):
            return Tables()

    engine = scalar_engine(task=WithTables())
    trainer = EpochTrainer(engine)
    engine.hooks.append(HistoryHook(tmp_path / "history.json", lambda: trainer.history))
    (record,) = trainer.fit([1.0], [1.0], 1)
    assert record["val_confusion"] == [[1.0, 0.0], [0.0, 1.0]]
    assert '"val_per_class": [0.5, null]' in (tmp_path / "history.json").read_text()
    assert engine.state_dict()["metrics"]["name"] == "a"


def test_the_averaged_weights_are_the_ones_that_are_evaluated():
    engine = scalar_engine(start=0.0, hooks=[EmaHook(0.5)])
    trainer = EpochTrainer(engine)
    trainer.fit([2.0], [1.0], 1)
    assert engine.model.weight.item() == -2.0
    assert trainer.history[0]["val_loss"] == -1.0
    assert engine.state_dict()["format"]["scored"] == "ema"


def test_which_weights_were_scored_survives_a_resume():
    engine = scalar_engine(hooks=[EmaHook(0.5)])
    EpochTrainer(engine).fit([2.0], [1.0], 1)
    resumed = scalar_engine(hooks=[EmaHook(0.5)])
    EpochTrainer(resumed)
    resumed.load_state_dict(engine.state_dict())
    assert resumed.state_dict()["format"]["scored"] == "ema"


# -- memory ------------------------------------------------------------------------------------------------------------


def every_tensor(value, seen=None):
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from every_tensor(item, seen)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from every_tensor(item, seen)
    elif hasattr(value, "__dict__") and type(value).__module__.startswith(("treadle", "tests", "test_")):
        yield from every_tensor(vars(value), seen)


class LeavesGraphs(MeanSquare):
    """Records that carry their graph, as in many a script."""

    def step(self, model, batch, totals=None, generator=None):
        x, y = batch
        out = model(x)
        loss = (out - y).square().mean()
        records = {"a": loss * 2, "m": {"b": Weighted(loss * 3, loss.exp())}, "t": Total(loss)}
        return StepOutput(loss, records, weight=loss.detach() * 0 + len(x), outputs=(out, y))


def test_no_graph_outlives_its_step():
    found = []

    class Look(BaseHook):
        def on_after_step(self, trainer):
            for where in (trainer.step_info, trainer.step_outputs, trainer.epoch_means, trainer.hooks):
                found.extend(t for t in every_tensor(where) if t.requires_grad or t.grad_fn is not None)

    set_seed(0)
    model = small_model()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.01), LeavesGraphs(), device="cpu",
                    hooks=[LoggingHook(3), Look()], accumulation_steps=2)  # fmt: skip
    engine.run(DataLoader(Augmented(20), batch_size=4), max_steps=5)
    assert found == []


def test_memory_does_not_grow_with_the_steps():
    set_seed(0)
    model = small_model()
    engine = Engine(model, torch.optim.Adam(model.parameters(), lr=0.01), LeavesGraphs(), device="cpu",
                    hooks=[LoggingHook(10), EmaHook(0.9)])  # fmt: skip
    loader = [(torch.randn(4, 4), torch.randn(4, 1)) for _ in range(20)]

    def live():
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    engine.run(loader, max_steps=128)
    tensors = live()
    tracemalloc.start()
    start = tracemalloc.get_traced_memory()[0]
    engine.run(loader, max_steps=128 + 256)
    gc.collect()  # what waits for it is no growth
    grown = tracemalloc.get_traced_memory()[0] - start
    tracemalloc.stop()
    assert live() <= tensors + 70, "a block of at most 64 records waits to be added up"
    assert grown < 256 * 1024


# -- later changes -----------------------------------------------------------------------------------------------------


def test_a_parameter_group_that_is_added_later_is_trained_and_saved():
    class Both:
        def step(self, model, batch, totals=None, generator=None):
            return StepOutput(model["a"](torch.ones(1, 1)).sum() + model["b"](torch.ones(1, 1)).sum())

    def make():
        torch.manual_seed(0)
        model = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)})
        return Engine(model, torch.optim.SGD(model["a"].parameters(), lr=0.1, momentum=0.9), Both(), device="cpu")

    class Adds(BaseHook):
        def on_before_step(self, trainer):
            if trainer.step == 3:
                trainer.optimizer.add_param_group({"params": trainer.model["b"].parameters(), "lr": 0.5})

    engine = make()
    engine.hooks = [Adds()]
    start = engine.model["b"].weight.item()
    engine.run([0], max_steps=2)
    assert engine.model["b"].weight.item() == start
    engine.run([0], max_steps=4)
    assert engine.model["b"].weight.item() != start
    assert engine.step_info["lr"] == [0.1, 0.5]
    state = engine.state_dict()
    resumed = make()
    resumed.optimizer.add_param_group({"params": resumed.model["b"].parameters(), "lr": 0.9})
    resumed.load_state_dict(state)
    for e in (engine, resumed):
        e.hooks = []
        e.run([0], max_steps=6)
    assert differences(dict(resumed.model.state_dict()), dict(engine.model.state_dict())) == []


def test_the_batch_of_the_caller_is_not_changed():
    batches = [{"x": [1.0], "n": {"k": torch.ones(2)}}]
    kept = copy.deepcopy(batches)

    class Reads:
        def step(self, model, batch, totals=None, generator=None):
            return StepOutput(model.weight * batch["x"][0])

    scalar_engine(task=Reads()).run(batches, max_steps=2)
    assert differences(batches, kept) == []


def test_the_host_reads_one_value_a_step_and_none_between_reports():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Reads(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += "_local_scalar_dense" in str(func)
            return func(*args, **(kwargs or {}))

    class OnDevice(MeanSquare):
        def step(self, model, batch, totals=None, generator=None):
            out = super().step(model, batch)
            return StepOutput(out.loss, {"a": out.loss, "b": Weighted(out.loss, torch.tensor(3))})

    set_seed(0)
    model = small_model()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.01, foreach=True), OnDevice(), device="cpu",
                    hooks=[LoggingHook(1000), EmaHook(0.9)], grad_clip=1.0, accumulation_steps=2)  # fmt: skip
    loader = [(torch.randn(4, 4), torch.randn(4, 1)) for _ in range(20)]
    engine.run(loader, max_steps=1)
    counts = []

    class Counts(BaseHook):
        def on_after_step(self, trainer):
            counts.append(reads.count)

    engine.hooks.append(Counts())
    with Reads() as reads:
        engine.run(loader, max_steps=9)
    assert {b - a for a, b in itertools.pairwise(counts)} <= {0, 1}


def test_the_scalar_kit_itself_is_plain_gradient_descent():
    model = Scalar(2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(3.0).backward()
    optimizer.step()
    engine = scalar_engine(start=2.0, lr=0.5)
    engine.run([3.0], max_steps=1)
    assert engine.model.weight.item() == model.weight.item() == 0.5
