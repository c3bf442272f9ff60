"""Data on two ranks: equal lengths or a clear end, nothing read twice, streams apart, means of one process."""

from __future__ import annotations

import logging
import pickle
import random
import signal
from itertools import chain

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler

from helpers import Snapshots, differences, small_model, through_a_file
from ranks import run_on_ranks
from treadle.data import Cursor, RankBatchSampler, TensorLoader, rank_and_worker, shard_iterable
from treadle.engine import Engine
from treadle.engine.hook import BaseHook
from treadle.engine.signals import ExitPlan
from treadle.errors import ConfigError
from treadle.faces.epochs import EpochTrainer
from treadle.seed import set_seed
from treadle.task import StepOutput


def forked(workers):
    """Settings of a loader with workers: forked, since ranks themselves come from a server and would start another."""
    return {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}


class Told(logging.Handler):
    """What was logged on this rank."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("treadle").addHandler(self)
        return self.lines

    def __exit__(self, *_):
        logging.getLogger("treadle").removeHandler(self)


class Means:
    """The loss is the mean of the batch, which the weights do not change; its batches are kept."""

    def __init__(self):
        self.seen = []

    def step(self, model, batch, totals=None, generator=None):
        self.seen.append(batch.tolist())
        return StepOutput(batch.double().mean() + 0 * model(torch.ones(1, 1)).sum(), weight=float(len(batch)))


class ListensToSignals(BaseHook):
    def exit_plan(self, trainer):
        return ExitPlan((signal.SIGUSR1,), write=lambda: None)


def plain(task, **settings):
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    if dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    return Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), task, device="cpu", **settings)


class Yields:
    """An iterable without a length."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return (torch.tensor([float(i)]) for i in range(self.count))


def refused(loader):
    with pytest.raises(ConfigError) as caught:
        plain(Means()).run(loader, epochs=1)
    return str(caught.value)


def unequal_lengths():
    rank = dist.get_rank()
    batches = [torch.ones(1)] * (5 + rank)
    return {
        "lists": refused(batches),
        "loaders": refused(DataLoader(range(5 + rank), batch_size=1)),
        "seeds": refused(TensorLoader(torch.arange(8), batch_size=2, distributed=True, shuffle=True, seed=rank)),
    }


def unknown_lengths():
    rank, found = dist.get_rank(), {}
    for name, loader, accumulation in [
        ("none knows", Yields(5 + 2 * rank), 1),
        ("groups", Yields(6 + rank), 4),
        ("one knows", [torch.ones(1)] * 7 if rank else Yields(5), 1),
        ("equal", Yields(4), 2),
    ]:
        task = Means()
        with Told() as lines:
            engine = plain(task, accumulation_steps=accumulation)
            engine.run(loader, epochs=2)
        found[name] = (engine.step, len(task.seen), [line for line in lines if "not used here" in line])
    return found


def evaluations():
    rank, found = dist.get_rank(), {}
    loader = DataLoader(torch.arange(13), batch_sampler=RankBatchSampler(13, 2, shuffle=True))
    engine = plain(Means(), hooks=[ListensToSignals()])
    engine.signals.expect([hook.exit_plan(engine) for hook in engine.hooks])  # as inside a run
    found["shared"] = engine.evaluate(loader)["loss"]
    found["signals, unequal"] = engine.evaluate([torch.tensor([1.0])] * (2 + 3 * rank))["loss"]
    found["nothing on a rank"] = engine.evaluate([torch.tensor([7.0])] * rank)["loss"]
    found["signals, unknown"] = engine.evaluate(Yields(2 + rank))["loss"]
    with Told() as lines:
        padded = DataLoader(torch.arange(13), batch_size=2, sampler=DistributedSampler(range(13), shuffle=False))
        found["padded"] = engine.evaluate(padded)["loss"], engine.evaluate(padded)["loss"]
    found["padded says"] = lines
    normed = nn.parallel.DistributedDataParallel(nn.BatchNorm1d(1))
    optimizer = torch.optim.SGD(normed.parameters(), lr=0.1)
    Engine(normed, optimizer, Normed(), device="cpu").evaluate([torch.ones(2, 1)] * (1 + rank))
    found["buffers stay"] = normed.require_forward_param_sync
    return found


def sharded():
    rank = dist.get_rank()
    model = nn.Linear(1, 1)
    fully_shard(model)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), Means(), device="cpu")
    with pytest.raises(ConfigError) as caught:
        engine.evaluate([torch.ones(1)] * (5 + rank))
    with Told() as lines:
        value = engine.evaluate(Yields(2 + rank))["loss"]
    return str(caught.value), value, len(lines)


