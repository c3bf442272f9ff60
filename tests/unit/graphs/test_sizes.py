"""The sizes of graphs are counted on the host before a batch is moved, and then no step waits for its device."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

import treadle.graphs.task as task_module
from graph_batches import GraphBatch, collate, with_changes
from graph_kit import graphs, make, model_of
from helpers import accept_meta, no_waits_for_meta
from treadle.data.graph_sizes import count_sizes, record_sizes, recorded_sizes
from treadle.graphs import get_loss_fn, get_metrics
from treadle.graphs.attention import batch_layout
from treadle.graphs.task import GraphTask, raw_outputs
from treadle.optim.nonfinite import FiniteGuard, Verdict

FAR = torch.device("meta")


def far_task(task_type="regression", **loss):
    metrics = get_metrics("regression")
    return GraphTask(FAR, task_type, loss_fn=get_loss_fn(task_type, **loss), metrics=metrics)


def step_far(batch, of=None, /, **settings):
    """Forward and backward on what stands for a GPU, where waiting is an error."""
    model = model_of(**settings).to(FAR)
    with no_waits_for_meta():
        output = (of or far_task()).step(model, batch)
        output.loss.backward()
    assert isinstance(output.weight, float)  # one on the device would be read by the step
    assert all(parameter.grad is not None for parameter in model.parameters())


# -- nothing is waited for ------------------------------------------------------------------------------------------


def test_what_stands_for_a_gpu_would_see_a_wait():
    far = torch.zeros(3, device=FAR)
    with no_waits_for_meta():
        for wait in (
            far.tolist, far.nonzero, far.cpu, far.sum().item, lambda: bool(far.sum()), lambda: int(far.sum()),
            lambda: far[far > 0], lambda: far.long().bincount(), lambda: far.repeat_interleave(far.long()),
            lambda: far.unique(), lambda: torch.masked_select(far, far > 0),
        ):  # fmt: skip
            with pytest.raises((NotImplementedError, RuntimeError)):
                wait()
        for copy in (
            lambda: torch.zeros(3).to(FAR), lambda: torch.tensor([1.0], device="meta"), lambda: far.new_tensor([1.0]),
            lambda: far.copy_(torch.zeros(3)), lambda: far[torch.tensor([0, 1])],
        ):  # fmt: skip
            with pytest.raises(AssertionError, match="and waits"):
                copy()
        torch.zeros(3).to(FAR, non_blocking=True)
        far.copy_(torch.zeros(3), non_blocking=True)


MODELS = [
    {}, {"readout": "max"}, {"readout": "add", "drop_path_rate": 0.3}, {"mpnn_type": "gat"}, {"mpnn_type": "gcn"},
    {"mpnn_type": "gatedgcn", "relative_pe_dim": None}, {"use_local": False, "num_edge_features": None},
    {"use_global": False, "relative_pe_dim": None}, {"task": "node"}, {"task": "edge"},
]  # fmt: skip


@pytest.mark.parametrize("settings", MODELS, ids=str)
def test_no_model_waits_in_a_step_forward_or_backward(settings):
    step_far(collate(graphs(6, level=settings.get("task", "graph"), width=2, unknown=0.2)), num_classes=2, **settings)


@pytest.mark.parametrize(("task_type", "level", "classes", "outputs"), [
    ("classification", "graph", 3, 3), ("classification", "node", 2, 2), ("edge_prediction", "edge", 2, 1),
])  # fmt: skip
def test_no_loss_waits(task_type, level, classes, outputs):
    task = far_task(task_type, num_classes=outputs)
    step_far(collate(graphs(6, level=level, classes=classes)), task, num_classes=outputs, task=level)


def test_a_loss_of_the_users_own_does_not_make_it_wait():
    loss_fn = torch.nn.MSELoss()
    step_far(collate(graphs(6)), GraphTask(FAR, "regression", loss_fn=loss_fn, metrics=get_metrics("regression")))


@pytest.mark.parametrize("count", [1, 5])
def test_nor_do_batches_that_do_not_say_how_many_graphs_they_have(count):
    step_far(GraphBatch(**vars(with_changes(collate(graphs(count)), num_graphs=None))))


def test_nor_does_a_single_graph_that_has_no_numbers_at_all():
    step_far(GraphBatch(**vars(graphs(1)[0])))


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    edge_index: torch.Tensor
    edge_attr: torch.Tensor
    batch: torch.Tensor
    y: torch.Tensor
    num_graphs: int


def test_nor_do_batches_that_cannot_be_written_to():
    batch = collate(graphs(6))
    frozen = Frozen(**{field.name: getattr(batch, field.name) for field in dataclasses.fields(Frozen)})
    step_far(frozen, node_pe_dim=None, relative_pe_dim=None)


def test_nor_do_batches_of_torch_geometric():
    geometric = pytest.importorskip("torch_geometric.data")
    data = [geometric.Data(x=g.x, edge_index=g.edge_index, edge_attr=g.edge_attr, y=g.y) for g in graphs(6)]
    batch = geometric.Batch.from_data_list(data)
    before = list(batch.keys())
    step_far(batch, node_pe_dim=None, relative_pe_dim=None)
    assert list(batch.keys()) == before
    assert recorded_sizes(batch.batch) is None


def test_predictions_and_evaluations_do_not_wait_either():
    model, batch = model_of().eval().to(FAR), collate(graphs(6))
    with no_waits_for_meta(), torch.no_grad():
        far_task().step(model, batch)
        raw_outputs(model, FAR, batch)


def test_a_whole_training_asks_nothing_of_its_device_before_the_epoch_ends(monkeypatch):
    def judge(self, norm, weight):
        weights.append(weight)
        return Verdict(finite=True, counted=True)

    weights = []
    accept_meta(monkeypatch)
    monkeypatch.setattr(FiniteGuard, "judge", judge)  # on a GPU its verdict comes a step late
    data = torch.utils.data.DataLoader(graphs(8), batch_size=4, collate_fn=collate)
    trainer = make(model=model_of().to(FAR), device="meta", grad_clip=1.0)
    with no_waits_for_meta(), pytest.raises(NotImplementedError, match="meta tensor"):
        trainer.train_epoch(data)  # it is the mean loss of the epoch that is read
    assert weights == [4.0, 4.0]
    assert trainer.global_step == 2


# -- and the numbers are right --------------------------------------------------------------------------------------


@pytest.mark.parametrize("owner", [[0, 0, 1, 2, 2, 2], [2, 0, 1, 0, 2, 2], [0, 0, 3, 3], [0, 0]])
def test_a_layout_of_given_sizes_is_that_of_sizes_which_were_read(owner):
    graph_N = torch.tensor(owner)
    num_graphs = max(owner) + 1
    read, given = batch_layout(graph_N, num_graphs), batch_layout(graph_N, num_graphs, graph_N.bincount().tolist())
    assert read.groups == given.groups
    for name in ("slot_N", "row_start_N", "position_N"):
        assert torch.equal(getattr(read, name), getattr(given, name))
    for one, other in zip(read.masks, given.masks, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def test_the_layout_of_one_graph_is_made_where_it_lies(monkeypatch):
    # Its shapes tell all of it, so that a step may be captured, which a copy from the host must not be.
    monkeypatch.setattr(torch.Tensor, "to", lambda *args, **kwargs: pytest.fail("copied"))
    one = batch_layout(torch.tensor([0, 0, 0]), 1)
    assert (one.groups, one.masks) == (((1, 3),), (None,))
    assert (one.slot_N.tolist(), one.position_N.tolist(), one.row_start_N.tolist()) == ([0, 1, 2], [0, 1, 2], [0, 3, 6])


@pytest.mark.parametrize("sizes", [(2, 1), (3, 2), (2, 2, 0)])
def test_sizes_of_another_batch_are_refused(sizes):
    with pytest.raises(ValueError, match="not 4 in 2"):
        batch_layout(torch.tensor([0, 0, 1, 1]), 2, sizes)


@pytest.mark.parametrize(("batch", "sizes"), [
    ({"batch": [0, 2, 2], "num_graphs": 4}, (1, 0, 2, 0)),
    ({"batch": [1, 0, 1]}, (1, 2)),
    ({"batch": [0, 1], "num_graphs": torch.tensor(2)}, (1, 1)),
    ({"batch": [0, 2], "num_graphs": 2}, None),
    ({"batch": [0, -1], "num_graphs": 2}, None),
    ({"batch": [0.0, 1.0], "num_graphs": 2}, None),
    ({"batch": [[0, 1]], "num_graphs": 2}, None),
    ({"batch": [False, True], "num_graphs": 2}, None),
    ({"batch": [], "num_graphs": 2}, None),
    ({"num_graphs": 2}, None),
])  # fmt: skip
def test_only_numbers_of_graphs_are_counted(batch, sizes):
    tensors = {"batch": torch.tensor(batch["batch"])} if "batch" in batch else {}
    assert count_sizes(SimpleNamespace(**{**batch, **tensors})) == sizes
    assert count_sizes(SimpleNamespace(batch=torch.zeros(2, device=FAR).long(), num_graphs=1)) is None


def test_what_was_noted_is_forgotten_where_the_numbers_are_other_ones():
    moved = SimpleNamespace(batch=torch.tensor([0, 0, 1]))
    record_sizes(moved, (2, 1))
    assert recorded_sizes(moved.batch) == (2, 1)
    assert [recorded_sizes(other) for other in (moved.batch.clone(), moved.batch[:], moved.batch + 0)] == [None] * 3
    moved.batch[1] = 1
    assert recorded_sizes(moved.batch) is None
    record_sizes(moved, (2, 2))  # it has three nodes
    assert recorded_sizes(moved.batch) is None
    with torch.inference_mode():
        made = SimpleNamespace(batch=torch.tensor([0, 0, 1]))
        record_sizes(made, (2, 1))
        assert recorded_sizes(made.batch) is None


def test_what_a_user_calls_so_is_not_believed():
    graph_N = torch.tensor([0, 0, 1])
    graph_N._treadle_graph_sizes = (1, 2)
    assert recorded_sizes(graph_N) is None


class Regrouping(torch.nn.Module):
    """Puts the nodes of a moved batch into other graphs before its model sees them."""

    def __init__(self, inner, change):
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, batch):
        return self.inner(self.change(batch))


def in_place(batch):
    batch.batch[batch.batch == 0] = 1
    return batch


def in_a_copy(batch):
    owner = batch.batch.clone()
    owner[owner == 0] = 1
    return GraphBatch(**{**vars(batch), "batch": owner})


def moved_as_elsewhere(monkeypatch):
    """Make the CPU look like another device: a moved batch has tensors of its own."""

    def moved(batch, device):
        copied = to_device(batch, device)
        return type(copied)(**{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in vars(copied).items()})

    to_device = task_module.to_device
    monkeypatch.setattr(task_module, "to_device", moved)
    monkeypatch.setattr(task_module, "_waits_for", lambda device: True)


@pytest.mark.parametrize("change", [lambda batch: batch, in_place, in_a_copy], ids=["none", "in place", "in a copy"])
def test_a_model_says_the_same_with_sizes_that_were_counted(monkeypatch, change):
    model, data = Regrouping(model_of().eval(), change), graphs(6)
    cpu = torch.device("cpu")
    expected = raw_outputs(model, cpu, collate(data))
    moved_as_elsewhere(monkeypatch)
    noted = []
    monkeypatch.setattr(task_module, "record_sizes", lambda *args: noted.append(args[1]) or record_sizes(*args))
    assert torch.equal(raw_outputs(model, cpu, collate(data)), expected)
    assert noted == [tuple(len(graph.x) for graph in data)]


def test_a_compiled_model_does_not_keep_sizes_either():
    torch._dynamo.reset()
    eager = model_of(num_layers=1, dropout=0.0).eval()
    compiled = torch.compile(eager, backend="eager")
    data = graphs(15)
    for start in range(0, 12, 2):
        batch = collate(data[start : start + 3])
        record_sizes(batch, count_sizes(batch))
        if start % 4:
            in_place(batch)
        with torch.no_grad():
            assert torch.equal(compiled(batch), eager(GraphBatch(**{**vars(batch), "batch": batch.batch.clone()})))
    torch._dynamo.reset()
