"""Nothing is silent: a load is compared, later needs are tried before step 1, and names that nothing calls are "
"named."""

from __future__ import annotations

import argparse
import array
import dataclasses
import functools
import logging
import multiprocessing
import random
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchmetrics
from scipy import spatial
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, Subset, default_collate

from helpers import MeanSquare, through_a_file
from strangers.bench import WIDTH, Case, Points, Row, inexact, net, points_loader
from strangers.data import OwnIterator, Scaling
from strangers.reported import Managed
from treadle import (
    BaseTrainer,
    CheckpointError,
    ConfigError,
    Engine,
    EpochTrainer,
    Trainer,
    load_weights,
)
from treadle.checkpoint import save_checkpoint
from treadle.functional.settings import read_settings
from treadle.hooks import BaseHook


def engine_of(model: Any = None, *, task: Any = None, optimizer: Any = None, **settings: Any) -> Engine:
    model = net() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05) if optimizer is None else optimizer(model)
    return Engine(model, optimizer, task or MeanSquare(), device="cpu", **settings)


# -- a load is compared with its file


class Forgets(nn.Module):
    """Loads another value than it saves."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.register_buffer("level", torch.zeros(1))

    def forward(self, x: Any) -> Any:
        if self.training:
            self.level += 1
        return self.inner(x) + self.level

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict[prefix + "level"] = torch.zeros(1)
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_a_model_that_loads_something_else_is_refused_by_name():
    engine = engine_of(Forgets())
    engine.run(points_loader(), max_steps=2)
    state = through_a_file(engine.state_dict())
    with pytest.raises(CheckpointError, match=r"model\.level: after loading"):
        engine_of(Forgets()).load_state_dict(state)


def test_a_model_in_another_dtype_is_refused_by_name():
    state = through_a_file(engine_of().state_dict())
    with pytest.raises(CheckpointError, match=r"model\.0\.weight: after loading.*float32 and torch\.bfloat16"):
        engine_of(net().bfloat16()).load_state_dict(state)


class ForgetsMomentum(torch.optim.SGD):
    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict({**state, "state": {}})


def test_an_optimizer_that_loads_no_state_is_refused_by_name():
    def made(model: nn.Module) -> Any:
        return ForgetsMomentum(model.parameters(), lr=0.1, momentum=0.9)

    engine = engine_of(optimizer=made)
    engine.run(points_loader(), max_steps=2)
    with pytest.raises(CheckpointError, match=r"optimizer\.state\.0\.weight: after loading, .*missing"):
        engine_of(optimizer=made).load_state_dict(through_a_file(engine.state_dict()))


class Stubborn:
    """Saves a state that it does not take."""

    def state_dict(self) -> Any:
        return {"count": 1}

    def load_state_dict(self, state: Any) -> None:
        raise KeyError("total")


def test_an_object_that_does_not_load_what_it_saves_is_found_at_the_first_save():
    task = MeanSquare()
    task.stubborn = Stubborn()
    saves = SimpleNamespace(count=0)

    class Saves(BaseHook):
        def on_after_step(self, trainer: Any) -> None:
            trainer.request_write(trainer.state_dict)
            saves.count += 1

    with pytest.raises(
        CheckpointError, match=r"first checkpoint.*task\.stubborn: Stubborn does not restore what it saves"
    ):
        engine_of(task=task, hooks=[Saves()]).run(points_loader(), max_steps=3)
    assert saves.count == 1


def test_an_object_that_is_missing_on_the_resume_is_refused_by_name():
    task = MeanSquare()
    task.critic = nn.Linear(1, 1)
    state = through_a_file(engine_of(task=task).state_dict())
    with pytest.raises(CheckpointError, match=r"task\.critic: the checkpoint holds the state"):
        engine_of().load_state_dict(state)


def test_another_set_of_frozen_parameters_is_said_and_that_of_the_file_is_taken(caplog):
    frozen = net()
    frozen[0].requires_grad_(False)
    engine = engine_of(frozen)
    engine.run(points_loader(), max_steps=2)
    other = engine_of()
    other.load_state_dict(through_a_file(engine.state_dict()))
    assert "0.bias, 0.weight: requires_grad is restored from the checkpoint" in caplog.text
    assert not other.model[0].weight.requires_grad


def test_an_attribute_that_cannot_be_kept_is_named_once(caplog):
    class Opens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls, self.handle, self.index = net(), 0, None, {}

        def forward(self, x: Any) -> Any:
            self.calls, self.handle = self.calls + 1, self.handle or object()
            self.index[0] = 1  # it may be read from what was opened
            return self.inner(x)

    engine = engine_of(Opens())
    for steps in (2, 3, 4):
        engine.run(points_loader(), max_steps=steps)
        engine.state_dict()
    assert caplog.text.count("index has changed, but checkpoints do not hold it") == 1
    assert "calls" not in caplog.text


def test_a_roll_back_takes_own_objects_back_too():
    task = MeanSquare()
    task.critic, task.factor = nn.Linear(1, 1), 1.0
    engine = engine_of(task=task)
    state = through_a_file(engine.state_dict())
    with torch.no_grad():
        task.critic.weight.add_(1)
    task.factor = 0.5
    engine.state.roll_back(engine, state)
    assert torch.equal(task.critic.weight, state["objects"]["task.critic"]["state"]["weight"])
    assert task.factor == 1.0


# -- optimizers with two points


class TwoPoints(torch.optim.SGD):
    """Evaluates at twice the weights that it trains at."""

    def __init__(self, params: Any, lr: float = 0.05):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["train_mode"] = False

    def _move(self, factor: float, mode: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != mode:
                group["train_mode"] = mode
                for parameter in group["params"]:
                    parameter.data.mul_(factor)

    def train(self) -> None:
        self._move(1 / 3, True)

    def eval(self) -> None:
        self._move(3.0, False)

    def step(self, closure: Any = None) -> Any:
        assert self.param_groups[0]["train_mode"]
        return super().step(closure)


def test_evaluation_best_rule_and_export_use_the_evaluation_point(tmp_path):
    seen = []

    class Watches(MeanSquare):
        def step(self, model: Any, batch: Any, totals: Any = None, generator: Any = None) -> Any:
            if not model.training:
                seen.append(model[0].weight.detach().clone())
            return super().step(model, batch)

    engine = engine_of(task=Watches(), optimizer=lambda model: TwoPoints(model.parameters()))
    driver = EpochTrainer(engine)
    driver.fit(points_loader(), points_loader(), 2)
    weight = engine.model[0].weight.detach().clone()
    driver.evaluate(points_loader())
    assert torch.equal(engine.model[0].weight, weight)
    assert torch.equal(seen[-1], weight * 3)
    save_checkpoint(engine.state_dict(), tmp_path / "last.pt")
    assert torch.equal(load_weights(tmp_path / "last.pt")["0.weight"], weight * 3)


# -- loaders are iterated as a plain loop does


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Points(), batch_size=3, shuffle=True),
        lambda: Scaling(Points(), batch_size=3, shuffle=True),
        lambda: OwnIterator(Points(), batch_size=3, shuffle=True),
        lambda: DataLoader(Points(), batch_size=3, collate_fn=lambda rows: {"x": default_collate(rows)}),
        lambda: DataLoader(Points(), batch_size=None),
    ],
    ids=["DataLoader", "own __iter__", "own iterator", "own collate function", "no batches"],
)
def test_the_batches_are_those_of_a_plain_loop(make):
    from treadle.data.cursor import Cursor

    torch.manual_seed(0)
    plain = list(make())
    torch.manual_seed(0)
    cursor = Cursor()
    cursor.open(make())
    ours = cursor.take(len(plain)).batches
    assert [type(batch) for batch in ours] == [type(batch) for batch in plain]
    for one, other in zip(ours, plain, strict=True):
        assert str(one) == str(other)


# -- classes of configs


class Slots:
    __slots__ = ("log_interval", "max_grad_norm")

    def __init__(self) -> None:
        self.max_grad_norm, self.log_interval = 2.0, None


class Keyed:
    """A mapping with attribute access that is no Mapping, as ml_collections' ConfigDict is."""

    def __init__(self, **fields: Any):
        object.__setattr__(self, "_fields", fields)

    def __getattr__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self, "_fields")[name]
        except KeyError:
            raise AttributeError(name) from None

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def keys(self) -> Any:
        return self._fields.keys()