class Normed:
    def step(self, model, batch, totals=None, generator=None):
        return StepOutput(model(batch).square().mean())


class Draws(Dataset):
    """Items are random numbers of each kind."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.tensor([torch.rand(()).item(), float(np.random.rand()), random.random()])


class Keeps:
    def __init__(self):
        self.batches, self.dropped = [], []

    def step(self, model, batch, totals=None, generator=None):
        self.batches.append(batch.clone())
        self.dropped.append(nn.functional.dropout(torch.ones(64)))
        return StepOutput(model(torch.ones(1, 1)).sum())


def streams():
    found = {}
    for workers in (0, 2):
        set_seed(3)
        model = nn.Linear(1, 1)
        first = model.weight.detach().clone()
        sampler = RankBatchSampler(16, 2)
        task = Keeps()
        engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.0), task, device="cpu")
        engine.run(DataLoader(Draws(), batch_sampler=sampler, **forked(workers)), epochs=1)
        found[workers] = torch.cat(task.batches), torch.stack(task.dropped), first
    return found


def shards():
    data = shard_iterable([torch.tensor([float(i)]) for i in range(21)])
    found = []
    for workers in (0, 2):
        cursor = Cursor()
        cursor.open(DataLoader(data, batch_size=None, **forked(workers)))
        found.append([int(item) for item in cursor.take(100).batches])
        cursor.close()
    # A worker that is spawned gets its data set through pickle, and has no process group.
    return found, [tuple(pair.tolist()) for pair in DataLoader(Who(), batch_size=None, **forked(2))], pickle.dumps(data)


class Who(IterableDataset):
    def __iter__(self):
        yield torch.tensor(rank_and_worker())


class Rows:
    def step(self, model, batch, totals=None, generator=None):
        x, y = batch
        return StepOutput(nn.functional.mse_loss(model(x), y), weight=float(len(x)))


def rows():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(23, 4, generator=generator)
    return x, x.sum(1, keepdim=True)


def trained():
    """Two epochs of a model over batches of all ranks together, with its history."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    inner = model
    if dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    engine = Engine(model, torch.optim.Adam(model.parameters(), lr=0.01), Rows(), device="cpu")
    loaders = [
        TensorLoader(*rows(), global_batch_size=6, shuffle=shuffle, distributed=True) for shuffle in (True, False)
    ]
    history = EpochTrainer(engine).fit(*loaders, epochs=2)
    return {name: value.detach() for name, value in inner.state_dict().items()}, history


def all_cases():
    return {
        function.__name__: function()
        for function in (unequal_lengths, unknown_lengths, evaluations, sharded, streams, shards, trained)
    }


@pytest.fixture(scope="module")
def two_ranks():
    return run_on_ranks(all_cases, 2, timeout=120)


@pytest.mark.parametrize("kind", ["lists", "loaders"])
def test_unequal_lengths_are_refused_on_every_rank_before_the_first_step(kind, two_ranks):
    for found in two_ranks:
        assert "5 on rank 0, 6 on rank 1" in found["unequal_lengths"][kind]
        assert "RankBatchSampler" in found["unequal_lengths"][kind]


def test_ranks_that_share_their_data_by_different_orders_are_refused(two_ranks):
    assert all("seed is [0, 1]" in found["unequal_lengths"]["seeds"] for found in two_ranks)


def test_an_epoch_of_unknown_length_ends_for_all_with_the_first_and_says_what_is_left(two_ranks):
    first, second = (found["unknown_lengths"] for found in two_ranks)
    assert first["none knows"] == (10, 10, [])
    assert second["none knows"][:2] == (10, 10)
    (line,) = second["none knows"][2]
    assert "rank 1" in line
    assert "1 or more micro-batches are not used here" in line


def test_groups_of_micro_batches_end_alike_too(two_ranks):
    first, second = (found["unknown_lengths"] for found in two_ranks)
    assert first["groups"] == (4, 12, [])
    assert second["groups"][:2] == (4, 12)
    assert "1 micro-batches are not used here" in second["groups"][2][0]


def test_where_one_rank_does_not_know_its_length_all_ask(two_ranks):
    assert [found["unknown_lengths"]["one knows"][:2] for found in two_ranks] == [(10, 10)] * 2
    assert "2 micro-batches are not used here" in two_ranks[1]["unknown_lengths"]["one knows"][2][0]
    assert [found["unknown_lengths"]["equal"] for found in two_ranks] == [(4, 8, [])] * 2


def test_an_evaluation_counts_every_sample_once(two_ranks):
    assert [found["evaluations"]["shared"] for found in two_ranks] == [6.0, 6.0]


