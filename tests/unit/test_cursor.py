from __future__ import annotations

import itertools
import logging
import math
import multiprocessing
import os
import random
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from helpers import Augmented, differences, scalar_engine, through_a_file
from treadle.checkpoint.schema import to_plain
from treadle.data import Cursor, open_source, steps_per_epoch
from treadle.data.own_state import owners_of
from treadle.errors import ConfigError
from treadle.seed import RngState, set_seed


class Items(Dataset):
    """Item i is i, so the order is visible; notes what is read, outside of its attributes, which are its state."""

    notes: ClassVar[dict[int, list[int]]] = {}

    def __init__(self, size=20):
        self.size = size
        self.notes[id(self)] = []

    @property
    def reads(self):
        return self.notes.setdefault(id(self), [])

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.reads.append(int(index))
        return torch.tensor(index)


class ManyItems(Items):
    """Reads a whole index list at once."""

    def __getitems__(self, indices):
        self.reads.extend(indices)
        return [torch.tensor(index) for index in indices]


class DrawsAsItGoes(Sampler):
    """A user's sampler on the global python RNG."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        for _ in range(self.size):
            yield random.randrange(self.size)

    def __len__(self):
        return self.size


class ByLength(Sampler):
    """A user's batch sampler; its length is an estimate, as for batches filled up to a number of tokens."""

    def __init__(self, declared):
        self.declared = declared

    def __iter__(self):
        yield from ([0, 1], [2, 3, 4], [5], [6, 7])

    def __len__(self):
        return self.declared


def own():
    return torch.Generator().manual_seed(11)


LOADERS = {
    "in order": lambda d: DataLoader(d, batch_size=3),
    "shuffled": lambda d: DataLoader(d, batch_size=3, shuffle=True),
    "shuffled, whole batches": lambda d: DataLoader(d, batch_size=5, shuffle=True),
    "shuffled, last dropped": lambda d: DataLoader(d, batch_size=3, shuffle=True, drop_last=True),
    "shuffled, own generator": lambda d: DataLoader(d, batch_size=3, shuffle=True, generator=own()),
    "shuffled, own generator, whole batches": lambda d: DataLoader(d, batch_size=5, shuffle=True, generator=own()),
    "shuffled, own generator, last dropped": lambda d: DataLoader(
        d, batch_size=3, shuffle=True, drop_last=True, generator=own()
    ),
    "sampler with a generator": lambda d: DataLoader(d, batch_size=5, sampler=RandomSampler(d, generator=own())),
    "with replacement": lambda d: DataLoader(
        d, batch_size=7, sampler=RandomSampler(d, replacement=True, num_samples=70)
    ),
    "with replacement, own generator": lambda d: DataLoader(
        d, batch_size=7, sampler=RandomSampler(d, replacement=True, num_samples=70, generator=own())
    ),
    "more samples than items": lambda d: DataLoader(d, batch_size=4, sampler=RandomSampler(d, num_samples=50)),
    "weighted": lambda d: DataLoader(d, batch_size=4, sampler=WeightedRandomSampler(range(1, 21), 20)),
    "weighted, own generator": lambda d: DataLoader(
        d, batch_size=4, sampler=WeightedRandomSampler(range(1, 21), 20, generator=own())
    ),
    "subset": lambda d: DataLoader(d, batch_size=4, sampler=SubsetRandomSampler(range(3, 15))),
    "subset, own generator": lambda d: DataLoader(
        d, batch_size=4, sampler=SubsetRandomSampler(range(3, 15), generator=own())
    ),
    "distributed": lambda d: DataLoader(d, batch_size=3, sampler=DistributedSampler(d, 2, 1, seed=3)),
    "batch sampler": lambda d: DataLoader(d, batch_sampler=BatchSampler(RandomSampler(d), 3, drop_last=False)),
    "a sampler of the user": lambda d: DataLoader(d, batch_size=3, sampler=DrawsAsItGoes(10)),
    "a batch sampler of the user": lambda d: DataLoader(d, batch_sampler=ByLength(4)),
    "one that says too few": lambda d: DataLoader(d, batch_sampler=ByLength(2)),
    "one that says too many": lambda d: DataLoader(d, batch_sampler=ByLength(9)),
    "no batching": lambda d: DataLoader(d, batch_size=None, shuffle=True),
    "no batching, own sampler": lambda d: DataLoader(d, batch_size=None, sampler=[4, 2, 7]),
    "own collate": lambda d: DataLoader(d, batch_size=3, shuffle=True, collate_fn=lambda items: {"x": items}),
    "a list": lambda d: [[1], [2], [3]],
}