@dataclasses.dataclass
class Fields:
    max_grad_norm: float = 2.0


def attrs_class() -> Any:
    attrs = pytest.importorskip("attrs")
    return attrs.make_class("Made", {"max_grad_norm": attrs.field(default=2.0)}, slots=True)()


def pydantic_model() -> Any:
    pydantic = pytest.importorskip("pydantic")
    return pydantic.create_model("Made", max_grad_norm=(float, 2.0))()


def ml_config_dict() -> Any:
    return pytest.importorskip("ml_collections").ConfigDict({"max_grad_norm": 2.0})


def omega() -> Any:
    return pytest.importorskip("omegaconf").OmegaConf.create({"max_grad_norm": 2.0})


PARTS = {
    "slots": Slots, "keys and attributes": lambda: Keyed(max_grad_norm=2.0), "dataclass": Fields, "attrs": attrs_class,
    "pydantic": pydantic_model, "ml_collections": ml_config_dict, "omegaconf": omega,
    "argparse": lambda: argparse.Namespace(max_grad_norm=2.0), "namespace": lambda: SimpleNamespace(max_grad_norm=2.0),
}  # fmt: skip


@pytest.mark.parametrize("make", PARTS.values(), ids=PARTS)
def test_the_settings_of_any_class_of_config_are_read(make):
    assert read_settings({"training": make()}).max_grad_norm == 2.0
    assert read_settings(SimpleNamespace(training=make())).max_grad_norm == 2.0


def test_a_config_that_shows_nothing_is_refused():
    with pytest.raises(ConfigError, match="has neither keys nor attributes"):
        read_settings({"training": object()})


def test_settings_outside_of_the_training_part_are_refused():
    with pytest.raises(ConfigError, match="max_grad_norm"):
        read_settings(argparse.Namespace(max_grad_norm=2.0))


# -- what comes later is tried before step 1


def test_an_evaluation_loader_that_cannot_be_collated_is_found_before_step_1():
    class Ragged(Points):
        def __getitem__(self, index: int) -> Any:
            return torch.ones(index + 1)

    engine = engine_of()
    with pytest.raises(ConfigError, match="stack expects each tensor to be equal size"):
        EpochTrainer(engine).fit(points_loader(), points_loader(Ragged()), 2)
    assert engine.step == 0


