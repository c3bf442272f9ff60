"""Parameter groups that hooks add when training begins: carried by a resume, or refused before step 1."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from treadle import CheckpointError, ConfigError, Trainer
from treadle.hooks.base import BaseHook

BATCHES = [(torch.randn(4, 3, generator=torch.Generator().manual_seed(n)), torch.ones(4, 1)) for n in range(4)]


class AddsLayer(BaseHook):
    def on_before_train(self, trainer):
        trainer.optimizer.add_param_group({"params": trainer.model[1].parameters(), "lr": 0.02})


class AddsParameter(BaseHook):
    def on_before_train(self, trainer):
        trainer.optimizer.add_param_group({"params": nn.Parameter(torch.ones(1))})


class AddsParameterLater(BaseHook):
    def on_after_step(self, trainer):
        if trainer.step == 2:
            trainer.optimizer.add_param_group({"params": nn.Parameter(torch.ones(1))})


def trained(folder, epochs, hook):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.01, momentum=0.9)
    trainer = Trainer(model, optimizer, nn.MSELoss(), hooks=[hook])
    trainer.train(BATCHES, epochs, save_dir=folder, resume_from=None if folder is None else "auto")
    return trainer


def test_a_group_that_a_hook_adds_when_training_begins_is_carried(tmp_path):
    straight = trained(tmp_path / "straight", 3, AddsLayer())
    trained(tmp_path / "stopped", 1, AddsLayer())
    resumed = trained(tmp_path / "stopped", 3, AddsLayer())
    assert len(resumed.optimizer.param_groups) == 2
    pairs = zip(straight.model.state_dict().values(), resumed.model.state_dict().values(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
    assert "add_param_group" not in vars(resumed.optimizer)


def test_parameters_outside_the_model_are_refused_before_step_1(tmp_path):
    with pytest.raises(ConfigError, match="parameters that the model does not have"):
        trained(tmp_path, 1, AddsParameter())
    assert not list(tmp_path.glob("*.pt"))


def test_parameters_that_are_added_later_are_refused_at_the_next_save(tmp_path):
    with pytest.raises(CheckpointError, match="parameters that the model does not have"):
        trained(tmp_path, 1, AddsParameterLater())


def test_a_run_that_saves_nothing_may_train_them():
    assert trained(None, 1, AddsParameter()).epoch == 1


def test_a_reduction_that_changes_within_an_epoch_is_named():
    loss = nn.MSELoss()

    class Changes(BaseHook):
        def on_after_step(self, trainer):
            loss.reduction = "sum" if trainer.step >= 2 else "mean"

    model = nn.Linear(3, 1)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), loss, hooks=[Changes()])
    with pytest.raises(ConfigError, match="reduction was changed between 'mean' and 'sum' within an epoch"):
        trainer.train(BATCHES, 1)
