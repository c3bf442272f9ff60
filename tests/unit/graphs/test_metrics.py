"""Metrics of graphs: equal to scikit-learn's, mean ranks for ties, NaN where undefined."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from sklearn import metrics as sk

from treadle.errors import ConfigError
from treadle.graphs import get_metrics

NAN = float("nan")


def near(value):
    return pytest.approx(value, abs=1e-6, nan_ok=True)


def measured(task, pred, target, *args, mask=None, **kwargs):
    metrics = get_metrics(task, *args, **kwargs)
    for part in range(0, len(pred), 7):  # in batches
        rows = slice(part, part + 7)
        metrics.update(pred[rows], target[rows], *([] if mask is None else [mask[rows]]))
    values = metrics.compute()
    assert tuple(values) == metrics.names
    return values


def random_scores(size=60, seed=0, *, tied=False):
    draw = torch.Generator().manual_seed(seed)
    z = torch.randn(size, generator=draw)
    return (z * 2).round() / 2 if tied else z, (torch.rand(size, generator=draw) < (z * 0.7).sigmoid()).long()


def test_logits_that_the_sigmoid_rounds_to_1_keep_their_order():
    logits, target = torch.tensor([40.0, 50.0, -3.0, 45.0]), torch.tensor([0, 1, 0, 1])
    for task, args in (("classification", (1,)), ("edge_prediction", ())):
        values = measured(task, logits, target, *args)
        assert (values["roc_auc"], values["ap"]) == (1.0, 1.0)
    values = measured("multilabel", logits[:, None], target[:, None].float(), 1)
    assert (values["roc_auc"], values["ap"]) == (1.0, 1.0)
    assert measured("edge_prediction", logits, target, k=2)["precision@2"] == 1.0


def test_regression_with_errors_1_and_2():
    values = measured("regression", torch.tensor([[1.0], [2.0]]), torch.zeros(2))
    assert values == {"mse": near(2.5), "mae": near(1.5), "rmse": near(1.581139)}


def test_regression_leaves_unknown_and_masked_entries_out():
    pred, target = torch.tensor([[1.0, 7.0], [2.0, 7.0], [9.0, 9.0]]), torch.tensor([[0.0, NAN], [0.0, NAN], [0.0, 0]])
    assert measured("regression", pred, target, mask=torch.tensor([True, True, False]))["mse"] == 2.5


def test_the_binary_numbers_of_the_specification():
    values = measured("classification", torch.tensor([2.0, -1.0, 0.5, -0.5]), torch.tensor([1, 0, 0, 1]))
    assert values == {"accuracy": 0.5, "f1": 0.5, "roc_auc": 0.75, "ap": near(0.833333)}


def test_the_multilabel_numbers_of_the_specification():
    pred = torch.tensor([[1.0, -2.0], [-1.0, 3.0], [0.5, 0.0]])
    y = torch.tensor([[1, NAN], [0, 1], [NAN, 0]])
    assert measured("multilabel", pred, y)["accuracy"] == 1.0


def test_a_sigmoid_is_taken_as_declared_and_never_by_the_range_of_the_data():
    pred, y = torch.tensor([0.1, 0.2, 0.9]), torch.tensor([0, 0, 1])
    values = measured("classification", pred, y, 1)
    assert values == {"accuracy": near(1 / 3), "f1": near(0.5), "roc_auc": 1.0, "ap": 1.0}
    assert measured("classification", pred, y, 1, from_logits=False)["accuracy"] == 1.0
    # One logit outside [0, 1] changes nothing for the others.
    far, labels = torch.tensor([0.1, 0.2, 0.9, -9.0]), torch.tensor([0, 0, 1, 0])
    assert measured("classification", far, labels, 1)["accuracy"] == 0.5


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("columns", [1, 2])
def test_binary_metrics_equal_those_of_scikit_learn(tied, columns):
    z, y = random_scores(tied=tied)
    pred = z if columns == 1 else torch.stack([torch.full_like(z, 0.5), z + 0.5], 1)
    values = measured("classification", pred, y, columns)
    label = z > 0
    assert values["accuracy"] == near(sk.accuracy_score(y, label))
    assert values["f1"] == near(sk.f1_score(y, label))
    assert values["roc_auc"] == near(sk.roc_auc_score(y, z))
    assert values["ap"] == near(sk.average_precision_score(y, z))


def test_scores_that_a_float32_sigmoid_cannot_tell_apart_are_told_apart():
    pred, y = torch.tensor([20.0, 25.0, 30.0, 18.0]), torch.tensor([0, 1, 1, 1])
    assert measured("classification", pred, y, 1)["roc_auc"] == near(sk.roc_auc_score(y, pred))


@pytest.mark.parametrize("absent", [None, 3])
def test_class_metrics_equal_those_of_scikit_learn(absent):
    draw = torch.Generator().manual_seed(4)
    pred, y = torch.randn(50, 4, generator=draw), torch.randint(0, 4, (50,), generator=draw)
    y = y if absent is None else y % absent
    values = measured("classification", pred, y, 4)
    assert values["accuracy"] == near(sk.accuracy_score(y, pred.argmax(1)))
    assert values["f1_macro"] == near(sk.f1_score(y, pred.argmax(1), average="macro"))
    each = [sk.roc_auc_score(y == c, pred.softmax(1)[:, c]) for c in y.unique().tolist()]
    assert values["roc_auc"] == near(sum(each) / len(each))
    assert measured("classification", pred.softmax(1), y, 4, from_logits=False) == near(values)


def test_multilabel_metrics_are_means_over_columns_with_both_classes_among_the_known():
    draw = torch.Generator().manual_seed(5)
    pred, y = torch.randn(40, 4, generator=draw), torch.randint(0, 2, (40, 4), generator=draw).float()
    y[torch.rand(40, 4, generator=draw) < 0.3] = NAN
    y[:, 2] = torch.where(y[:, 2].isnan(), NAN, 1.0)  # one class only
    values = measured("multilabel", pred, y)
    auc, ap, hits = [], [], []
    for column in range(4):
        known = ~y[:, column].isnan()
        z, t = pred[known, column], y[known, column]
        hits += ((z > 0) == t.bool()).tolist()
        if column != 2:
            auc.append(sk.roc_auc_score(t, z))
            ap.append(sk.average_precision_score(t, z))
    assert values == {"accuracy": near(sum(hits) / len(hits)), "roc_auc": near(sum(auc) / 3), "ap": near(sum(ap) / 3)}


@pytest.mark.parametrize("k", [1, 10, 1000])
def test_edge_metrics(k):
    z, y = random_scores()
    values = measured("edge_prediction", z[:, None], y.float(), k=k)
    assert list(values) == ["roc_auc", "ap", f"precision@{k}"]
    assert values["roc_auc"] == near(sk.roc_auc_score(y, z))
    assert values["ap"] == near(sk.average_precision_score(y, z))
    best = z.argsort(descending=True)[:k]
    assert values[f"precision@{k}"] == near(float(y[best].double().mean()))


def test_equal_scores_at_the_border_share_its_places():
    z, y = torch.tensor([3.0, 1.0, 1.0, 1.0, 0.0]), torch.tensor([1, 1, 0, 0, 1])
    expected = (1 + 1 * 1 / 3) / 2
    for order in (torch.arange(5), torch.tensor([4, 3, 2, 1, 0])):
        assert measured("edge_prediction", z[order], y[order], k=2)["precision@2"] == near(expected)


@pytest.mark.parametrize("label", [0, 1])
def test_a_metric_that_is_undefined_is_nan(label):
    y = torch.full((3,), label)
    values = measured("classification", torch.tensor([-1.0, -2.0, -3.0]), y, 1)
    assert math.isnan(values["roc_auc"])
    assert math.isnan(values["ap"])
    assert math.isnan(values["f1"]) == (label == 0)  # nothing is positive, neither really nor as predicted
    assert math.isnan(measured("classification", torch.eye(3), torch.zeros(3, dtype=torch.long), 3)["roc_auc"])
    assert math.isnan(measured("multilabel", torch.zeros(2, 2), torch.ones(2, 2))["roc_auc"])
    assert all(math.isnan(v) for v in measured("regression", torch.zeros(2, 1), torch.full((2, 1), NAN)).values())


@pytest.mark.parametrize(("task", "target"), [("regression", [0.0, 0.0]), ("classification", [0, 1])])
def test_a_diverged_prediction_is_seen_in_every_metric(task, target):
    values = measured(task, torch.tensor([[NAN], [1.0]]), torch.tensor(target))
    assert all(math.isnan(value) for value in values.values())


def test_before_any_update_and_after_a_reset_there_is_nothing_to_compute():
    metrics = get_metrics("regression")
    with pytest.raises(ConfigError, match="update first"):
        metrics.compute()
    metrics.update(torch.zeros(1, 1), torch.zeros(1, 1))
    metrics.reset()
    with pytest.raises(ConfigError, match="update first"):
        metrics.compute()


def test_predictions_are_kept_free_of_their_graph():
    metrics = get_metrics("regression")
    metrics.update(torch.zeros(1, 1, requires_grad=True) * 2, torch.zeros(1, 1))
    assert not metrics._kept[0][0].requires_grad


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("classifcation",), "did you mean 'classification'"), (("classification", 0), "num_classes=0"),
        (("edge_prediction", 2, 0), "k=0"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(arguments, words):
    task, classes, k = (*arguments, 2, 100)[:3] if len(arguments) < 3 else arguments
    with pytest.raises(ConfigError, match=words):
        get_metrics(task, classes if isinstance(classes, int) else 2, k=k)


@pytest.mark.parametrize(
    ("task", "classes", "pred", "target"),
    [("regression", 2, (4, 1), (4, 2)), ("classification", 3, (4, 2), (4,)), ("edge_prediction", 2, (4, 2), (4,))],
)
def test_shapes_that_do_not_fit_are_refused(task, classes, pred, target):
    with pytest.raises(ConfigError, match="the prediction has shape"):
        get_metrics(task, classes).update(torch.zeros(pred), torch.zeros(target))


def test_labels_that_are_no_classes_are_refused():
    with pytest.raises(ConfigError, match="is not a class"):
        get_metrics("classification", 3).update(torch.zeros(2, 3), torch.tensor([0, 3]))


def test_a_missing_torchmetrics_is_said_before_training_and_not_needed_for_regression(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchmetrics.functional.classification", None)
    get_metrics("regression")
    with pytest.raises(ImportError, match=r"treadle\[graphs\]"):
        get_metrics("classification")
