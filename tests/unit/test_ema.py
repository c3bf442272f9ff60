from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch import nn

from helpers import differences, through_a_file
from treadle.checkpoint.schema import to_plain
from treadle.errors import CheckpointError, ConfigError
from treadle.optim import ema as ema_module
from treadle.optim.ema import Ema


class Compiled(nn.Module):
    """Names its parameters as torch.compile does."""

    def __init__(self, inner):
        super().__init__()
        self._orig_mod = inner


class Scalar(nn.Module):
    """One weight, a floating buffer and an integer one."""

    def __init__(self, start=1.0, dtype=torch.float32):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start, dtype=dtype))
        self.register_buffer("running", torch.tensor(start))
        self.register_buffer("count", torch.tensor(int(start)))
        self.register_buffer("hidden", torch.tensor(start), persistent=False)

    def move_to(self, value):
        with torch.no_grad():
            for tensor in (self.w, self.running, self.hidden):
                tensor.fill_(value)
            self.count.fill_(10 * int(value))


def follow(ema, model, values=(2.0, 3.0, 4.0)):
    shadows = []
    for step, value in enumerate(values, start=1):
        model.move_to(value)
        ema.update(model, applied_steps=step)
        shadows.append((ema.module.w.item(), ema.module.running.item(), ema.module.count.item()))
    return [list(column) for column in zip(*shadows, strict=True)]


@pytest.mark.parametrize("use_buffers", [False, True])
def test_the_shadow_starts_at_the_initial_weights_and_buffers_follow_their_rule(use_buffers):
    model = Scalar()
    weights, floats, integers = follow(Ema(model, 0.9, use_buffers=use_buffers), model)
    assert weights == pytest.approx([1.1, 1.29, 1.561], abs=1e-6)
    assert floats == pytest.approx([1.1, 1.29, 1.561] if use_buffers else [2, 3, 4], abs=1e-6)
    assert integers == [20, 30, 40]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_average_of_half_precision_weights_moves(dtype):
    model = Scalar(1.0, dtype)
    ema = Ema(model, 0.9999)
    model.move_to(1.5)
    for step in range(1, 10_001):
        ema.update(model, applied_steps=step)
    assert ema.module.w.dtype == torch.float32
    assert ema.module.w.item() == pytest.approx(1.31607, abs=5e-6)
    assert model.w.dtype == dtype
    assert ema.export(model)["w"].dtype == dtype


def test_half_precision_buffers_are_averaged_in_full_precision_also_when_shared():
    layer = nn.Linear(1, 1)
    layer.register_buffer("a", torch.ones(2, dtype=torch.bfloat16))
    model = nn.Sequential(layer, nn.Linear(1, 1))
    model[1].register_buffer("b", layer.a)
    ema = Ema(model, 0.5, use_buffers=True)
    layer.a.fill_(2.0)
    ema.update(model, applied_steps=1)
    assert ema.module[0].a.dtype == torch.float32
    assert ema.module[1].b is ema.module[0].a
    assert ema.module[0].a.tolist() == [1.5, 1.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_weights_stay_tied_and_are_averaged_once(dtype):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).to(dtype)
    model[1].weight = model[0].weight
    nn.init.ones_(model[0].weight)
    ema = Ema(model, 0.5)
    nn.init.constant_(model[0].weight, 3.0)
    ema.update(model, applied_steps=1)
    assert ema.module[1].weight is ema.module[0].weight
    assert ema.module[0].weight.tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_only_every_nth_applied_step_moves_the_shadow():
    model = Scalar()
    ema = Ema(model, 0.9, update_interval=3)
    model.move_to(2.0)
    moved = []
    for step in range(1, 8):
        ema.update(model, applied_steps=step)
        moved.append(ema.num_updates)
    assert moved == [0, 0, 1, 1, 1, 2, 2]
    assert ema.module.w.item() == pytest.approx(1 + 0.1 + 0.09, abs=1e-6)


@pytest.mark.parametrize(("decay", "expected"), [(0.0, 4.0), (1.0, 1.0)])
def test_the_ends_of_the_decay_copy_or_keep(decay, expected):
    model = Scalar()
    assert follow(Ema(model, decay), model)[0][-1] == expected


