"""Losses of graphs: the numbers of the specification, masks, weights, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from treadle.errors import ConfigError
from treadle.graphs import get_loss_fn, get_metrics
from treadle.graphs.task_types import counted

NAN = float("nan")
LOGITS, LABELS = torch.tensor([2.0, -1.0, 0.5, -0.5]), torch.tensor([1, 0, 0, 1])


def near(value):
    return pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(("loss_type", "value"), [("mse", 2.5), ("mae", 1.5), (None, 2.5)])
def test_regression_with_errors_1_and_2(loss_type, value):
    loss = get_loss_fn("regression", loss_type)(torch.tensor([[1.0], [-2.0]]), torch.zeros(2, 1))
    assert float(loss) == near(value)


def test_huber_is_smooth_l1_with_beta_1():
    pred = torch.tensor([[3.0], [-0.5]])
    loss = get_loss_fn("regression", "huber")(pred, torch.zeros(2, 1))
    assert float(loss) == near(1.3125)
    assert float(loss) == near(float(F.smooth_l1_loss(pred, torch.zeros(2, 1))))


@pytest.mark.parametrize("pred", [LOGITS, LOGITS[:, None]])
@pytest.mark.parametrize("labels", [LABELS, LABELS.float(), LABELS[:, None], LABELS.bool()])
@pytest.mark.parametrize("num_classes", [None, 1, 2])
def test_one_logit_in_every_spelling(pred, labels, num_classes):
    loss_fn = get_loss_fn("classification", num_classes=num_classes)
    assert float(loss_fn(pred, labels)) == near(0.597086)
    assert float(loss_fn.count(labels)) == 4


def test_two_columns_equal_one_logit_and_cross_entropy():
    two = torch.stack([torch.zeros(4), LOGITS], dim=1) + torch.randn(4, 1, generator=torch.Generator().manual_seed(0))
    for loss_type in ("bce_logits", "cross_entropy"):
        loss = get_loss_fn("classification", loss_type, num_classes=2)(two, LABELS)
        assert float(loss) == near(0.597086)
        assert float(loss) == near(float(F.cross_entropy(two, LABELS)))


def test_confident_columns_have_almost_no_loss_and_the_metric_agrees():
    pred, y = torch.tensor([[-5.0, 5.0], [5.0, -5.0]]), torch.tensor([1, 0])
    assert float(get_loss_fn("classification", "bce_logits", 2)(pred, y)) == pytest.approx(4.54e-5, abs=1e-6)
    metrics = get_metrics("classification", 2)
    metrics.update(pred, y)
    values = metrics.compute()
    assert (values["accuracy"], values["roc_auc"]) == (1.0, 1.0)


def test_more_classes_are_cross_entropy():
    pred, y = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 3, 1, 2, 2])
    for loss_type in (None, "cross_entropy"):
        assert float(get_loss_fn("classification", loss_type, 4)(pred, y)) == near(float(F.cross_entropy(pred, y)))


def test_multilabel_leaves_unknown_labels_out():
    pred = torch.tensor([[1.0, -2.0], [-1.0, 3.0], [0.5, 0.0]])
    y = torch.tensor([[1, NAN], [0, 1], [NAN, 0]])
    loss_fn = get_loss_fn("multilabel")
    assert float(loss_fn(pred, y)) == near(0.342064)
    assert float(loss_fn.count(y)) == 4


@pytest.mark.parametrize(("task", "classes"), [("classification", 1), ("multilabel", None)])
def test_bce_takes_probabilities(task, classes):
    pred = LOGITS[:, None].sigmoid()
    assert float(get_loss_fn(task, "bce", classes)(pred, LABELS[:, None].float())) == near(0.597086)
    assert get_loss_fn(task, "bce", classes).from_logits is False
    assert get_loss_fn(task, "bce_logits", classes).from_logits is True


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_pairs_have_one_logit(shape):
    assert float(get_loss_fn("edge_prediction")(LOGITS.reshape(shape), LABELS)) == near(0.597086)


def test_unknown_regression_targets_are_left_out_of_value_and_gradient():
    pred = torch.tensor([[1.0, 5.0], [2.0, NAN]], requires_grad=True)
    target = torch.tensor([[0.0, NAN], [0.0, NAN]])
    loss_fn = get_loss_fn("regression")
    loss = loss_fn(pred, target)
    loss.backward()
    assert float(loss.detach()) == 2.5
    assert float(loss_fn.count(target)) == 2
    assert torch.equal(pred.grad, torch.tensor([[1.0, 0.0], [2.0, 0.0]]))


@pytest.mark.parametrize("mask", [torch.tensor([True, False]), torch.tensor([[True], [False]])])
def test_a_mask_is_true_where_an_entry_counts(mask):
    loss_fn = get_loss_fn("regression")
    pred, target = torch.tensor([[1.0], [100.0]]), torch.zeros(2, 1)
    assert float(loss_fn(pred, target, mask)) == 1.0
    assert float(loss_fn.count(target, mask)) == 1
    labels = get_loss_fn("classification", num_classes=1)
    assert float(labels(torch.tensor([[0.0], [50.0]]), torch.tensor([1, 0]), mask)) == near(math.log(2))
    assert float(labels.count(torch.tensor([[1], [0]]), mask)) == 1


@pytest.mark.parametrize(
    ("task", "pred", "target"),
    [
        ("regression", torch.ones(2, 1, requires_grad=True), torch.full((2, 1), NAN)),
        ("multilabel", torch.ones(2, 3, requires_grad=True), torch.full((2, 3), NAN)),
        ("classification", torch.ones(2, 2, requires_grad=True), torch.full((2,), NAN)),
        ("edge_prediction", torch.ones(0, 1, requires_grad=True), torch.zeros(0)),
    ],
)
def test_nothing_that_counts_is_0_attached_to_the_graph(task, pred, target):
    loss_fn = get_loss_fn(task)
    loss = loss_fn(pred, target)
    loss.backward()
    assert float(loss.detach()) == 0
    assert float(loss_fn.count(target)) == 0
    assert torch.equal(pred.grad, torch.zeros_like(pred))


def test_class_weights_weigh_losses_and_counts_as_torch_does():
    weights = torch.tensor([1.0, 2.0, 4.0])
    pred, y = torch.randn(6, 3, generator=torch.Generator().manual_seed(2)), torch.tensor([0, 1, 2, 2, 1, 0])
    loss_fn = get_loss_fn("classification", num_classes=3, class_weights=weights)
    assert float(loss_fn(pred, y)) == near(float(F.cross_entropy(pred, y, weights)))
    assert float(loss_fn.count(y)) == 14
    binary = get_loss_fn("classification", num_classes=1, class_weights=[1.0, 3.0])
    each = F.binary_cross_entropy_with_logits(LOGITS, LABELS.float(), reduction="none")
    assert float(binary(LOGITS, LABELS)) == near(float((each * torch.tensor([3.0, 1, 1, 3])).sum() / 8))


def test_weights_of_labels_weigh_columns():
    loss_fn = get_loss_fn("multilabel", num_classes=2, class_weights=[1.0, 0.0])
    pred, y = torch.tensor([[1.0, 9.0], [2.0, 9.0]]), torch.zeros(2, 2)
    assert float(loss_fn(pred, y)) == near(float(F.softplus(pred[:, 0]).mean()))
    assert float(loss_fn.count(y)) == 2


@pytest.mark.parametrize("task", ["regression", "classification", "multilabel"])
def test_the_loss_is_computed_in_full_precision_under_autocast(task):
    pred = torch.randn(4, 2, generator=torch.Generator().manual_seed(3)).bfloat16()
    target = torch.zeros(4, dtype=torch.long) if task == "classification" else torch.zeros(4, 2)
    loss_fn = get_loss_fn(task)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_fn(pred, target)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, loss_fn(pred.float(), target))


def test_a_large_error_does_not_overflow_in_half_precision():
    loss = get_loss_fn("regression")(torch.full((2, 1), 6e4, dtype=torch.float16), torch.zeros(2, 1))
    assert math.isfinite(float(loss))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("regresion",), "did you mean 'regression'"),
        (("regression", "bce"), "not a loss of regression"),
        (("classification", "bce_logits", 3), "not a loss of classification with num_classes=3"),
        (("classification", "bce", 5), "num_classes=5"),
        (("classification", "cross_entropy", 1), "num_classes=1"),
        (("classification", None, 0), "num_classes=0"),
        (("classification", None, True), "num_classes=True"),
        (("edge_prediction", None, 3), "one logit for each pair"),
        (("edge_prediction", "bce"), "bce_logits"),
        (("regression", None, None, [1.0]), "no classes"),
        (("classification", None, 3, [1.0, 2.0]), "3 classes"),
        (("classification", None, 1, [1.0]), "2 classes"),
        (("classification", None, 2, [1.0, -1.0]), ">= 0"),
        (("multilabel", None, 3, [1.0, 2.0]), "3 classes"),
    ],
)
def test_settings_that_do_not_fit_are_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        get_loss_fn(*arguments)


@pytest.mark.parametrize(
    ("arguments", "pred", "target"),
    [
        (("regression",), (4, 1), (4, 2)),
        (("regression",), (4,), (4, 1)),
        (("regression",), (4, 2), (4,)),
        (("regression",), (4, 1), (2,)),
        (("regression",), (1, 4), (4, 1)),
        (("regression", None, 3), (4, 2), (4, 2)),
        (("multilabel",), (4, 2), (4, 3)),
        (("classification", None, 1), (4, 2), (4,)),
        (("classification", None, 3), (4, 2), (4,)),
        (("classification", None, 3), (4,), (4,)),
        (("classification", None, 2), (4, 2), (4, 2)),
        (("classification", None, 2), (4, 2), (3,)),
        (("edge_prediction",), (4, 2), (4,)),
        (("edge_prediction",), (4, 1), (5,)),
    ],
)
def test_shapes_that_do_not_fit_are_named_and_never_broadcast(arguments, pred, target):
    with pytest.raises(ConfigError) as caught:
        get_loss_fn(*arguments)(torch.zeros(pred), torch.zeros(target))
    assert str(pred) in str(caught.value)
    assert str(target) in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "pred", "loss"),
    [(("classification", "bce", 2), (4, 2), "two columns"), (("classification", "cross_entropy", 2), (4, 1), "logit")],
)
def test_a_loss_that_cannot_read_the_columns_says_so(arguments, pred, loss):
    with pytest.raises(ConfigError, match=loss):
        get_loss_fn(*arguments)(torch.full(pred, 0.5), torch.zeros(4))


@pytest.mark.parametrize(
    ("task", "classes", "labels"),
    [
        ("classification", 3, [0, 3]), ("classification", 3, [-1, 0]), ("classification", 1, [0, 2]),
        ("classification", 2, [0.0, 0.5]), ("edge_prediction", None, [0.0, 2.0]), ("multilabel", None, [0.3, 1.0]),
    ],
)  # fmt: skip
def test_labels_that_are_no_classes_are_refused_by_loss_and_count(task, classes, labels):
    loss_fn = get_loss_fn(task, num_classes=classes)
    pred = torch.zeros(2, 1 if classes in (None, 1) else classes)
    for ask in (lambda: loss_fn(pred, torch.tensor(labels)), lambda: loss_fn.count(torch.tensor(labels))):
        with pytest.raises(ConfigError, match="is not a class"):
            ask()


@pytest.mark.parametrize("mask", [torch.ones(4), torch.ones(3, dtype=torch.bool)])
def test_a_mask_that_does_not_fit_is_refused(mask):
    with pytest.raises(ConfigError, match="mask"):
        get_loss_fn("regression")(torch.zeros(4, 1), torch.zeros(4, 1), mask)


@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 3), (0, 2)])
@pytest.mark.parametrize("masked", [False, True])
def test_entries_are_counted_on_the_host_as_torch_counts_them(shape, masked):
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(shape, generator=generator)
    target[torch.rand(shape, generator=generator) < 0.4] = math.nan
    mask = torch.rand(shape[0], generator=generator) < 0.5 if masked else None
    assert float(get_loss_fn("regression").count(target, mask)) == float(counted(target, mask).sum())


@pytest.mark.parametrize("kind", ["mse", "mae", "huber"])
def test_errors_are_taken_in_the_units_of_the_targets(kind):
    pred, target = torch.tensor([[1.0, 700.0], [2.0, 100.0]]), torch.tensor([[0.0, 100.0], [math.nan, 400.0]])
    scale = torch.tensor([2.0, 200.0])
    found = get_loss_fn("regression", kind, target_scale=scale)(pred, target)
    assert torch.equal(found, get_loss_fn("regression", kind)(pred / scale, target / scale))
    with pytest.raises(ConfigError, match="one number for each target"):
        get_loss_fn("multilabel", target_scale=scale)
