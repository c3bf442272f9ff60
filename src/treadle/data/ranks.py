"""Sharding of data over ranks: a batch sampler for map-style data sets, and every n-th item of other iterables."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

from torch.utils.data import IterableDataset, Sampler, get_worker_info

from treadle import distributed
from treadle.data.order import GlobalOrder, check_batch_size
from treadle.errors import ConfigError
from treadle.errors.arguments import checked

_T = TypeVar("_T")


class RankBatchSampler(Sampler[list[int]]):
    """Batch sampler that shards each batch over ranks: every sample once per epoch, equally many batches per rank.

    Pass it as ``batch_sampler`` to a ``DataLoader`` of torch or torch_geometric, for training and evaluation alike.
    :class:`GlobalOrder` documents the rule for a short last batch. No sample is repeated, so means and metrics over
    ranks equal those of one process. A run may continue with another number of ranks within an epoch: the rest of the
    epoch keeps its order, without lost or repeated samples.

    Args:
        data: a data set, or its number of samples.
        batch_size: samples in a batch of one rank, >= 1.
        global_batch_size: instead, samples in a batch over all ranks; independent of the number of ranks, and so is the
            number of steps per epoch.
        shuffle: whether to use a new order for each epoch, the same on all ranks.
        seed: seed of the orders; must be equal on all ranks.
        drop_last: leave a short last batch out.
        rank: rank of this reader, from 0; None takes that of the process group.
        num_replicas: number of readers that share the data; None takes all ranks of the process group, or 1 without
            one.

    Raises:
        ConfigError: not exactly one size is given, only one of ``rank`` and ``num_replicas`` is, or a number is
            outside its range.

    Example:
        >>> [list(RankBatchSampler(9, 2, rank=rank, num_replicas=2)) for rank in range(2)]
        [[[0, 1], [4, 5], [7]], [[2, 3], [6], [8]]]
    """

    @checked
    def __init__(
        self,
        data: Sized | int,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        num_replicas: int | None = None,
    ):
        check_batch_size(batch_size, global_batch_size, owner="RankBatchSampler")
        check_rank(rank, num_replicas)
        self.data = data
        self.batch_size = batch_size
        self.global_batch_size = global_batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self._rank = rank
        self._num_replicas = num_replicas
        self._start = 0

    @property
    def order(self) -> GlobalOrder:
        """Order with its batch division; computed each time, since a process group may be initialized later."""
        replicas = distributed.world_size() if self._num_replicas is None else self._num_replicas
        size = self.global_batch_size if self.batch_size is None else self.batch_size * replicas
        assert size is not None, "the constructor checks it"
        length = self.data if isinstance(self.data, int) else len(self.data)
        return GlobalOrder(length, size, replicas, self.shuffle, self.seed, self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order the next pass uses; called by the engine."""
        self.epoch = epoch
        self._start = 0

    def start_at(self, consumed: int) -> None:
        """Let the next pass give what follows the first ``consumed`` samples of its epoch."""
        self._start = consumed

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, the same on all ranks."""
        return self.order.num_batches()

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of each batch of this rank."""
        order, start = self.order, self._start
        rank = distributed.rank() if self._rank is None else self._rank
        rows = order.rows(self.epoch)
        for number in range(order.num_batches(start)):
            part = order.part(number, rank, start)
            yield list(part) if rows is None else rows[part.start : part.stop].tolist()


def check_rank(rank: int | None, num_replicas: int | None) -> None:
    """Raise unless both or none are given and they are consistent.

    Raises:
        ConfigError: one is missing, or the rank is not below the number of replicas.
    """
    if (rank is None) != (num_replicas is None):
        raise ConfigError(
            f"={rank} and num_replicas={num_replicas}: give both, or none to ask the process group", argument="rank"
        )
    if rank is not None and num_replicas is not None and not 0 <= rank < num_replicas:
        raise ConfigError(f"={rank}: must be from 0 to num_replicas - 1 = {num_replicas - 1}", argument="rank")


def rank_and_worker() -> tuple[int, int]:
    """Return index and number of readers, counting every worker of a loader on every rank.

    For your own iterable data sets: take item i if ``i % count == index``.

    Returns:
        (index, count), 0 <= index < count; (0, 1) in one process without workers.

    Example:
        >>> rank_and_worker()
        (0, 1)
    """
    return reader_of(*ranks_of())


def ranks_of() -> tuple[int, int]:
    """Return rank and number of ranks, also in a spawned worker, which has no process group."""
    if get_worker_info() is not None and not distributed.is_distributed():
        return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    return distributed.rank(), distributed.world_size()


def reader_of(rank: int, world_size: int) -> tuple[int, int]:
    """Return index and number of readers like :func:`rank_and_worker`, for a given rank."""
    info = get_worker_info()
    worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
    return rank * workers + worker, world_size * workers


class _Shard(IterableDataset[_T]):
    def __init__(self, iterable: Iterable[_T]):
        self.iterable = iterable
        self._of_main_process: tuple[int, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker has no process group, and not every launcher sets environment variables.
        return {**self.__dict__, "_of_main_process": self._of_main_process or ranks_of()}

    def __iter__(self) -> Iterator[_T]:
        index, count = reader_of(*(self._of_main_process or ranks_of()))
        return itertools.islice(self.iterable, index, None, count)


@checked
def shard_iterable(iterable: Iterable[_T]) -> IterableDataset[_T]:
    """Return a data set that yields every n-th item of an iterable on each rank and loader worker.

    Each of them iterates over the whole iterable, which must yield the same items in the same order everywhere, and
    skips the items of the others. If skipping items is costly, use :func:`rank_and_worker` to open different files in
    each.

    Args:
        iterable: picklable if the loader's workers are spawned; iterated again for each epoch.

    Example:
        >>> list(shard_iterable("abc"))
        ['a', 'b', 'c']
    """
    return _Shard(iterable)