def test_a_metric_that_does_not_fit_is_found_before_step_1():
    torchmetrics = pytest.importorskip("torchmetrics")
    model = net()
    trainer = Trainer(model, None, nn.MSELoss(), device="cpu", metrics={"acc": torchmetrics.Accuracy("binary")})
    with pytest.raises(Exception, match=r"binary|int|values"):
        trainer.train(points_loader(), 2, points_loader())
    assert trainer.step == 0


def test_trying_the_evaluation_changes_no_number():
    def losses(val_loader: Any) -> Any:
        torch.manual_seed(0)
        engine = engine_of()
        EpochTrainer(engine).fit(points_loader(shuffle=True), val_loader, 2)
        return engine.model[0].weight

    assert torch.equal(losses(points_loader(shuffle=True)), losses(None))


def test_a_schedule_that_ends_before_the_last_epoch_is_refused_before_step_1():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=7, cycle_momentum=False)
    engine = Engine(model, optimizer, MeanSquare(), scheduler=scheduler, device="cpu")
    with pytest.raises(ConfigError, match=r"OneCycleLR has total_steps=7.*total_steps=8"):
        engine.run(points_loader(), epochs=2)
    assert engine.step == 0


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda of: torch.optim.lr_scheduler.CosineAnnealingLR(of, 5), "CosineAnnealingLR(T_max=5) ends after 5 steps"),
        (lambda of: torch.optim.lr_scheduler.CosineAnnealingLR(of, 8), ""),
        (lambda of: torch.optim.lr_scheduler.SequentialLR(of, [
            torch.optim.lr_scheduler.LinearLR(of, 0.1, total_iters=2), torch.optim.lr_scheduler.PolynomialLR(of, 4)],
            milestones=[2]), "PolynomialLR(total_iters=4) ends after 6 steps"),
    ],
    ids=["too short", "long enough", "the last of a sequence"],
)  # fmt: skip
def test_a_schedule_that_ends_before_the_run_is_named_before_step_1(make, named, caplog):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(model, optimizer, MeanSquare(), scheduler=make(optimizer), device="cpu", progress=False)
    engine.run(points_loader(), epochs=2)
    assert ("ends after" in caplog.text, named in caplog.text) == (bool(named), True)


def test_a_model_that_fails_in_an_evaluation_is_found_before_step_1_without_metrics():
    class FailsInEval(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: Any) -> Any:
            if not self.training:
                raise RuntimeError("no such mode")
            return self.inner(x)

    engine = engine_of(FailsInEval())
    with pytest.raises(RuntimeError, match="no such mode"):
        EpochTrainer(engine).fit(points_loader(), points_loader(), 2)
    assert engine.step == 0


def test_what_a_checkpoint_cannot_hold_of_a_hook_and_a_cache_is_named_once(caplog):
    class Late(BaseHook):
        teacher = None

        def on_after_step(self, trainer: Any) -> None:
            self.teacher = self.teacher or net()

    class Cached(Points):
        def __init__(self) -> None:
            super().__init__()
            self.read = functools.lru_cache(super().__getitem__)

        def __getitem__(self, index: int) -> Any:
            return self.read(index)

    engine = engine_of(hooks=[Late()])
    for steps in (2, 3, 4):
        engine.run(points_loader(Cached()), max_steps=steps)
        engine.state_dict()
    assert caplog.text.count("hook Late: teacher has changed, but checkpoints do not hold it") == 1
    assert "Cached.read (an lru_cache) has changed, but checkpoints do not hold it" in caplog.text


def test_a_change_deep_in_a_dict_that_holds_a_lock_is_named(caplog):
    class Guarded(MeanSquare):
        def __init__(self) -> None:
            self.memory = {"shared": {"lock": threading.Lock(), "calls": 0}}

        def step(self, model: Any, batch: Any, totals: Any = None, generator: Any = None) -> Any:
            self.memory["shared"]["calls"] += 1
            return super().step(model, batch)

    engine = engine_of(task=Guarded())
    engine.run(points_loader(), max_steps=2)
    engine.state_dict()
    assert "task.memory changes during the run, but checkpoints do not hold it" in caplog.text


def test_trying_the_schedule_moves_nothing():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    Engine(model, optimizer, MeanSquare(), scheduler=scheduler, device="cpu").run(points_loader(), max_steps=2)
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (2, 0.025)


# -- names that nothing calls


