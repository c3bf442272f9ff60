"""Values that a script builds and no checkpoint holds: a resume with other ones is named, in one warning."""

from __future__ import annotations

import functools
import logging
import os
import queue
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from helpers import MeanSquare
from ranks import run_on_ranks
from treadle import Engine, TensorLoader, distributed, set_seed
from treadle.checkpoint.built_values import BuiltValues
from treadle.hooks import BaseHook


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


class Scale:
    """An object of a user's with a setting."""

    def __init__(self, factor):
        self.factor = factor


class Task(MeanSquare):
    """A task with a loss of a user's and constant values."""

    def __init__(self, loss, scale):
        self.loss = loss
        self.scale = scale


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def points(count=16, seed=0):
    return TensorDataset(drawn(seed, count, 4), drawn(seed + 1, count, 1))


def built(
    *, seed=0, p=0.1, loss=None, projection=None, place="attribute", scale=None, shuffle=True, split=None, size=4,
    rows=None, weights=None, hooks=(), workers=0, collate=None,
):  # fmt: skip
    set_seed(seed)
    model = Fixed(p, torch.eye(4) if projection is None else projection, place)
    rows = points() if rows is None else rows
    if split is not None:
        rows = random_split(ConcatDataset([rows, rows]), [16, 16], generator=torch.Generator().manual_seed(split))[0]
    engine = Engine(
        model, torch.optim.SGD(model.parameters(), lr=0.01), Task(loss or nn.HuberLoss(), scale), device="cpu",
        hooks=hooks,
    )  # fmt: skip
    if weights is not None:
        return engine, DataLoader(rows, batch_size=size, sampler=WeightedRandomSampler(weights, 16))
    if isinstance(rows, torch.Tensor):
        return engine, TensorLoader(rows, rows[:, :1], batch_size=size, shuffle=shuffle)
    return engine, DataLoader(rows, batch_size=size, shuffle=shuffle, num_workers=workers, collate_fn=collate)


def mixed(part, items):
    x, y = (torch.stack(column) for column in zip(*items, strict=True))
    return x + part * x.flip(0), y


class Frame(Dataset):
    """Rows of a pandas table in some order."""

    def __init__(self, order):
        pd = pytest.importorskip("pandas", reason="pandas is not installed")
        self.table = pd.DataFrame(drawn(0, 16, 4).numpy()[order], columns=list("abcd"))

    def __len__(self):
        return 16

    def __getitem__(self, index):
        row = torch.tensor(self.table.iloc[index].to_numpy())
        return row, row[:1]


class Saving(BaseHook):
    """A hook that keeps the state after a step or an epoch, as a killed run leaves it."""

    def __init__(self, step=None, epoch=None):
        self.step, self.epoch = step, epoch
        self.states = queue.SimpleQueue()

    def on_after_step(self, trainer):
        if trainer.step == self.step:
            self.states.put(trainer.state_dict())

    def on_after_epoch(self, trainer):
        if trainer.epoch == self.epoch:
            self.states.put(trainer.state_dict())


STOPS = [{"step": 1}, {"step": 6}, {"epoch": 1}, {"epoch": 2}]
"""Where a run of three epochs of four steps is killed: inside epochs, and between two of them."""


def killed(stop, before):
    saving = Saving(**stop)
    engine, loader = built(**{**before, "hooks": [*before.get("hooks", ()), saving]})
    engine.run(loader, epochs=3)
    return saving.states.get_nowait()


def warnings_of(caplog):
    return [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]


def warnings_of_a_resume(caplog, stop, before, now):
    state = killed(stop, before)
    caplog.clear()
    resumed, loader = built(**now)
    resumed.load_state_dict(state)
    resumed.run(loader, epochs=3)
    return warnings_of(caplog)


def huber(delta):
    return {"loss": nn.HuberLoss(delta=delta)}


