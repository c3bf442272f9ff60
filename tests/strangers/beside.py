"""Variables of a module that other code reads as its attributes."""

from __future__ import annotations

import random

calls = 0
chance = random.Random(0)


def begin() -> None:
    """Reset the variables, as a new process would find them."""
    global calls
    calls = 0
    chance.seed(0)


def count() -> float:
    """Return a number that depends on all calls before."""
    global calls
    calls += 1
    return calls + chance.random()


COUNTS = {"by name": [count]}
