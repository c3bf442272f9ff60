"""Memory and checkpoints do not grow with an epoch: sums where a metric is a sum, else a bound."""

from __future__ import annotations

import io
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from graph_kit import make
from helpers import differences
from treadle import BaseHook
from treadle.graphs import get_metrics, metrics
from treadle.graphs.train_outputs import TrainOutputsHook


class Sizes(BaseHook):
    """Measures the state after every step, and may go on from one in another trainer."""

    def __init__(self):
        self.sizes, self.kept, self.trees = [], [], {}

    def on_after_step(self, trainer):
        file = io.BytesIO()
        self.trees[trainer.step] = tree = trainer.state_dict()
        torch.save(tree["hooks"]["TrainOutputsHook"], file)
        self.sizes.append(len(file.getvalue()))
        (outputs,) = (hook for hook in trainer.hooks if isinstance(hook, TrainOutputsHook))
        self.kept.append(sum(part.numel() for kept in outputs._outputs for part in kept if part is not None))


class Linear(nn.Module):
    def __init__(self, width):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, width)

    def forward(self, batch):
        return self.layer(batch.x)


def batches(count, rows, classes=None):
    draw = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        x = torch.randn(rows, 4, generator=draw)
        y = x.sum(1, keepdim=True) if classes is None else (x.sum(1) > 0).long()
        made.append(SimpleNamespace(x=x, y=y, num_graphs=rows))
    return made


def trained(task, sizes, bound, monkeypatch, *, count=20, rows=50, tree=None):
    monkeypatch.setattr(metrics, "MOST_KEPT", bound)
    monkeypatch.setattr("treadle.graphs.train_outputs.MOST_KEPT", bound)
    classes = 2 if task == "classification" else None
    model = Linear(1 if classes is None else 2)
    trainer = make(model=model, task_type=task, hooks=[sizes], lr=0.05)
    if tree is not None:
        trainer._engine.load_state_dict(tree)
    data = batches(count, rows, classes)
    return trainer.fit(data, data, epochs=2)


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_a_checkpoint_in_an_epoch_does_not_grow_with_its_steps(monkeypatch, task):
    sizes = Sizes()
    trained(task, sizes, 200, monkeypatch)
    assert max(sizes.sizes[10:20]) < 1.1 * max(sizes.sizes[:10])
    assert max(sizes.kept) <= 200 + 400


def test_the_sums_of_a_regression_are_its_metrics_over_all_outputs_also_over_a_resume(monkeypatch):
    whole, sizes = trained("regression", Sizes(), 10**9, monkeypatch), Sizes()
    bounded = trained("regression", sizes, 200, monkeypatch)
    for part in ("train", "val"):
        for one, other in zip(whole[part], bounded[part]):
            for name in ("mse", "mae", "rmse"):
                assert one[name] == pytest.approx(other[name], rel=1e-12)
    again = trained("regression", Sizes(), 200, monkeypatch, tree=sizes.trees[13])
    timeless = [[{k: v for k, v in r.items() if k != "time"} for r in h["train"]] for h in (bounded, again)]
    assert differences(*timeless) == []


def test_the_latest_outputs_decide_where_a_metric_is_no_sum_and_a_warning_names_it(monkeypatch, caplog):
    sizes = Sizes()
    history = trained("classification", sizes, 200, monkeypatch)
    assert "only the latest 200 values of each epoch" in caplog.text
    assert history["val"] == trained("classification", Sizes(), 10**9, monkeypatch)["val"]
    again = trained("classification", Sizes(), 200, monkeypatch, tree=sizes.trees[13])
    assert [r["roc_auc"] for r in history["train"]] == [r["roc_auc"] for r in again["train"]]


def test_an_evaluation_of_a_regression_keeps_no_more_than_the_bound(monkeypatch):
    monkeypatch.setattr(metrics, "MOST_KEPT", 100)
    whole, folded = get_metrics("regression"), get_metrics("regression")
    pred, target = torch.randn(1000, 2), torch.randn(1000, 2)
    target[::7, 0] = math.nan
    for start in range(0, 1000, 25):
        folded.update(pred[start : start + 25], target[start : start + 25])
        assert sum(kept[0].numel() for kept in folded._kept) <= 150
    monkeypatch.setattr(metrics, "MOST_KEPT", 10**9)
    whole.update(pred, target)
    assert folded.compute() == pytest.approx(whole.compute(), rel=1e-12)
    assert folded.compute() == folded.compute()
    folded.update(torch.full((1, 2), math.nan), torch.zeros(1, 2))
    assert all(math.isnan(value) for value in folded.compute().values())
