"""The norm of a step's gradients and their clipping have the bits of torch's functions, of whatever kinds they are."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from treadle.optim import gradients
from treadle.optim.gradients import clip_, total_norm

KINDS = {
    "float32": [torch.float32] * 3,
    "one": [torch.float32],
    "float64": [torch.float64] * 3,
    "bfloat16": [torch.bfloat16] * 3,
    "complex": [torch.complex64] * 2,
    "mixed": [torch.float32, torch.bfloat16, torch.float64],
}


def parameters_of(dtypes, value=None):
    generator = torch.Generator().manual_seed(0)
    found = []
    for number, dtype in enumerate(dtypes):
        parameter = torch.nn.Parameter(torch.zeros(number + 2, 3, dtype=dtype))
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=dtype)
        found.append(parameter)
    if value is not None:
        found[-1].grad[0, 0] = value
    return [*found, torch.nn.Parameter(torch.zeros(1))]  # the last one has no gradient


@pytest.mark.parametrize("value", [None, math.inf, math.nan, 0.0])
@pytest.mark.parametrize("max_norm", [0.5, 1, 1.0, 1e4])
@pytest.mark.parametrize("kind", KINDS)
def test_norm_and_clipping_are_those_of_torch(kind, max_norm, value):
    ours, theirs = (parameters_of(KINDS[kind], value) for _ in range(2))
    norm = total_norm([parameter.grad for parameter in ours[:-1]])
    expected = get_total_norm([parameter.grad for parameter in theirs[:-1]])
    assert norm.dtype == expected.dtype
    assert torch.equal(norm, expected) or (norm.isnan() and expected.isnan())
    clip_([parameter.grad for parameter in ours[:-1]], max_norm, norm)
    clip_grads_with_norm_(theirs, max_norm, expected)
    for one, other in zip(ours[:-1], theirs[:-1], strict=True):
        assert torch.equal(one.grad.nan_to_num(7.0), other.grad.nan_to_num(7.0))
    assert not norm.requires_grad


def test_nothing_has_the_norm_0():
    assert torch.equal(total_norm([]), torch.tensor(0.0))
    clip_([], 1.0, torch.tensor(0.0))


def test_gradients_of_one_kind_are_not_sorted_into_groups(monkeypatch):
    def refused(*args, **kwargs):
        raise AssertionError("torch sorts them into groups")

    monkeypatch.setattr(gradients, "get_total_norm", refused)
    monkeypatch.setattr(gradients, "clip_grads_with_norm_", refused)
    parameters = parameters_of(KINDS["float32"])
    grads = [parameter.grad for parameter in parameters[:-1]]
    clip_(grads, 1.0, total_norm(grads))


def test_gradients_with_a_graph_leave_none_behind():
    weight = torch.nn.Parameter(torch.randn(3))
    grad = weight * 2
    expected = grad.detach().clone()
    norm = total_norm([grad])
    clip_([grad], 0.5, norm)
    assert not norm.requires_grad
    assert torch.equal(grad.detach(), expected * torch.clamp(0.5 / (expected.norm() + 1e-6), max=1.0))


def test_gradients_are_looked_at_once_in_a_step(monkeypatch):
    looks = []
    kind_of = gradients._kind_of
    monkeypatch.setattr(gradients, "_kind_of", lambda grad: looks.append(1) or kind_of(grad))
    weight = torch.nn.Parameter(torch.randn(3))
    weight.grad = torch.randn(3)
    found = gradients.Gradients.of(torch.optim.SGD([weight, torch.nn.Parameter(torch.ones(1))], lr=1.0))
    clip_(found, 1.0, total_norm(found))
    assert (len(found), len(looks)) == (1, 1)
