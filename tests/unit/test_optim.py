from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from helpers import differences, through_a_file
from treadle.checkpoint.schema import to_plain
from treadle.errors import CheckpointError
from treadle.optim.late_flags import step_unless
from treadle.optim.optimizer import (
    clean_name,
    load_optimizer_state,
    move_optimizer_state,
    optimizer_state,
    parameter_names,
    uncovered_parameters,
)


class Compiled(nn.Module):
    """Names its parameters as torch.compile does."""

    def __init__(self, inner):
        super().__init__()
        self._orig_mod = inner


OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "SGD with momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, betas=(0.8, 0.95), amsgrad=True),
    "Adam on the device": lambda params: torch.optim.Adam(params, lr=torch.tensor(1e-2), capturable=False),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-2, momentum=0.5, centered=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=1e-2),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=1e-2),
}


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def train(model, optimizer, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3, generator=generator)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_to_the_bit_from_a_file(name):
    straight = net()
    straight_optimizer = OPTIMIZERS[name](straight.parameters())
    train(straight, straight_optimizer, 3)
    saved = through_a_file(to_plain(optimizer_state(straight_optimizer, straight)))
    resumed = net(9)
    resumed.load_state_dict(straight.state_dict())
    optimizer = OPTIMIZERS[name](resumed.parameters())
    load_optimizer_state(optimizer, resumed, saved)
    for group, other in zip(optimizer.param_groups, straight_optimizer.param_groups, strict=True):
        kinds = {key: type(value) for key, value in group.items()}
        assert kinds == {key: type(value) for key, value in other.items()}
    for model, opt in [(straight, straight_optimizer), (resumed, optimizer)]:
        train(model, opt, 3, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))
    again = to_plain(optimizer_state(optimizer, resumed))
    assert differences(again, to_plain(optimizer_state(straight_optimizer, straight))) == []


def test_state_follows_the_name_when_the_order_of_parameters_changed():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 3)
    saved = to_plain(optimizer_state(optimizer, model))
    reordered = torch.optim.AdamW(reversed(list(model.parameters())), lr=1e-2)
    load_optimizer_state(reordered, model, saved)
    for parameter in model.parameters():
        assert torch.equal(reordered.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_parameters_of_one_shape_are_not_confused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, 2)
    saved = to_plain(optimizer_state(optimizer, model))
    shuffled = [model[1].weight, model[2].bias, model[0].weight, model[1].bias, model[2].weight, model[0].bias]
    other = torch.optim.SGD(shuffled, lr=0.1, momentum=0.9)
    load_optimizer_state(other, model, saved)
    for parameter in shuffled:
        assert torch.equal(other.state[parameter]["momentum_buffer"], optimizer.state[parameter]["momentum_buffer"])


def test_groups_keep_their_own_settings():
    model = net()

    def make(rate):
        groups = [{"params": model[0].parameters(), "lr": rate}, {"params": model[2].parameters()}]
        return torch.optim.SGD(groups, lr=0.5)

    saved = to_plain(optimizer_state(make(0.1), model))
    optimizer = make(0.9)
    load_optimizer_state(optimizer, model, saved)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    assert saved["param_groups"][0]["param_names"] == ["0.weight", "0.bias"]


def test_another_number_of_groups_is_a_checkpoint_error():
    model = net()
    saved = to_plain(optimizer_state(torch.optim.SGD(model.parameters(), lr=0.1), model))
    two = torch.optim.SGD([{"params": [p]} for p in (model[0].weight, model[2].weight)], lr=0.1)
    with pytest.raises(CheckpointError, match=r"1 parameter groups.*2"):
        load_optimizer_state(two, model, saved)


def test_other_parameters_in_a_group_are_a_checkpoint_error_naming_them():
    model = net()
    saved = to_plain(optimizer_state(torch.optim.SGD([model[0].weight], lr=0.1), model))
    with pytest.raises(CheckpointError, match=r"2\.weight"):
        load_optimizer_state(torch.optim.SGD([model[2].weight], lr=0.1), model, saved)
    with pytest.raises(CheckpointError, match="has 4 parameters"):
        load_optimizer_state(torch.optim.SGD(model.parameters(), lr=0.1), model, saved)