class Fit(BaseTrainer):
    def build_data_loader(self) -> Any:
        return points_loader()

    def build_model(self) -> nn.Module:
        return nn.Linear(WIDTH, 1)

    def build_optimizer(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def forward(self, input: Any) -> Any:
        return self.helper(input), {}

    def helper(self, input: Any) -> Any:
        return self.model(input[0]).square().mean()


@pytest.mark.parametrize(
    "name", ["_train_step", "build_lr_schedular", "build_optimiser", "training_step", "log_scalars", "_before_step"]
)
def test_a_method_that_nothing_calls_is_named_at_once(name, caplog):
    type("Mine", (Fit,), {name: lambda self: None})(max_steps=1, device="cpu").train()
    assert f"Mine.{name}: nothing calls it" in caplog.text


def test_a_call_of_its_super_does_not_make_a_method_the_users_own(caplog):
    class Mine(Fit):
        def _before_step(self) -> None:
            super()._before_step()  # type: ignore[misc]

    Mine(max_steps=1, device="cpu").train()
    assert "Mine._before_step: nothing calls it; pass a hook with on_before_step" in caplog.text


def test_a_method_that_the_user_calls_is_not_named(caplog):
    class Mine(Fit):
        def training_step(self, input: Any) -> Any:
            return self.helper(input), {}

        def forward(self, input: Any) -> Any:
            return self.training_step(input)

    Mine(max_steps=1, device="cpu").train()
    assert "nothing calls it" not in caplog.text


@pytest.mark.parametrize("name", ["on_train_batch_end", "on_after_stop", "after_step", "before_train"])
def test_an_event_that_does_not_exist_is_named_at_once(name, caplog):
    hook = type("Mine", (BaseHook,), {name: lambda self, trainer: None})()
    Fit(max_steps=1, device="cpu", hooks=[hook]).train()
    assert f"Mine.{name}: no event calls it" in caplog.text


async def in_another_loop(self: Any, trainer: Any) -> None: ...


def in_parts(self: Any, trainer: Any) -> Any:
    yield


@pytest.mark.parametrize(
    ("event", "value", "message"),
    [
        ("on_after_step", lambda self: None, "is called as on_after_step\\(trainer\\)"),
        ("on_after_epoch", lambda self, trainer, epoch: None, "is called as on_after_epoch\\(trainer\\)"),
        ("on_state_dict", lambda self, trainer: None, "is called as on_state_dict\\(trainer, state_dict\\)"),
        ("on_after_train", None, "on_after_train=None: is not a method"),
        ("on_log", property(lambda self: 3), "on_log=3: is not a method"),
        ("on_after_step", in_another_loop, "is an async function"),
        ("on_after_epoch", in_parts, "is a generator function"),
    ],
)
def test_an_event_that_could_not_be_called_is_refused_before_anything_is_built(event, value, message):
    hook = type("Mine", (BaseHook,), {event: value})()
    with pytest.raises(ConfigError, match=f"Mine.{event}.*{message}" if "not a method" not in message else message):
        Fit(max_steps=1, device="cpu", hooks=[hook])


def test_events_that_are_static_or_on_the_object_act_and_a_misspelt_one_there_is_named(caplog):
    calls = array.array("i", [0])

    class Counts(BaseHook):
        @staticmethod
        def on_after_step(trainer: Any) -> None:
            calls[0] += 1

    hook = Counts()
    hook.on_after_epoch = lambda trainer: calls.append(1)
    hook.on_step_done = lambda trainer: None
    Trainer(net(), None, nn.MSELoss(), device="cpu", hooks=[hook]).train(points_loader(), 1)
    assert calls[0] > 1
    assert len(calls) == 2
    assert "Counts.on_step_done: no event calls it" in caplog.text


@pytest.mark.parametrize(
    "name", ["on_epoch_end", "on_train_start", "configure_optimizers", "_forward", "prepare_batch", "compute_metrics"]
)
def test_a_method_of_the_functional_face_that_nothing_calls_is_named(name, caplog):
    kind = type("Mine", (Trainer,), {name: lambda self: None})
    kind(net(), None, nn.MSELoss(), device="cpu").train(points_loader(), 1)
    assert f"Mine.{name}: nothing calls it" in caplog.text


@pytest.mark.parametrize("name", ["build_eval_data_loader", "build_predict_data_loader", "predict_step"])
def test_methods_for_the_commands_are_not_named(name, caplog):
    type("Mine", (Fit,), {name: lambda self, *_: points_loader()})(max_steps=1, device="cpu").train()
    assert "nothing calls it" not in caplog.text


@pytest.mark.parametrize(
    ("name", "method", "arguments"),
    [
        ("evaluate", lambda self: {"loss": 1.0}, "1 argument;"),
        ("train_step", lambda self, batch, index: {}, "1 argument;"),
        ("_compute_loss", lambda self, outputs: outputs.mean(), "2 arguments;"),
        ("train_epoch", lambda self: {}, "3 or 2 arguments;"),
    ],
)
def test_an_override_with_other_arguments_is_refused_before_step_1(name, method, arguments):
    trainer = type("Mine", (Trainer,), {name: method})(net(), None, nn.MSELoss(), device="cpu")
    with pytest.raises(ConfigError, match=f"Mine.{name}.*is called with {arguments}"):
        trainer.train(points_loader(), 1, points_loader())
    assert trainer.step == 0


def test_other_arguments_of_the_step_face_are_refused_before_step_1():
    trainer = type("Mine", (Fit,), {"forward": lambda self, input, index: None})(max_steps=1, device="cpu")
    with pytest.raises(ConfigError, match=r"Mine.forward.*is called with 1 argument"):
        trainer.train()


def test_a_constructor_that_forgot_its_base_is_named():
    class Mine(Fit):
        def __init__(self, width: int):
            self.width = width

    with pytest.raises(ConfigError, match=r"Mine.__init__\(\) did not call super\(\).__init__"):
        Mine(3).train()


@pytest.mark.parametrize("metric", ["eval/mean_squared_error", "eval_mse", "val_gap"])
def test_a_metric_to_select_by_that_does_not_exist_is_found_before_step_1(metric):
    metrics = {"gap": lambda outputs, targets: {"mean": 1.0}, "mae": "mae"}
    trainer = Trainer(net(), None, nn.MSELoss(), device="cpu", metrics=metrics)
    with pytest.raises(ConfigError, match="they will contain eval_gap/mean, eval_loss, eval_mae, and train_loss"):
        trainer.train(points_loader(), 1, points_loader(), best_model_metric=metric, best_mode="min")
    assert trainer.step == 0


@pytest.mark.parametrize("metric", ["gap/mean", "eval_gap/mean", "mae", "train_loss", "lr"])
def test_a_metric_to_select_by_may_have_either_name(metric):
    metrics = {"gap": lambda outputs, targets: {"mean": 1.0}, "mae": torchmetrics.MeanAbsoluteError()}
    trainer = Trainer(net(), None, nn.MSELoss(), device="cpu", metrics=metrics)
    trainer.train(points_loader(), 1, {"one": points_loader()}, best_model_metric=metric, best_mode="min")
    assert trainer.best_metric is not None


def test_a_metric_of_classes_on_numbers_is_found_before_step_1():
    trainer = Trainer(net(), None, nn.MSELoss(), device="cpu", metrics=["accuracy"])
    with pytest.raises(ConfigError, match="accuracy needs class indices"):
        trainer.train(points_loader(), 1, points_loader())
    assert trainer.step == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"save_dir": 3}, "save_dir=3: must be a path or None"),
        ({"resume_from": True}, "resume_from=True: must be a path or None"),
        ({"best_model_metric": 3}, "best_model_metric=3: must be a string or None"),
        ({"callbacks": 3}, "callbacks=3: must be a list of functions"),
        ({"train_dataloader": "train"}, "train_dataloader='train': must be a DataLoader"),
        ({"train_dataloader": None}, "train_dataloader=None: must be a DataLoader"),
    ],
)
def test_arguments_of_train_of_another_type_are_refused(arguments, message):
    given = {"train_dataloader": points_loader(), "num_epochs": 1, **arguments}
    with pytest.raises(ConfigError, match=message):
        Trainer(net(), None, nn.MSELoss(), device="cpu").train(**given)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps), "CosineAnnealingLR"),
        (lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, steps), "OneCycleLR"),
    ],
)
def test_a_schedule_over_the_steps_that_moves_with_epochs_is_named(make, name, caplog):
    model, batches = net(), points_loader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = make(optimizer, 3 * len(batches))
    Trainer(model, optimizer, nn.MSELoss(), device="cpu", scheduler=schedule).train(batches, 3)
    assert f"scheduler: {name}" in caplog.text
    assert "covers the steps of this run but moves once in each of its 3 epochs" in caplog.text


