"""Each task with each loss: sixteen graphs are learned by heart, to a loss near 0 and the best of every metric."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graph_kit import graphs, loader, make, model_of
from treadle.graphs import get_loss_fn


class Probabilities(nn.Module):
    """Puts a sigmoid behind a model."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        return self.model(batch).sigmoid()


LABELS = {"accuracy": 1.0, "roc_auc": 1.0}
BINARY = {**LABELS, "f1": 1.0, "ap": 1.0}
# Task, loss, targets, outputs, level, what the metrics end at.
CASES = [
    ("regression", "mse", {"width": 2, "unknown": 0.3}, 2, "graph", {"mse": 0.0, "mae": 0.0, "rmse": 0.0}),
    ("regression", "mae", {}, 1, "graph", {"mse": 0.0, "mae": 0.0}),
    ("regression", "huber", {}, 1, "node", {"mse": 0.0, "mae": 0.0}),
    ("classification", "bce_logits", {"classes": 2}, 1, "graph", BINARY),
    ("classification", "bce", {"classes": 2}, 1, "graph", BINARY),
    ("classification", "bce_logits", {"classes": 2}, 2, "node", BINARY),
    ("classification", "cross_entropy", {"classes": 2}, 2, "graph", BINARY),
    ("classification", "cross_entropy", {"classes": 4}, 4, "graph", {**LABELS, "f1_macro": 1.0}),
    ("classification", "cross_entropy", {"classes": 3}, 3, "edge", {**LABELS, "f1_macro": 1.0}),
    ("multilabel", "bce_logits", {"classes": 2, "labels": 3}, 3, "graph", {**LABELS, "ap": 1.0}),
    ("multilabel", "bce", {"classes": 2, "labels": 3}, 3, "graph", {**LABELS, "ap": 1.0}),
    ("edge_prediction", "bce_logits", {"classes": 2}, 1, "edge", {"roc_auc": 1.0, "ap": 1.0}),
]


def targets(labels=None, level="graph", **settings):
    data = graphs(16, level=level, seed=3, **settings)
    draw = torch.Generator().manual_seed(4)
    for graph in data if labels is not None else []:
        graph.y = torch.randint(0, 2, (1, labels), generator=draw).float()
        graph.y[torch.rand(1, labels, generator=draw) < 0.2] = torch.nan
    return data


@pytest.mark.parametrize(("task", "loss", "settings", "outputs", "level", "ends"), CASES)
def test_sixteen_graphs_are_learned_by_heart(task, loss, settings, outputs, level, ends):
    torch.manual_seed(0)
    model = model_of(outputs, task=level, dropout=0.0, hidden_dim=32)
    trainer = make(
        model=Probabilities(model) if loss == "bce" else model, lr=5e-3, task_type=task, num_classes=outputs,
        loss_fn=get_loss_fn(task, loss, outputs),
    )  # fmt: skip
    data = loader(targets(level=level, **settings), 16)
    for _ in range(12):
        for _ in range(25):
            trainer.train_epoch(data)
        values = trainer.eval_epoch(data)
        if values["loss"] < 0.02:
            break
        for group in trainer.optimizer.param_groups:
            group["lr"] *= 0.7  # an absolute error ends at its step width
    assert values["loss"] < 0.05
    for name, end in ends.items():
        assert values[name] == pytest.approx(end, abs=0.2 if end == 0 else 1e-9), name
