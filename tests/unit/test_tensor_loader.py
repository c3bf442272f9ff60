"""TensorLoader: every row once, an order of seed and epoch alone, and a position that is exact."""

from __future__ import annotations

import copy
import pickle
import random

import numpy as np
import pytest
import torch

from treadle import ConfigError, TensorLoader
from treadle.data import Cursor, MappedLoader


def rows(loader):
    return [row for batch in loader for row in batch.tolist()]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_row_comes_once_in_batches_of_the_right_size(shuffle, drop_last):
    loader = TensorLoader(torch.arange(23), batch_size=5, shuffle=shuffle, drop_last=drop_last)
    batches = list(loader)
    assert len(batches) == len(loader) == (4 if drop_last else 5)
    assert [len(batch) for batch in batches] == [5, 5, 5, 5] + ([] if drop_last else [3])
    seen = [row for batch in batches for row in batch.tolist()]
    assert len(set(seen)) == len(seen)
    assert sorted(seen) == list(range(23)) or drop_last


def test_the_order_depends_on_seed_and_epoch_alone_and_no_global_generator_moves():
    states = torch.get_rng_state(), np.random.get_state()[2], random.getstate()
    loader = TensorLoader(torch.arange(50), batch_size=7, shuffle=True, seed=3)
    first, second = rows(loader), rows(loader)
    assert first != second
    assert (torch.equal(states[0], torch.get_rng_state()), states[1:]) == (
        True, (np.random.get_state()[2], random.getstate())
    )  # fmt: skip
    again = TensorLoader(torch.arange(50), batch_size=7, shuffle=True, seed=3)
    again.set_epoch(1)
    assert rows(again) == second
    assert rows(TensorLoader(torch.arange(50), batch_size=7, shuffle=True, seed=4)) != first


def test_a_state_taken_after_any_batch_goes_on_with_the_next_one():
    straight = TensorLoader(torch.arange(23), torch.arange(23) * 2.0, batch_size=5, shuffle=True)
    expected = [batch for _ in range(2) for batch in straight]
    loader = TensorLoader(torch.arange(23), torch.arange(23) * 2.0, batch_size=5, shuffle=True)
    for number, _ in enumerate(batch for _ in range(2) for batch in loader):
        resumed = TensorLoader(torch.arange(23), torch.arange(23) * 2.0, batch_size=5, shuffle=True)
        resumed.load_state_dict(loader.state_dict())
        rest = list(resumed) + (list(resumed) if number < 5 else [])
        ahead = expected[number + 1 :]
        assert len(rest) == len(ahead)
        for (a, b), (x, y) in zip(rest, ahead, strict=True):
            assert torch.equal(a, x)
            assert torch.equal(b, y)


def test_a_position_in_other_data_is_refused_by_name():
    state = TensorLoader(torch.arange(23), batch_size=5).state_dict()
    with pytest.raises(ConfigError, match="batch_size was 5"):
        TensorLoader(torch.arange(23), batch_size=6).load_state_dict(state)
    with pytest.raises(ConfigError, match="num_rows was 23"):
        TensorLoader(torch.arange(24), batch_size=5).load_state_dict(state)


@pytest.mark.parametrize(
    ("tensors", "batch_size", "words"),
    [
        ((), 4, "at least one"),
        ((torch.ones(3), torch.ones(4)), 4, r"\[3, 4\] rows"),
        ((torch.ones(3),), 0, "batch_size=0"),
    ],
)
def test_what_makes_no_sense_is_refused_when_it_is_made(tensors, batch_size, words):
    with pytest.raises(ConfigError, match=words):
        TensorLoader(*tensors, batch_size=batch_size)


def buffered(num_buffers, **settings):
    return TensorLoader(torch.arange(23), torch.arange(23) * 2.0, num_buffers=num_buffers, **settings)


@pytest.mark.parametrize("shuffle", [False, True])
def test_buffers_hold_the_same_batches_at_addresses_that_never_change(shuffle):
    plain = TensorLoader(torch.arange(23), torch.arange(23) * 2.0, batch_size=5, shuffle=shuffle)
    loader = buffered(2, batch_size=5, shuffle=shuffle)
    places = {}
    for _ in range(2):
        for number, (batch, expected) in enumerate(zip(loader, plain, strict=True)):
            for index, (given, right) in enumerate(zip(batch, expected, strict=True)):
                assert torch.equal(given, right)
                assert places.setdefault((number % 2, index), given.data_ptr()) == given.data_ptr()
    assert len(set(places.values())) == 4
    sources = {tensor.untyped_storage().data_ptr() for tensor in loader.tensors}
    assert not sources & set(places.values()), "the data itself is not given out"


