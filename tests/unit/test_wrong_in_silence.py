"""Settings that trained something else without a word: plateaus, half sums, decay groups, batches of one."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import functional_kit
from helpers import MeanSquare
from treadle import BestRule, ConfigError, Engine, EpochTrainer, Trainer
from treadle.hooks import BaseHook
from treadle.optim.schedules import step_plateau
from treadle.spectra import build_optimizer


def plateau(**settings):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    return ReduceLROnPlateau(optimizer, factor=0.1, **settings)


# -- ReduceLROnPlateau ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_plateau_at_a_negative_value_lowers_the_rate_as_at_a_positive_one(mode, sign):
    scheduler = plateau(mode=mode, patience=1)
    rates = []
    for _ in range(5):
        step_plateau(scheduler, sign)
        rates.append(round(scheduler.get_last_lr()[0], 6))
    assert rates == [1.0, 1.0, 0.1, 0.1, 0.01]
    assert (scheduler.threshold_mode, scheduler.threshold) == ("rel", 1e-4)


@pytest.mark.parametrize(("mode", "values", "bad"), [
    ("min", [-1.0, -1.05, -1.2], [0, 1, 0]), ("max", [-1.0, -0.95, -0.8], [0, 1, 0]),
    ("min", [0.5, -0.5, -0.52], [0, 0, 1]),
])  # fmt: skip
def test_a_relative_threshold_is_a_share_of_the_size_of_the_best(mode, values, bad):
    scheduler, counted = plateau(mode=mode, patience=9, threshold=0.1), []
    for value in values:
        step_plateau(scheduler, value)
        counted.append(scheduler.num_bad_epochs)
    assert counted == bad


def test_positive_values_are_judged_as_torch_does():
    mine, torchs = plateau(patience=0), plateau(patience=0)
    for value in torch.rand(200, generator=torch.Generator().manual_seed(0)).tolist():
        step_plateau(mine, value)
        torchs.step(value)
        assert mine.state_dict() == torchs.state_dict()


def test_a_plateau_against_the_direction_of_its_metric_is_refused_before_step_1():
    told = functional_kit.evaluations([0.1, 0.2], key="accuracy")
    trainer = functional_kit.scalar(told, scheduler=lambda o: ReduceLROnPlateau(o))
    data = [torch.ones(2, 1)] * 3
    with pytest.raises(ConfigError, match=r"mode='min'\) is stepped with 'eval_accuracy', .* with mode='max'"):
        trainer.train(data, 2, data, best_model_metric="accuracy")
    assert trainer.step == 0
    trainer = functional_kit.scalar(told, scheduler=lambda o: ReduceLROnPlateau(o, mode="max"))
    trainer.train(data, 2, data, best_model_metric="accuracy")
    with pytest.raises(ConfigError, match=r"mode='max'.* with mode='min'"):
        functional_kit.scalar(scheduler=lambda o: ReduceLROnPlateau(o, mode="max")).train(data, 2)
    assert functional_kit.scalar(scheduler=ReduceLROnPlateau).train(data, 2, best_model_metric=None)["epoch"] == [1, 2]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_an_engine_alone_steps_a_plateau_with_its_training_loss(mode):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = Engine(model, optimizer, Ones(), device="cpu", scheduler=ReduceLROnPlateau(optimizer, mode=mode))
    if mode == "max":
        with pytest.raises(ConfigError, match="stepped with 'train_loss'"):
            engine.run([torch.ones(1, 2)], epochs=1)
    else:
        engine.run([torch.ones(1, 2)], epochs=1)


# -- weights in half precision -------------------------------------------------------------------------------------


class Ones:
    def step(self, model, batch, totals=None, generator=None):
        return model(batch).float().sum(), {}


@pytest.mark.parametrize(("dtype", "accumulation", "named"), [
    (torch.bfloat16, 4, True), (torch.float16, 2, True), (torch.bfloat16, 1, False), (torch.float32, 4, False),
])  # fmt: skip
def test_half_weights_with_accumulation_are_named(caplog, dtype, accumulation, named):
    model = nn.Linear(2, 1).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = Engine(model, optimizer, Ones(), device="cpu", accumulation_steps=accumulation)
    with caplog.at_level(logging.WARNING, "treadle"):
        engine.run([torch.ones(1, 2, dtype=dtype)] * 4, max_steps=1)
    assert ("keep the weights in float32" in caplog.text) == named


# -- weight decay --------------------------------------------------------------------------------------------------


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.pos_embedding = nn.Linear(3, 3)
        self.norm_free = nn.Linear(3, 3, bias=False)
        self.layer = nn.LayerNorm(3)
        self.scale = nn.Parameter(torch.ones(3))
        self.pos_embed = nn.Parameter(torch.ones(1, 4, 3))
        self.tied = self.norm_free
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x):
        return self.layer(self.norm_free(self.pos_embedding(x)) * self.scale).sum(1, keepdim=True)


def names_in(optimizer, model):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [({names[id(p)] for p in group["params"]}, group["weight_decay"]) for group in optimizer.param_groups]


def test_only_matrices_that_are_trained_decay_in_the_optimizer_that_is_built():
    model = Parts()
    trainer = Trainer(model, None, nn.MSELoss(), {"training": {"weight_decay": 0.2}}, "cpu")
    rest = {"pos_embedding.bias", "layer.weight", "layer.bias", "scale"}
    matrices = {"pos_embedding.weight", "norm_free.weight"}
    assert names_in(trainer.optimizer, model) == [(matrices | {"pos_embed"}, 0.2), (rest, 0.0)]
    # A table of positions that the model holds itself is no matrix of a layer.
    spectra = build_optimizer(model, weight_decay=0.2)
    assert names_in(spectra, model) == [(matrices, 0.2), (rest | {"pos_embed"}, 0.0)]
    assert sum(len(group["params"]) for group in spectra.param_groups) == 7


# -- a batch of one ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_batch_of_one_at_a_batch_norm_is_named_with_its_fix(accumulation):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    data = TensorDataset(torch.randn(9, 2), torch.randn(9, 1))
    config = {"training": {"gradient_accumulation_steps": accumulation}}
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss(), config, "cpu")
    with pytest.raises(ConfigError, match=r"batch 3 of epoch 1 .* one sample, but 1 \(BatchNorm1d\).*drop_last=True"):
        trainer.train(DataLoader(data, 4), 1)
    trainer.train(DataLoader(data, 4, drop_last=True), 1)


def test_another_value_error_is_left_as_it_is():
    class Raises(Ones):
        def step(self, model, batch, totals=None, generator=None):
            raise ValueError("the user's own")

    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    engine = Engine(model, torch.optim.SGD(model.parameters(), 0.1), Raises(), device="cpu")
    with pytest.raises(ValueError, match="the user's own"):
        EpochTrainer(engine, best=BestRule("train_loss")).fit([torch.ones(2, 2)], None, 1)


# -- a schedule that two step ---------------------------------------------------------------------------------------


class StepsToo(BaseHook):
    """Moves the schedule as a plain loop does."""

    def __init__(self, event, *arguments):
        setattr(self, event, lambda trainer, *rest: trainer.lr_scheduler.step(*arguments))


class Restarts(BaseHook):
    """Begins the schedule again, which the schedule still follows alone."""

    def on_after_step(self, trainer):
        if trainer.step == 3:
            trainer.lr_scheduler.last_epoch = 0
            trainer.lr_scheduler.load_state_dict(trainer.lr_scheduler.state_dict())


def of_two(optimizer):
    return lrs.SequentialLR(optimizer, [lrs.LinearLR(optimizer), lrs.StepLR(optimizer, 1)], milestones=[2])


@pytest.mark.parametrize(("make", "hook", "interval", "named"), [
    (lambda of: lrs.StepLR(of, 2, 0.9), StepsToo("on_after_step"), "step", True),
    (lambda of: lrs.StepLR(of, 2, 0.9), StepsToo("on_after_step"), "epoch", True),
    (lambda of: lrs.ReduceLROnPlateau(of), StepsToo("on_after_epoch", 1.0), "epoch", True),
    (of_two, StepsToo("on_after_step"), "step", True),
    (lambda of: lrs.ChainedScheduler([lrs.StepLR(of, 2)]), StepsToo("on_after_step"), "step", True),
    (lambda of: lrs.StepLR(of, 2, 0.9), BaseHook(), "step", False),
    (lambda of: lrs.StepLR(of, 2, 0.9), Restarts(), "step", False),
    (of_two, BaseHook(), "step", False),
])  # fmt: skip
def test_a_schedule_that_something_else_steps_too_is_named_once(make, hook, interval, named, caplog):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(
        model, optimizer, MeanSquare(), scheduler=make(optimizer), scheduler_interval=interval, device="cpu",
        hooks=[hook],
    )  # fmt: skip
    engine.run([(torch.ones(2, 1), torch.ones(2, 1))] * 2, epochs=3)
    assert caplog.text.count("something else also steps this") == int(named)
