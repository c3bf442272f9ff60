"""Sweeps of settings: grids and random draws."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treadle.errors import ConfigError
from treadle.errors.arguments import is_whole_number
from treadle.seed import as_seed


def grid(**values: Iterable[Any]) -> list[dict[str, Any]]:
    """Return every combination of values, the last name varying fastest.

    Args:
        values: values by setting.

    Raises:
        ConfigError: a setting has no values, or a string in their place.

    Example:
        >>> grid(lr=[0.1, 0.01], seed=range(2))
        [{'lr': 0.1, 'seed': 0}, {'lr': 0.1, 'seed': 1}, {'lr': 0.01, 'seed': 0}, {'lr': 0.01, 'seed': 1}]
    """
    lists = {}
    for name, each in values.items():
        if isinstance(each, (str, bytes)) or not isinstance(each, Iterable):
            raise ConfigError(f"must be a list of values, such as [{each!r}]", argument=name, value=each)
        lists[name] = list(each)
        if not lists[name]:
            raise ConfigError("has no values; give at least one", argument=name, value=each)
    return [dict(zip(lists, row, strict=True)) for row in itertools.product(*lists.values())]


@dataclass(frozen=True)
class Uniform:
    """Uniform distribution of numbers between two bounds.

    Args:
        low: lower bound.
        high: upper bound.
        log: draw uniformly in the logarithm; both bounds must be above 0.
        whole: draw whole numbers, both bounds included.

    Raises:
        ConfigError: the bounds are not in order, or not above 0 with ``log``.

    Example:
        >>> Uniform(1e-4, 1e-1, log=True).draw(random.Random(0)) > 1e-4
        True
    """

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ConfigError(f"must be below high={self.high}", argument="low", value=self.low)
        if self.log and not self.low > 0:
            raise ConfigError("must be above 0 with log=True", argument="low", value=self.low)

    def draw(self, rng: random.Random) -> float:
        """Draw a number."""
        low, high = self.low, self.high + (1 if self.whole else 0)
        number = math.exp(rng.uniform(math.log(low), math.log(high))) if self.log else rng.uniform(low, high)
        return min(int(number), int(self.high)) if self.whole else min(max(number, self.low), self.high)


def draws(count: int, *, draw_seed: int = 0, **space: Uniform | Sequence[Any]) -> list[dict[str, Any]]:
    """Draw random settings; the first ones do not depend on ``count``.

    Args:
        count: number of draws, >= 1.
        draw_seed: seed of the draws, not of the runs.
        space: a :class:`Uniform` or a list of choices, by setting.

    Raises:
        ConfigError: ``count`` is below 1, or a setting has no values.

    Example:
        >>> draws(2, lr=Uniform(1e-4, 1e-1, log=True), width=[16, 32]) == draws(
        ...     3, lr=Uniform(1e-4, 1e-1, log=True), width=[16, 32])[:2]
        True
    """
    if not is_whole_number(count, 1):
        raise ConfigError("must be a whole number of settings, >= 1", argument="count", value=count)
    rng = random.Random(draw_seed)
    for name, values in space.items():
        if not isinstance(values, Uniform) and (isinstance(values, str) or not list(values)):
            raise ConfigError("must be a Uniform or a list of values", argument=name, value=values)
    return [
        {name: each.draw(rng) if isinstance(each, Uniform) else rng.choice(list(each)) for name, each in space.items()}
        for _ in range(count)
    ]


def with_seeds(settings: Sequence[Mapping[str, Any]], seeds: Iterable[int] | None) -> list[dict[str, Any]]:
    """Return settings with each seed in turn; None leaves them unchanged.

    Example:
        >>> with_seeds([{"lr": 0.1}], range(2))
        [{'lr': 0.1, 'seed': 0}, {'lr': 0.1, 'seed': 1}]
    """
    if seeds is None:
        return [dict(each) for each in settings]
    if isinstance(seeds, int):
        raise ConfigError(f"must be several whole numbers, such as range({seeds})", argument="seeds", value=seeds)
    given = [as_seed("seeds", seed) for seed in seeds]
    both = next((each for each in settings if "seed" in each), None)
    if both is not None:
        raise ConfigError(f": settings {both!r} have a seed already; give seeds in one of them", argument="seeds")
    return [{**each, "seed": seed} for each in settings or [{}] for seed in given]