KINDS = {
    "rows of a split": ({"split": 1}, {"split": 2}, "dataset.indices"),
    "rows of an array": ({"rows": Subset(points(), np.arange(16))}, {"rows": Subset(points(), 15 - np.arange(16))},
                         "dataset.indices"),
    "a dropout rate": ({"p": 0.1}, {"p": 0.5}, "model.dropout.p=0.1 (here 0.5)"),
    "a number of a loss": (huber(1.0), huber(3.0), "loss.delta=1 (here 3)"),
    "an argument of a partial": ({"loss": functools.partial(nn.functional.huber_loss, delta=1.0)},
                                 {"loss": functools.partial(nn.functional.huber_loss, delta=3.0)}, "delta=1 (here 3)"),
    "weights of a loss": ({"loss": nn.CrossEntropyLoss(weight=torch.ones(2))},
                          {"loss": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))}, "loss.weight"),
    "a number of an object": ({"scale": Scale(0.5)}, {"scale": Scale(0.7)}, "scale.factor=0.5 (here 0.7)"),
    "the order": ({"shuffle": True}, {"shuffle": False}, "sampler=RandomSampler (here SequentialSampler)"),
    "a constant tensor": ({"scale": torch.ones(2)}, {"scale": torch.zeros(2)}, "task.scale"),
    "a constant array": ({"scale": np.ones(2)}, {"scale": np.zeros(2)}, "task.scale"),
    "a projection": ({"projection": drawn(1, 4, 4)}, {"projection": drawn(2, 4, 4)}, "model.projection"),
    "a scaled projection": ({"projection": torch.eye(4)}, {"projection": 1.01 * torch.eye(4)}, "model.projection"),
    "a buffer": ({"projection": drawn(1, 4, 4), "place": "buffer"}, {"projection": drawn(2, 4, 4), "place": "buffer"},
                 "model.projection"),
    "an array of a module": ({"projection": drawn(1, 4, 4), "place": "array"},
                             {"projection": drawn(2, 4, 4), "place": "array"}, "model.projection"),
    "random samples": ({"rows": points(seed=1)}, {"rows": points(seed=2)}, "dataset.tensors"),
    "a list of samples": ({"rows": list(points(seed=1))}, {"rows": list(points(seed=2))}, "loader.dataset"),
    "rows of a TensorLoader": ({"rows": drawn(1, 16, 4)}, {"rows": drawn(2, 16, 4)}, "loader.tensors"),
    "an argument of a collate function": ({"collate": functools.partial(mixed, 0.1)},
                                          {"collate": functools.partial(mixed, 0.2)}, "args[0]=0.1 (here 0.2)"),
    "weights of a sampler": ({"weights": torch.ones(16)}, {"weights": torch.arange(1.0, 17.0)}, "sampler.weights"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_another_value_is_named_in_one_warning(caplog, kind):
    before, now, name = KINDS[kind]
    (text,) = warnings_of_a_resume(caplog, STOPS[1], before, now)
    assert name in text
    assert "set_seed" in text
    assert not warnings_of_a_resume(caplog, STOPS[1], before, before)


def test_other_rows_of_a_table_are_named(caplog):
    before, now = {"rows": Frame(np.arange(16))}, {"rows": Frame(15 - np.arange(16))}
    (text,) = warnings_of_a_resume(caplog, STOPS[1], before, now)
    assert "dataset.table" in text
    assert not warnings_of_a_resume(caplog, STOPS[1], before, before)


@pytest.mark.parametrize("kind", ["rows of a split", "a dropout rate", "the order", "random samples"])
@pytest.mark.parametrize("stop", STOPS, ids=str)
def test_it_is_named_wherever_the_run_was_killed(caplog, kind, stop):
    before, now, name = KINDS[kind]
    (text,) = warnings_of_a_resume(caplog, stop, before, now)
    assert name in text
    assert not warnings_of_a_resume(caplog, stop, now, now)


def test_a_finished_run_that_is_continued_is_compared(caplog):
    engine, loader = built(split=1)
    engine.run(loader, epochs=2)
    resumed, loader = built(split=2)
    resumed.load_state_dict(engine.state_dict())
    resumed.run(loader, epochs=3)
    assert ["dataset.indices" in text for text in warnings_of(caplog)] == [True]


def test_a_third_run_is_compared_with_the_second(caplog):
    engine, loader = built(split=1)
    engine.run(loader, max_steps=2)
    second, loader = built(split=2, p=0.5)
    second.load_state_dict(engine.state_dict())
    second.run(loader, max_steps=3)
    caplog.clear()
    for split, count in ((2, 0), (3, 1)):
        third, loader = built(split=split, p=0.5)
        third.load_state_dict(second.state_dict())
        third.run(loader, max_steps=4)
        assert len(warnings_of(caplog)) == count


def test_rows_and_samples_of_data_sets_of_libraries_are_compared():
    datasets = pytest.importorskip("datasets")
    graphs = pytest.importorskip("torch_geometric.data")

    class Graphs(graphs.InMemoryDataset):
        def __init__(self, seed):
            super().__init__(None)
            self.data, self.slices = self.collate([graphs.Data(x=drawn(10 * seed + row, 3, 2)) for row in range(8)])

    def values_of(dataset):
        return BuiltValues(lambda: {"dataset": dataset}, lists=True)

    table = datasets.Dataset.from_dict({"x": list(range(8))})
    first, second = (values_of(table.train_test_split(2, seed=seed)["train"]) for seed in (1, 2))
    assert second.differing(first.unchanged()) == ["dataset.indices"]
    first, second = (values_of(Graphs(0)[order]) for order in ([1, 2, 3], [3, 2, 1]))
    assert second.differing(first.unchanged()) == ["dataset.indices"]
    assert values_of(Graphs(1)).differing(values_of(Graphs(0)).unchanged()) == ["dataset.data"]
    assert values_of(Graphs(0)).differing(values_of(Graphs(0)).unchanged()) == []


# -- no false alarms ----------------------------------------------------------------------------------------------


def test_a_checkpoint_without_marks_loads_without_a_warning(caplog):
    for stop in STOPS[1:3]:
        state = killed(stop, {"split": 1})
        assert state.pop("built")["model.dropout.p"] == 0.1
        assert "dataset.indices" in state["data"].pop("built")["values"]
        resumed, loader = built(split=2, p=0.5)
        resumed.load_state_dict(state)
        resumed.run(loader, epochs=3)
    assert not warnings_of(caplog)


NAMED_ELSEWHERE = {
    "length": {"rows": points(40)},
    "batch size": {"size": 2},
    "workers": {"workers": 1},
}


@pytest.mark.parametrize("now", NAMED_ELSEWHERE.values(), ids=NAMED_ELSEWHERE)
@pytest.mark.parametrize("stop", STOPS[1:3], ids=str)
def test_what_is_named_elsewhere_is_not_named_twice(caplog, now, stop):
    texts = warnings_of_a_resume(caplog, stop, {}, now)
    assert texts
    assert "other values" not in " ".join(texts)


class OfTheMoment(nn.Module):
    """A loss with numbers of the machine, the moment and the length of the run."""

    def __init__(self, number):
        super().__init__()
        self.started, self.created, self.ticks = time.perf_counter(), time.time(), time.monotonic()
        self.load_seconds, self.device_id, self.pid = 0.5 + number, number, os.getpid() + number
        self.log_every, self.num_epochs, self.folder = 10 + number, 3 + number, f"run{number}"


class Places(Dataset):
    """Rows of a folder, opened at some time."""

    def __init__(self, number):
        self.rows = points()
        self.root = f"folder{number}"
        self.paths = [f"{self.root}/{row}" for row in range(16)]
        self.opened, self.size, self.took = time.monotonic(), 100 + number, 0.1 + number

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return self.rows[index]


def test_numbers_of_the_machine_and_the_moment_are_not_compared(caplog):
    before, now = ({"loss": OfTheMoment(number), "rows": Places(number)} for number in (0, 1))
    assert not warnings_of_a_resume(caplog, STOPS[1], before, now)


def test_rounding_of_another_processor_is_not_named(caplog):
    angles = torch.linspace(0, 6, 16).reshape(4, 4)
    before, now = ({"projection": angles.sin() * (1 + change), "place": "buffer"} for change in (0.0, 3e-7))
    assert not torch.equal(before["projection"], now["projection"])
    assert not warnings_of_a_resume(caplog, STOPS[1], before, now)


class Annealing(BaseHook):
    """A hook that lowers the dropout rate and writes weights of the sampler."""

    def on_before_step(self, trainer):
        trainer.model.dropout.p = 0.5 - 0.01 * trainer.step
        trainer.cursor.loader.sampler.weights[trainer.step] += 1


@pytest.mark.parametrize("stop", STOPS[1:3], ids=str)
def test_what_the_run_changes_is_not_named(caplog, stop):
    before, now = (
        {"p": p, "weights": torch.full((16,), weight), "hooks": [Annealing()]} for p, weight in ((0.1, 1.0), (0.2, 2.0))
    )
    assert not warnings_of_a_resume(caplog, stop, before, now)


class Permuted(Dataset):
    """Rows in an order that a state dict holds, that is set for each epoch, or that changes while they are read."""

    def __init__(self, seed, kind):
        self.order = torch.randperm(16, generator=torch.Generator().manual_seed(seed)).tolist()
        self.last, self.kind = torch.full((1,), float(seed)), kind
        if kind == "saved":
            self.state_dict = lambda: {"order": list(self.order), "last": self.last}
            self.load_state_dict = self._load
        elif kind == "set":
            self.last = torch.zeros(1)
            self.set_epoch(0)

    def _load(self, state):
        self.order, self.last = state["order"], state["last"]

    def set_epoch(self, epoch):
        if self.kind == "set":
            self.order = torch.randperm(16, generator=torch.Generator().manual_seed(epoch)).tolist()

    def __len__(self):
        return 16

    def __getitem__(self, index):
        if self.kind == "moves":
            self.order.append(index)
            self.last += 1
        return torch.full((4,), float(self.order[index])), torch.zeros(1)


@pytest.mark.parametrize("kind", ["saved", "set", "moves"])
@pytest.mark.parametrize("stop", STOPS[1:3], ids=str)
def test_data_that_moves_is_not_named(caplog, stop, kind):
    before, now = ({"rows": Permuted(seed, kind), "shuffle": False} for seed in (1, 2))
    assert not warnings_of_a_resume(caplog, stop, before, now)


def subset(seed):
    rows = torch.randperm(16, generator=torch.Generator().manual_seed(seed))
    return DataLoader(Subset(points(), rows[:12].tolist()), batch_size=4)


@pytest.mark.parametrize("stop", [1, 3, 5, 6, 7, 9])
@pytest.mark.parametrize("skips", [True, False])
def test_a_loader_for_each_epoch_is_not_named(caplog, stop, skips):
    def trained(engine, until):
        for epoch in range(engine.epoch if skips else 0, 5):
            if engine.step < until:
                engine.run(subset(epoch), max_steps=min(3 * epoch + 3, until))

    engine, _ = built()
    trained(engine, stop)
    resumed, _ = built()
    resumed.load_state_dict(engine.state_dict())
    trained(resumed, 15)
    again, _ = built()
    again.load_state_dict(resumed.state_dict())
    again.run(subset(5), epochs=6)
    assert "other values" not in caplog.text


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("stop", [{"step": 5}, {"step": 8}, {"epoch": 2}, {"epoch": 3}, {"epoch": 4}], ids=str)
def test_two_loaders_in_turn_are_not_named(caplog, stop, epochs):
    def trained(hooks=(), state=None):
        engine, _ = built(hooks=hooks)
        if state is not None:
            engine.load_state_dict(state)
        loaders = subset(0), subset(1)
        for turn in range(6 // epochs):
            engine.run(loaders[turn % 2], epochs=epochs * (turn + 1))

    saving = Saving(**stop)
    trained([saving])
    trained(state=saving.states.get_nowait())
    assert "other values" not in caplog.text


def test_training_again_on_other_data_and_folds_are_not_named(caplog):
    engine, _ = built()
    for fold in range(3):
        engine.run(subset(fold), epochs=2 * fold + 2)
    for fold in range(3):
        engine, _ = built()
        engine.run(subset(fold), epochs=2)
    assert "other values" not in caplog.text


# -- several ranks ------------------------------------------------------------------------------------------------


class Noting(logging.Handler):
    """A handler that keeps messages."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = queue.SimpleQueue()

    def emit(self, record):
        self.texts.put(record.getMessage())


def on_ranks():
    """Trains with rows and a dropout rate, and resumes with the same and with others, each rank with its own rows."""
    noting = Noting()
    logging.getLogger("treadle").addHandler(noting)
    state = None
    for seed in (0, 0, 1):
        engine, loader = built(rows=points(seed=10 * seed + distributed.rank()), p=0.1 * (1 + seed))
        if state is not None:
            engine.load_state_dict(state)
        engine.run(loader, max_steps=2 if state is None else 3)
        if state is None:
            state = engine.state_dict()
        noting.texts.put("resumed")
    return [noting.texts.get_nowait() for _ in range(noting.texts.qsize())]


def test_each_rank_compares_its_own_data_with_that_of_before():
    for rank, texts in enumerate(run_on_ranks(on_ranks, 2)):
        second = texts[: [number for number, text in enumerate(texts) if text == "resumed"][1]]
        assert "other values" not in " ".join(second)
        assert sum("dataset.tensors" in text for text in texts) == 1
        assert sum("model.dropout.p" in text for text in texts) == (rank == 0)
