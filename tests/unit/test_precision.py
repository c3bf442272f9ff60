from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch import nn

from treadle.errors import ConfigError
from treadle.optim.precision import Precision, tf32

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["float16", "fp32", "amp", True, "BF16", ""])
def test_an_unknown_name_is_refused_and_the_known_ones_are_named(name):
    with pytest.raises(ConfigError, match=r"'bf16' or 'fp16'"):
        Precision(name, CPU)


def test_a_device_without_autocast_is_refused():
    with pytest.raises(ConfigError, match="autocast"):
        Precision("bf16", torch.device("meta"))
    assert Precision(None, torch.device("meta")).name is None


@pytest.mark.parametrize(("name", "dtype"), [(None, torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_autocast_takes_effect_on_the_cpu(name, dtype):
    with Precision(name, CPU).autocast():
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == dtype


@pytest.mark.parametrize(("name", "scaled"), [(None, False), ("bf16", False), ("fp16", True)])
def test_only_fp16_scales(name, scaled):
    assert Precision(name, CPU).scaled is scaled


def parts(scale=65536.0, grad=1.0):
    weight = nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    precision = Precision("fp16", CPU, scaler=torch.amp.GradScaler("cpu", init_scale=scale))

    def step(value=grad):
        optimizer.zero_grad()
        precision.scale(weight * value).backward()
        precision.unscale(optimizer)
        return weight.grad.item()

    return precision, step


def test_the_gradient_is_that_of_the_unscaled_loss():
    _, step = parts()
    assert step(3.0) == 3.0


def test_each_refusal_halves_the_scale_until_it_would_fall_below_one():
    precision, step = parts(scale=4.0)
    scales = []
    for _ in range(5):
        step(math.inf)
        scales.append((precision.refused(), precision.scaler.get_scale()))
    assert scales == [(True, 2.0), (True, 1.0), (False, 1.0), (False, 1.0), (False, 1.0)]


def test_a_norm_that_overflows_lowers_the_scale_too():
    precision, step = parts(scale=8.0)
    step(1.0)  # the scaler saw finite elements
    assert precision.refused()
    assert precision.scaler.get_scale() == 4.0


def test_a_skipped_step_leaves_the_scaler_ready_for_the_next_and_the_scale_alone():
    precision, step = parts(scale=8.0)
    step(1.0)
    precision.skipped()
    assert precision.scaler.get_scale() == 8.0
    assert step(2.0) == 2.0


def test_a_step_that_was_broken_off_leaves_the_scaler_ready_for_the_next():
    precision, step = parts(scale=8.0)
    step(1.0)  # a hook or Ctrl-C interrupts here
    assert step(2.0) == 2.0
    precision.applied()
    assert precision.scaler.get_scale() == 8.0


def test_applied_steps_let_the_scale_grow():
    precision, step = parts(scale=8.0)
    precision.scaler.set_growth_interval(2)
    for _ in range(2):
        step(1.0)
        precision.applied()
    assert precision.scaler.get_scale() == 16.0


def test_a_step_without_any_gradient_can_be_applied():
    precision, _ = parts()
    idle = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    precision.scale(torch.ones((), requires_grad=True)).backward()
    precision.unscale(idle)
    precision.applied()
    assert precision.scaler.get_scale() == 65536.0


@pytest.mark.parametrize("name", [None, "bf16"])
def test_without_a_scaler_nothing_is_scaled_and_every_refusal_stands(name):
    precision = Precision(name, CPU)
    loss = torch.tensor(2.0)
    assert precision.scale(loss) is loss
    assert precision.refused() is False


def test_a_forward_without_gradients_does_not_cut_the_graph_of_the_next_one():
    layer = nn.Linear(2, 2, bias=False)
    precision = Precision("bf16", CPU)
    with precision.autocast():
        with torch.no_grad():
            layer(torch.ones(1, 2))
        layer(torch.ones(1, 2)).sum().backward()
    assert layer.weight.grad.sum().item() == 4.0


def test_tf32_flags_are_put_back_also_after_an_exception():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    with contextlib.suppress(KeyError), tf32(True):
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cudnn.allow_tf32
        raise KeyError
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before
    with tf32(False):
        assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before


def test_the_step_face_names_its_own_argument():
    from treadle import BaseTrainer

    with pytest.raises(ConfigError, match=r"mixed_precision='half': must be '(fp16|bf16)' or '(fp16|bf16)' or None"):
        BaseTrainer(1, mixed_precision="half")
