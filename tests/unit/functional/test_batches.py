"""Batches as users have them: split, moved, and left alone."""

from __future__ import annotations

import collections
import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, TensorDataset
from transformers import BatchEncoding

import treadle
from functional_kit import make
from treadle import ConfigError
from treadle.functional.batches import num_samples, split_batch

# torch_geometric compiles functions with torch.jit.script when it is imported, which torch calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

X, Y, Z = torch.ones(3, 4), torch.zeros(3, 1), torch.full((3, 2), 2.0)
Pair = collections.namedtuple("Pair", ["inputs", "targets"])
META = torch.device("meta")


@dataclass(frozen=True)
class Rows:
    x: torch.Tensor
    names: list


class Own:
    """Moves itself in place, as batches of graphs do."""

    def __init__(self):
        self.x = X

    def to(self, device):
        self.x = self.x.to(device)
        return self


def graphs():
    from torch_geometric.data import Batch, Data

    return Batch.from_data_list([Data(x=torch.ones(2, 3), y=torch.ones(1)), Data(x=torch.ones(4, 3), y=torch.ones(1))])


class OnMeta(treadle.Trainer):
    """Looks as if it were on another device."""

    def __init__(self):
        super().__init__(nn.Linear(1, 1), None, nn.MSELoss(), device="cpu")
        self.device = META


def prepared(batch):
    return OnMeta()._prepare_batch(batch)


@pytest.mark.parametrize(
    "batch", [(X, Y), [X, Y], Pair(X, Y), (X, Y, Z), [X, Y, Z, "more"]], ids=lambda b: f"{type(b).__name__}{len(b)}"
)
def test_of_a_list_or_tuple_the_first_two_are_inputs_and_targets(batch):
    inputs, targets = prepared(batch)
    assert inputs.shape == X.shape
    assert targets.shape == Y.shape
    assert inputs.device == targets.device == META


@pytest.mark.parametrize("batch", [(X,), [X], X], ids=["tuple", "list", "tensor"])
def test_a_tensor_alone_or_in_a_list_has_no_target(batch):
    inputs, targets = prepared(batch)
    assert inputs.device == META
    assert targets is None


@pytest.mark.parametrize(
    "batch",
    [{"x": X, "n": 3}, collections.OrderedDict(x=X), collections.UserDict({"x": X}), BatchEncoding({"x": X})],
    ids=lambda batch: type(batch).__name__,
)
def test_a_mapping_stays_one_of_its_type_and_goes_as_keywords(batch):
    before = dict(batch)
    inputs, targets = prepared(batch)
    assert type(inputs) is type(batch)
    assert inputs["x"].device == META
    assert targets is None
    assert batch["x"] is X
    assert dict(batch).keys() == before.keys()

    class Named(nn.Module):
        def forward(self, x, n=None):
            return x.sum(1, keepdim=True)

    trainer = make(model=Named(), optimizer=torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0))
    assert trainer._forward_pass(batch).shape == (3, 1)


def test_a_dataclass_and_nested_lists_are_moved_in_new_containers():
    rows = Rows(X, ["a", "b"])
    inputs, targets = prepared(rows)
    assert type(inputs) is Rows
    assert inputs.x.device == META
    assert inputs.names == ["a", "b"]
    assert targets is None
    assert rows.x is X
    inner = [[X, {"y": (Y,)}], Y]
    kept = copy.copy(inner)
    inputs, targets = prepared(inner)
    assert inputs[0].device == inputs[1]["y"][0].device == targets.device == META
    assert all(a is b for a, b in zip(inner, kept))


def test_a_batch_of_graphs_is_moved_without_changing_the_users():
    batch = graphs()
    inputs, targets = prepared(batch)
    assert type(inputs) is type(batch)
    assert inputs.x.device == META
    assert inputs.num_graphs == 2
    assert targets is None
    assert batch.x.device.type == batch.batch.device.type == "cpu"
    assert num_samples(batch) == 2


def test_what_moves_itself_in_place_is_copied_first():
    own = Own()
    inputs, _ = prepared(own)
    assert inputs.x.device == META
    assert own.x.device.type == "cpu"
    inside, _ = prepared(([own], Y))
    assert inside[0].x.device == META
    assert own.x.device.type == "cpu"


def test_a_packed_sequence_is_an_input_and_not_a_tuple():
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    inputs, targets = make()._prepare_batch(packed)
    assert isinstance(inputs, PackedSequence)
    assert targets is None


def test_the_batch_is_the_same_before_and_after_a_step():
    batch = {"input": torch.ones(3, 4), "note": ["a", 1]}
    before = copy.deepcopy(batch)

    class Own(treadle.Trainer):
        def _forward_pass(self, inputs):
            inputs.pop("note")
            return self.model(**inputs)

        def _compute_loss(self, outputs, targets):
            return outputs.square().mean()

    make(Own, model=nn.Linear(4, 1)).train_step(batch)
    assert batch.keys() == before.keys()
    assert torch.equal(batch["input"], before["input"])


def test_items_beyond_the_second_are_named_once(caplog):
    trainer = make()
    for _ in range(2):
        trainer.train_step((X, Y, Z))
    assert caplog.text.count("a batch has 3 items") == 1


@pytest.mark.parametrize("batch", [(), []])
def test_an_empty_batch_is_refused(batch):
    with pytest.raises(ConfigError, match="empty"):
        split_batch(batch)


@pytest.mark.parametrize(
    ("obj", "count"),
    [
        (X, 3), (torch.tensor(1.0), 1), ({"n": 1, "x": X}, 3), ([Z, Y], 3), (Rows(X, []), 3), ("text", None),
        ({}, None),
    ],
)  # fmt: skip
def test_samples_are_counted_in_dimension_0_of_the_first_tensor(obj, count):
    assert num_samples(obj) == count


def test_batches_of_graphs_train_by_graphs_as_weight():
    class Graphs(treadle.Trainer):
        def _forward_pass(self, inputs):
            return self.model(inputs.x)

        def _compute_loss(self, outputs, targets):
            return outputs.square().mean()

        def _loss_weight(self, inputs, outputs, targets):
            weights.append(super()._loss_weight(inputs, outputs, targets))
            return weights[-1]

    weights = []
    make(Graphs, model=nn.Linear(3, 1)).train([graphs()], 1)
    assert weights == [2.0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_batches_are_moved_without_waiting():
    data = DataLoader(TensorDataset(torch.ones(8, 4), torch.ones(8, 1)), batch_size=4, pin_memory=True)
    trainer = treadle.Trainer(nn.Linear(4, 1), None, nn.MSELoss())
    trainer.train(data, 1)
    assert trainer.step == 2
