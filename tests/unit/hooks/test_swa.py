"""SwaHook and SwaSchedule: torch's own average, statistics and rates, exact over any stop."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_swa_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset

import treadle
from helpers import differences


def loader():
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4, shuffle=True)


def net():
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))


class Fit(treadle.BaseTrainer):
    def __init__(self, steps, folder=None, *, hook=None, interval=1):
        self.swa = treadle.SwaHook(6, interval) if hook is None else hook
        super().__init__(steps, device="cpu", progress=False, workspace=folder)

    def build_data_loader(self):
        return loader()

    def build_model(self):
        return net()

    def build_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def build_lr_scheduler(self):
        before = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        return treadle.SwaSchedule(self.optimizer, start=5, swa_lr=0.05, anneal_steps=3, before=before)

    def build_hooks(self):
        return [self.swa, *([treadle.CheckpointingHook(1)] if self.workspace else [])]

    def forward(self, batch):
        return nn.functional.mse_loss(self.model(batch[0]), batch[1]), {}


def by_hand(steps, interval):
    treadle.set_seed(0)
    data = loader()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before, after = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), None
    average = AveragedModel(model, multi_avg_fn=get_swa_multi_avg_fn())
    step = 0
    while step < steps:
        for x, y in data:
            step += 1
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            if step > 5:
                after = after or SWALR(optimizer, 0.05, 3)
                after.step()
            else:
                before.step()
            if step >= 6 and (step - 6) % interval == 0:
                average.update_parameters(model)
            if step == steps:
                break
    update_bn(loader_of_all(), average.module)
    return model, average.module, optimizer


def loader_of_all():
    return [batch[0] for batch in DataLoader(loader().dataset, 4)]


def same(one, other):
    states = one.state_dict(), other.state_dict()
    return all(map(torch.equal, states[0].values(), states[1].values()))


@pytest.mark.parametrize("interval", [1, 3])
def test_average_statistics_and_rates_are_those_of_torch(interval):
    treadle.set_seed(0)
    hook = treadle.SwaHook(6, interval, bn_loader=DataLoader(loader().dataset, 4))
    trainer = Fit(13, hook=hook)
    trainer.train()
    model, average, optimizer = by_hand(13, interval)
    assert same(trainer.model, model)
    assert same(hook.swa_model.module, average)
    assert trainer.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.05


def test_before_the_start_the_average_is_the_weights():
    treadle.set_seed(0)
    trainer = Fit(4)
    trainer.train()
    assert same(trainer.swa.swa_model.module, trainer.model)
    assert trainer.swa.swa_model.num_updates == 0


def test_the_pass_for_the_statistics_leaves_training_untouched():
    treadle.set_seed(0)
    with_pass = Fit(8)
    with_pass.train()
    state = torch.get_rng_state()
    treadle.set_seed(0)
    without = Fit(8, hook=treadle.EmaHook(0.5))
    without.train()
    assert same(with_pass.model, without.model)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("stops", [(3, 7, 12), (11, 12)])
def test_a_stopped_run_ends_as_one_that_was_not(tmp_path, stops):
    treadle.set_seed(0)
    straight = Fit(12, tmp_path / "straight", hook=treadle.SwaHook(6, 2))
    straight.train()
    for stop in stops:
        treadle.set_seed(0)
        resumed = Fit(stop, tmp_path / "stopped", hook=treadle.SwaHook(6, 2))
        resumed.train()
    assert differences(straight.state_dict(), resumed.state_dict()) == []
    assert same(straight.swa.swa_model.module, resumed.swa.swa_model.module)


def test_the_checkpoint_of_the_last_step_has_the_statistics(tmp_path):
    treadle.set_seed(0)
    trainer = Fit(9, tmp_path)
    trainer.train()
    again = Fit(9, tmp_path)
    again.train()
    assert same(trainer.swa.swa_model.module, again.swa.swa_model.module)
    assert not torch.equal(again.swa.swa_model.module[1].running_mean, again.model[1].running_mean)


def test_evaluations_score_the_average():
    treadle.set_seed(0)
    model = nn.Linear(3, 1)
    hook = treadle.SwaHook(3)
    trainer = treadle.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), device="cpu", progress=False, hooks=[hook]
    )
    trainer.train(loader(), 2)
    scored = copy.deepcopy(hook.swa_model.module)
    x, y = loader().dataset.tensors
    with torch.no_grad():
        expected = nn.functional.mse_loss(scored(x), y)
    assert trainer.evaluate(DataLoader(loader().dataset, 20))["loss"] == pytest.approx(float(expected))


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: treadle.SwaHook(0), "start"),
        (lambda: treadle.SwaHook(1, 0), "update_interval"),
        (lambda: treadle.SwaHook(1, bn_loader=loader().dataset), "bn_loader"),
        (lambda: treadle.SwaSchedule(sgd(), start=1, swa_lr=0), "swa_lr"),
        (lambda: treadle.SwaSchedule(sgd(), start=1, swa_lr=1.0, anneal_steps=-1), "anneal_steps"),
        (
            lambda: treadle.SwaSchedule(sgd(), start=1, swa_lr=1.0, before=other_schedule()),
            "before",
        ),
    ],
)
def test_bad_arguments_are_refused(make, argument):
    with pytest.raises(treadle.ConfigError) as error:
        make()
    assert error.value.argument == argument


def other_schedule():
    return treadle.build_schedule(sgd(), total_steps=3)


def sgd():
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
