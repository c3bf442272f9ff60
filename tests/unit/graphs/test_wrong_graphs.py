"""Wrong uses of the trainer of graphs that are refused before step 1."""

from __future__ import annotations

import pytest
import torch

from treadle.errors import ConfigError

pytest.importorskip("torch_geometric")

from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

import treadle.graphs as tg


def loader(width: int = 3) -> DataLoader:
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    return DataLoader([Data(x=torch.ones(3, width), edge_index=edges, y=torch.ones(1, 1)) for _ in range(4)], 2)


def trainer_of(**options) -> tg.GraphTrainer:
    model = tg.get_model("gps", num_features=3, hidden_dim=8, num_layers=1, num_heads=2)
    return tg.GraphTrainer(model, tg.get_optimizer(model), device="cpu", progress=False, **options)


def test_graphs_of_another_width_are_named_before_step_1_also_in_the_evaluation():
    trainer = trainer_of()
    with pytest.raises(ValueError, match="num_features=3") as raised:
        trainer.fit(loader(), loader(4), 1)
    assert "tried before step 1; what the loader gave: DataBatch {x: float32 (6, 4)" in raised.value.__notes__[0]
    assert trainer.global_step == 0


def test_the_trial_of_the_evaluation_changes_nothing():
    first, second = trainer_of(), trainer_of()
    second.model.load_state_dict(first.model.state_dict())
    torch.manual_seed(0)
    records = first.fit(loader(), loader(), 1)["val"][0]
    torch.manual_seed(0)
    second.fit(loader(), None, 1)
    assert all(map(torch.equal, first.model.state_dict().values(), second.model.state_dict().values()))
    again = second.eval_epoch(loader())
    assert {name: records[name] for name in again} == again


def test_metrics_that_are_names_are_refused():
    with pytest.raises(ConfigError, match=r"metrics=\['mae'\]: must have update"):
        trainer_of(metrics=["mae"])