@pytest.mark.parametrize("model", [nn.Linear, "resnet18", None])
def test_what_is_no_model_is_refused_by_name(model):
    with pytest.raises(ConfigError, match=r"model=.*must be a model"):
        Trainer(model, None, nn.MSELoss(), device="cpu")


def test_an_evaluation_that_is_set_on_the_object_acts_and_a_step_is_named(caplog):
    model = net()
    trainer = Trainer(model, None, nn.MSELoss(), device="cpu")
    trainer.evaluate = lambda loader: {"loss": 7.0}
    trainer.eval_step = lambda batch: {"loss": 0.0}
    assert trainer.train(points_loader(), 1, points_loader())["eval_loss"] == [7.0]
    assert "eval_step: set on this object of Trainer, which nothing calls" in caplog.text
    assert "evaluate: set" not in caplog.text


def test_a_second_train_that_trains_nothing_says_so(caplog):
    trainer = Trainer(net(), None, nn.MSELoss(), device="cpu")
    trainer.train(points_loader(), 1)
    caplog.clear()
    trainer.train(points_loader(), 1)
    found = [record.levelno for record in caplog.records if "nothing to do" in record.getMessage()]
    assert found == [logging.WARNING]


def test_a_second_run_that_trains_nothing_says_so(caplog):
    trainer = Fit(max_steps=2, device="cpu")
    trainer.train()
    caplog.clear()
    trainer.train()
    assert [record.levelno for record in caplog.records if "nothing to do" in record.getMessage()] == [logging.WARNING]


def test_states_that_a_hook_keeps_are_named_and_do_not_grow_into_each_other(caplog):
    class Keeps(BaseHook):
        def __init__(self):
            self.states = {}

        def on_after_step(self, trainer):
            trainer.request_write(lambda: self.states.__setitem__(trainer.step, trainer.state_dict()))

    itself = []
    itself.append(itself)
    hook = Keeps()
    hook.ring = itself
    engine = Engine(net(), torch.optim.SGD(net().parameters(), lr=0.1), MeanSquare(), device="cpu", hooks=[hook])
    engine.optimizer = torch.optim.SGD(engine.model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING):
        engine.run(points_loader(), max_steps=4)
    assert len(hook.states) == 4
    sizes = [len(repr(state["hooks"])) for state in hook.states.values()]
    assert max(sizes) == min(sizes)
    assert [record.getMessage() for record in caplog.records if "Keeps: states" in record.getMessage()] != []


