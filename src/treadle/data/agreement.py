"""Agreement of ranks about their data: equal lengths before an epoch, and its end if a length is unknown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from treadle import distributed
from treadle.data.duplicates import fingerprint, repeated_by_ranks
from treadle.data.order import GlobalOrder, in_global_order
from treadle.errors import ConfigError

Coordination = Literal["equal", "unequal", "independent"]
_SETTINGS = (
    "num_samples", "global_batch_size", "num_replicas", "shuffle", "seed", "drop_last", "chunk_rows", "window_chunks",
)  # fmt: skip


@dataclass(frozen=True)
class Lengths:
    """Lengths that the ranks report for their loaders.

    Attributes:
        batches: micro-batches in an epoch for each rank; None for a loader without a length.
        certain: whether all lengths are exact, so that no rank can end earlier than the others expect.
        same_data: whether all ranks read the same samples.
    """

    batches: tuple[int | None, ...]
    certain: bool
    same_data: bool = False

    @property
    def common(self) -> int:
        """Number of micro-batches that every rank is certain to have."""
        return min(length or 0 for length in self.batches) if self.certain else 0

    def check_equal(self) -> None:
        """Raise on every rank if two ranks report different lengths.

        Raises:
            ConfigError: the lengths differ.

        Example:
            >>> try:
            ...     Lengths((5, 6), certain=True).check_equal()
            ... except ConfigError as error:
            ...     print(str(error)[:95])
            loader: the ranks have different numbers of micro-batches in an epoch: 5 on rank 0, 6 on rank 1
        """
        if len({length for length in self.batches if length is not None}) > 1:
            numbers = ", ".join(
                f"{'unknown' if n is None else n} on rank {rank}" for rank, n in enumerate(self.batches)
            )
            raise ConfigError(
                f"the ranks have different numbers of micro-batches in an epoch: {numbers}. Ranks with more would "
                "wait forever. Split the data with a treadle.data.RankBatchSampler, or drop the extra batches",
                argument="loader",
            )


class EpochAgreement:
    """Agreement of ranks on the length and the end of an epoch.

    Args:
        mode: ``"equal"``: epochs must have equally many micro-batches on all ranks; if a length is unknown, all end
            with the first to end. ``"unequal"``: the lengths are gathered, and may differ. ``"independent"``: nothing
            is gathered.

    Attributes:
        lengths: lengths reported by the ranks when the epoch was opened; None on one rank or if independent.
    """

    def __init__(self, mode: Coordination):
        self.mode = mode
        self.lengths: Lengths | None = None

    def open(self, loader: Any, length: int | None, *, exact: bool) -> list[str]:
        """Gather the length of the epoch on all ranks, before any of them begins it; collective.

        Args:
            loader: the loader of this rank.
            length: its number of micro-batches in an epoch, or None.
            exact: whether the length is exact.

        Returns:
            Warnings about samples that several ranks read.

        Raises:
            ConfigError: the ranks order their data differently, or must have equal lengths and do not.
        """
        self.lengths = None
        if self.mode == "independent" or distributed.world_size() == 1:
            return []
        ordered = in_global_order(loader)
        certain = exact or isinstance(loader, (list, tuple, range))
        order = None if ordered is None else ordered.order
        trains = self.mode == "equal"
        data = fingerprint(loader) if trains else 0
        self.lengths = lengths_of_ranks(length, certain=certain, order=order, data=data)
        if not trains:
            return []
        self.lengths.check_equal()
        return repeated_by_ranks(loader, same_data=self.lengths.same_data)

    @property
    def on_each_group(self) -> bool:
        """Whether some rank may end early, so that ranks must agree on each group."""
        return self.mode == "equal" and self.lengths is not None and not self.lengths.certain

    def smallest(self, count: int) -> int:
        """Return the smallest number of micro-batches that a rank has for a group; collective."""
        return -distributed.agree(-count)


def lengths_of_ranks(length: int | None, *, certain: bool, order: GlobalOrder | None, data: int = 0) -> Lengths:
    """Gather the lengths of every rank; collective.

    Args:
        length: micro-batches in an epoch of this rank's loader, or None.
        certain: whether the length is exact.
        order: the loader's global order, if it has one.
        data: a fingerprint of this rank's data; 0 if unknown.

    Raises:
        ConfigError: the ranks order their data differently.
    """
    settings = [0] * len(_SETTINGS) if order is None else [int(getattr(order, name, 0)) for name in _SETTINGS]
    own = [-1 if length is None else length, int(certain and length is not None), int(order is not None), data]
    rows = numbers_of_ranks([*own, *settings])
    _refuse_other_orders([row[4:] for row in rows if row[2]])
    batches = tuple(None if row[0] < 0 else row[0] for row in rows)
    same_data = all(row[3] == data != 0 for row in rows)
    return Lengths(batches, certain=all(row[1] for row in rows), same_data=same_data)


def _refuse_other_orders(rows: Sequence[Sequence[int]]) -> None:
    shared = [row for row in rows if row[2] > 1]  # an order that is not shared concerns one rank only
    for name, values in zip(_SETTINGS, zip(*shared, strict=True), strict=False):
        if len(set(values)) > 1:
            raise ConfigError(
                f"the ranks order their data differently: {name} is {sorted(set(values))}, but must be the same on "
                "all ranks, or samples are lost or repeated",
                argument="loader",
            )


def numbers_of_ranks(numbers: Sequence[int]) -> list[list[int]]:
    """Return the integers of every rank, in rank order; collective.

    Args:
        numbers: integers, equally many on all ranks; those >= 2**63 are reduced to their lower bits.

    Example:
        >>> numbers_of_ranks([1, 2])
        [[1, 2]]
    """
    own = [number & ((1 << 63) - 1) if number >= 0 else number for number in numbers]
    return distributed.gather_numbers(own, dtype=torch.int64)
