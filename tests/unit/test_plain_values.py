"""Comparison of plain trees: to the bit, and without a visit to each item of a large container of scalars."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from treadle.checkpoint.comparison import same, unequal
from treadle.checkpoint.plain_values import decode, encode
from treadle.errors import CheckpointError

LARGE = {"a dict": {number: str(number) for number in range(5000)}, "a list": [float(number) for number in range(5000)]}


@pytest.mark.parametrize("kind", LARGE)
def test_items_of_a_large_container_of_scalars_are_not_visited_one_by_one(kind):
    visits = []

    def watch(frame, event, _):
        if event == "call" and frame.f_code is unequal.__code__:
            visits.append(1)

    one, other = LARGE[kind], type(LARGE[kind])(LARGE[kind])
    sys.setprofile(watch)
    try:
        found = same(one, other)
    finally:
        sys.setprofile(None)
    assert found
    assert len(visits) == 1


@pytest.mark.parametrize("other", [{"a": 1.0}, {"a": True}, {"b": 1}, {"a": 1, "b": 2}])
def test_dicts_of_other_types_keys_or_values_differ(other):
    assert not same({"a": 1}, other)


def test_the_order_of_a_dict_does_not_count_and_nan_is_nan():
    assert same({"a": 1, "b": float("nan")}, {"b": math.nan, "a": 1})


@pytest.mark.parametrize("kind", [">f4", "<f4", ">i2", ">f8", ">c8"])
def test_arrays_keep_the_byte_order_of_their_file(kind):
    array = np.arange(6).reshape(2, 3).astype(kind)
    for held in (None, np.zeros((2, 3), kind)):
        found = decode(encode(array, deep=True), held)
        assert found.dtype == array.dtype
        assert np.array_equal(found, array)
        assert found is not array


class Opened:
    calls = 0

    def __init__(self, *args):
        Opened.calls += 1


@pytest.mark.parametrize(
    "tree",
    [
        {"flag": 1, "of": f"{__name__}:Opened"},
        {"enum": "x", "of": f"{__name__}:Opened"},
        {"bits": {"bit_generator": "PCG64"}, "of": "seed"},
        {"generator": {"bit_generator": "seed"}},
        {"object": {"args": [1]}, "of": "subprocess:Popen"},
        {"record": [1], "of": "subprocess:Popen"},
        {"iterator": "iter", "arguments": {"tuple": [{"class": f"{__name__}:Opened"}, 1]}, "state": None},
        {
            "reduced": "itertools.accumulate",
            "made": "called",
            "state": None,
            "arguments": {"tuple": [[1, 2, 3], {"class": f"{__name__}:Opened"}]},
        },
    ],
    ids=lambda tree: next(iter(tree)),
)
def test_a_file_cannot_choose_what_is_called(tree):
    state = np.random.get_state()[1].tolist()
    with pytest.raises(CheckpointError):
        next(iter(decode(tree)))
    assert Opened.calls == 0
    assert np.random.get_state()[1].tolist() == state
