"""Schedules by name and clipping by value: equal to the same made by hand, exact over a stop, refused before step 1."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import treadle
from functional_kit import line, loader
from treadle.errors import ConfigError
from treadle.functional.settings import read_settings
from treadle.optim.schedules import SCHEDULES


def run(name=None, *, scheduler=None, folder=None, epochs=4, optimizer=None, **settings):
    treadle.set_seed(0)
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = treadle.Trainer(
        model, optimizer, nn.MSELoss(), device="cpu", progress=False, lr_scheduler=name,
        scheduler=None if scheduler is None else scheduler(optimizer), **settings,
    )  # fmt: skip
    trainer.train(loader(20, 8, shuffle=True), epochs, save_dir=folder, resume_from=folder and "auto")
    return trainer


def weights(trainer):
    return torch.cat([value.flatten() for value in trainer.model.state_dict().values()])


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("warmup", [{"warmup_steps": 3}, {"warmup_ratio": 0.25}, {}])
def test_a_schedule_by_name_is_that_made_by_hand(name, warmup):
    by_name = run(name, min_lr_scale=0.1, **warmup)
    by_hand = run(
        scheduler=lambda optimizer: treadle.build_schedule(optimizer, name, total_steps=12, min_scale=0.1, **warmup),
        scheduler_step_per_batch=True,
    )
    assert torch.equal(weights(by_name), weights(by_hand))
    assert by_name.history["lr"] == by_hand.history["lr"]


def test_groups_of_micro_batches_count_as_steps():
    trainer = run("linear", gradient_accumulation_steps=2)
    assert trainer.step == 8
    assert trainer.scheduler.get_last_lr() == [0.0]


@pytest.mark.parametrize(
    ("settings", "steps"),
    [({"limit_train_batches": 2}, 8), ({"overfit_batches": 1}, 4), ({"fast_dev_run": 2}, 2)],
)
def test_limits_shorten_the_schedule(settings, steps):
    trainer = run("linear", **settings)
    assert trainer.step == steps
    assert trainer.scheduler.get_last_lr() == [0.0]


def test_a_stopped_run_follows_the_same_schedule_to_the_bit(tmp_path):
    class Stop(treadle.BaseHook):
        def on_after_step(self, trainer):
            trainer.should_stop = trainer.step == 5

    straight = run("cosine", warmup_ratio=0.3)
    run("cosine", warmup_ratio=0.3, folder=tmp_path, hooks=[Stop()])
    resumed = run("cosine", warmup_ratio=0.3, folder=tmp_path)
    assert resumed.step == straight.step == 12
    assert torch.equal(weights(resumed), weights(straight))
    assert resumed.scheduler.state_dict() == straight.scheduler.state_dict()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "cosin"}, "lr_scheduler='cosin': did you mean 'cosine'"),
        ({"warmup_steps": 3}, "warmup_steps=3: needs a schedule by name"),
        ({"name": "cosine", "warmup_steps": -1}, "warmup_steps=-1"),
        ({"name": "cosine", "warmup_steps": 1.5}, "whole number"),
        ({"name": "cosine", "warmup_steps": 1, "warmup_ratio": 0.1}, "not both"),
        ({"name": "cosine", "warmup_ratio": 1.1}, "between 0 and 1"),
        ({"name": "cosine", "min_lr_scale": 2.0}, "min_lr_scale"),
        ({"name": "cosine", "scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)}, "keep one"),
        ({"grad_clip_value": -1.0}, "grad_clip_value"),
        ({"grad_clip_value": 1.0, "max_grad_norm": 1.0}, "keep one of the two"),
    ],
)
def test_bad_settings_are_refused_when_the_trainer_is_made(settings, message):
    with pytest.raises(treadle.ConfigError, match=message):
        run(**settings)


def test_a_loader_without_a_length_is_refused_before_step_1():
    model = line()
    trainer = treadle.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), device="cpu", lr_scheduler="cosine"
    )
    with pytest.raises(treadle.ConfigError, match=r"no length.*build_schedule"):
        trainer.train((batch for batch in [(torch.ones(2, 4), torch.ones(2, 1))]), 1)
    assert trainer.step == 0


def test_a_schedule_of_timm_is_refused_when_the_trainer_is_made():
    class CosineLRScheduler:  # as timm's
        def __init__(self, optimizer):
            self.optimizer = optimizer

        def step(self, epoch, metric=None):
            raise AssertionError

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    with pytest.raises(treadle.ConfigError, match="needs 'epoch', like those of timm"):
        run(scheduler=CosineLRScheduler)


def test_clipping_by_value_is_that_of_torch():
    trainer = run(grad_clip_value=0.05, epochs=2)
    treadle.set_seed(0)
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for x, y in loader(20, 8, shuffle=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            assert max(p.grad.abs().max() for p in model.parameters()) > 0.05
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
            optimizer.step()
    assert torch.equal(weights(trainer), torch.cat([p.detach().flatten() for p in model.parameters()]))


def test_the_step_face_clips_by_value_too():
    class Fit(treadle.BaseTrainer):
        def build_data_loader(self):
            return [torch.tensor([3.0])] * 2

        def build_model(self):
            return nn.Linear(1, 1, bias=False)

        def build_optimizer(self):
            return torch.optim.SGD(self.model.parameters(), lr=1.0)

        def forward(self, batch):
            return self.model(batch).sum(), {}

    trainer = Fit(1, device="cpu", progress=False, grad_clip_value=0.5)
    trainer.prepare()
    before = trainer.model.weight.item()
    trainer.train()
    assert trainer.model.weight.item() == pytest.approx(before - 0.5)


def test_a_wrong_schedule_is_named_as_it_was_given():
    with pytest.raises(ConfigError, match=r"^lr_scheduler='cosin'"):
        read_settings(None, {"lr_scheduler": "cosin"})
    with pytest.raises(ConfigError, match=r"^config\.training\.lr_scheduler='cosin'"):
        read_settings({"training": {"lr_scheduler": "cosin"}})
