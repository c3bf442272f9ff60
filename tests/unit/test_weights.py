from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from treadle.errors import ConfigError
from treadle.optim.gradients import divide_
from treadle.optim.loss_weights import GivenWeights, GroupWeights
from treadle.task import StepOutput

CPU = torch.device("cpu")


def gradient(outputs_of, undivided=False):
    """The gradient of one parameter at 0 under the rules for a group."""
    p = nn.Parameter(torch.zeros(()))
    outputs = outputs_of(p)
    weights = GroupWeights(len(outputs), device=CPU, undivided=undivided)
    for output in outputs:
        loss = weights.scaled(output)
        if loss is not None:
            loss.backward()
    if p.grad is None:
        return None
    divide_([p.grad], weights.divisor())
    return p.grad.item()


def slopes(*pairs, as_weight=lambda w: w, **kwargs):
    return lambda p: [
        StepOutput(None if g is None else g * p, weight=None if w is None else as_weight(w), **kwargs) for g, w in pairs
    ]


@pytest.mark.parametrize("as_weight", [float, torch.tensor])
def test_tokens_are_weighed_not_micro_batches(as_weight):
    assert gradient(slopes((8.0, 1), (0.0, 3), as_weight=as_weight)) == pytest.approx(2.0, abs=1e-6)


def test_a_group_of_means_equals_one_big_batch():
    outputs = lambda p: [StepOutput((p - 1) ** 2, weight=3), StepOutput((p - 5) ** 2, weight=1)]  # noqa: E731
    assert gradient(outputs) == pytest.approx(-4, abs=1e-6)


def test_a_missing_loss_is_left_out_of_the_divisor():
    assert gradient(slopes((3.0, None), (None, None))) == 3.0
    assert gradient(slopes((None, None), (3.0, None), (None, 9))) == pytest.approx(3.0, abs=1e-6)


def test_losses_that_are_all_missing_give_no_gradient():
    weights = GroupWeights(2, device=CPU)
    assert [weights.scaled(StepOutput(None)) for _ in range(2)] == [None, None]
    assert (weights.num_losses, weights.divisor()) == (0, None)


@pytest.mark.parametrize("as_weight", [float, torch.tensor])
def test_a_weight_of_zero_contributes_nothing(as_weight):
    assert gradient(slopes((8.0, 0), (4.0, 2), as_weight=as_weight)) == pytest.approx(4.0, abs=1e-6)
    assert gradient(slopes((4.0, 2), (8.0, 0), as_weight=as_weight)) == pytest.approx(4.0, abs=1e-6)


def test_a_cross_entropy_over_no_label_at_all_does_not_poison_its_group():
    layer = nn.Linear(2, 3)
    x, labels = torch.ones(2, 2), torch.tensor([0, 1])

    def step(groups):
        layer.zero_grad()
        weights = GroupWeights(len(groups), device=CPU)
        for y in groups:
            loss = nn.functional.cross_entropy(layer(x), y)
            weights.scaled(StepOutput(loss, weight=(y != -100).sum())).backward()
        divide_([layer.weight.grad], weights.divisor())
        return layer.weight.grad.clone()

    ignored = torch.full((2,), -100)
    assert torch.allclose(step([labels, ignored]), step([labels]), atol=1e-6)
    assert torch.allclose(step([ignored, labels]), step([labels]), atol=1e-6)


def test_one_micro_batch_alone_is_not_scaled_at_all():
    for weight in (None, 7.0, torch.tensor(7)):
        loss = torch.tensor(2.0, requires_grad=True)
        weights = GroupWeights(1, device=CPU)
        assert weights.scaled(StepOutput(loss, weight=weight)) is loss
        assert weights.divisor() is None


def test_equal_weights_divide_once_by_the_size_and_never_again():
    weights = GroupWeights(3, device=CPU)
    losses = [torch.tensor(float(i), requires_grad=True) for i in (1, 2, 4)]
    scaled = [weights.scaled(StepOutput(loss, weight=5)) for loss in losses]
    assert all(torch.equal(s, loss / 3) for s, loss in zip(scaled, losses, strict=True))
    assert weights.divisor() is None


