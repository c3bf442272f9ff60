"""Optimizer, schedules and helpers of the graph face."""

from __future__ import annotations

import inspect
import logging
import math

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from helpers import through_a_file
from treadle.errors import ConfigError
from treadle.graphs import (
    EarlyStopping,
    GradientAccumulator,
    count_parameters,
    get_model,
    get_optimizer,
    get_optimizer_from_config,
    get_scheduler,
    log_model_info,
    scheduler,
)


class Named(nn.Module):
    """Names that say the opposite of what their parameters are."""

    def __init__(self):
        super().__init__()
        self.norm_weight = nn.Parameter(torch.ones(2, 2))
        self.gate = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.linear = nn.BatchNorm1d(3)
        self.table = nn.LayerNorm((2, 3))  # two dimensions, and yet of a normalisation layer
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
def test_matrices_decay_and_vectors_gates_and_normalisation_do_not(kind):
    model = Named()
    optimizer = get_optimizer(model, kind, lr=0.1, weight_decay=0.5)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    assert groups[0] == ["norm_weight"]
    assert groups[1] == ["gate", "scale", "linear.weight", "linear.bias", "table.weight", "table.bias"]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    assert type(optimizer).__name__.lower() == kind
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_every_parameter_of_a_graph_model_is_in_one_group():
    model = get_model(num_features=3, hidden_dim=8, num_layers=2, num_heads=2, node_pe_dim=4, relative_pe_dim=3)
    grouped = [id(p) for group in get_optimizer(model).param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())


def test_the_settings_reach_the_optimizer():
    adam = get_optimizer(Named(), "adam", betas=(0.5, 0.6), eps=1e-3)
    assert (adam.defaults["betas"], adam.defaults["eps"]) == ((0.5, 0.6), 1e-3)
    assert get_optimizer(Named(), "sgd", momentum=0.3).defaults["momentum"] == 0.3
    built = get_optimizer_from_config(Named(), {"type": "sgd", "lr": 0.2, "momentum": 0.4, "weight_decay": 0.0})
    assert (built.defaults["lr"], built.defaults["momentum"]) == (0.2, 0.4)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: get_optimizer(Named(), "adamww"), "did you mean 'adamw'"),
        (lambda: get_optimizer_from_config(Named(), {"learning_rate": 1}), "unknown key 'learning_rate'"),
        (lambda: get_optimizer_from_config(Named(), {"type": "lion"}), "'lion' is unknown"),
        (lambda: get_optimizer(nn.ReLU()), "no parameter"),
    ],
)
def test_optimizers_that_do_not_exist_are_refused(ask, words):
    with pytest.raises(ConfigError, match=words):
        ask()


# -- schedules --------------------------------------------------------------------------------------------------------


def optimizer_of(*rates):
    return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates])


def rates(epochs, *args, base=1e-3, **kwargs):
    optimizer = optimizer_of(base)
    scheduler = get_scheduler(optimizer, *args, **kwargs)
    found = []
    for _ in range(epochs):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_cosine_with_warm_up_has_the_numbers_of_the_specification():
    expected = [
        1e-7, 3.3340e-4, 6.6670e-4, 1e-3, 9.5053e-4, 8.1193e-4, 6.1165e-4, 3.8935e-4, 1.8907e-4, 5.0466e-5, 1e-6,
    ]  # fmt: skip
    found = rates(13, "cosine_warmup", 10, 3, 1e-6)
    assert found[:11] == pytest.approx(expected, rel=1e-4)
    assert found[11:] == pytest.approx([1e-6, 1e-6])


def test_cosine_has_the_numbers_of_the_specification_and_stays_at_its_end():
    found = rates(13, "cosine", 10, min_lr=1e-6)
    assert [found[e] for e in (0, 1, 2, 9, 10, 12)] == pytest.approx(
        [1e-3, 9.7555e-4, 9.0460e-4, 2.5447e-5, 1e-6, 1e-6], rel=1e-4
    )


def test_the_other_schedules():
    assert rates(6, "linear", 4, min_lr=0.0) == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4, 0.0, 0.0])
    assert rates(5, "step", step_size=2, gamma=0.5) == pytest.approx([1e-3, 1e-3, 5e-4, 5e-4, 2.5e-4])
    assert rates(4, "warmup", warmup_epochs=2, warmup_start_lr=0.0) == pytest.approx([0.0, 5e-4, 1e-3, 1e-3])
    assert get_scheduler(optimizer_of(1.0), "none") is None


