"""A second optimizer on the trainer: no wrong warning, and its state is part of every checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import treadle
from functional_kit import loader
from helpers import differences
from treadle import BaseHook, BaseTrainer, CheckpointingHook, ConfigError


class Own(BaseHook):
    """Keeps a number among the states of hooks, under a key that is not its state key."""

    count = 0

    def on_after_step(self, trainer):
        self.count += 1

    def on_state_dict(self, trainer, state_dict):
        state_dict["hooks"]["turns"] = self.count

    def on_load_state_dict(self, trainer, state_dict):
        self.count = state_dict["hooks"]["turns"]


class Two(BaseTrainer):
    second = True

    def build_data_loader(self):
        treadle.set_seed(0)
        return loader(20, 4, shuffle=True)

    def build_model(self):
        return nn.ModuleDict({"first": nn.Linear(4, 1), "second": nn.Linear(4, 1)})

    def build_optimizer(self):
        if self.second:
            self.other = torch.optim.Adam(self.model["second"].parameters(), 0.05)
        return torch.optim.SGD(self.model["first"].parameters(), 0.05, momentum=0.9)

    def build_hooks(self):
        return [CheckpointingHook(3), Own()]

    def forward(self, input):
        x, y = input
        if self.second:
            self.other.zero_grad()
            (self.model["second"](x) - y).square().mean().backward()
            self.other.step()
        return (self.model["first"](x) - self.model["second"](x)).square().mean(), {}


def trained(folder, *stops, cls=Two):
    for steps in stops:
        trainer = cls(steps, workspace=folder, device="cpu", progress=False)
        trainer.train()
    return trainer


def test_nothing_wrong_is_warned_of_and_the_resume_is_exact(tmp_path, caplog):
    with caplog.at_level("WARNING", "treadle"):
        straight = trained(tmp_path / "straight", 9)
        stopped = trained(tmp_path / "stopped", 4, 9)
    assert caplog.messages == []
    assert differences(straight.state_dict(), stopped.state_dict()) == []
    assert stopped.hooks[1].count == 9


def test_parameters_that_nothing_holds_are_still_named(tmp_path, caplog):
    class One(Two):
        second = False

    with caplog.at_level("WARNING", "treadle"):
        trained(tmp_path, 1, cls=One)
    assert "2 parameters that need gradients" in caplog.text


def test_an_optimizer_over_nothing_of_the_model_is_still_refused(tmp_path):
    class Wrong(Two):
        def build_optimizer(self):
            return torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)

    with pytest.raises(ConfigError, match="it holds none of the 4 trainable parameters of the model"):
        trained(tmp_path, 1, cls=Wrong)
