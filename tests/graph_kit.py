"""Small reproducible trainers of graph models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from graph_batches import SMALL, collate, make_graph
from treadle.graphs import GraphTrainer, get_model, get_optimizer
from treadle.seed import set_seed

LEVELS = {"graph": lambda graph: 1, "node": lambda graph: len(graph.x), "edge": lambda graph: graph.pair_index.shape[1]}


def graphs(count=14, *, level="graph", classes=None, width=1, unknown=0.0, masks=False, seed=0):
    """Return random graphs; ``y`` holds classes (rows,), or numbers (rows, width) some of which are NaN.

    With ``masks``, each split has a third of the rows.
    """
    draw = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        graph = make_graph(4 + number % 5, seed=100 * seed + number)
        # No pair occurs in both orders: their scores would be equal except for rounding, and their ranks random.
        graph.pair_index = graph.pair_index[:, :4]
        rows = LEVELS[level](graph)
        if classes is None:
            graph.y = torch.randn(rows, width, generator=draw)
            graph.y[torch.rand(rows, width, generator=draw) < unknown] = torch.nan
        else:
            graph.y = torch.randint(0, classes, (rows,), generator=draw)
        if masks:
            split = torch.randint(0, 3, (rows,), generator=draw)
            graph.train_mask, graph.val_mask, graph.test_mask = split == 0, split == 1, split == 2
        made.append(graph)
    return made


def loader(data, batch_size=4, *, shuffle=False, **kwargs):
    return DataLoader(data, batch_size=batch_size, shuffle=shuffle, collate_fn=collate, **kwargs)


def model_of(num_classes=1, **changes):
    return get_model(**{**SMALL, "num_classes": num_classes, "num_layers": 2, **changes})


def make(folder=None, *, seed=0, model=None, optimizer=None, scheduler=None, lr=0.01, kind="adamw", **kwargs: Any):
    """Return a trainer; ``model`` is a model or its settings, ``scheduler`` makes a scheduler from the optimizer."""
    set_seed(seed)
    model = model if isinstance(model, nn.Module) else model_of(**(model or {}))
    optimizer = get_optimizer(model, kind, lr) if optimizer is None else optimizer
    settings = {"device": "cpu", "log_every": None, "checkpoint_dir": folder, **kwargs}
    return GraphTrainer(model, optimizer, None if scheduler is None else scheduler(optimizer), **settings)


def records(history):
    """Return a history without run-specific values."""
    return {part: [{k: v for k, v in record.items() if k != "time"} for record in history[part]] for part in history}


def same_weights(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.model.state_dict().values(), b.model.state_dict().values()))


class Scale(nn.Module):
    """Model of one weight times the mean feature of each graph, so that results can be computed by hand."""

    def __init__(self, start=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(float(start)))

    def forward(self, batch):
        return self.weight * batch.x
