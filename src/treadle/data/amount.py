"""Amounts of batches: a number, or a fraction of an epoch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from treadle.errors import ConfigError
from treadle.errors.arguments import checked

Amount = int | float


def check_amount(amount: Any, argument: str) -> None:
    """Raise ConfigError unless the amount is None, a whole number >= 1, or a float in (0, 1]."""
    if amount is None or (type(amount) is int and amount >= 1) or (type(amount) is float and 0 < amount <= 1):
        return
    raise ConfigError(
        "must be a whole number of batches >= 1, or a float above 0 and up to 1, a fraction of an epoch",
        argument=argument,
        value=amount,
    )


def batches_in(amount: Amount, length: int | None, argument: str) -> int:
    """Return an amount as a number of batches.

    Args:
        amount: a number, or a fraction of ``length``.
        length: batches of an epoch, or None if unknown.
        argument: name of the amount, for the error.

    Raises:
        ConfigError: it is a fraction of an unknown length, or amounts to no batch.

    Example:
        >>> batches_in(3, None, "limit"), batches_in(0.5, 9, "limit")
        (3, 4)
    """
    if isinstance(amount, int):
        return amount
    if length is None:
        raise ConfigError(
            "a fraction of an epoch needs a loader with a length; give a number of batches",
            argument=argument,
            value=amount,
        )
    count = int(length * amount)
    if count == 0:
        raise ConfigError(
            f"gives no batch out of {length}; use a larger fraction, or a number of batches >= 1",
            argument=argument,
            value=amount,
        )
    return count


class FirstBatches:
    """First batches of a loader; other attributes are those of the loader.

    Args:
        loader: any iterable.
        amount: number of batches, or fraction of the loader.
        argument: name of the amount, for errors.

    Raises:
        ConfigError: it is a fraction of an unknown length, or amounts to no batch.

    Example:
        >>> list(FirstBatches([1, 2, 3], 2, "limit"))
        [1, 2]
    """

    def __init__(self, loader: Iterable[Any], amount: Amount, argument: str):
        self._loader = loader
        self._count = batches_in(amount, length_of(loader), argument)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._loader), self._count)

    def __len__(self) -> int:
        length = length_of(self._loader)
        return self._count if length is None else min(length, self._count)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def length_of(loader: Any) -> int | None:
    """Return the number of batches in an epoch of a loader, or None.

    Example:
        >>> length_of([1, 2]), length_of(iter([1, 2]))
        (2, None)
    """
    try:
        return len(loader)
    except Exception:  # noqa: BLE001  (some loaders know their length once they are iterated, and raise what they like)
        return None


@checked
def steps_per_epoch(loader: Any, accumulation: int = 1) -> int:
    """Return the optimizer steps of one epoch: ceil(len(loader) / accumulation).

    Args:
        loader: anything with a length, in micro-batches.
        accumulation: micro-batches per step, >= 1.

    Raises:
        ConfigError: ``accumulation`` is below 1.

    Example:
        >>> steps_per_epoch(range(7), accumulation=3)
        3
    """
    if not accumulation >= 1:
        raise ConfigError(
            "a step needs a whole number of micro-batches, >= 1", argument="accumulation", value=accumulation
        )
    return math.ceil(len(loader) / accumulation)
