"""Samplers, data sets, collate functions and loaders, with state and without."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils import data as torch_data

from helpers import MeanSquare
from strangers.bench import ROWS, Case, Points, Row, points_loader

SAMPLERS, DATA, LOADERS = "Samplers", "Data sets and collate functions", "Loaders"


class CountsPasses(torch_data.Sampler):
    """An order that depends on how often it was asked for; nobody sets it."""

    def __init__(self, rows: int = ROWS):
        self.rows, self.passes = rows, 0

    def __len__(self) -> int:
        return self.rows

    def __iter__(self) -> Any:
        self.passes += 1
        yield from torch.randperm(self.rows, generator=torch.Generator().manual_seed(self.passes)).tolist()


class CountsOnItsClass(torch_data.Sampler):
    """The same, without attributes of its own until it is asked."""

    passes = 0

    def __len__(self) -> int:
        return ROWS

    __iter__ = CountsPasses.__iter__
    rows = ROWS


class WithState:
    """Adds the two methods to a class that counts in ``passes``."""

    def state_dict(self) -> Any:
        return {"passes": self.passes}

    def load_state_dict(self, state: Any) -> None:
        self.passes = state["passes"]


class CountsWithState(WithState, CountsPasses):
    pass


class Positioned(torch_data.Sampler):
    """Keeps its place and its order, and goes on there when it is asked again after a load."""

    def __init__(self) -> None:
        self.epoch, self.place = 0, 0

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Any:
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.place < ROWS:
            self.place += 1
            yield order[self.place - 1]
        self.epoch, self.place = self.epoch + 1, 0

    def state_dict(self) -> Any:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: Any) -> None:
        self.epoch, self.place = state["epoch"], state["place"]


class ShufflesInPlace(torch_data.Sampler):
    """Shuffles the order of the last pass once more, with a generator of its own."""

    def __init__(self) -> None:
        self.order, self.chance = list(range(ROWS)), random.Random(0)

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Any:
        self.chance.shuffle(self.order)
        return iter(list(self.order))


class NumpyGenerator(torch_data.Sampler):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Any:
        return iter(self.rng.permutation(ROWS).tolist())


class TorchGenerator(torch_data.Sampler):
    """A generator under another name than torch's samplers have it."""

    def __init__(self) -> None:
        self.mine = torch.Generator().manual_seed(1)

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Any:
        return iter(torch.randperm(ROWS, generator=self.mine).tolist())


class Batches(torch_data.Sampler):
    """A batch sampler that counts, over a sampler inside it."""

    def __init__(self, inner: Any):
        self.inner, self.sampler, self.passes = inner, inner, 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        self.passes += 1
        order = list(self.inner)
        shift = self.passes % ROWS
        order = order[shift:] + order[:shift]
        yield from (order[start : start + 3] for start in range(0, ROWS, 3))


class BatchesWithState(WithState, Batches):
    pass


class Curriculum(torch_data.Sampler):
    """Easy rows first; a hook raises the difficulty."""

    def __init__(self) -> None:
        self.difficulty = 6

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Any:
        return iter((torch.randperm(ROWS) % self.difficulty).tolist())

    def state_dict(self) -> Any:
        return {"difficulty": self.difficulty}

    def load_state_dict(self, state: Any) -> None:
        self.difficulty = state["difficulty"]


def harder() -> Any:
    from strangers.models import AtStep

    return AtStep(3, lambda trainer: setattr(trainer.cursor.loader.sampler, "difficulty", ROWS))


class SetEpoch(torch_data.Sampler):
    def __init__(self, source: Any = None):
        self.source, self.epoch = source, 0

    def __len__(self) -> int:
        return ROWS

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter(torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Wrapped(torch_data.Sampler):
    """A sampler inside a sampler, under a name that torch does not use."""

    def __init__(self, wrapped: Any):
        self.wrapped = wrapped

    def __len__(self) -> int:
        return len(self.wrapped)

    def __iter__(self) -> Any:
        return iter(self.wrapped)


class EpochPoints(Points):
    """Rows that depend on the epoch, which somebody has to set."""

    epoch = -5

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + self.epoch, y


class CountingPoints(Points):
    """Rows that depend on how many were read."""

    reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        x, y = super().__getitem__(index)
        return x + self.reads / 100, y


class CountingPointsWithState(CountingPoints):
    def state_dict(self) -> Any:
        return {"reads": self.reads}

    def load_state_dict(self, state: Any) -> None:
        self.reads = state["reads"]


class OwnNoise(Points):
    """Rows with noise of a generator of the data set."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(3)

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + float(self.rng.random()), y


class OpensLazily(Points):
    """Opens its file at the first read, as readers of large files do; that is no state."""

    handle, opened = None, False

    def __getitem__(self, index: int) -> Any:
        if not self.opened:
            self.handle, self.opened = object(), True
        assert self.handle is not None
        return super().__getitem__(index)


class Collate:
    """A collate function that counts its batches."""

    def __init__(self) -> None:
        self.passes = 0

    def __call__(self, rows: Any) -> Any:
        self.passes += 1
        x, y = torch_data.default_collate(rows)
        return x * (1 + self.passes / 10), y


class CollateWithState(WithState, Collate):
    pass


class Stream(torch_data.IterableDataset):
    """A stream that counts its passes."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Any:
        self.passes += 1
        rows = Points()
        for index in torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.passes)).tolist():
            yield rows[index]