def test_a_cache_of_samples_is_named_and_goes_into_no_checkpoint(caplog):
    class Caches(Points):
        def __init__(self) -> None:
            super().__init__()
            self.cache: dict[int, Any] = {}

        def __getitem__(self, index: int) -> Any:
            self.cache[index] = torch.zeros(200_000)  # below the bound of one value; all together are above it
            return super().__getitem__(index)

    engine = engine_of()
    engine.run(points_loader(Caches()), max_steps=4)
    cached = engine.cursor.loader.dataset.cache
    assert sum(value.numel() for value in cached.values()) > 1_000_000
    held = str(engine.cursor.state_dict().get("objects"))
    assert "cache" not in held
    assert "Caches.cache has changed, but checkpoints do not hold it" in caplog.text


# -- what hooks set when they begin


class SetsWhenItBegins(BaseHook):
    """Sets what a new run must set itself, and what it may want otherwise."""

    def __init__(self, folder: str, factor: float):
        self.given = folder, factor

    def on_before_train(self, trainer: Any) -> None:
        self.folder, self.factor = self.given
        self.started, self.clock = time.time(), time.perf_counter()
        self.rate = trainer.optimizer.param_groups[0]["lr"]
        trainer.optimizer.param_groups[0]["lr"] = self.rate / 2


def test_texts_and_times_that_a_hook_sets_when_it_begins_stay_and_numbers_are_named(caplog):
    hook = SetsWhenItBegins("here", 1.0)
    engine = engine_of(hooks=[hook])
    engine.run(points_loader(), max_steps=2)
    state = through_a_file(engine.state_dict())
    again = SetsWhenItBegins("there", 2.0)
    resumed = engine_of(hooks=[again])
    resumed.load_state_dict(state)
    resumed.run(points_loader(), max_steps=3)
    assert again.folder == "there"
    assert again.started > hook.started
    assert again.clock > hook.clock
    assert (again.rate, again.factor) == (0.05, 1.0)
    assert caplog.text.count("the run continues with the checkpoint's factor=1.0 (on_before_train set 2.0)") == 1
    assert "continues with the checkpoint's rate=0.05 (on_before_train set 0.025)" in caplog.text


class SetsRate(BaseHook):
    def __init__(self, rate: float):
        self.given = (rate,)

    def on_before_train(self, trainer: Any) -> None:
        trainer.optimizer.param_groups[0]["lr"] = self.given[0]

    def on_after_step(self, trainer: Any) -> None:
        trainer.optimizer.param_groups[0]["lr"] /= 2


@pytest.mark.parametrize(("first", "later", "used"), [(0.05, 0.05, 0.0125), (0.03, 0.03, 0.0075), (0.03, 0.5, 0.5)])
def test_a_rate_that_a_hook_sets_again_when_it_begins_is_put_back_and_another_one_stays(first, later, used, caplog):
    engine = engine_of(hooks=[SetsRate(first)])
    engine.run(points_loader(), max_steps=2)
    resumed = engine_of(hooks=[SetsRate(later)])
    resumed.load_state_dict(through_a_file(engine.state_dict()))
    resumed.run(points_loader(), max_steps=3)
    assert resumed.optimizer.param_groups[0]["lr"] == used / 2
    named = "continues with the checkpoint's optimizer[0].lr=0.0125 (on_before_train set 0.05"
    assert caplog.text.count(named) == (first == 0.05)  # with which the optimizer was built, so it may be on purpose


@pytest.mark.parametrize("make", [lambda: nn.LSTM(WIDTH, 1), lambda: nn.GRU(WIDTH, 1), lambda: nn.RNN(WIDTH, 1)])
def test_the_parameters_of_a_recurrent_layer_are_not_named(make, caplog):
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make()

        def forward(self, x: Any) -> Any:
            return self.inner(x)[0]

    engine = engine_of(First())
    for steps in (1, 2, 3):
        engine.run(points_loader(), max_steps=steps)
        engine.state_dict()
    assert "no checkpoint holds it" not in caplog.text


# -- what public reports are about


class TakesOut(BaseHook):
    def on_before_step(self, trainer: Any) -> None:
        if trainer.step == 2:
            trainer.optimizer.param_groups[0]["params"].pop(0).requires_grad_(False)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_parameter_taken_out_of_its_group_is_named_at_the_next_save(kind: Any) -> None:
    engine = engine_of(optimizer=lambda of: kind(of.parameters(), lr=0.05), hooks=[TakesOut()])
    engine.run(points_loader(), max_steps=3)
    with pytest.raises(CheckpointError, match=r"0\.weight.*requires_grad_"):
        engine.state_dict()


class Numbered(BaseTrainer):
    def build_data_loader(self) -> Any:
        return points_loader()

    def build_model(self) -> Any:
        return net()

    def build_optimizer(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.05)

    def forward(self, input: Any) -> Any:
        return nn.functional.mse_loss(self.model(input[0]), input[1])


@pytest.mark.parametrize(("name", "value"), [("steps", 0), ("guard", "none"), ("target", [1.0])])
def test_a_part_of_the_engine_that_a_subclass_assigns_is_refused_by_name(name: str, value: Any) -> None:
    trainer = Numbered(2, device="cpu", progress=False)
    setattr(trainer, name, value)
    with pytest.raises(ConfigError, match=rf"Numbered\.{name}"):
        trainer.train()
    assert trainer.hooks is None


class Grows(MeanSquare):
    def __init__(self) -> None:
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 1)])

    def step(self, model: Any, batch: Any, totals: Any = None, generator: Any = None) -> Any:
        if len(self.heads) < 3:
            self.heads.append(nn.Linear(WIDTH, 1))
        return super().step(model, batch)


