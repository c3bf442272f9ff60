"""Global order of an epoch, common to all ranks and divided into batches that the ranks share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from treadle.errors import ConfigError
from treadle.errors.arguments import check_least, checked
from treadle.seed import mix_seed

_CUTS = ("global_batch_size", "num_replicas", "drop_last")  # how an order is divided into batches


@checked
@dataclass(frozen=True)
class GlobalOrder:
    """Order of an epoch's samples, with the part that each rank reads of each batch.

    The order depends only on the seed and the epoch, so it is the same on any number of ranks. Batch t of all ranks is
    the next slice of it, and each rank takes a contiguous part of the slice; parts differ by at most one sample. So
    every sample is read once per epoch, by one rank, and all ranks have equally many batches.

    A last batch with fewer samples than ranks takes as many as it needs from the previous one. If both together have
    fewer than two samples per rank, they become one batch. Nothing is repeated or left out.

    An epoch may be resumed after ``start`` samples: the rest of the same order is then divided again, for any number of
    ranks and any batch size. If it has fewer samples than ranks, it has no batch.

    Attributes:
        num_samples: samples in an epoch, >= the number of ranks.
        global_batch_size: samples in a batch of all ranks together, >= the number of ranks.
        num_replicas: ranks that share the samples, >= 1.
        shuffle: whether to use a new order for each epoch; otherwise 0, 1, 2, ...
        seed: seeds the orders.
        drop_last: leave a short last batch out.

    Raises:
        ConfigError: a number is outside its range.

    Example:
        >>> order = GlobalOrder(num_samples=9, global_batch_size=4, num_replicas=2)
        >>> [[list(order.part(number, rank)) for rank in range(2)] for number in range(order.num_batches())]
        [[[0, 1], [2, 3]], [[4, 5], [6]], [[7], [8]]]
    """

    num_samples: int
    global_batch_size: int
    num_replicas: int = 1
    shuffle: bool = False
    seed: int = 0
    drop_last: bool = False

    def __post_init__(self) -> None:
        check_least(1, num_replicas=self.num_replicas)
        if self.global_batch_size < self.num_replicas:
            raise ConfigError(
                f"={self.global_batch_size}: must be at least 1 sample for each of the {self.num_replicas} ranks",
                argument="global_batch_size",
            )
        if self.num_samples < self.num_replicas and self.num_replicas > 1:
            raise ConfigError(
                f"the data set has {self.num_samples} samples and there are {self.num_replicas} ranks: every rank "
                "needs at least one sample; use fewer ranks, or give every rank all samples (num_replicas=1, rank=0)"
            )

    def num_batches(self, start: int = 0) -> int:
        """Return the number of batches of an epoch resumed after ``start`` samples."""
        whole, rest = divmod(self.num_samples - start, self.global_batch_size)
        if self.drop_last or rest == 0:
            return whole
        enough_for_two = self.global_batch_size + rest >= 2 * self.num_replicas
        return whole + 1 if rest >= self.num_replicas or (whole > 0 and enough_for_two) else whole

    def consumed(self, batches: int, start: int = 0) -> int:
        """Return how many samples of the order are consumed by ``batches`` batches after ``start``."""
        count = self.num_batches(start)
        batches = min(batches, count)
        end = start + batches * self.global_batch_size
        if self.drop_last or batches < count - 1 or count == 0:
            return end
        return self.num_samples if batches == count else min(end, self.num_samples - self.num_replicas)

    def part(self, number: int, rank: int, start: int = 0, *, count: int | None = None) -> range:
        """Return the positions in the order that a rank reads in batch ``number`` after ``start``.

        Args:
            number: 0-based batch number.
            rank: rank of the reader.
            start: samples consumed before the epoch was resumed.
            count: result of :meth:`num_batches`, if already known.
        """
        if (
            number < (self.num_batches(start) if count is None else count) - 2
        ):  # no short batch involved: the usual case, in each step
            begin = start + number * self.global_batch_size
            end = begin + self.global_batch_size
        else:
            begin, end = self.consumed(number, start), self.consumed(number + 1, start)
        size, extra = divmod(end - begin, self.num_replicas)
        first = begin + rank * size + min(rank, extra)
        return range(first, first + size + (rank < extra))

    def rows(self, epoch: int) -> Tensor | None:
        """Return the order of an epoch, (num_samples,) int64 on the CPU; None stands for 0, 1, 2, ..."""
        if not self.shuffle:
            return None
        return torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(mix_seed(self.seed, epoch)))

    def describe(self) -> dict[str, Any]:
        """Return the settings as plain values."""
        return asdict(self)

    def same_samples(self, saved: Mapping[str, Any]) -> bool:
        """Return whether the order matches a description, regardless of the batches."""
        aside = {*_CUTS, "start", "consumed"} if self.shuffle else {*_CUTS, "start", "consumed", "seed"}
        before = {name: value for name, value in saved.items() if name not in aside}
        return before == {name: value for name, value in self.describe().items() if name not in aside}

    def same_batches(self, saved: Mapping[str, Any]) -> bool:
        """Return whether the batches match a description, given that the order does."""
        return all(saved[name] == getattr(self, name) for name in _CUTS)


class InGlobalOrder(Protocol):
    """Loader or batch sampler with a global order of samples."""

    @property
    def order(self) -> GlobalOrder:
        """Order with its batch division."""
        ...

    def start_at(self, consumed: int) -> None:
        """Start the next pass after the first ``consumed`` samples of its epoch."""
        ...


def in_global_order(loader: Any) -> InGlobalOrder | None:
    """Return the object that gives a loader a global order, or None.

    Example:
        >>> in_global_order([1, 2]) is None
        True
    """
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        if owner is not None and isinstance(getattr(owner, "order", None), GlobalOrder):
            found: InGlobalOrder = owner
            return found
    return None


def check_batch_size(batch_size: int | None, global_batch_size: int | None, *, owner: str) -> None:
    """Raise unless exactly one size is given and it is at least 1.

    Raises:
        ConfigError: none or both are given, or the size is below 1.
    """
    if (batch_size is None) == (global_batch_size is None):
        raise ConfigError(
            f"{owner}: give exactly one of batch_size={batch_size} (of each rank) and "
            f"global_batch_size={global_batch_size} (of all ranks together)"
        )
    check_least(1, batch_size=batch_size)