@pytest.mark.parametrize(
    "wrong",
    [{"decay": -0.1}, {"decay": 1.1}, {"decay": math.nan}, {"update_interval": 0}, {"device": "no such device"}],
)
def test_a_setting_outside_its_range_is_refused_by_name(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Ema(Scalar(), **{"decay": 0.9, **wrong})


def state_of(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("failing", [False, True])
def test_swapping_in_restores_the_raw_weights_to_the_bit(dtype, failing):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(dtype)
    ema = Ema(model, 0.37, use_buffers=True)
    with torch.no_grad():
        for tensor in state_of(model).values():
            tensor.add_(1) if not tensor.is_floating_point() else tensor.add_(torch.randn_like(tensor))
    ema.update(model, applied_steps=1)
    live = state_of(model)
    raw = {name: tensor.clone() for name, tensor in live.items()}
    shadow = {name: tensor.clone() for name, tensor in state_of(ema.module).items()}
    with contextlib.suppress(KeyError), ema.applied_to(model):
        inside = {name: tensor.clone() for name, tensor in state_of(model).items()}
        if failing:
            raise KeyError
    assert all(torch.equal(inside[name], shadow[name].to(inside[name].dtype)) for name in inside)
    assert not torch.equal(inside["0.weight"], raw["0.weight"])
    assert all(torch.equal(state_of(model)[name], raw[name]) for name in raw)
    assert all(state_of(model)[name] is live[name] for name in live), "the optimizer would hold other tensors"
    assert all(torch.equal(state_of(ema.module)[name], shadow[name]) for name in shadow)


def test_a_swap_that_fails_half_way_leaves_the_raw_weights():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ema = Ema(model, 0.5)
    nn.init.zeros_(ema.module[0].weight)
    ema.module[1].weight = nn.Parameter(torch.zeros(5, 5))  # cannot be copied
    raw = {name: tensor.clone() for name, tensor in state_of(model).items()}
    with pytest.raises(RuntimeError), ema.applied_to(model):
        pass
    assert all(torch.equal(state_of(model)[name], raw[name]) for name in raw)


def test_a_saved_average_goes_on_to_the_bit():
    straight_model, model = Scalar(), Scalar()
    straight, first = Ema(straight_model, 0.9, update_interval=2), Ema(model, 0.9, update_interval=2)
    follow(straight, straight_model, [2.0, 3.0, 4.0, 5.0])
    follow(first, model, [2.0, 3.0])
    entry = through_a_file(to_plain(first.snapshot()))
    assert set(entry) == {"decay", "update_interval", "num_updates", "shadow"}
    fresh = Scalar(7.0)
    second = Ema(fresh, 0.9, update_interval=2)
    second.restore(entry)
    for step, value in [(3, 4.0), (4, 5.0)]:
        fresh.move_to(value)
        second.update(fresh, applied_steps=step)
    assert torch.equal(second.module.w, straight.module.w)
    assert differences(to_plain(second.snapshot()), to_plain(straight.snapshot())) == []


def test_an_average_of_another_model_is_a_checkpoint_error():
    with pytest.raises(CheckpointError, match="average"):
        Ema(nn.Linear(2, 2), 0.9).restore(Ema(nn.Linear(3, 3), 0.9).snapshot())


def test_a_restart_copies_the_present_weights_and_counts_nothing():
    model = Scalar()
    ema = Ema(model, 0.9)
    follow(ema, model)
    ema.restart_from(model)
    assert (ema.module.w.item(), ema.module.hidden.item(), ema.num_updates) == (4.0, 4.0, 0)


def test_names_of_a_compiled_part_do_not_reach_a_file():
    plain = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    parts = nn.Sequential(Compiled(nn.Linear(2, 2)), nn.ReLU())
    ema = Ema(parts, 0.9)
    assert set(ema.snapshot()["shadow"]) == set(ema.export(parts)) == set(plain.state_dict())
    ema.restore(Ema(plain, 0.9).snapshot())


def test_the_average_needs_no_gradient_and_does_not_take_any_from_the_model():
    model = Scalar()
    ema = Ema(nn.DataParallel(model), 0.9)
    assert model.w.requires_grad
    assert not any(parameter.requires_grad for parameter in ema.parameters())
    model.w.sum().backward()
    ema.update(nn.DataParallel(model), applied_steps=1)
    assert model.w.grad.item() == 1.0


def test_an_average_reads_nothing_on_the_host():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Reads(TorchDispatchMode):
        seen: list = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "_local_scalar_dense" in str(func):
                self.seen.append(func)
            return func(*args, **(kwargs or {}))

    model = Scalar()
    ema = Ema(model, 0.9)
    with Reads() as reads:
        for step in range(1, 4):
            ema.update(model, applied_steps=step)
    assert reads.seen == []


def test_complex_weights_are_averaged_too():
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(torch.tensor([1.0 + 2.0j])))
    model.register_parameter("real", nn.Parameter(torch.tensor([1.0])))
    model.register_buffer("b", torch.tensor([1.0 + 2.0j]))
    ema = Ema(model, 0.5, use_buffers=True)
    with torch.no_grad():
        for tensor in state_of(model).values():
            tensor.add_(2.0)
    ema.update(model, applied_steps=1)
    assert ema.module.w.tolist() == ema.module.b.tolist() == [2.0 + 2.0j]
    assert ema.module.real.tolist() == [2.0]


class Table(nn.Module):
    """Keeps a table as long as its longest input, made at the first one."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.dtype = dtype
        self.register_buffer("table", None, persistent=False)
        self.register_buffer("running", torch.zeros(2))

    def forward(self, x):
        if self.table is None or len(self.table) < len(x):
            self.table = torch.arange(len(x), dtype=self.dtype)
        return self.w * (x + self.table[: len(x)]).sum()


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_average_follows_buffers_that_come_and_grow(use_buffers, dtype):
    model = Table(dtype)
    ema = Ema(model, 0.5, use_buffers=use_buffers)
    for step, size in enumerate((2, 5, 3, 6), start=1):
        model(torch.ones(size))
        ema.update(model, applied_steps=step)
        assert ema.module.table.shape == model.table.shape
    assert ema.module.table.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert "table" not in ema.module.state_dict()


@pytest.mark.parametrize("size", [3, 7])
@pytest.mark.parametrize("begun", [False, True])
def test_a_buffer_that_grows_in_an_evaluation_does_not_keep_the_raw_weights_away(size, begun):
    model = Table()
    if begun:
        model(torch.ones(5))
    ema = Ema(model, 0.5)
    with torch.no_grad():
        model.w.fill_(3.0)
        model.running.fill_(3.0)
    ema.move(model)
    with ema.applied_to(model):
        assert model.w.item() == 2.0
        model(torch.ones(size))
    assert model.w.item() == 3.0
    assert model.running.tolist() == [3.0, 3.0]
    assert model.table.tolist() == list(range(max(size, 5 if begun else 0)))


def test_the_walk_gives_what_torch_lists_in_its_order():
    shared, tied = nn.Linear(2, 2), nn.BatchNorm1d(2)
    model = nn.Sequential(shared, nn.Sequential(tied, nn.ReLU(), shared), Compiled(nn.Linear(2, 2, bias=False)), tied)
    model.nothing = None
    model[2]._orig_mod.weight = shared.weight
    parameters, buffers = ema_module._tensors(model)
    assert [id(one) for one in parameters] == [id(one) for one in model.parameters()]
    assert [id(one) for one in buffers] == [id(one) for one in model.buffers()]


def test_a_weight_or_buffer_that_was_replaced_is_averaged_from_then_on():
    model = Scalar(0.0)
    average = Ema(model, 0.5, use_buffers=True)
    model.w, model.running = nn.Parameter(torch.tensor(2.0)), torch.tensor(4.0)
    average.update(model, applied_steps=1)
    assert (average.module.w.item(), average.module.running.item()) == (1.0, 2.0)