class StreamWithState(WithState, Stream):
    pass


class EpochStream(Stream):
    def set_epoch(self, epoch: int) -> None:
        self.passes = epoch


class Plain:
    """An iterable of batches that counts its passes."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Any:
        self.passes += 1
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.passes))
        rows = Points()
        for part in order.split(3):
            yield torch_data.default_collate([rows[int(index)] for index in part])


class Scaling(torch_data.DataLoader):
    """A loader whose class adds something to each batch."""

    def __iter__(self) -> Any:
        for x, y in super().__iter__():
            yield x * 2, y


class _Doubled:
    def __init__(self, inner: Any):
        self.inner = inner

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        x, y = next(self.inner)
        return x * 2, y


class OwnIterator(torch_data.DataLoader):
    """The same where torch makes the iterator, as loaders of graphs do."""

    def _get_iterator(self) -> Any:
        return _Doubled(super()._get_iterator())


def loads(data: Any = None, *, hooks: Any = (), **settings: Any) -> Any:
    """Return what builds a case from what builds data, samplers and collate functions."""

    def case() -> Case:
        made = {name: value() if isinstance(value, type) else value for name, value in settings.items()}
        made = {name: value() if callable(value) and name in ("sampler", "batch_sampler") else value
                for name, value in made.items()}  # fmt: skip
        return Case(loader=points_loader(data() if data else None, **made), hooks=[hook() for hook in hooks])

    return case


def distributed() -> Any:
    return torch_data.DistributedSampler(Points(), num_replicas=1, rank=0, shuffle=True)


class Graphs(MeanSquare):
    def step(self, model: Any, batch: Any, totals: Any = None, generator: Any = None) -> Any:
        return super().step(model, (batch.x, batch.y.reshape(-1, 1)))


def of_graphs(make: str, **settings: Any) -> Any:
    def case() -> Case:
        from torch_geometric import loader
        from torch_geometric.data import Data

        rows = Points()
        if make == "DataLoader":
            graphs = [Data(x=rows.x[i : i + 1] / 10, y=rows.x[i].sum().reshape(1)) for i in range(ROWS)]
            return Case(loader=loader.DataLoader(graphs, batch_size=3, shuffle=True), task=Graphs())
        edges = torch.stack([torch.arange(ROWS), (torch.arange(ROWS) + 1) % ROWS])
        graph = Data(x=rows.x / 10, y=rows.x.sum(1), edge_index=edges)
        return Case(loader=getattr(loader, make)(graph, batch_size=3, shuffle=True, **settings), task=Graphs())

    return case


def of_torchdata(data: Any = None, **settings: Any) -> Any:
    def case() -> Case:
        from torchdata.stateful_dataloader import StatefulDataLoader

        made = {name: value() if isinstance(value, type) else value for name, value in settings.items()}
        return Case(loader=StatefulDataLoader(data() if data else Points(), batch_size=3, **made))

    return case


def of_nodes() -> Case:
    from torchdata.nodes import Batcher, Loader, Mapper, SamplerWrapper

    rows = Points()
    node = SamplerWrapper(SetEpoch())
    return Case(loader=Loader(Mapper(Batcher(node, 3), lambda ids: torch_data.default_collate([rows[i] for i in ids]))))


DATA_ROWS = [
    Row("RandomSampler", SAMPLERS, loads(shuffle=True)),
    Row("RandomSampler with a generator", SAMPLERS, loads(
        sampler=lambda: torch_data.RandomSampler(Points(), generator=torch.Generator().manual_seed(1)))),
    Row("WeightedRandomSampler", SAMPLERS, loads(
        sampler=lambda: torch_data.WeightedRandomSampler(torch.arange(1.0, 13.0), ROWS))),
    Row("SubsetRandomSampler", SAMPLERS, loads(sampler=lambda: torch_data.SubsetRandomSampler(range(3, ROWS)))),
    Row("DistributedSampler", SAMPLERS, loads(sampler=distributed)),
    Row("a sampler that counts its passes", SAMPLERS, loads(sampler=CountsPasses)),
    Row("the same from a default of its class", SAMPLERS, loads(sampler=CountsOnItsClass), stops=(2, 5)),
    Row("the same with state_dict", SAMPLERS, loads(sampler=CountsWithState)),
    Row("the same with two workers", SAMPLERS, loads(sampler=CountsPasses, num_workers=2)),
    Row("a sampler that keeps its position", SAMPLERS, loads(sampler=Positioned)),
    Row("a sampler that shuffles in place", SAMPLERS, loads(sampler=ShufflesInPlace)),
    Row("a sampler with a NumPy generator", SAMPLERS, loads(sampler=NumpyGenerator)),
    Row("a sampler with a torch generator under another name", SAMPLERS, loads(sampler=TorchGenerator)),
    Row("a batch sampler that counts", SAMPLERS, loads(batch_sampler=lambda: Batches(range(ROWS)))),
    Row("a batch sampler with state over a sampler that counts", SAMPLERS, loads(
        batch_sampler=lambda: BatchesWithState(CountsPasses()))),
    Row("a sampler inside a sampler, under another name", SAMPLERS, loads(sampler=lambda: Wrapped(CountsPasses()))),
    Row("a curriculum advanced by a hook", SAMPLERS, loads(sampler=Curriculum, hooks=[harder])),
    Row("a sampler with set_epoch", SAMPLERS, loads(sampler=SetEpoch)),
    Row("a sampler with set_epoch inside another", SAMPLERS, loads(sampler=lambda: Wrapped(SetEpoch()))),
    Row("a data set with set_epoch", DATA, loads(EpochPoints, shuffle=True)),
    Row("a data set with set_epoch, two workers", DATA, loads(EpochPoints, shuffle=True, num_workers=2)),
    Row("a data set with set_epoch, persistent workers", DATA, loads(
        EpochPoints, shuffle=True, num_workers=2, persistent_workers=True)),
    Row("a data set with set_epoch inside a Subset", DATA, loads(
        lambda: torch_data.Subset(EpochPoints(), list(range(ROWS))), shuffle=True)),
    Row("a data set that counts its reads", DATA, loads(CountingPoints, shuffle=True)),
    Row("the same with state_dict", DATA, loads(CountingPointsWithState, shuffle=True)),
    Row("the same inside a ConcatDataset", DATA, loads(
        lambda: torch_data.ConcatDataset([CountingPointsWithState(), Points()]), shuffle=True)),
    Row("a data set with state_dict that changes in workers", DATA, loads(
        CountingPointsWithState, shuffle=True, num_workers=1), ("CountingPointsWithState", "worker")),
    Row("a data set with a NumPy generator", DATA, loads(OwnNoise, shuffle=True)),
    Row("a data set that opens its file lazily", DATA, loads(OpensLazily, shuffle=True)),
    Row("a counting collate function", DATA, loads(collate_fn=Collate, shuffle=True)),
    Row("a collate function with state_dict", DATA, loads(collate_fn=CollateWithState, shuffle=True)),
    Row("a stream that counts its passes", DATA, loads(Stream)),
    Row("a stream with state_dict", DATA, loads(StreamWithState)),
    Row("a stream with set_epoch", DATA, loads(EpochStream)),
    Row("a stream with set_epoch, persistent workers", DATA, loads(
        EpochStream, num_workers=1, persistent_workers=True)),
    Row("a list of batches", LOADERS, lambda: Case(loader=list(points_loader()))),
    Row("an iterable that counts its passes", LOADERS, lambda: Case(loader=Plain())),
    Row("a DataLoader with a custom __iter__", LOADERS, lambda: Case(
        loader=Scaling(Points(), batch_size=3, shuffle=True))),
    Row("a DataLoader with a custom iterator", LOADERS, lambda: Case(
        loader=OwnIterator(Points(), batch_size=3, shuffle=True))),
    Row("torchdata.StatefulDataLoader", LOADERS, of_torchdata(shuffle=True), needs=("torchdata",)),
    Row("torchdata.StatefulDataLoader, a sampler with state", LOADERS, of_torchdata(sampler=CountsWithState),
        needs=("torchdata",)),
    Row("torchdata.StatefulDataLoader, a sampler that counts", LOADERS, of_torchdata(sampler=CountsPasses),
        needs=("torchdata",)),
    Row("torchdata.StatefulDataLoader, a data set with state", LOADERS, of_torchdata(CountingPointsWithState),
        needs=("torchdata",)),
    Row("torchdata.nodes", LOADERS, of_nodes, needs=("torchdata",)),
    Row("torch_geometric DataLoader", LOADERS, of_graphs("DataLoader"), needs=("torch_geometric",)),
]  # fmt: skip
