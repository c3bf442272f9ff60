"""A group knows which samples it is made of, and knowing it costs no read and moves no random number."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from helpers import Augmented
from treadle.data import TensorLoader
from treadle.data.cursor import Cursor
from treadle.hooks.flight import ids_as_plain


class Ids(Augmented):
    """Each item is its own index, with a random number beside it."""

    def __getitem__(self, index):
        super().__getitem__(index)
        return torch.tensor(int(index)), torch.rand(1)


def through(cursor, loader, count, size=1):
    cursor.open(loader)
    groups = []
    while len(groups) < count and (group := cursor.take(size)).batches:
        groups.append(group)
    return groups


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [1, 3])
def test_the_ids_are_those_that_were_read(workers, size):
    loader = DataLoader(Ids(20), batch_size=3, shuffle=True, num_workers=workers)
    cursor = Cursor()
    for _ in range(2):
        for group in through(cursor, loader, 99, size):
            assert len(group.sample_ids) == len(group.batches)
            for ids, (read, _) in zip(group.sample_ids, group.batches, strict=True):
                assert ids == read.tolist()
        cursor.next_epoch()


@pytest.mark.parametrize("workers", [0, 2])
def test_they_are_right_after_a_resume_inside_the_epoch(workers):
    loader = DataLoader(Ids(20), batch_size=3, shuffle=True, num_workers=workers)
    cursor = Cursor()
    through(cursor, loader, 3)
    state = cursor.state_dict()
    cursor.close()
    again = Cursor()
    again.load_state_dict(state)
    dataset = Ids(20)
    groups = through(again, DataLoader(dataset, batch_size=3, shuffle=True, num_workers=workers), 99)
    assert [group.sample_ids[0] for group in groups] == [group.batches[0][0].tolist() for group in groups]
    assert len(groups) == 4
    if not workers:
        assert dataset.reads == [index for group in groups for index in group.sample_ids[0]]  # and no other


def test_only_the_prefetch_is_remembered():
    loader = DataLoader(Ids(200), batch_size=1, num_workers=2, prefetch_factor=3)
    cursor = Cursor()
    through(cursor, loader, 100)
    assert len(cursor._source.feed.current._handed_out) <= 2 * 3 + 1
    cursor.close()


def test_other_samplers_and_no_batching():
    sampler = BatchSampler(RandomSampler(range(20)), 4, drop_last=True)
    for group in through(Cursor(), DataLoader(Ids(20), batch_sampler=sampler), 99):
        assert group.sample_ids[0] == group.batches[0][0].tolist()
    for group in through(Cursor(), DataLoader(Ids(5), batch_size=None), 99):
        assert group.sample_ids[0] == int(group.batches[0][0])


def test_a_tensor_loader_says_its_rows():
    loader = TensorLoader(torch.arange(20), batch_size=3, shuffle=True)
    cursor = Cursor()
    for _ in range(2):
        for group in through(cursor, loader, 99):
            assert ids_as_plain(group.sample_ids[0]) == group.batches[0].tolist()
        cursor.next_epoch()
    loader = TensorLoader(torch.arange(5), batch_size=3)
    assert [ids_as_plain(group.sample_ids[0]) for group in through(Cursor(), loader, 99)] == [[0, 1, 2], [3, 4]]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


@pytest.mark.parametrize("loader", [DataLoader(Stream()), [1, 2, 3]], ids=["iterable", "list"])
def test_where_nobody_knows_it_is_none(loader):
    assert [group.sample_ids for group in through(Cursor(), loader, 3)] == [[None]] * 3


def test_workers_that_may_swap_batches_are_not_believed():
    loader = DataLoader(Ids(8), batch_size=2, num_workers=2, in_order=False)
    cursor = Cursor()
    assert [group.sample_ids for group in through(cursor, loader, 4)] == [[None]] * 4
    cursor.close()