def plain_epochs(loader, epochs):
    order = []
    for epoch in range(epochs):
        sampler = getattr(loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        order.append(list(loader))
    return order


def cursor_epochs(loader, epochs, cursor=None):
    cursor, order = cursor or Cursor(), []
    for _ in range(epochs):
        cursor.open(loader)
        order.append([])
        while batches := cursor.take(2).batches:
            order[-1] += batches
        cursor.next_epoch()
    cursor.close()
    return order


@pytest.mark.parametrize("dataset", [Items, ManyItems])
@pytest.mark.parametrize("name", LOADERS)
def test_batches_come_in_the_order_of_a_plain_loop_and_the_rng_ends_at_the_same_place(name, dataset):
    set_seed(1)
    expected = plain_epochs(LOADERS[name](dataset()), 3)
    rng = RngState.capture().to_plain()
    set_seed(1)
    got = cursor_epochs(LOADERS[name](dataset()), 3)
    assert differences(got, expected) == []
    assert differences(RngState.capture().to_plain(), rng) == []


# Draws between batches come too late for a worker's prefetching to be seen from here; a sampler of the user is told so.
WITH_WORKERS = [name for name in LOADERS if name not in ("a list", "own collate", "a sampler of the user")]


@pytest.mark.parametrize("name", WITH_WORKERS[1::4])
def test_workers_give_the_order_of_a_plain_loop_too(name):
    set_seed(1)
    expected = plain_epochs(LOADERS[name](Items()), 2)
    set_seed(1)
    loader = LOADERS[name](Items())
    loader.__dict__.update(num_workers=2, prefetch_factor=2)
    assert differences(cursor_epochs(loader, 2), expected) == []


@pytest.mark.parametrize("name", [name for name in LOADERS if name != "a sampler of the user"])
def test_every_position_is_reached_again_in_a_new_process(name, caplog):
    set_seed(2)
    epochs = cursor_epochs(LOADERS[name](Items()), 3)
    straight = [batch for epoch in epochs for batch in epoch]
    for cut in range(len(straight) + 1):
        set_seed(2)
        first, seen = Cursor(), []
        loader = LOADERS[name](Items())
        while True:
            first.open(loader)
            if len(seen) == cut:
                break
            batches = first.take(1).batches
            seen += batches
            if not batches:
                first.next_epoch()
        saved = through_a_file(to_plain({"data": first.state_dict(), "rng": RngState.capture().to_plain()}))
        set_seed(99)
        second, rest = Cursor(), []
        rng = RngState.from_plain(saved["rng"])
        second.load_state_dict(saved["data"], rng=rng)
        again = through_a_file(to_plain(second.state_dict()))
        assert differences(again, saved["data"]) == [], "saving what was just loaded changes it"
        loader = LOADERS[name](Items())
        while second.epoch < 3:
            second.open(loader)
            batches = second.take(1).batches
            rest += batches
            if not batches:
                second.next_epoch()
        assert differences(seen + rest, straight) == [], cut


def test_a_resume_reads_nothing_that_was_consumed():
    loader = DataLoader(Items(20), batch_size=2, shuffle=True)
    first = Cursor()
    first.open(loader)
    first.take(7)
    dataset = Items(20)
    second = Cursor()
    second.load_state_dict(first.state_dict(), rng=RngState.capture())
    second.open(DataLoader(dataset, batch_size=2, shuffle=True))
    assert dataset.reads == []
    second.take(1)
    assert len(dataset.reads) == 2
    assert not set(dataset.reads) & set(loader.dataset.reads)


class Notes(Dataset):
    """What a dataset can see of the worker that reads it."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        info = get_worker_info()
        same = info is not None and info.dataset is self
        return {"mine": same, "set_by_init": getattr(self, "set_by_init", None), "index": index}


def note_in_dataset(worker_id):
    get_worker_info().dataset.set_by_init = "yes"


def test_worker_init_fn_and_worker_info_see_the_users_dataset():
    loader = DataLoader(Notes(), batch_size=2, num_workers=2, worker_init_fn=note_in_dataset)
    (batches,) = cursor_epochs(loader, 1)
    assert [batch["mine"].tolist() for batch in batches] == [[True, True]] * 4
    assert [batch["set_by_init"] for batch in batches] == [["yes", "yes"]] * 4


@pytest.mark.parametrize("batch_size", [None, 3])
def test_the_number_and_persistence_of_workers_do_not_change_augmented_items(batch_size):
    results = []
    for workers, persistent in [(1, False), (2, False), (3, False), (2, True)]:
        set_seed(4)
        loader = DataLoader(
            Augmented(8), batch_size=batch_size, shuffle=True, num_workers=workers, persistent_workers=persistent
        )
        results.append(cursor_epochs(loader, 2))
    for other in results[1:]:
        assert differences(other, results[0]) == []
    first, second = (torch.stack([x for x, _ in epoch]).sum() if batch_size is None else epoch for epoch in results[0])
    assert differences(first, second) != [], "both epochs were augmented alike"


def test_items_of_one_epoch_are_augmented_apart():
    set_seed(4)

    class Draws(Items):
        def __getitem__(self, index):
            return random.random(), float(np.random.rand()), torch.rand(()).item()

    (batches,) = cursor_epochs(DataLoader(Draws(6), batch_size=None, num_workers=2), 1)
    assert len({tuple(batch) for batch in batches}) == 6


def test_a_sampler_that_draws_between_batches_is_named_in_a_warning(caplog):
    set_seed(0)
    cursor = Cursor()
    with caplog.at_level(logging.WARNING, "treadle"):
        cursor.open(DataLoader(Items(), batch_size=2, sampler=DrawsAsItGoes(10)))
        while cursor.take(1).batches:
            random.random()
    assert "draws from the global RNG" in caplog.text


class NotShuffledAtOnce(RandomSampler):
    """A subclass may draw at any time, whatever its base does."""

    def __iter__(self):
        for _ in range(len(self.data_source)):
            yield int(torch.randint(len(self.data_source), ()))


def test_a_subclass_of_a_known_sampler_is_watched_like_any_other(caplog):
    with caplog.at_level(logging.WARNING, "treadle"):
        cursor_epochs(DataLoader(Items(), batch_size=2, sampler=NotShuffledAtOnce(range(8))), 1)
    assert "draws from the global RNG" in caplog.text


@pytest.mark.parametrize("make", [lambda: iter([1, 2, 3]), lambda: (i for i in (1, 2, 3)), lambda: map(int, "123")])
def test_a_one_shot_stream_is_named_when_training_starts(make, caplog):
    with caplog.at_level(logging.WARNING, "treadle"):
        Cursor().open(make())
    assert "iterated only once" in caplog.text
    assert type(make()).__name__ in caplog.text


class Stream(IterableDataset):
    def __iter__(self):
        yield from (torch.tensor(i) for i in range(6))


def test_a_stream_that_is_entered_in_the_middle_is_replayed_and_the_warning_says_so(caplog):
    loader = DataLoader(Stream(), batch_size=None)
    first, second = Cursor(), Cursor()
    first.open(loader)
    first.take(2)
    with caplog.at_level(logging.WARNING, "treadle"):
        second.load_state_dict(first.state_dict())
        assert caplog.text == ""
        second.open(DataLoader(Stream(), batch_size=None))
    assert "replayed" in caplog.text
    assert [int(batch) for batch in second.take(9).batches] == [2, 3, 4, 5]


def test_what_is_not_iterable_is_refused():
    with pytest.raises(ConfigError, match="iterable"):
        Cursor().open(3)


def test_an_empty_loader_ends_at_once():
    cursor = Cursor()
    cursor.open([])
    assert cursor.take(2).batches == []
    assert cursor.ended


def test_a_smaller_epoch_than_the_checkpoint_was_in_is_over_and_the_change_is_named(caplog):
    first, second = Cursor(), Cursor()
    first.open(DataLoader(Items(20), batch_size=2))
    first.take(8)
    second.load_state_dict(first.state_dict(), rng=RngState.capture())
    with caplog.at_level(logging.WARNING, "treadle"):
        second.open(DataLoader(Items(20), batch_size=5))
    assert "10 micro-batches and now has 4" in caplog.text
    assert second.take(1).batches == []
    assert second.ended


class Stateful:
    """A loader with a position of its own."""

    def __init__(self, size=5):
        self.size = size
        self.at = 0

    def __iter__(self):
        while self.at < self.size:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("cut", range(11))
def test_a_loader_with_its_own_state_is_asked_for_it(cut):
    first, second, seen, rest = Cursor(), Cursor(), [], []
    loader = Stateful()
    while len(seen) < cut:
        first.open(loader)
        batches = first.take(1).batches
        seen += batches
        if not batches:
            first.next_epoch()
    first.open(loader)
    second.load_state_dict(through_a_file(to_plain(first.state_dict())))
    fresh = Stateful()
    while second.epoch < 3:
        second.open(fresh)
        batches = second.take(1).batches
        rest += batches
        if not batches:
            second.next_epoch()
    assert seen + rest == [0, 1, 2, 3, 4] * 3


def test_a_state_of_another_kind_of_loader_is_not_handed_over(caplog):
    first, second = Cursor(), Cursor()
    first.open(DataLoader(Items(5), batch_size=None))
    first.take(2)
    second.load_state_dict(first.state_dict())
    with caplog.at_level(logging.WARNING, "treadle"):
        second.open(Stateful())
    assert "kind" in caplog.text
    assert second.take(9).batches == [2, 3, 4]


class Fails(Items):
    """Item 5 cannot be read the first time."""

    def __getitem__(self, index):
        if index == 5 and index not in self.reads:
            self.reads.append(5)
            raise OSError("disk error")
        return super().__getitem__(index)


@pytest.mark.parametrize("make", [lambda: DataLoader(Fails(8), batch_size=2), lambda: FailingStream()])
def test_after_an_error_in_the_data_the_same_batch_comes_again(make):
    loader, cursor = make(), Cursor()
    cursor.open(loader)
    seen = [batch.tolist() for batch in cursor.take(2).batches]
    with pytest.raises(OSError, match="disk error"):
        cursor.take(1)
    assert (cursor.position, cursor.ended) == (2, False)
    cursor.open(loader)
    seen += [batch.tolist() for batch in cursor.take(9).batches]
    assert seen == [[0, 1], [2, 3], [4, 5], [6, 7]]


class FailingStream:
    def __init__(self):
        self.failed = False

    def __iter__(self):
        for i in range(0, 8, 2):
            if i == 4 and not self.failed:
                self.failed = True
                raise OSError("disk error")
            yield torch.tensor([i, i + 1])


class EndsTooEarly(Items):
    """A mistake in a dataset: next() of an empty iterator inside an item."""

    def __getitem__(self, index):
        return next(iter([])) if index == 3 else super().__getitem__(index)


def test_a_stop_iteration_inside_an_item_is_not_the_end_of_the_data():
    cursor = Cursor()
    cursor.open(DataLoader(EndsTooEarly(8), batch_size=2))
    cursor.take(1)
    with pytest.raises(RuntimeError, match="StopIteration"):
        cursor.take(1)
    assert not cursor.ended


def test_the_epoch_is_told_to_sampler_and_loader():
    told = []

    class Loader(list):
        def set_epoch(self, epoch):
            told.append(epoch)

    cursor_epochs(Loader([1, 2]), 3)
    assert told == [0, 1, 2]


def test_the_users_loader_is_neither_iterated_nor_changed():
    loader = DataLoader(Items(6), batch_size=2, shuffle=True)
    before = dict(vars(loader))
    cursor_epochs(loader, 1)
    assert {key: value for key, value in vars(loader).items() if value is not before.get(key)} == {}


def test_the_times_of_waiting_are_noted_one_per_micro_batch():
    cursor = Cursor()
    cursor.open([1, 2, 3])
    group = cursor.take(2)
    assert len(group.data_time) == len(group.batches) == 2
    assert all(0 <= seconds < 5 for seconds in group.data_time)


def test_the_end_of_an_epoch_of_known_length_is_seen_with_its_last_batch():
    cursor = Cursor()
    cursor.open(DataLoader(Items(6), batch_size=2))
    assert [cursor.take(1) and cursor.ended for _ in range(3)] == [False, False, True]
    assert cursor.length == 3


def test_steps_per_epoch_rounds_up():
    assert [steps_per_epoch(range(7), k) for k in (1, 2, 3, 7, 8)] == [7, 4, 3, 1, 1]
    assert steps_per_epoch(DataLoader(Items(20), batch_size=3), 2) == 4
    with pytest.raises(ConfigError, match="accumulation=0"):
        steps_per_epoch(range(7), 0)


@pytest.mark.parametrize(
    ("loader", "kind"),
    [
        (DataLoader(Items(), sampler=SequentialSampler(range(20))), "indexed"),
        (DataLoader(Stream()), "replayed"),
        (Stateful(), "stateful"),
        ([1], "replayed"),
        (range(3), "replayed"),
        (itertools.count(), "replayed"),
    ],
)
def test_each_loader_is_read_in_its_way(loader, kind):
    assert open_source(loader).kind == kind


class WrapsItself(DataLoader):
    """A loader whose iteration the user changed."""

    def __iter__(self):
        for batch in super().__iter__():
            yield batch + 100


def test_a_loader_whose_iteration_was_changed_is_iterated_as_it_is():
    assert [b.tolist() for b in cursor_epochs(WrapsItself(Items(4), batch_size=2), 1)[0]] == [[100, 101], [102, 103]]


def test_after_a_resume_at_the_very_start_of_an_epoch_the_position_is_counted():
    """A second stop in that epoch would otherwise begin it again, with no word."""
    cursor = Cursor()
    cursor.load_state_dict({**Cursor().state_dict(), "epoch": 1})  # as an epoch's checkpoint says it
    cursor.open([10, 20, 30])
    assert cursor.take(2).batches == [10, 20]
    kept = through_a_file(to_plain(cursor.state_dict()))
    assert (kept["epoch"], kept["position"]) == (1, 2)
    again = Cursor()
    again.load_state_dict(kept)
    again.open([10, 20, 30])
    assert again.take(2).batches == [30]


class Counting(Dataset):
    def __init__(self):
        self.read, self.start, self.unknown, self.opened = [], 5, math.nan, None

    def __len__(self):
        return 6

    def __getitem__(self, index):
        self.opened = open(os.devnull)  # noqa: SIM115  (what no checkpoint can hold)
        self.opened.close()
        self.read.append(index)
        return index + self.start


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("saves", [False, True])
def test_a_data_set_that_keeps_state_between_items_is_named_once(inside, saves, caplog):
    dataset = Subset(Counting(), range(6)) if inside else Counting()
    cursor = Cursor()
    for _ in range(2):
        cursor.open(DataLoader(dataset, batch_size=2) if cursor.loader is None else cursor.loader)
        cursor.take(1)
        if saves:
            cursor.state_dict()
            assert len(caplog.messages) <= 1
        while cursor.take(1).batches:
            pass
        cursor.next_epoch()
    (line,) = caplog.messages
    assert line.startswith("Counting.read has changed, but checkpoints do not hold it")


class Unreadable(Items):
    """Cannot read one item."""

    def __getitem__(self, index):
        if index == 5:
            raise ValueError("item 5")
        return torch.tensor(1.0)


class UnreadableInOrder(IterableDataset):
    def __iter__(self):
        items = Unreadable()
        return (items[index] for index in range(len(items)))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(("make", "evaluating"), [
    (lambda: DataLoader(Unreadable(), batch_size=None, num_workers=2), False),
    (lambda: DataLoader(Unreadable(), batch_size=None, num_workers=2), True),
    (lambda: DataLoader(UnreadableInOrder(), batch_size=None, num_workers=1), False),
    (lambda: StatefulDataLoader(Unreadable(), batch_size=None, num_workers=1), False),
])  # fmt: skip
def test_workers_end_with_a_pass_that_failed_and_not_with_its_error(make, evaluating):
    engine, loader = scalar_engine(), make()
    with pytest.raises(ValueError, match="item 5") as kept:
        engine.evaluate(loader) if evaluating else engine.run(loader, epochs=1)
    assert multiprocessing.active_children() == []
    assert kept.value.__traceback__ is not None


class OwnGenerator(Items):
    """Draws from a generator that it keeps."""

    def __init__(self, generator):
        super().__init__(4)
        self.chance = generator


@pytest.mark.parametrize(
    "make", [lambda: torch.Generator(), lambda: np.random.default_rng(0), lambda: random.Random(0)]
)
def test_a_generator_of_the_data_sets_own_is_named_where_workers_have_copies_and_kept_elsewhere(make, caplog):
    items = ConcatDataset([Subset(OwnGenerator(make()), [0, 1])])
    for loader in (DataLoader(items, num_workers=1), DataLoader(Lines(OwnGenerator(make())), num_workers=1)):
        caplog.clear()
        Cursor().attach(loader)
        assert "OwnGenerator.chance is a random generator that no checkpoint holds" in caplog.text
    caplog.clear()
    for loader in (DataLoader(items), DataLoader(Lines(OwnGenerator(make())))):
        cursor = Cursor()
        cursor.attach(loader)
        generator = next(one for path, one in owners_of(loader).items() if isinstance(one, OwnGenerator)).chance
        draw(generator)
        saved = through_a_file(to_plain(cursor.state_dict()))
        wanted = draw(generator)
        cursor.load_state_dict(saved)
        cursor.open(loader)
        assert draw(generator) == wanted
    assert caplog.text == ""


def draw(generator):
    if isinstance(generator, torch.Generator):
        return torch.rand(1, generator=generator).item()
    return generator.random()


class Lines(IterableDataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        return iter([1, 2])


def test_a_generator_that_the_loader_draws_from_too_is_no_secret(caplog):
    generator = torch.Generator()
    Cursor().attach(DataLoader(OwnGenerator(generator), shuffle=True, generator=generator))
    Cursor().attach(DataLoader(Items(), shuffle=True, generator=generator, num_workers=1))
    assert "generator" not in caplog.text
    Cursor().attach(DataLoader(OwnGenerator(generator), shuffle=True, generator=generator, num_workers=1))
    assert "OwnGenerator.chance" in caplog.text


class Wrapping(Sampler):
    """Hands out what another sampler gives, as wrappers of samplers do."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        return iter(self.sampler)

    def __len__(self):
        return len(self.sampler)


class OwnOrder(Wrapping):
    """Shuffles with a generator of its own."""

    def __init__(self, sampler):
        super().__init__(sampler)
        self.chance = random.Random(0)

    def __iter__(self):
        return iter(self.chance.sample(list(self.sampler), len(self.sampler)))


def test_a_sampler_inside_others_goes_on_in_its_order():
    def make():
        inner = RandomSampler(range(6), generator=torch.Generator().manual_seed(1))
        return DataLoader(torch.arange(6), batch_size=2, sampler=Wrapping(Wrapping(inner)))

    def taken(cursor, loader, count):
        batches = []
        while len(batches) < count:
            cursor.open(loader)
            batches += [batch.tolist() for batch in cursor.take(1).batches]
            if cursor.ended:
                cursor.next_epoch()
        return batches

    straight = taken(Cursor(), make(), 9)
    for cut in range(1, 9):
        first, second, loader = Cursor(), Cursor(), make()
        before = taken(first, loader, cut)
        second.load_state_dict(through_a_file(to_plain(first.state_dict())))
        assert before + taken(second, make(), 9 - cut) == straight, cut


def test_a_distributed_sampler_inside_another_is_told_the_epoch():
    sampler = DistributedSampler(range(6), num_replicas=1, rank=0)
    cursor, loader = Cursor(), DataLoader(torch.arange(6), batch_size=3, sampler=Wrapping(sampler))
    cursor.open(loader)
    cursor.next_epoch()
    cursor.open(loader)
    assert sampler.epoch == 1


def test_a_sampler_with_a_generator_of_its_own_goes_on_in_its_order(caplog):
    def make():
        return DataLoader(torch.arange(6), batch_size=2, sampler=Wrapping(OwnOrder(range(6))))

    straight, loader = Cursor(), make()
    straight.open(loader)
    straight.take(3)
    straight.next_epoch()
    straight.open(loader)
    straight.take(1)
    saved = through_a_file(to_plain(straight.state_dict()))
    resumed = Cursor()
    resumed.load_state_dict(saved)
    resumed.open(make())
    assert [b.tolist() for b in resumed.take(2).batches] == [b.tolist() for b in straight.take(2).batches]
    assert "generator" not in caplog.text
