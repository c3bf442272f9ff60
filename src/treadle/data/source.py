"""Interface of loaders to the cursor: epochs that can be opened at any position."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Protocol

from treadle.data.amount import length_of

EXACT_REPLAY = "This is exact only if its items depend on nothing but the random state at its start"


class Source(Protocol):
    """Reader that opens the epochs of a loader at any position.

    Attributes:
        kind: ``"indexed"``, ``"stateful"``, ``"streamed"`` or ``"replayed"``; written into checkpoints.
        length: micro-batches in an epoch by the loader's ``len``, or None.
        exact: whether the length is exact, so that the last batch is known to be the last.
        counts_epochs: whether the state is kept between two epochs, too: the loader's next epoch depends on it.
    """

    kind: str
    length: int | None
    exact: bool
    counts_epochs: bool

    def open(self, *, skip: int, seed: int, state: Any, cut: bool = False) -> Iterator[Any]:
        """Open an epoch after ``skip`` micro-batches; ``state`` is the result of :meth:`state` at that position.

        Between two epochs, ``state`` is that of the previous epoch's end, or where a limit ``cut`` it.
        """
        ...

    def measure(self) -> None:
        """Update the length, since a data set may grow between two epochs."""
        ...

    def finish(self, iterator: Iterator[Any]) -> None:
        """Exhaust the loader after the last batch of an exact length, as a plain loop does."""
        ...

    def is_over_at(self, position: int) -> bool:
        """Return whether a StopIteration after ``position`` batches can be the end of the data."""
        ...

    def ids_at(self, position: int) -> Any:
        """Return what the batch at ``position`` was read with, or None; called once for each batch."""
        ...

    def state(self) -> Any:
        """Return the loader's own state as plain values, or None."""
        ...

    def warnings(self, *, resuming: bool) -> list[str]:
        """Return warnings about exact resume with this loader."""
        ...

    def close(self) -> None:
        """End background workers and threads."""
        ...


class FromStart:
    """Mixin of sources that open epochs at their start only: a length, and nothing by position."""

    loader: Any
    length: int | None
    counts_epochs = False

    def measure(self) -> None:
        """Update the length, since a data set may grow between two epochs."""
        self.length = length_of(self.loader)

    def finish(self, iterator: Iterator[Any]) -> None:
        """Do nothing: the length is not exact."""

    def is_over_at(self, position: int) -> bool:
        """Return True: the data may end anywhere."""
        return True

    def ids_at(self, position: int) -> Any:
        """Return None."""
        return None


def skipped(iterator: Iterator[Any], count: int) -> Iterator[Any]:
    """Return an iterator after ``count`` of its items were dropped."""
    for _ in itertools.islice(iterator, count):
        pass
    return iterator