def test_evaluations_of_unequal_lengths_end_and_have_the_mean_of_all(two_ranks):
    for found in two_ranks:
        assert found["evaluations"]["signals, unequal"] == 1.0
        assert found["evaluations"]["nothing on a rank"] == 7.0
        assert found["evaluations"]["signals, unknown"] == (0 + 1 + 0 + 1 + 2) / 5
        assert found["evaluations"]["buffers stay"] is True


def test_evaluations_of_a_sharded_model_need_equal_lengths_and_end_with_the_first(two_ranks):
    for rank, found in enumerate(two_ranks):
        refusal, value, warnings = found["sharded"]
        assert "5 on rank 0, 6 on rank 1" in refusal
        assert (value, warnings) == (0.5, rank)


def test_copies_of_a_padding_sampler_are_named_once(two_ranks):
    for found in two_ranks:
        assert found["evaluations"]["padded"] == (78 / 14, 78 / 14)
        (line,) = found["evaluations"]["padded says"]
        assert "repeats 1 samples to give all 2 ranks" in line
        assert "RankBatchSampler repeats none" in line


@pytest.mark.parametrize("workers", [0, 2])
def test_every_rank_and_worker_draws_its_own_numbers_from_equal_weights(workers, two_ranks):
    (first, dropped, weights), (second, other, again) = (found["streams"][workers] for found in two_ranks)
    both = torch.cat([first, second]).T  # one row per kind of generator
    assert all(len(set(kind.tolist())) == 16 for kind in both)
    assert not torch.equal(dropped, other)
    assert torch.equal(weights, again)


def test_the_streams_are_the_same_when_the_run_is_repeated(two_ranks):
    again = run_on_ranks(streams, 2)
    assert differences([found["streams"] for found in two_ranks], again) == []


def test_an_iterable_is_dealt_out_to_ranks_and_workers(two_ranks):
    for place in (0, 1):
        parts = [found["shards"][0][place] for found in two_ranks]
        assert sorted(parts[0] + parts[1]) == list(range(21))
        assert abs(len(parts[0]) - len(parts[1])) <= 1
    assert [found["shards"][1] for found in two_ranks] == [[(0, 4), (1, 4)], [(2, 4), (3, 4)]]
    spawned = [[int(item) for item in pickle.loads(found["shards"][2])] for found in two_ranks]
    assert spawned == [found["shards"][0][0] for found in two_ranks]


def test_weights_and_history_are_those_of_one_process_with_the_same_batches(two_ranks):
    weights, history = trained()
    for found in two_ranks:
        ours, ours_history = found["trained"]
        assert all(torch.allclose(ours[name], weights[name], atol=1e-6) for name in weights)
        for a, b in zip(ours_history, history, strict=True):
            assert a == pytest.approx(b, abs=1e-6)


# -- resume ---------------------------------------------------------------------------------------------------------


class Noisy(Dataset):
    """Rows with random augmentation."""

    def __init__(self, size=20):
        self.x = torch.randn(size, 4, generator=torch.Generator().manual_seed(5))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        noise = 0.1 * torch.rand(1) + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return self.x[index] + noise, self.x[index].sum(0, keepdim=True)


def noisy_loader(kind):
    data = Noisy()
    if kind == "own shard":  # draws its order from the global generator, which differs between ranks
        return DataLoader(data, batch_size=2, sampler=RandomSampler(data, num_samples=10))
    workers = 2 if kind == "workers" else 0
    return DataLoader(data, batch_sampler=RankBatchSampler(data, 2, shuffle=True), **forked(workers))


def noisy_run(kind, *, state=None, hooks=()):
    set_seed(2)
    model = small_model()
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = Engine(model, optimizer, Rows(), device="cpu", hooks=hooks)
    trainer = EpochTrainer(engine)
    if state is not None:
        engine.load_state_dict(state)
    trainer.fit(noisy_loader(kind), None, epochs=2)
    return through_a_file(engine.state_dict())


def resumes(kind, cuts):
    snapshots = Snapshots()
    straight = noisy_run(kind, hooks=[snapshots])
    found = []
    for cut in cuts:
        # Every rank loads the file that rank 0 wrote.
        saved = [snapshots.states[cut]]
        dist.broadcast_object_list(saved, src=0)
        set_seed(99)
        found.append(differences(noisy_run(kind, state=saved[0], hooks=[Snapshots()]), straight))
    return found


def every_resume():
    return {kind: resumes(kind, cuts) for kind, cuts in CUTS.items()}


CUTS = {"main process": (3, 5), "workers": (3,), "own shard": (2,)}