def test_the_scaled_loss_does_not_grow_with_the_weights():
    weights = GroupWeights(2, device=CPU)
    loss = torch.tensor(1000.0, requires_grad=True)
    for weight in (1e9, 2e9):
        assert weights.scaled(StepOutput(loss, weight=weight)).abs() <= 1000.0


def test_sums_are_added_up_and_not_divided():
    assert gradient(slopes((3.0, None), (5.0, 10), (None, None), reduction="sum")) == 8.0
    assert gradient(slopes((3.0, 2), (5.0, 10)), undivided=True) == 8.0


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 50)), min_size=1, max_size=6),
    st.booleans(),
)
def test_the_gradient_is_the_weighted_mean_of_the_micro_gradients(pairs, as_tensor):
    total = sum(w for _, w in pairs)
    got = gradient(slopes(*pairs, as_weight=torch.tensor if as_tensor else float))
    if total:
        assert got == pytest.approx(sum(g * w for g, w in pairs) / total, abs=1e-4)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_every_split_of_the_same_samples_gives_the_same_gradient(sizes):
    y = torch.arange(float(sum(sizes)))
    whole = gradient(lambda p: [StepOutput(((p - y) ** 2).mean(), weight=len(y))])
    split = gradient(lambda p: [StepOutput(((p - part) ** 2).mean(), weight=len(part)) for part in y.split(sizes)])
    assert split == pytest.approx(whole, abs=1e-4)


@pytest.mark.parametrize("weight", [-1, -0.5, math.nan, math.inf])
def test_a_weight_that_counts_nothing_sensible_is_refused_with_its_value(weight):
    with pytest.raises(ConfigError, match=r"weight=.*>= 0"):
        GroupWeights(2, device=CPU).scaled(StepOutput(torch.ones(()), weight=weight))


def test_means_and_sums_cannot_share_a_step():
    weights = GroupWeights(2, device=CPU)
    weights.scaled(StepOutput(torch.ones(()), weight=1))
    with pytest.raises(ConfigError, match="reduction"):
        weights.scaled(StepOutput(torch.ones(()), weight=1, reduction="sum"))


def test_no_gradient_flows_into_a_weight_and_no_graph_of_it_is_kept():
    weights = GroupWeights(2, device=CPU)
    count = torch.ones((), requires_grad=True)
    loss = weights.scaled(StepOutput(torch.ones((), requires_grad=True), weight=count * 2))
    loss.backward()
    assert count.grad is None
    assert not weights.total.requires_grad
    assert not torch.as_tensor(weights.divisor()).requires_grad


def test_gradients_are_divided_in_their_own_precision():
    grads = [torch.ones(2), torch.ones(2, dtype=torch.bfloat16)]
    divide_(grads, torch.tensor(2.0, dtype=torch.float64))
    assert [g.tolist() for g in grads] == [[0.5, 0.5], [0.5, 0.5]]
    divide_(grads, None)
    divide_([], 2.0)
    assert grads[1].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
)
def test_weights_that_are_given_later_have_the_bits_of_those_of_the_host(device):
    draw = torch.Generator().manual_seed(0)
    target = torch.device(device)
    for _ in range(200):
        numbers = torch.randint(1, 20, (2,), generator=draw).double().tolist()
        own = GroupWeights(2, device=target)
        given = GivenWeights(2, device=target, equal=len(set(numbers)) == 1)
        given.give(numbers)
        grads = []
        for weights in (own, given):
            p = torch.full((50,), 0.3, device=target, requires_grad=True)
            for number in numbers:
                loss = (p * torch.arange(50, device=target)).square().mean() * number
                weights.scaled(StepOutput(loss, weight=number)).backward()
            divide_([p.grad], weights.divisor())
            grads.append(p.grad)
        assert torch.equal(*grads)