def test_names_that_torch_itself_keeps_are_kept():
    model = net()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, 1)
    saved = through_a_file(to_plain(optimizer_state(optimizer, model)))
    other = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    load_optimizer_state(other, model, saved)
    assert other.param_groups[0]["param_names"] == optimizer.param_groups[0]["param_names"]


def test_a_parameter_outside_the_model_is_matched_by_its_place():
    model, scale = net(), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1, momentum=0.9)
    scale.grad = torch.ones(1)
    train(model, optimizer, 1)
    optimizer.zero_grad()
    scale.grad = torch.ones(1)
    optimizer.step()
    saved = to_plain(optimizer_state(optimizer, model))
    other = torch.optim.SGD([*model.parameters(), scale], lr=0.1, momentum=0.9)
    load_optimizer_state(other, model, saved)
    assert torch.equal(other.state[scale]["momentum_buffer"], optimizer.state[scale]["momentum_buffer"])


def test_names_are_those_of_the_plain_model_in_any_wrapper():
    plain = net()
    expected = [name for name, _ in plain.named_parameters()]
    for wrapped in (nn.DataParallel(plain), Compiled(plain), Compiled(nn.DataParallel(plain))):
        assert list(parameter_names(wrapped).values()) == expected
    assert clean_name("layers.0._orig_mod.weight") == "layers.0.weight"


def test_a_part_that_the_user_called_module_keeps_its_name():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2, bias=False)
            self.weight = nn.Parameter(torch.zeros(1))

    model = Outer()
    assert sorted(parameter_names(model).values()) == ["module.weight", "weight"]
    assert sorted(parameter_names(nn.DataParallel(model)).values()) == ["module.weight", "weight"]


def test_parameters_that_would_not_be_trained_are_found():
    model = net()
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD([model[0].weight], lr=0.1)
    assert [name for name, _ in uncovered_parameters(model, optimizer)] == ["2.weight", "2.bias"]


def test_state_on_another_device_moves_beside_its_parameter_and_counters_stay():
    parameter = nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {"buffer": torch.zeros(2), "step": torch.zeros(())}
    move_optimizer_state(optimizer)
    assert optimizer.state[parameter]["buffer"].device.type == "meta"
    assert optimizer.state[parameter]["step"].device.type == "cpu"


def test_a_loaded_state_stays_the_callers():
    from helpers import differences, scalar_engine

    def engine():
        made = scalar_engine()
        made.optimizer = torch.optim.Adam(made.model.parameters(), lr=0.1)
        return made

    first = engine()
    first.run([1.0] * 4, max_steps=3)
    tree = first.state_dict()
    kept = copy.deepcopy(tree)
    second = engine()
    second.load_state_dict(tree)
    second.run([1.0] * 4, max_steps=6)
    assert not differences(tree, kept)


@pytest.mark.parametrize("left_out", [False, True])
@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop", "ASGD"])
def test_a_step_that_is_left_out_puts_back_all_that_an_unfused_optimizer_moved(name, left_out):
    def stepped(step):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(5))
        options = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
        optimizer = getattr(torch.optim, name)([weight], lr=0.1, **options)
        for _ in range(2):
            weight.grad = torch.randn(5)
            optimizer.step()
        state = copy.deepcopy((weight.detach(), optimizer.state_dict()["state"]))
        weight.grad = torch.full((5,), math.nan) if left_out else torch.randn(5)
        step(optimizer)
        return state, (weight.detach(), optimizer.state_dict()["state"])

    before, after = stepped(lambda optimizer: step_unless(torch.tensor(float(left_out)), optimizer))
    expected = before if left_out else stepped(lambda optimizer: optimizer.step())[1]
    assert differences(after, expected) == []
