"""Whatever a config is, its training part is read, checked and left alone."""

from __future__ import annotations

import copy
from argparse import Namespace
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import treadle
from functional_kit import loader, make, net
from treadle import ConfigError, EmaHook
from treadle.functional.settings import TrainingSettings, read_settings


@dataclass
class Training:
    max_grad_norm: float | None = 0.5
    gradient_accumulation_steps: int = 2


@dataclass(frozen=True)
class Config:
    training: Training = field(default_factory=Training)
    data: str = "mine"


class Base:
    max_grad_norm = 0.5


class Written(Base):
    gradient_accumulation_steps = 2
    _private = "not read"

    def describe(self):
        return "not read either"

    @property
    def also_this(self):
        return 1


class Slots:
    def __init__(self):
        self.max_grad_norm = 0.5
        self.gradient_accumulation_steps = 2


VALUES = {"max_grad_norm": 0.5, "gradient_accumulation_steps": 2}
CONFIGS = {
    "mapping": {"training": VALUES, "model": {"width": 3}},
    "omegaconf": OmegaConf.create({"training": VALUES, "list": [1, 2]}),
    "mapping of an object": {"training": Namespace(**VALUES)},
    "object of a mapping": SimpleNamespace(training=VALUES),
    "objects": SimpleNamespace(training=SimpleNamespace(**VALUES)),
    "dataclasses": Config(),
    "attributes of a class": SimpleNamespace(training=Written()),
    "a class itself": SimpleNamespace(training=Written),
    "plain object": SimpleNamespace(training=Slots()),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_kind_of_config_is_read_and_not_changed(config):
    before = copy.deepcopy(config)
    settings = read_settings(config)
    assert (settings.max_grad_norm, settings.gradient_accumulation_steps, settings.log_interval) == (0.5, 2, 50)
    if config is not CONFIGS["plain object"] and not isinstance(getattr(config, "training", None), (Written, Slots)):
        assert config == before


@pytest.mark.parametrize("part", [SimpleNamespace(max_grad_nrom=1), {"max_grad_nrom": 1}, Namespace(max_grad_nrom=1)])
def test_an_unknown_key_or_field_names_the_nearest(part):
    with pytest.raises(ConfigError, match=r"max_grad_nrom.*max_grad_norm"):
        read_settings({"training": part})


def test_none_is_the_default_everywhere():
    names = list(TrainingSettings.__dataclass_fields__)
    settings = read_settings({"training": dict.fromkeys(names)})
    assert settings == TrainingSettings(log_interval=None)


def test_what_belongs_to_the_user_is_accepted_and_not_used():
    part = {"batch_size": 32, "num_epochs": 3, "seed": 5}
    assert read_settings({"training": part, "anything": object()}) == TrainingSettings()


def test_a_config_that_forgot_the_training_part_is_refused_and_one_beside_it_warned_about(caplog):
    with pytest.raises(ConfigError, match=r"'training': \{'max_grad_norm'"):
        read_settings({"max_grad_norm": 1.0, "lr": 3})
    read_settings({"max_grad_norm": 1.0, "training": {}})
    assert "'max_grad_norm'" in caplog.text
    for config in ({"model": "mine"}, SimpleNamespace(seed=3), Namespace(lr=0.1, epochs=3), {"training.lr": 1}):
        caplog.clear()
        assert read_settings(config) == TrainingSettings()
        assert "ignored, since it has no part" in caplog.text
    with pytest.raises(ConfigError, match=r"SimpleNamespace\(training="):
        read_settings(Namespace(max_grad_norm=1.0))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_grad_norm", -1), ("max_grad_norm", "1.0"), ("gradient_accumulation_steps", 0),
        ("gradient_accumulation_steps", 1.5), ("gradient_accumulation_steps", True), ("mixed_precision", "float16"),
        ("mixed_precision", 16), ("max_non_finite_grad_retries", -1), ("log_interval", -5), ("min_delta", -0.1),
        ("min_delta", float("nan")), ("ema_decay", 1.5), ("scheduler_step_per_batch", "yes"), ("weight_decay", -1),
        ("learning_rate", -1),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_by_name(key, value):
    with pytest.raises(ConfigError, match=rf"{key}={value!r}"):
        make(config={"training": {key: value}})


@pytest.mark.parametrize(
    ("scheduler", "why"),
    [(None, "there is no scheduler"), (ReduceLROnPlateau, "ReduceLROnPlateau steps with"), (StepLR, None)],
)
def test_a_schedule_that_is_asked_to_move_with_steps_and_cannot_is_said(scheduler, why, caplog):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = {None: lambda: None, StepLR: lambda: StepLR(optimizer, 1)}.get(scheduler, lambda: scheduler(optimizer))()
    config = {"training": {"scheduler_step_per_batch": True}}
    treadle.Trainer(model, optimizer, nn.MSELoss(), config, "cpu", made)
    assert (why in caplog.text) if why else caplog.messages == []


@pytest.mark.parametrize(("value", "name"), [("bf16", "bf16"), (True, "bf16"), (False, None), (None, None)])
def test_mixed_precision_by_name_or_flag(value, name):
    trainer = make(mixed_precision=value)
    assert trainer._engine.precision.name == name
    assert trainer.train(loader(), 1)["train_loss"][0] > 0


@pytest.mark.parametrize("norm", [None, 0, 0.0])
def test_clipping_is_off_without_a_norm(norm):
    assert make(max_grad_norm=norm)._engine.grad_clip is None


def test_the_optimizer_is_built_from_the_settings_or_the_defaults():
    def groups(part):
        trainer = treadle.Trainer(net(), None, nn.MSELoss(), {"training": part}, "cpu")
        assert isinstance(trainer.optimizer, torch.optim.AdamW)
        return trainer.optimizer.param_groups[0]["lr"], trainer.optimizer.param_groups[0]["weight_decay"]

    assert groups({}) == (1e-4, 0.01)
    assert groups({"learning_rate": 0.5, "weight_decay": 0.25}) == (0.5, 0.25)


def test_a_setting_that_a_given_optimizer_contradicts_is_warned_about_and_the_optimizer_stays(caplog):
    trainer = make(lr=0.25, learning_rate=0.5, weight_decay=0.125)
    assert "learning_rate=0.5" in caplog.text
    assert "0.25" in caplog.text
    assert "weight_decay=0.125" in caplog.text
    assert trainer.optimizer.param_groups[0]["lr"] == 0.25


def test_a_setting_that_a_given_optimizer_has_is_fine_whatever_a_scheduler_made_of_it(caplog):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    scheduler = StepLR(optimizer, 1)
    optimizer.param_groups[0]["lr"] = 0.1
    config = {"training": {"learning_rate": 0.5}}
    treadle.Trainer(model, optimizer, nn.MSELoss(), config, "cpu", scheduler)
    assert caplog.text == ""


def test_a_scheduler_over_another_optimizer_is_refused():
    model = net()
    scheduler = StepLR(torch.optim.SGD(model.parameters(), lr=1.0), 1)
    with pytest.raises(ConfigError, match="another optimizer"):
        treadle.Trainer(model, None, nn.MSELoss(), None, "cpu", scheduler)


def test_an_average_by_config_is_that_of_the_hook_and_is_what_evaluations_score(tmp_path):
    histories = []
    for number, own in enumerate(({"ema_decay": 0.5}, {"hooks": [EmaHook(0.5)]})):
        trainer = make(**own)
        histories.append(trainer.train(loader(), 2, loader(seed=6), save_dir=tmp_path / str(number)))
    raw = make().train(loader(), 2, loader(seed=6))
    assert histories[0] == histories[1]
    assert histories[0]["train_loss"] == raw["train_loss"]
    assert histories[0]["eval_loss"] != raw["eval_loss"]
    fresh = make(seed=4)
    fresh.model.load_state_dict(treadle.load_weights(tmp_path / "1" / "best_model.pt"))
    assert fresh.evaluate(loader(seed=6))["loss"] == trainer.best_metric


def test_an_average_by_config_and_one_by_hook_need_two_names():
    with pytest.raises(ConfigError, match="EmaHook"):
        make(ema_decay=0.5, hooks=[EmaHook(0.9)]).train(loader(), 1)


@pytest.mark.parametrize("interval", [2, None, 0])
def test_log_lines_come_every_interval_and_not_at_all_without_one(interval, caplog):
    with caplog.at_level("INFO", "treadle"):
        make(log_interval=interval).train(loader(), 2)
    lines = [record.message for record in caplog.records if record.message.startswith("Step ")]
    assert [line.split(":")[0] for line in lines] == (["Step 2/6", "Step 4/6", "Step 6/6"] if interval else [])


def test_every_epoch_is_one_line_in_the_log(caplog):
    class Own(treadle.Trainer):
        def train_epoch(self, train_dataloader, eval_dataloader=None, epoch=0):
            return super().train_epoch(train_dataloader, eval_dataloader, epoch)

    for cls in (treadle.Trainer, Own):
        caplog.clear()
        with caplog.at_level("INFO", "treadle"):
            make(cls).train(loader(), 2, loader())
        lines = [record.message for record in caplog.records if record.message.startswith("Epoch ")]
        assert [line.split(":")[0] for line in lines] == ["Epoch 1", "Epoch 2"]
        assert " eval_loss " in lines[0]


def test_a_progress_hook_of_the_users_replaces_the_log_lines(caplog):
    with caplog.at_level("INFO", "treadle"):
        make(log_interval=1, hooks=[treadle.ProgressHook(3)]).train(loader(), 1)
        make(log_interval=1, hooks=[treadle.ProgressBarHook(line_seconds=1e9)]).train(loader(), 1)
    assert sum(record.message.startswith("Step ") for record in caplog.records) == 1


def test_fp16_lowers_its_scale_and_skips_the_step():
    class Overflows(treadle.Trainer):
        def _compute_loss(self, outputs, targets):
            loss = super()._compute_loss(outputs, targets)
            return loss * float("inf") if self.step == 1 else loss

    trainer = make(Overflows, mixed_precision="fp16")
    x = torch.full((4, 4), 0.1)
    trainer.train([(x, x.sum(1, keepdim=True))] * 3, 1)
    assert (trainer.step, trainer.applied_steps) == (3, 2)
    assert trainer._engine.precision.scaler.get_scale() == 2.0**15


def test_an_unavailable_device_and_equal_spellings():
    with pytest.raises(ConfigError, match="available: cpu"):
        treadle.Trainer(net(), None, nn.MSELoss(), None, "cuda:99")
    for spelling in ("cpu", torch.device("cpu")):
        assert treadle.Trainer(net(), None, nn.MSELoss(), None, spelling).device == torch.device("cpu")


def test_a_misspelt_training_part_is_a_warning_and_other_parts_are_not(caplog):
    read_settings({"trainning": {"max_grad_norm": 1.0}})
    assert "did you mean 'training'?" in caplog.text
    caplog.clear()
    read_settings({"training": {"max_grad_norm": 1.0}, "trainings": 3})
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": torch.optim.SGD}, "optimizer=.*must be a torch optimizer"),
        ({"optimizer": None, "loss_fn": nn.MSELoss}, "loss_fn=.*an instance, not the class"),
        ({"optimizer": None, "loss_fn": "mse"}, "loss_fn='mse': must be a function"),
    ],
)
def test_a_class_in_place_of_an_object_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        treadle.Trainer(nn.Linear(1, 1), device="cpu", **{"loss_fn": nn.MSELoss(), **arguments})