def test_a_batch_is_valid_until_as_many_more_are_drawn_as_there_are_buffers():
    loader = iter(buffered(2, batch_size=5))
    first = next(loader)[0]
    next(loader)
    assert first.tolist() == [0, 1, 2, 3, 4]
    next(loader)
    assert first.tolist() == [10, 11, 12, 13, 14]


def test_buffers_fit_the_uneven_batches_of_ranks_too():
    parts = [buffered(1, global_batch_size=5, rank=rank, num_replicas=3) for rank in range(3)]
    assert sorted(row for part in parts for x, _ in part for row in x.tolist()) == list(range(23))


def test_accumulation_over_more_batches_than_buffers_is_refused_before_anything_is_drawn():
    loader, cursor = buffered(2, batch_size=5), Cursor()
    cursor.open(loader)
    with pytest.raises(ConfigError, match="pass num_buffers=3"):
        cursor.take(3)
    assert loader.position == 0
    assert [x.tolist()[0] for x, _ in cursor.take(2).batches] == [0, 5]


def test_buffers_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="num_buffers=0"):
        TensorLoader(torch.ones(3), batch_size=1, num_buffers=0)
    with pytest.raises(ConfigError, match="requires gradients"):
        TensorLoader(torch.ones(3, requires_grad=True), batch_size=1, num_buffers=1)


def test_a_mapping_gives_dicts():
    loader = TensorLoader({"x": torch.arange(4), "y": -torch.arange(4)}, batch_size=3)
    assert [{name: t.tolist() for name, t in batch.items()} for batch in loader] == [
        {"x": [0, 1, 2], "y": [0, -1, -2]}, {"x": [3], "y": [-3]},
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="either one mapping"):
        TensorLoader({"x": torch.arange(4)}, torch.arange(4), batch_size=3)


def test_what_is_not_there_for_a_broken_pass_is_not_read_again():
    """Where a state of its own is missing, the cursor leaves batches out by number."""
    loader, cursor = TensorLoader(torch.arange(23), batch_size=5), Cursor()
    cursor.open(loader)
    cursor.take(2)
    again = Cursor()
    again.load_state_dict({**cursor.state_dict(), "loader": None})
    other = TensorLoader(torch.arange(23), batch_size=5)
    again.open(other)
    assert other.position == 2
    assert again.take(1).batches[0].tolist() == [10, 11, 12, 13, 14]


def test_a_changed_shuffle_is_refused_and_an_older_state_that_does_not_say_it_loads():
    state = TensorLoader(torch.arange(23), batch_size=5, shuffle=True).state_dict()
    with pytest.raises(ConfigError, match="shuffle was True"):
        TensorLoader(torch.arange(23), batch_size=5).load_state_dict(state)
    del state["shuffle"]
    TensorLoader(torch.arange(23), batch_size=5, shuffle=True).load_state_dict(state)


@pytest.mark.parametrize("loader", [TensorLoader, MappedLoader])
def test_a_pass_whose_position_another_one_took_says_so_instead_of_going_on_wrongly(loader):
    rows = loader(torch.arange(23), batch_size=5)
    training = iter(rows)
    next(training)
    assert len(list(rows)) == 4  # an evaluation over the same loader goes on from its position, and ends the epoch
    with pytest.raises(RuntimeError, match="separate loaders"):
        next(training)


def test_a_loader_that_has_given_a_batch_can_be_copied_and_sent_to_another_process():
    loader = TensorLoader(torch.arange(10), batch_size=4, shuffle=True)
    batches = iter(loader)
    first = next(batches)
    for copied in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert copied.last_rows.tolist() == loader.last_rows.tolist() == first.tolist()
        assert not copied.last_ids().gave(first.clone())
    assert loader.last_ids().gave(first)
    first += 1
    assert not loader.last_ids().gave(first), "somebody has written to it"