def test_a_module_of_the_task_that_grows_is_named(caplog: Any) -> None:
    engine = engine_of(task=Grows())
    with caplog.at_level(logging.WARNING):
        engine.run(points_loader(), max_steps=1)
        engine.state_dict()
    assert "task.heads.1" in caplog.text


RATES = [0]


def falling(step: int) -> float:
    RATES[0] += 1
    return 1 / RATES[0]


def test_a_schedule_by_a_variable_that_is_loaded_with_it_warns_of_no_jump(caplog: Any) -> None:
    def made() -> Engine:
        RATES[0] = 0
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, falling)
        return Engine(model, optimizer, MeanSquare(), scheduler=schedule, device="cpu")

    first = made()
    first.run(points_loader(), max_steps=3)
    state, rate = through_a_file(first.state_dict()), first.optimizer.param_groups[0]["lr"]
    second = made()
    second.prepare()
    with caplog.at_level(logging.WARNING):
        second.load_state_dict(state)
    assert (second.optimizer.param_groups[0]["lr"], RATES[0]) == (rate, 4)
    assert caplog.text == ""


class Searches(MeanSquare):
    """Finds neighbours in a tree of SciPy's, which is written in C."""

    def __init__(self, every: int):
        self.every, self.moves = every, 0
        self.tree = spatial.cKDTree(Points().x.numpy())

    def step(self, model: Any, batch: Any, totals: Any = None, generator: Any = None) -> Any:
        self.moves += 1
        if self.moves % self.every == 0:
            self.tree = spatial.cKDTree(Points().x.numpy() * self.moves)
        return super().step(model, batch)


@pytest.mark.parametrize(("every", "named"), [(2, True), (9, False)])
def test_an_object_of_a_library_that_no_checkpoint_holds_is_named_where_it_is_replaced(
    every: int, named: bool, caplog: Any
) -> None:
    engine = engine_of(task=Searches(every))
    engine.prepare()
    with caplog.at_level(logging.WARNING):
        engine.state_dict()
        engine.run(points_loader(), max_steps=3)
        engine.state_dict()
    assert ("task.tree" in caplog.text) is named


class FitsOnce(MeanSquare):
    """Interpolates with an object that it makes when it is first needed, from nothing that changes."""

    spline: Any = None

    def step(self, model: Any, batch: Any, totals: Any = None, generator: Any = None) -> Any:
        if self.spline is None:
            self.spline = spatial.cKDTree(Points().x.numpy())
        return super().step(model, batch)


def test_an_object_of_a_library_that_is_made_when_needed_is_not_named(caplog: Any) -> None:
    engine = engine_of(task=FitsOnce())
    with caplog.at_level(logging.WARNING):
        for steps in (1, 2, 3):
            engine.run(points_loader(), max_steps=steps)
            engine.state_dict()
    assert caplog.text == ""


def draws(trainer: Any, epoch: int, metrics: Any) -> None:
    torch.rand(3)


def grows(trainer: Any, epoch: int, metrics: Any) -> None:
    trainer.rows.indices = [*trainer.rows.indices, *range(6, 9 + epoch)]


def forgets(trainer: Any, epoch: int, metrics: Any) -> None:
    trainer.optimizer.state[trainer.model[0].weight]["momentum_buffer"].zero_()


def tells_a_hook(trainer: Any, epoch: int, metrics: Any) -> None:
    trainer.scales.factor *= 0.5


class Scales(BaseHook):
    factor = 1.0

    def on_before_optimizer_step(self, trainer: Any) -> None:
        for one in trainer.model.parameters():
            one.grad.mul_(self.factor)


class WithRows(Trainer):
    def __init__(self) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        super().__init__(model, optimizer, nn.MSELoss(), device="cpu", progress=False, hooks=[scales := Scales()])
        self.scales = scales
        self.rows = Subset(Points(), list(range(6)))

    def run_to(self, epochs: int, folder: Any, callback: Any) -> Any:
        loader = DataLoader(self.rows, batch_size=3, shuffle=True)
        self.train(loader, epochs, save_dir=folder, resume_from="auto", callbacks=[callback])
        return self.model.state_dict()


@pytest.mark.parametrize("callback", [draws, grows, forgets, tells_a_hook])
def test_whatever_a_callback_moves_is_in_the_state_of_its_epoch(callback: Any, tmp_path: Any) -> None:
    torch.manual_seed(0)
    expected = WithRows().run_to(3, tmp_path / "straight", callback)
    torch.manual_seed(0)
    WithRows().run_to(1, tmp_path / "stopped", callback)
    found = WithRows().run_to(3, tmp_path / "stopped", callback)
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []


def test_weights_that_were_pruned_before_training_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    def engine() -> Engine:
        model = net()
        prune.l1_unstructured(model[0], "weight", amount=0.3)
        return engine_of(model)

    first, second = engine(), engine()
    first.run(points_loader(), max_steps=2)
    second.load_state_dict(first.state_dict())
    second.state_dict()  # before a forward pass computes the weight again
    assert caplog.text == ""


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
@pytest.mark.parametrize("fuses", [True, False])
def test_torchscript_is_named_where_it_fuses_kernels(fuses: bool, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(torch.jit.script(nn.Linear(WIDTH, 1)))
    before = torch.jit.set_fusion_strategy([("STATIC", 2)] if fuses else [])
    try:
        engine.state_dict()
        assert torch.jit.set_fusion_strategy(before) == ([("STATIC", 2)] if fuses else [])
    finally:
        torch.jit.set_fusion_strategy(before)
    assert caplog.text.count("torch.jit.set_fusion_strategy([])") == fuses


def test_what_a_manager_of_multiprocessing_holds_is_carried() -> None:
    with multiprocessing.get_context("fork").Manager() as manager:
        assert inexact(Row("a manager", "Own objects", lambda: Case(task=Managed(manager)), stops=(2, 5))) == []


class AddsGroup(BaseHook):
    def on_before_step(self, trainer: Any) -> None:
        if trainer.step == 2:
            trainer.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_a_schedule_that_does_not_cover_an_added_group_fails_with_a_note() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    engine = Engine(model, optimizer, MeanSquare(), scheduler=schedule, device="cpu", hooks=[AddsGroup()])
    with pytest.raises(ValueError) as failed:
        engine.run(points_loader(), max_steps=3)
    notes = getattr(failed.value, "__notes__", ["LambdaLR was built for 1 parameter groups"])  # since Python 3.11
    assert any("LambdaLR was built for 1 parameter groups" in note for note in notes)


class Registers(BaseHook):
    """Registers hooks on a module, a parameter and the optimizer, when training begins or at a step."""

    def __init__(self, step: int):
        self.at = step
        self.scale = 0.5

    def register(self, trainer: Any) -> None:
        trainer.model[0].register_forward_hook(lambda module, inputs, output: output * self.scale)
        trainer.model[0].weight.register_hook(self.scaled)
        trainer.optimizer.register_step_pre_hook(functools.partial(print_nothing, 1))

    def scaled(self, grad: torch.Tensor) -> torch.Tensor:
        return grad * self.scale

    def on_before_train(self, trainer: Any) -> None:
        if self.at == 0:
            self.register(trainer)

    def on_before_step(self, trainer: Any) -> None:
        if trainer.step == self.at:
            self.register(trainer)


def print_nothing(*given: Any) -> None:
    pass


@pytest.mark.parametrize("step", [0, 2])
def test_hooks_of_torch_that_are_registered_while_training_are_named(step: int, caplog: Any) -> None:
    engine = engine_of(hooks=[Registers(step), Saves()])
    with caplog.at_level(logging.WARNING):
        engine.run(points_loader(), max_steps=3)
    names = ("model.0._forward_hooks[0]", "model.0.weight._backward_hooks[0]", "optimizer._optimizer_step_pre_hooks[0]")
    assert [f"{name} was registered" in caplog.text for name in names] == [step > 0] * 3


class Saves(BaseHook):
    def on_after_step(self, trainer: Any) -> None:
        trainer.state_dict()


class Draws(MeanSquare):
    def __init__(self) -> None:
        self.chance = random.SystemRandom()


def test_a_generator_without_a_state_is_named(caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        engine_of(task=Draws(), hooks=[Saves()]).run(points_loader(), max_steps=1)
    assert "task.chance" in caplog.text


class Ensemble(nn.Module):
    """Members of an ensemble in stacked parameters, with their form on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        members = [nn.Linear(WIDTH, 1) for _ in range(2)]
        self.form = [nn.Linear(WIDTH, 1).to("meta")]
        stacked = {name: value.detach() for name, value in torch.func.stack_module_state(members)[0].items()}
        self.members = nn.ParameterDict(stacked)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = functools.partial(torch.func.functional_call, self.form[0], args=(x,))
        return torch.func.vmap(one)(dict(self.members)).mean(0)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.jit.script(nn.Linear(WIDTH, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.parametrize("model", [Ensemble, Scripted])
def test_a_model_with_modules_that_are_not_plain_is_exact(model: Any) -> None:
    assert inexact(Row("model", "Models", lambda: Case(model=model()), stops=(2, 5))) == []


class Merges(nn.Module):
    """Merges its adapter into its weights to evaluate, as loralib does."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.merged = nn.Linear(WIDTH, 1).requires_grad_(False), False
        self.adapter = nn.Parameter(torch.zeros(1, WIDTH))

    def train(self, mode: bool = True) -> Any:
        if mode == self.merged:
            self.base.weight.data += -self.adapter.data if mode else self.adapter.data
            self.merged = not mode
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) if self.merged else self.base(x) + x @ self.adapter.T


def test_an_overridden_train_is_called_after_an_evaluation() -> None:
    model = Merges()
    engine = engine_of(model, optimizer=lambda of: torch.optim.SGD([of.adapter], lr=0.05))
    engine.run(points_loader(), max_steps=1)
    engine.evaluate(points_loader())
    assert not model.merged
    engine.run(points_loader(), max_steps=2)
    assert engine.applied_steps == 2


def test_an_optimizer_that_computes_its_rate_is_taken() -> None:
    optimization = pytest.importorskip("transformers.optimization")
    model = net()
    optimizer = optimization.Adafactor(model.parameters(), lr=None, warmup_init=True)
    trainer = Trainer(model, optimizer, nn.MSELoss(), device="cpu", progress=False)
    assert len(trainer.train(points_loader(), 1)["train_loss"]) == 1
