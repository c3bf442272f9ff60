"""Samples that several workers or ranks read are named before step 1, with the fix; shared ones are not."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset, TensorDataset, get_worker_info

from ranks import run_on_ranks
from treadle import BaseHook, Engine, parallelize
from treadle.data import RankBatchSampler, rank_and_worker, shard_iterable


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.arange(10.0).reshape(10, 1)


class Shared(IterableDataset):
    def __iter__(self):
        index, count = rank_and_worker()
        yield from torch.arange(10.0).reshape(10, 1)[index::count]


class SharedByHelper(IterableDataset):
    def mine(self):
        info = get_worker_info()
        return (0, 1) if info is None else (info.id, info.num_workers)

    def __iter__(self):
        index, count = self.mine()
        yield from torch.arange(10.0).reshape(10, 1)[index::count]


class Inside(IterableDataset):
    def __init__(self, inner):
        self.inner = inner

    def __iter__(self):
        yield from self.inner


class Stages(IterableDataset):
    """A pipeline of functions, as webdataset's DataPipeline is."""

    def __init__(self, *stages):
        self.pipeline = list(stages)

    def __iter__(self):
        items = torch.arange(10.0).reshape(10, 1)
        for stage in self.pipeline:
            items = stage(items)
        yield from items


def split_by_worker(items):
    info = get_worker_info()
    return items[info.id :: info.num_workers]


def doubled(items):
    return items * 2


def share(worker):
    """A worker_init_fn may change the worker's copy of the data set."""


CASES = {
    "unshared": (lambda: DataLoader(Stream(), 2, num_workers=2), True),
    "nested": (lambda: DataLoader(Inside(Stream()), 2, num_workers=2), True),
    "one worker": (lambda: DataLoader(Stream(), 2, num_workers=1), False),
    "no worker": (lambda: DataLoader(Stream(), 2), False),
    "shared": (lambda: DataLoader(Shared(), 2, num_workers=2), False),
    "by a method": (lambda: DataLoader(SharedByHelper(), 2, num_workers=2), False),
    "shared inside": (lambda: DataLoader(Inside(Shared()), 2, num_workers=2), False),
    "shard_iterable": (lambda: DataLoader(shard_iterable(Stream()), 2, num_workers=2), False),
    "a stage shares": (lambda: DataLoader(Stages(split_by_worker, doubled), 2, num_workers=2), False),
    "no stage shares": (lambda: DataLoader(Stages(doubled), 2, num_workers=2), True),
    "worker_init_fn": (lambda: DataLoader(Stream(), 2, num_workers=2, worker_init_fn=share), False),
    "map-style": (lambda: DataLoader(TensorDataset(torch.ones(4, 1)), 2, num_workers=2), False),
}


class Square:
    def step(self, model, batch, totals=None, generator=None):
        batch = batch[0] if isinstance(batch, (list, tuple)) else batch
        return model(batch.reshape(-1, 1)).square().mean(), {}


class Said(BaseHook, logging.Handler):
    """Keeps what was logged before the first step."""

    def __init__(self):
        logging.Handler.__init__(self)
        self.before, self.begun = [], False

    def emit(self, record):
        if not self.begun:
            self.before.append(record.getMessage())

    def on_before_step(self, trainer):
        self.begun = True


REPEATS = (" times in an epoch", "every rank reads")


def said_before_step_1(loader, wrap=lambda model: model, words_of_it=REPEATS):
    said = Said()
    logging.getLogger("treadle").addHandler(said)
    try:
        model = wrap(nn.Linear(1, 1))
        engine = Engine(model, torch.optim.SGD(model.parameters(), 0.01), Square(), device="cpu", hooks=[said])
        engine.run(loader, epochs=1)
    finally:
        logging.getLogger("treadle").removeHandler(said)
    return [line for line in said.before if any(words in line for words in words_of_it)]


@pytest.mark.parametrize("case", CASES)
def test_a_stream_that_every_worker_reads_whole_is_named_before_step_1(case):
    make, named = CASES[case]
    said = said_before_step_1(make())
    assert len(said) == named
    assert all("shard_iterable" in line and "each occurs 2 times" in line for line in said)


X = torch.arange(12.0).reshape(12, 1)


class Own(torch.utils.data.Dataset):
    """Rows that a rank has chosen itself."""

    def __init__(self, rank):
        self.rows = X[rank::2]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class EverySecond(torch.utils.data.Sampler):
    def __len__(self):
        return 6

    def __iter__(self):
        return iter(range(torch.distributed.get_rank(), 12, 2))


def on_two_ranks():
    rank, data = torch.distributed.get_rank(), TensorDataset(X)
    loaders = {
        "plain": DataLoader(data, 2),
        "shuffled": DataLoader(data, 2, shuffle=True),
        "stream": DataLoader(Stream(), 2),
        "DistributedSampler": DataLoader(data, 2, sampler=DistributedSampler(data)),
        "own sampler": DataLoader(data, 2, sampler=EverySecond()),
        "RankBatchSampler": DataLoader(data, batch_sampler=RankBatchSampler(12, 2)),
        "subset": DataLoader(Subset(data, range(rank, 12, 2)), 2),
        "rows": DataLoader(TensorDataset(X[rank::2]), 2),
        "own": DataLoader(Own(rank), 2),
        "shared stream": DataLoader(Shared(), 1),
    }
    return {name: len(said_before_step_1(loader)) for name, loader in loaders.items()}


def test_on_ranks_a_loader_without_a_share_is_named_before_step_1():
    expected = {
        "plain": 1, "shuffled": 1, "stream": 1, "DistributedSampler": 0, "RankBatchSampler": 0, "subset": 0, "rows": 0,
        "own": 0, "shared stream": 0, "own sampler": 0,
    }  # fmt: skip
    assert run_on_ranks(on_two_ranks, 2) == [expected, expected]


def models_on_two_ranks():
    def averaged(model):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter: torch.distributed.all_reduce(parameter.grad))
        return model

    wraps = {
        "alone": lambda model: model,
        "ddp": lambda model: parallelize(model, "ddp"),
        "fsdp": lambda model: parallelize(model, "fsdp"),
        "torch's": nn.parallel.DistributedDataParallel,
        "inside": lambda model: nn.Sequential(nn.parallel.DistributedDataParallel(model)),
        "averaged by hooks": averaged,
    }
    data = [X[:6], X[6:]]
    return {name: len(said_before_step_1(data, wrap, ("trains a model by itself",))) for name, wrap in wraps.items()}


def test_a_model_that_nothing_keeps_equal_on_ranks_is_named_before_step_1():
    expected = {"alone": 1, "ddp": 0, "fsdp": 0, "torch's": 0, "inside": 0, "averaged by hooks": 0}
    assert run_on_ranks(models_on_two_ranks, 2) == [expected, expected]
