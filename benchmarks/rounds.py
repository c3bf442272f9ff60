"""Alternating measurement of several ways, so that other load on the machine affects all of them."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Key = TypeVar("Key")
Figure = TypeVar("Figure")


@dataclass
class Rounds(Generic[Key, Figure]):
    """Ways to measure in rounds, each built and warmed up at its first turn; one that fails is reported and dropped.

    Attributes:
        ways: the builder of each way.
        measure: takes the built object and the number of the round; round 0, the warm-up, does not count.
        built: the ways built so far.
        figures: the figures of each way, one per round.
        failed: why a way has no more rounds.
    """

    ways: Mapping[Key, Callable[[], Any]]
    measure: Callable[[Any, int], Figure]
    built: dict[Key, Any] = field(default_factory=dict)
    figures: dict[Key, list[Figure]] = field(default_factory=dict)
    failed: dict[Key, str] = field(default_factory=dict)

    def play(self, num_rounds: int) -> Iterator[tuple[Key, Figure | None]]:
        """Run every way in each round; yield it with its figure, which is None if it failed.

        The first round has the order of ``ways``, so that slow builds can come last; the others have a random order.
        """
        draw = random.Random(0)
        for number in range(1, num_rounds + 1):
            for key in draw.sample(list(self.ways), len(self.ways)) if number > 1 else self.ways:
                if key not in self.failed:
                    yield key, self._turn(key, number)

    def _turn(self, key: Key, number: int) -> Figure | None:
        try:
            if key not in self.built:
                self.built[key] = self.ways[key]()
                self.measure(self.built[key], 0)
            figure = self.measure(self.built[key], number)
        except Exception as error:  # noqa: BLE001  # the other ways continue
            self.failed[key] = f"{type(error).__name__}: {error}"
            print(f"{key}: {self.failed[key]}", file=sys.stderr, flush=True)
            return None
        self.figures.setdefault(key, []).append(figure)
        return figure


def exit_if_failed(failed: bool) -> None:
    """Exit with status 1 if a way failed, after its table is written."""
    if failed:
        sys.exit("a way failed: see above")
