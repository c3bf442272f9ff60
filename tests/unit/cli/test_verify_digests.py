"""Digests are equal if, and only if, the values are equal to the bit."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from treadle.runs.verify.digests import leaf_text, leaves_of, without_durations

NAN = float("nan")
DIFFERENT = [
    (torch.ones(3), torch.ones(3, dtype=torch.float64)),
    (torch.ones(6), torch.ones(2, 3)),
    (torch.ones(3), torch.tensor([1.0, 1.0, 1.0 + 2**-23])),
    (torch.zeros(3), -torch.zeros(3)),
    (torch.tensor(0.1), torch.tensor(0.1) + 2**-27),
    (torch.ones(3, dtype=torch.bfloat16), torch.tensor([1.0, 1.0, 1.0078125], dtype=torch.bfloat16)),
    (np.ones(3), np.ones(3, dtype=np.float32)),
    (0.1, 0.1 + 2**-56),
    (1, 1.0),
    (True, 1),
    ("1", 1),
    ([], {}),
    ([1, 2], [2, 1]),
    (list(range(40)), [*range(39), 40]),
    ("a" * 100, "a" * 99 + "b"),
    (np.random.default_rng(0), np.random.default_rng(1)),
    (random.Random(0), random.Random(1)),
    (torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_what_differs_has_another_digest(one, other):
    assert leaves_of({"x": one}) != leaves_of({"x": other})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.ones(3, 2), torch.ones(2, 3).T),
        (torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.0])),
        (NAN, NAN),
        ((1, 2), [1, 2]),
        (torch.arange(4)[::2], torch.tensor([0, 2])),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse()),
        (torch.tensor(1 + 2j).conj(), torch.tensor(1 - 2j)),
        ({"a", "b"}, {"b", "a"}),
        (np.random.default_rng(0), np.random.default_rng(0)),
    ],
)
def test_what_is_equal_has_the_same_digest(one, other):
    assert leaves_of({"x": one}) == leaves_of({"x": other})


def test_a_leaf_is_named_by_its_path_and_small_values_stay_readable():
    class Graph:
        def __init__(self):
            self.num_nodes, self.x = 2, torch.zeros(2, 2)

    texts = leaves_of([{"lr": 0.5}, Graph()])
    assert texts["0.lr"] == "0.5"
    assert texts["1.num_nodes"] == "2"
    assert texts["1.x"].startswith("float32[2, 2] ")
    assert leaf_text(torch.tensor([0.5])) == "0.5"


def test_what_refers_to_itself_comes_to_an_end():
    loop: dict[str, object] = {}
    loop["self"] = loop
    assert list(leaves_of(loop).values()) == ["a dict"]


def test_times_and_memory_are_in_no_promise():
    given = {"train.loss": "1", "train.step_time": "2", "max_memory": "3", "train.time_steps": "4", "a.seconds": "5"}
    assert without_durations(given) == {"train.loss": "1", "train.time_steps": "4"}
