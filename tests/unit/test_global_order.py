"""Which samples each rank reads: every sample once, equally many batches, also after a change of ranks mid-epoch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from treadle.data import Cursor, GlobalOrder, RankBatchSampler, TensorLoader
from treadle.data.elastic import find_place
from treadle.errors import ConfigError

# torchdata's StatefulDataLoader calls torch.set_vital, which torch 2.13 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

ORDERS = st.builds(
    lambda ranks, samples, batch, shuffle, drop_last: GlobalOrder(
        ranks + samples, ranks + batch, ranks, shuffle=shuffle, seed=3, drop_last=drop_last
    ),
    st.integers(1, 7), st.integers(0, 60), st.integers(0, 15), st.booleans(), st.booleans(),
)  # fmt: skip


def read(order, start=0, until=None):
    """The places that are read, per batch and rank."""
    batches = range(order.num_batches(start))[:until]
    return [[order.part(number, rank, start) for rank in range(order.num_replicas)] for number in batches]


def places(batches):
    return [place for batch in batches for part in batch for place in part]


@given(ORDERS)
def test_every_sample_is_read_once_in_order_and_every_rank_has_a_share_of_every_batch(order):
    batches = read(order)
    seen = places(batches)
    assert seen == list(range(len(seen)))
    if not order.drop_last:
        assert len(seen) == order.num_samples
    for number, batch in enumerate(batches):
        sizes = [len(part) for part in batch]
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1
        assert order.consumed(number) == batch[0].start
    assert order.consumed(len(batches)) == len(seen)


@given(ORDERS)
def test_batches_have_the_size_that_was_asked_for_but_for_the_last_two(order):
    sizes = [sum(map(len, batch)) for batch in read(order)]
    assert all(size == order.global_batch_size for size in sizes[: len(sizes) if order.drop_last else -2])
    assert all(size < order.global_batch_size + order.num_replicas for size in sizes)
    if order.num_replicas == 1:
        assert all(size <= order.global_batch_size for size in sizes), "one process never merges batches"


@given(ORDERS, st.lists(st.tuples(st.integers(1, 7), st.integers(0, 15), st.integers(0, 5)), max_size=4))
def test_stopped_and_gone_on_with_other_ranks_every_sample_is_read_once(order, layouts):
    layouts = [(order.num_replicas, order.global_batch_size, 2), *[(r, r + extra, n) for r, extra, n in layouts]]
    seen, start = [], 0
    for number, (ranks, size, batches) in enumerate(layouts):
        now = GlobalOrder(max(order.num_samples, 7), size, ranks, order.shuffle, order.seed)
        until = None if number == len(layouts) - 1 else batches
        part = read(now, start, until)
        seen += places(part)
        start = now.consumed(len(part), start)
        assert now.num_batches(start) <= now.num_batches(), "what is left is counted from the end of a whole epoch"
    left_out = now.num_samples - len(seen)
    assert seen == list(range(len(seen)))
    assert left_out < now.num_replicas, "fewer samples than ranks cannot be shared"
    assert left_out == 0 or not part


def test_a_last_batch_too_small_for_the_ranks_takes_from_the_one_before():
    order = GlobalOrder(13, 6, 3)
    assert [[len(part) for part in batch] for batch in read(order)] == [[2, 2, 2], [2, 1, 1], [1, 1, 1]]


def test_where_two_batches_cannot_serve_all_ranks_they_become_one():
    assert [[len(part) for part in batch] for batch in read(GlobalOrder(7, 3, 3))] == [[1, 1, 1], [2, 1, 1]]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_order_is_the_same_on_any_number_of_ranks_and_another_in_each_epoch(ranks):
    def epoch(number, ranks):
        samplers = [RankBatchSampler(20, 4, shuffle=True, seed=5, rank=r, num_replicas=ranks) for r in range(ranks)]
        for sampler in samplers:
            sampler.set_epoch(number)
        return [index for parts in zip(*samplers, strict=True) for part in parts for index in part]

    assert epoch(0, ranks) == epoch(0, 1)
    assert epoch(1, ranks) == epoch(1, 1) != epoch(0, 1)
    assert sorted(epoch(0, ranks)) == list(range(20))


def test_a_tensor_loader_and_a_batch_sampler_give_the_same_rows():
    for rank in range(2):
        rows = TensorLoader(torch.arange(11), batch_size=2, shuffle=True, seed=1, rank=rank, num_replicas=2)
        sampler = RankBatchSampler(range(11), 2, shuffle=True, seed=1, rank=rank, num_replicas=2)
        assert [batch.tolist() for batch in rows] == list(sampler)
        assert len(rows) == len(sampler) == 3


def test_a_global_batch_size_keeps_the_steps_of_an_epoch():
    lengths = {len(RankBatchSampler(100, global_batch_size=12, rank=0, num_replicas=n)) for n in (1, 2, 3, 5)}
    assert lengths == {9}


def test_torchs_loaders_take_the_sampler_with_workers_too():
    sampler = RankBatchSampler(range(7), 2, rank=1, num_replicas=2)
    assert [batch.tolist() for batch in DataLoader(range(7), batch_sampler=sampler)] == [[2, 3], [6]]
    geometric = pytest.importorskip("torch_geometric.loader")
    assert [batch.tolist() for batch in geometric.DataLoader(range(7), batch_sampler=sampler)] == [[2, 3], [6]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RankBatchSampler(9), "exactly one of batch_size=None"),
        (lambda: RankBatchSampler(9, 2, global_batch_size=4), "exactly one of batch_size=2"),
        (lambda: RankBatchSampler(9, 0), "batch_size=0"),
        (lambda: RankBatchSampler(9, 2, rank=1), "give both"),
        (lambda: RankBatchSampler(9, 2, rank=2, num_replicas=2), "rank=2: must be from 0 to num_replicas - 1 = 1"),
        (lambda: len(RankBatchSampler(1, 2, rank=0, num_replicas=2)), "1 samples and there are 2 ranks"),
        (lambda: len(RankBatchSampler(9, global_batch_size=2, rank=0, num_replicas=3)), "each of the 3 ranks"),
        (lambda: TensorLoader(torch.ones(3)), "TensorLoader: give exactly one"),
        (lambda: GlobalOrder(3, 2, 0), "num_replicas=0"),
    ],
)
def test_numbers_that_cannot_be_are_refused_with_the_reason(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def loaders(kind, ranks, size):
    """Return the loader of each of several ranks, without starting them."""
    if kind == "tensors":
        return [
            TensorLoader(torch.arange(50), global_batch_size=size, shuffle=True, rank=r, num_replicas=ranks)
            for r in range(ranks)
        ]
    samplers = [
        RankBatchSampler(50, global_batch_size=size, shuffle=True, rank=r, num_replicas=ranks) for r in range(ranks)
    ]
    make = StatefulDataLoader if kind == "stateful" else DataLoader
    return [make(range(50), batch_sampler=sampler) for sampler in samplers]


@pytest.mark.parametrize("kind", ["tensors", "sampler", "stateful"])
@pytest.mark.parametrize("cut", range(5))
def test_a_run_on_2_then_1_then_3_ranks_reads_every_sample_once_and_the_next_epoch_is_whole(kind, cut, caplog):
    state, seen = None, []
    for ranks, size, batches in [(2, 8, cut), (1, 5, 3), (3, 7, None)]:
        cursors = [Cursor() for _ in range(ranks)]
        readers = loaders(kind, ranks, size)
        for cursor, loader in zip(cursors, readers, strict=True):
            if state is not None:
                cursor.load_state_dict(state)
            cursor.open(loader)
        assert len({(cursor.position, cursor.length) for cursor in cursors}) == 1
        groups = [cursor.take(100 if batches is None else batches).batches for cursor in cursors]
        seen += [int(row) for group in groups for batch in group for row in batch]
        state = cursors[0].state_dict()
    assert sorted(seen) == list(range(50))
    assert caplog.text.count("none lost or repeated") == 1 + 3
    assert cursors[0].ended
    assert cursors[0].position == cursors[0].length == 8
    following = []
    for cursor, loader in zip(cursors, readers, strict=True):
        cursor.next_epoch()
        cursor.open(loader)
        following += [int(row) for batch in cursor.take(100).batches for row in batch]
    assert sorted(following) == list(range(50))


@pytest.mark.parametrize("kind", ["tensors", "sampler", "stateful"])
def test_an_epoch_that_was_entered_in_the_middle_is_resumed_exactly_too(kind):
    first = Cursor()
    first.open(loaders(kind, 2, 8)[0])
    first.take(2)
    second = Cursor()
    second.load_state_dict(first.state_dict())
    second.open(loaders(kind, 1, 5)[0])
    second.take(2)
    state = second.state_dict()
    rest = second.take(100).batches
    third = Cursor()
    third.load_state_dict(state)
    third.open(loaders(kind, 1, 5)[0])
    again = third.take(100).batches
    assert len(rest) == 5
    assert all(torch.equal(a, b) for a, b in zip(rest, again, strict=True))
    assert (third.epoch, third.position) == (second.epoch, second.position)


def test_the_last_samples_that_are_fewer_than_the_ranks_are_named(caplog):
    first = Cursor()
    first.open(TensorLoader(torch.arange(50), batch_size=7, shuffle=True))
    first.take(7)
    second = Cursor()
    second.load_state_dict(first.state_dict())
    second.open(loaders("tensors", 3, 9)[0])
    assert second.take(1).batches == []
    assert second.ended
    assert "the last 1 samples of the epoch are skipped, as they are fewer than the 3 ranks" in caplog.text
    assert second.position == second.length


@pytest.mark.parametrize("start", [0, 24])
def test_another_loader_inside_an_epoch_goes_on_with_what_is_left(start):
    first, second = Cursor(), Cursor()
    if start:
        first.open(loaders("tensors", 2, 8)[0])
        first.take(3)
        second.load_state_dict(first.state_dict())
    second.open(loaders("tensors", 1, 5)[0])
    seen = second.take(2).batches
    second.open(loaders("sampler", 1, 6)[0])
    seen += second.take(100).batches
    assert len(torch.cat(seen).unique()) == sum(map(len, seen)) == 50 - start


@pytest.mark.parametrize(
    ("before", "now"),
    [(None, "shuffled"), ("shuffled", None), ("shuffled", "other seed")],
)
def test_on_as_many_ranks_another_order_inside_an_epoch_is_named(before, now):
    orders = {
        None: None,
        "shuffled": GlobalOrder(8, 2, shuffle=True),
        "other seed": GlobalOrder(8, 2, shuffle=True, seed=1),
    }
    described = None if before is None else {**orders[before].describe(), "start": 0, "consumed": 4}
    saved = {"num_ranks": 1, "length": 4, "order": described}
    place = find_place(saved, position=2, order=orders[now], length=4, ranks=1, loader="DataLoader")
    assert place.position == 2
    assert not place.exact
    assert "a different sample order" in place.warnings[0]
    kept = find_place(saved, position=2, order=orders[before], length=4, ranks=1, loader="DataLoader")
    assert kept.exact
    assert kept.warnings == []
