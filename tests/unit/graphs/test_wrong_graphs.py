"""Wrong uses of the trainer of graphs that are refused before step 1."""

from __future__ import annotations

import pytest
import torch

from treadle.errors import ConfigError

pytest.importorskip("torch_geometric")

from torch_geometric.data import Data, InMemoryDataset
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


def graphs(*, rows: int = 1, count: int = 4) -> list[Data]:
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    return [Data(x=torch.ones(3, 3), edge_index=edges, y=torch.ones(rows, 1)) for _ in range(count)]


class Molecules(InMemoryDataset):
    def __init__(self, given: list[Data]):
        super().__init__(None)
        self.data, self.slices = self.collate(given)


class Lazily(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Data:
        return graphs()[index]


SINGLE = {
    "list": (lambda: graphs(), "train_loader: a list of 4 single graphs.*batch_size=1"),
    "tuple": (lambda: tuple(graphs()), "train_loader: a tuple of 4 single graphs"),
    "data set": (lambda: Molecules(graphs()), "train_loader: a Molecules of 4 single graphs"),
    "data set of nodes": (lambda: Molecules(graphs(rows=3)), "train_loader: a Molecules of 4 single graphs"),
    "torch's loader": (lambda: torch.utils.data.DataLoader(graphs(), 2), "train_loader: a DataLoader of torch cannot"),
    "torch's loader of a data set": (
        lambda: torch.utils.data.DataLoader(Molecules(graphs()), 2), "train_loader: a DataLoader of torch cannot"),
    "torch's loader of a part": (
        lambda: torch.utils.data.DataLoader(torch.utils.data.Subset(Molecules(graphs()), [0, 1]), 2),
        "train_loader: a DataLoader of torch cannot"),
    "torch's loader of what is made on demand": (
        lambda: torch.utils.data.DataLoader(Lazily(), 2), "(?s)collate_fn: .*use torch_geometric.loader.DataLoader"),
}  # fmt: skip


@pytest.mark.parametrize("case", SINGLE)
def test_graphs_that_nothing_joins_are_refused_before_step_1(case):
    made, message = SINGLE[case]
    trainer = trainer_of()
    with pytest.raises(ConfigError, match=message):
        trainer.fit(made(), None, 1)
    with pytest.raises(ConfigError, match=message.replace("train", "val")):
        trainer.fit(loader(), made(), 1)
    assert trainer.global_step == 0


def test_one_graph_and_graphs_with_targets_of_nodes_are_batches():
    for given in (graphs(count=1), Molecules(graphs(count=1)), graphs(rows=3), list(loader())):
        task = {"task": "node"} if len(given[0].y) == 3 else {}
        model = tg.get_model("gps", num_features=3, hidden_dim=8, num_layers=1, num_heads=2, **task)
        trainer = tg.GraphTrainer(model, tg.get_optimizer(model), device="cpu", progress=False)
        trainer.fit(given, None, 1)
        assert trainer.global_step == len(given)


EDGES = {
    "beyond": ([[0, 9], [9, 0]], r"names nodes 0 to 12, and the batch has nodes 0 to 5"),
    "negative": ([[0, -1], [-1, 0]], r"names nodes -1 to 3"),
    "floats": ([[0.0, 1.0], [1.0, 0.0]], "has dtype torch.float32; it must be torch.long"),
    "pairs": ([[0, 1], [1, 2], [2, 0]], r"has shape \(3, 4\); it must be \(2, E\)"),
}


@pytest.mark.parametrize("case", EDGES)
def test_wrong_edges_are_named(case):
    edges, message = EDGES[case]
    data = [Data(x=torch.ones(3, 3), edge_index=torch.tensor(edges), y=torch.ones(1, 1)) for _ in range(2)]
    trainer = trainer_of()
    with pytest.raises(ConfigError, match=f"batch: the edge_index of a DataBatch {message}"):
        trainer.fit(DataLoader(data, 2), None, 1)
    assert trainer.applied_steps == 0


def test_an_error_of_the_model_with_right_edges_is_left_as_it_is():
    trainer = trainer_of()
    trainer.model.register_forward_pre_hook(lambda *given: [][1])
    with pytest.raises(IndexError, match="list index"):
        trainer.fit(loader(), None, 1)


def test_targets_that_are_strings_are_named():
    data = [Data(x=torch.ones(3, 3), edge_index=torch.tensor([[0, 1], [1, 0]]), y="toxic") for _ in range(2)]
    with pytest.raises(ConfigError, match=r"whose 'y' is \(str, str\); it needs a tensor"):
        trainer_of().fit(DataLoader(data, 2), None, 1)


def test_a_single_graph_in_place_of_a_loader_is_refused():
    graph = Data(x=torch.randn(4, 3), edge_index=torch.zeros(2, 0, dtype=torch.long), y=torch.randn(4, 1))
    with pytest.raises(ConfigError, match=r"train_loader: is a single graph.*\[graph\]"):
        trainer_of().fit(graph, epochs=1)


def test_an_unknown_task_type_lists_those_that_exist():
    with pytest.raises(ConfigError, match="task_type='multiclass': did you mean 'classification'"):
        trainer_of(task_type="multiclass")
