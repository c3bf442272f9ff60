"""Common mistakes are answered before step 1, by what to write instead."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from treadle import BaseTrainer, CheckpointingHook, ConfigError, EarlyStopping, Trainer
from treadle.optim.optimizer import check_scheduler


@pytest.fixture
def data():
    torch.manual_seed(0)
    x = torch.randn(32, 3)
    return TensorDataset(x, x.sum(1, keepdim=True))


def make(**options):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return Trainer(model, optimizer, nn.MSELoss(), device="cpu", **options)


def untouched(trainer, expected, call):
    with pytest.raises(ConfigError, match=expected):
        call()
    assert trainer.step == 0


def test_a_data_set_is_no_loader(data):
    trainer = make()
    untouched(
        trainer, r"train_dataloader: a TensorDataset is a data set.*DataLoader\(dataset", lambda: trainer.train(data, 1)
    )
    untouched(
        trainer, "eval_dataloader: a TensorDataset is a data set", lambda: trainer.train(DataLoader(data, 8), 1, data)
    )


def test_a_data_set_is_no_loader_of_the_step_face_either(data):
    class Fit(BaseTrainer):
        def build_data_loader(self):
            return data

        def build_model(self):
            return nn.Linear(3, 1)

        def build_optimizer(self):
            return torch.optim.SGD(self.model.parameters(), 0.1)

    with pytest.raises(ConfigError, match="a TensorDataset is a data set"):
        Fit(3, device="cpu").train()


def test_lists_of_loaders_are_refused_and_dicts_are_not_trained_on(data):
    trainer, loader = make(), DataLoader(data, 8)
    untouched(trainer, "eval_dataloader: is a list of loaders.*dict", lambda: trainer.train(loader, 1, [loader]))
    untouched(trainer, "train_dataloader: is a dict, whose keys", lambda: trainer.train({"a": loader}, 1))
    untouched(trainer, r"eval_dataloader\['a'\]: it is empty", lambda: trainer.train(loader, 1, {"a": []}))
    untouched(trainer, "must have at least one, with non-empty strings as names", lambda: trainer.train(loader, 1, {}))


def test_several_named_loaders_are_evaluated_each_and_the_first_selects(data, tmp_path):
    trainer, loader = make(), DataLoader(data, 8)
    far = DataLoader(TensorDataset(data.tensors[0] * 3, data.tensors[1]), 8)
    history = trainer.train(loader, 3, {"near": loader, "far": far}, save_dir=tmp_path)
    assert {"eval_near_loss", "eval_far_loss"} <= set(history)
    assert trainer.best_metric == min(history["eval_near_loss"])
    assert history["eval_near_loss"][-1] == trainer.evaluate(loader)["loss"]
    again = make()
    assert again.train(loader, 3, {"near": loader, "far": far}, save_dir=tmp_path, resume_from="auto") == history
    by_far = make()
    by_far.train(loader, 3, {"near": loader, "far": far}, best_model_metric="far_loss")
    assert by_far.best_metric == min(by_far.history["eval_far_loss"])
    with pytest.raises(ConfigError, match="eval_near_loss, eval_far_loss"):
        make().train(loader, 1, {"near": loader, "far": far}, best_model_metric="eval_other_loss")


@pytest.mark.parametrize(
    ("callback", "instead"),
    [
        (EarlyStopping(3), "early_stopping_patience="),
        (CheckpointingHook(3), r"pass it to the trainer in hooks=\[...\]"),
        (lambda trainer: None, r"cannot be called with \(trainer, epoch, metrics\)"),
    ],
)
def test_a_callback_that_cannot_be_called_so_is_refused(callback, instead, data):
    trainer = make()
    untouched(trainer, instead, lambda: trainer.train(DataLoader(data, 8), 1, callbacks=[callback]))


def test_an_optimizer_over_another_model_is_an_error(data):
    optimizer = torch.optim.SGD(nn.Linear(3, 1).parameters(), 0.1)
    trainer = Trainer(nn.Linear(3, 1), optimizer, nn.MSELoss(), device="cpu")
    untouched(trainer, "none of the 2 trainable parameters", lambda: trainer.train(DataLoader(data, 8), 1))


def test_a_scheduler_whose_step_wants_an_argument_is_refused_when_it_is_given():
    class CosineLRScheduler:  # as timm's
        def step(self, epoch, metric=None):
            raise AssertionError

    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ConfigError, match=r"step\(\) of the CosineLRScheduler needs 'epoch'"):
        Trainer(model, optimizer, nn.MSELoss(), device="cpu", scheduler=CosineLRScheduler())
    for scheduler in (
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
        torch.optim.lr_scheduler.SequentialLR(optimizer, [torch.optim.lr_scheduler.ConstantLR(optimizer)], []),
    ):
        check_scheduler(scheduler, optimizer)


def test_a_setting_at_the_wrong_level_is_an_error_that_names_both_right_ones():
    with pytest.raises(ConfigError, match=r"'training': \{'max_grad_norm'.*pass max_grad_norm= to the trainer"):
        make(config={"max_grad_norm": 1.0})


def test_settings_are_taken_as_keywords_and_win_over_the_config():
    trainer = make(config={"training": {"max_grad_norm": 1.0, "log_interval": 7}}, max_grad_norm=2.0, ema_decay=0.9)
    assert (trainer.settings.max_grad_norm, trainer.settings.log_interval) == (2.0, 7)
    assert trainer.settings.ema_decay == 0.9
    with pytest.raises(ConfigError, match=r"max_grad_nrm: no such argument.*max_grad_norm"):
        make(max_grad_nrm=1.0)
    with pytest.raises(ConfigError, match="max_grad_norm"):
        make(max_grad_norm=-1.0)
