"""Values that a script builds and no checkpoint holds: a resume with other ones is named, in one warning."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, random_split

from helpers import MeanSquare
from treadle import Engine, set_seed


class Fixed(nn.Module):
    """A model that keeps a fixed projection in some place and has a dropout."""

    def __init__(self, p, projection, place):
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 1), nn.Dropout(p)
        if place == "buffer":
            self.register_buffer("projection", projection, persistent=False)
        else:
            self.projection = projection.numpy() if place == "array" else projection

    def forward(self, x):
        return self.linear(self.dropout(x @ torch.as_tensor(self.projection)))


class Task(MeanSquare):
    """A task with a loss of a user's and constant weights."""

    def __init__(self, loss, scale):
        self.loss = loss
        self.scale = scale


def built(
    *, seed=0, p=0.1, delta=1.0, projection=None, place="attribute", scale=None, shuffle=True, split=None, size=4,
    rows=None,
):  # fmt: skip
    set_seed(seed)
    own = torch.Generator().manual_seed(0)
    projection = torch.eye(4) if projection is None else projection
    model = Fixed(p, projection, place)
    rows = TensorDataset(torch.randn(16, 4, generator=own), torch.randn(16, 1, generator=own)) if rows is None else rows
    if split is not None:
        rows = random_split(ConcatDataset([rows, rows]), [16, 16], generator=torch.Generator().manual_seed(split))[0]
    engine = Engine(
        model, torch.optim.SGD(model.parameters(), lr=0.01), Task(nn.HuberLoss(delta=delta), scale),
        device="cpu",
    )  # fmt: skip
    return engine, DataLoader(rows, batch_size=size, shuffle=shuffle)


def warnings_of_a_resume(caplog, stop, before, now):
    engine, loader = built(**before)
    engine.run(loader, max_steps=stop)
    caplog.clear()
    resumed, loader = built(**now)
    resumed.load_state_dict(engine.state_dict())
    resumed.run(loader, max_steps=stop + 2)
    return [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]


PROJECTIONS = {"projection": torch.eye(4)}, {"projection": 2 * torch.eye(4)}
CASES = [
    ({"split": 1}, {"split": 2}, "dataset.indices"),
    ({"p": 0.1}, {"p": 0.5}, "model.dropout.p=0.1 (here 0.5)"),
    ({"delta": 1.0}, {"delta": 3.0}, "loss.delta=1 (here 3)"),
    ({"shuffle": True}, {"shuffle": False}, "sampler=RandomSampler (here SequentialSampler)"),
    ({"scale": torch.ones(2)}, {"scale": torch.zeros(2)}, "task.scale"),
    ({"scale": np.ones(2)}, {"scale": np.zeros(2)}, "task.scale"),
    (*PROJECTIONS, "model.projection"),
    ({**PROJECTIONS[0], "place": "buffer"}, {**PROJECTIONS[1], "place": "buffer"}, "model.projection"),
    ({**PROJECTIONS[0], "place": "array"}, {**PROJECTIONS[1], "place": "array"}, "model.projection"),
    ({"rows": TensorDataset(torch.ones(16, 4), torch.ones(16, 1))},
     {"rows": TensorDataset(torch.ones(16, 4), torch.zeros(16, 1))}, "dataset.tensors"),
]  # fmt: skip


@pytest.mark.parametrize("stop", [1, 6, 8])
@pytest.mark.parametrize(("before", "now", "name"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_another_value_is_named_in_one_warning(caplog, before, now, name, stop):
    (text,) = warnings_of_a_resume(caplog, stop, before, now)
    assert name in text
    assert "set_seed" in text
    assert not warnings_of_a_resume(caplog, stop, before, before)
    assert not warnings_of_a_resume(caplog, stop, now, now)


def test_another_number_of_rows_or_batch_size_has_one_warning(caplog):
    rows = TensorDataset(torch.ones(40, 4), torch.ones(40, 1))
    for now in ({"rows": rows}, {"size": 2}):
        assert len(warnings_of_a_resume(caplog, 5, {}, now)) == 1


class Permuted(Dataset):
    """Rows in an order that a state dict holds, or that changes while they are read."""

    def __init__(self, seed, *, has_state):
        self.order = torch.randperm(16, generator=torch.Generator().manual_seed(seed)).tolist()
        self.last = torch.full((1,), float(seed))
        if has_state:
            self.state_dict = lambda: {"order": list(self.order), "last": self.last}
            self.load_state_dict = self._load

    def _load(self, state):
        self.order, self.last = state["order"], state["last"]

    def __len__(self):
        return 16

    def __getitem__(self, index):
        if not hasattr(self, "state_dict"):
            self.order[0] += 1
            self.last += 1
        return torch.full((4,), float(self.order[index])), torch.zeros(1)


@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize("stop", [1, 6, 8])
def test_a_value_that_the_checkpoint_holds_is_not_named(caplog, stop, has_state):
    def made(seed):
        return {"rows": Permuted(seed, has_state=has_state), "seed": seed}

    assert not warnings_of_a_resume(caplog, stop, made(1), made(2))


@pytest.mark.parametrize("stop", [1, 8])
def test_a_checkpoint_without_marks_loads_without_a_warning(caplog, stop):
    engine, loader = built(split=1)
    engine.run(loader, max_steps=stop)
    state = engine.state_dict()
    assert state.pop("built")["model.dropout.p"] == 0.1
    assert "dataset.indices" in state["data"].pop("built")["values"]
    resumed, loader = built(split=2, p=0.5)
    resumed.load_state_dict(state)
    resumed.run(loader, max_steps=stop + 1)
    assert not caplog.records


def test_a_third_run_is_compared_with_the_second(caplog):
    engine, loader = built()
    engine.run(loader, max_steps=2)
    second, loader = built(p=0.5)
    second.load_state_dict(engine.state_dict())
    second.run(loader, max_steps=4)
    caplog.clear()
    third, loader = built(p=0.5)
    third.load_state_dict(second.state_dict())
    third.run(loader, max_steps=5)
    assert not caplog.records


@pytest.mark.parametrize("stop", [1, 3, 5, 6, 7, 9])
@pytest.mark.parametrize("skips", [True, False])
def test_a_loader_for_each_epoch_is_not_named(caplog, stop, skips):
    def made(epoch):
        rows = torch.randperm(16, generator=torch.Generator().manual_seed(epoch))
        return DataLoader(Subset(TensorDataset(torch.ones(16, 4), torch.ones(16, 1)), rows[:12].tolist()), batch_size=4)

    def trained(engine, until):
        for epoch in range(engine.epoch if skips else 0, 5):
            if engine.step < until:
                engine.run(made(epoch), max_steps=min(3 * epoch + 3, until))

    engine, _ = built()
    trained(engine, stop)
    resumed, _ = built()
    resumed.load_state_dict(engine.state_dict())
    trained(resumed, 15)
    again, _ = built()
    again.load_state_dict(resumed.state_dict())
    again.run(made(5), epochs=6)
    assert "other values" not in caplog.text