@pytest.fixture(scope="module")
def resumed():
    return run_on_ranks(every_resume, 2, timeout=120)


@pytest.mark.parametrize("kind", CUTS)
def test_resuming_on_as_many_ranks_is_exact(kind, resumed):
    assert [found[kind] for found in resumed] == [[[]] * len(CUTS[kind])] * 2


# -- another number of ranks ----------------------------------------------------------------------------------------


def elastic(state, batches, kind, ranks):
    """Go on for some steps, or to the end of two epochs; return what was read, the state, the history, the words."""
    data = torch.arange(50.0)
    if kind == "tensors":
        loader = TensorLoader(data, global_batch_size=6, shuffle=True, distributed=True)
    else:
        loader = DataLoader(data, batch_sampler=RankBatchSampler(data, 3, shuffle=True))
    task = Means()
    engine = plain(task)
    trainer = EpochTrainer(engine)
    seen = []
    with Told() as lines:
        if state is not None:
            engine.load_state_dict(state)
        if batches is None:
            trainer.fit(loader, None, 1)
            seen, task.seen = task.seen, []
            trainer.fit(loader, None, 2)
        else:
            engine.run(loader, max_steps=engine.step + batches)
            seen, task.seen = task.seen, []
    drawn = torch.rand(())
    return {
        "seen": list(chain(*seen)), "next": list(chain(*task.seen)), "history": trainer.history, "drawn": drawn,
        "state": through_a_file(engine.state_dict()), "lines": lines, "step": engine.step,
    }  # fmt: skip


def both_kinds(states, batches, ranks):
    return {kind: elastic(states and states[kind], batches, kind, ranks) for kind in ("tensors", "sampler")}


@pytest.fixture(scope="module")
def journey():
    """Four steps on two ranks, two on one, the rest and a whole epoch on three."""
    first = run_on_ranks(both_kinds, 2, None, 4, 2)
    second = [both_kinds({kind: found["state"] for kind, found in first[0].items()}, 2, 1)]
    third = run_on_ranks(both_kinds, 3, {kind: found["state"] for kind, found in second[0].items()}, None, 3)
    return [first, second, third]


@pytest.mark.parametrize("kind", ["tensors", "sampler"])
def test_2_then_1_then_3_ranks_read_every_sample_once_in_each_epoch(kind, journey):
    seen = [row for leg in journey for found in leg for row in found[kind]["seen"]]
    assert sorted(seen) == list(range(50))
    following = [row for found in journey[-1] for row in found[kind]["next"]]
    assert sorted(following) == list(range(50))


@pytest.mark.parametrize("kind", ["tensors", "sampler"])
def test_the_means_of_the_epoch_are_over_all_of_it_on_any_ranks(kind, journey):
    for found in journey[-1]:
        assert [record["train_loss"] for record in found[kind]["history"]] == pytest.approx([24.5, 24.5], abs=1e-9)


@pytest.mark.parametrize(("kind", "steps"), [("tensors", 4 + 2 + 3 + 9), ("sampler", 4 + 2 + 3 + 6)])
def test_each_rank_makes_as_many_steps_and_draws_numbers_of_its_own(kind, steps, journey):
    last = journey[-1]
    assert [found[kind]["step"] for found in last] == [steps] * 3
    assert len({float(found[kind]["drawn"]) for found in last}) == 3


def test_what_is_no_longer_the_same_is_said(journey):
    for found in journey[-1]:
        assert any("random generators start fresh" in line for line in found["sampler"]["lines"])
        (line,) = [line for line in found["sampler"]["lines"] if "samples" in line]
        assert "after 30 of its 50 samples" in line
        assert "3 samples on 1 ranks before, 9 on 3 now" in line


def without_an_order(state, ranks):
    sampler = DistributedSampler(range(40), shuffle=False) if dist.is_initialized() else None
    task = Means()
    engine = plain(task)
    with Told() as lines:
        if state is not None:
            engine.load_state_dict(state)
        engine.run(DataLoader(torch.arange(40.0), batch_size=2, sampler=sampler), max_steps=engine.step + 4)
    return engine.cursor.position, through_a_file(engine.state_dict()), lines


def test_without_a_global_order_the_share_of_the_epoch_is_kept_and_the_loss_is_said():
    (position, state, _), _ = run_on_ranks(without_an_order, 2, None, 2)
    assert position == 4
    position, _, lines = without_an_order(state, 1)
    assert position == 8 + 4, "4 of 10 batches on two ranks are 8 of 20 on one"
    assert any("written by 2 ranks" in line and "RankBatchSampler continues" in line for line in lines)
