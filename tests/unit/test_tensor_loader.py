"""TensorLoader: every row once, an order of seed and epoch alone, and a position that is exact."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from treadle import ConfigError, TensorLoader


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