def test_every_group_follows_the_curve_from_its_own_rate():
    optimizer = optimizer_of(1.0, 0.1)
    scheduler = get_scheduler(optimizer, "cosine", 2, min_lr=0.1)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([0.55, 0.1])


def test_a_restored_schedule_goes_on_and_its_state_is_plain():
    optimizer = optimizer_of(1e-3)
    scheduler = get_scheduler(optimizer, total_epochs=10, warmup_epochs=3)
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    saved = through_a_file({"scheduler": scheduler.state_dict(), "optimizer": optimizer.state_dict()})
    other = optimizer_of(1e-3)
    again = get_scheduler(other, total_epochs=10, warmup_epochs=3)
    other.load_state_dict(saved["optimizer"])
    again.load_state_dict(saved["scheduler"])
    for optimizer_, scheduler_ in ((optimizer, scheduler), (other, again)):
        optimizer_.step()
        scheduler_.step()
    assert isinstance(again, LambdaLR)
    assert again.get_last_lr() == scheduler.get_last_lr()


def test_a_warm_up_that_fills_the_run_is_legal_and_warns_once(caplog):
    with caplog.at_level(logging.WARNING, "treadle"):
        found = rates(5, "cosine_warmup", 3, 3, warmup_start_lr=0.0)
    assert len(caplog.records) == 1
    assert found[3:] == pytest.approx([1e-3, 1e-3])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"scheduler_type": "cosine_warmpu"}, "did you mean 'cosine_warmup'"), ({"total_epochs": 0}, "total_epochs=0"),
        ({"warmup_epochs": -1}, "warmup_epochs=-1"), ({"min_lr": -1.0}, "min_lr=-1.0"), ({"min_lr": 1.0}, "min_lr=1.0"),
        ({"step_size": 0}, "step_size=0"), ({"gamma": -0.1}, "gamma=-0.1"), ({"min_lr": math.nan}, "min_lr=nan"),
    ],
)  # fmt: skip
def test_schedules_that_do_not_fit_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        get_scheduler(optimizer_of(1e-3), **settings)


# -- helpers ----------------------------------------------------------------------------------------------------------


def test_the_accumulator_steps_at_every_kth_and_at_the_last():
    accumulator = GradientAccumulator(4)
    assert [n for n in range(1, 11) if accumulator.should_step()] == [4, 8]
    assert accumulator.should_step(is_last=True)
    assert [accumulator.should_step() for _ in range(4)] == [False, False, False, True]
    accumulator.should_step()
    accumulator.reset()
    assert [accumulator.should_step() for _ in range(4)] == [False, False, False, True]
    assert float(accumulator.scale_loss(torch.tensor(2.0))) == 0.5
    with pytest.raises(ConfigError, match="accumulation_steps=0"):
        GradientAccumulator(0)


def test_early_stopping_as_a_callable():
    stop = EarlyStopping(patience=2)
    assert [stop(value) for value in (1, 1, 1, 0.5, 0.6, 0.6)] == [False, False, True, False, False, True]


def test_the_parameters_of_a_model_are_counted_once_and_logged(caplog):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    with caplog.at_level(logging.INFO, "treadle.graphs"):
        assert log_model_info(model) == {"total": 8, "trainable": 6, "frozen": 2} == count_parameters(model)
    assert "8 parameters, 6 of them trainable" in caplog.text


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda net, _: get_optimizer(net, "sgd", betas=[0.5, 0.9], eps=0.1), "'sgd' has no betas=(0.5, 0.9), eps=0.1"),
        (lambda net, _: get_optimizer(net, "adam", momentum=0.5), "'adam' has no momentum=0.5"),
        (lambda _, optimizer: get_scheduler(optimizer, "cosine", warmup_epochs=5), "'cosine' has no warmup_epochs=5"),
        (lambda _, optimizer: get_scheduler(optimizer, "step", min_lr=0.0), "'step' has no min_lr=0.0"),
        (lambda net, _: get_optimizer(net, "sgd", betas=[0.9, 0.999], momentum=0.5), None),
        (lambda _, optimizer: get_scheduler(optimizer, "warmup", total_epochs=7, warmup_epochs=5), None),
    ],
)  # fmt: skip
def test_a_setting_that_another_type_reads_is_named(build, words, caplog):
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with caplog.at_level("WARNING", "treadle.graphs"):
        build(net, optimizer)
    assert len(caplog.messages) == (words is not None)
    assert words is None or words in caplog.text


def test_the_defaults_that_are_no_choice_are_those_of_the_signature():
    parameters = inspect.signature(get_scheduler).parameters
    assert {name: parameters[name].default for name in scheduler._DEFAULTS} == scheduler._DEFAULTS
