"""Map-style data sets behind a DataLoader: index lists are known, so resuming skips lists instead of data.

The loader built here runs the user's data set, batch sampler and collate function. It differs in three ways:

* consumed index lists are skipped in the batch sampler, so nothing is read for them;
* with workers, each index list carries a seed, with which the worker seeds Python, NumPy and torch before reading. So
random augmentation is independent of the number of workers, prefetching and ``persistent_workers``. With 0 workers
items draw from the main RNG, as in a plain loop;
* a resumed epoch sends each list to the worker that reads it in an epoch from the start, so that items may depend on
``get_worker_info().id``.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from treadle.data.amount import length_of
from treadle.data.own_state import WatchedState, hidden_generators
from treadle.data.ranks import RankBatchSampler
from treadle.data.samples import unjoined
from treadle.seed import RngState, mix_seed

# These draw from the global RNG only when opened, never while running, and their length is exact. By type: a subclass
# may do anything.
_KNOWN = (
    DistributedSampler,
    RandomSampler,
    RankBatchSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    list,
    tuple,
    range,
)


def has_known_order(loader: Any) -> bool:
    """Return whether a DataLoader's order comes from torch's own samplers, whose behaviour is known."""
    lists = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    inner = lists.sampler if type(lists) is BatchSampler else lists
    return type(inner) in _KNOWN


class _SeededIndex:
    """Index (list) that the batch sampler sends to a worker, with a seed."""

    def __init__(self, index: Any, seed: int):
        self.index = index
        self.seed = seed


class _SeededDataset(Dataset[Any]):
    """Wrapper of the user's data set that seeds with the index's seed before reading; used in workers only.

    None in place of an index reads nothing: it skips the turn of this worker.
    """

    def __init__(self, dataset: Any, watch: WatchedState):
        self.dataset = dataset
        self._watch = watch

    def __getitem__(self, index: _SeededIndex | None) -> Any:
        if index is None:
            return None
        seed_worker(index.seed)
        with self._watch.reading():
            return self.dataset[index.index]

    def __getitems__(self, index: _SeededIndex | None) -> Any:
        if index is None:
            return None
        seed_worker(index.seed)
        getitems = getattr(self.dataset, "__getitems__", None)
        with self._watch.reading():
            return getitems(index.index) if getitems else [self.dataset[i] for i in index.index]

    def __len__(self) -> int:
        return len(self.dataset)


class _WatchedCollate:
    """The user's collate function in a worker."""

    def __init__(self, collate: Callable[[Any], Any], watch: WatchedState):
        self.collate = collate
        self._watch = watch

    def __call__(self, rows: Any) -> Any:
        if rows is None:
            return None
        try:
            batch = self.collate(rows)
        except (TypeError, RuntimeError) as error:
            if self.collate is not default_collate or not isinstance(rows, list):
                raise
            raise unjoined(error, rows) from error
        self._watch.compare()
        return batch


def seed_worker(seed: int) -> None:
    """Seed Python, NumPy and torch on the CPU in a worker."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


class _WorkerInit:
    """Wrapper of the user's ``worker_init_fn`` that puts the user's data set into ``get_worker_info()``."""

    def __init__(self, user_fn: Callable[[int], None] | None):
        self.user_fn = user_fn

    def __call__(self, worker_id: int) -> None:
        info: Any = get_worker_info()
        # WorkerInfo refuses setattr, but user code must find its data set here, not the seeding wrapper.
        object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.user_fn is not None:
            self.user_fn(worker_id)


class _EpochFeed:
    """Iterator over the index lists of one epoch."""

    def __init__(self, lists: Iterable[Any], *, skip: int, seed: int | None, watch: bool, turns: int = 0):
        # Opened eagerly: a sampler may draw here, and in a plain loop this precedes the loader's own draw.
        self._lists = iter(lists)
        self._skip = skip
        self._number = 0
        self._seed = seed
        self._watch = watch
        self._turns = turns  # worker turns to skip, so that the next list goes to the right worker
        self._handed_out: deque[tuple[int, Any]] = deque()  # lists whose batch was not queried yet
        self.exhausted = False
        self.draws_while_running = False

    def __iter__(self) -> _EpochFeed:
        return self

    def prime(self) -> None:
        """Skip the consumed lists; must run under the RNG of the epoch's opening."""
        while self._number < self._skip and not self.exhausted:
            self._draw()

    def _draw(self) -> Any:
        try:
            index = next(self._lists)
        except StopIteration:
            self.exhausted = True
            return None
        self._number += 1
        return index

    def ids_at(self, number: int) -> Any:
        """Return the index list of batch ``number`` and drop earlier ones, so that only the prefetch is kept."""
        while self._handed_out:
            drawn, index = self._handed_out.popleft()
            if drawn == number:
                return index
        return None

    def is_over_at(self, position: int) -> bool:
        """Return whether all lists were drawn and they yield exactly ``position`` batches."""
        return self.exhausted and self._number <= position

    def __next__(self) -> Any:
        self.prime()
        if self._turns:
            self._turns -= 1
            return None
        before = RngState.capture() if self._watch and self._number > 0 else None
        number = self._number
        index = self._draw()
        if self.exhausted:
            raise StopIteration
        if before is not None and _moved(before):
            self.draws_while_running, self._watch = True, False
        self._handed_out.append((number, index))
        return index if self._seed is None else _SeededIndex(index, mix_seed(self._seed, number))


def _moved(before: RngState) -> bool:
    after = RngState.capture()
    same_numpy = before.numpy[2] == after.numpy[2] and np.array_equal(before.numpy[1], after.numpy[1])
    return not (before.python == after.python and same_numpy and torch.equal(before.torch, after.torch))


def draw_worker_seed(generator: torch.Generator | None) -> None:
    """Make the draw that torch omits when persistent workers begin another epoch.

    Persistent workers are not reseeded, while those of a resumed run start and are seeded. Drawing in both cases keeps
    the random stream the same whether an epoch is reached or resumed.
    """
    torch.empty((), dtype=torch.int64).random_(generator=generator)


class Workers:
    """Workers of a loader's last pass, ended on request.

    Left to garbage collection, each pair of persistent workers can take ten seconds to end; those of a failed pass live
    as long as the error's traceback.

    Example:
        >>> workers = Workers()
        >>> next(workers.of(iter(DataLoader([1.0], num_workers=1))))
        tensor([1.], dtype=torch.float64)
        >>> workers.end()
    """

    def __init__(self) -> None:
        self._pass: Callable[[], Any] = lambda: None

    def of(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Return a pass and track its workers from now on."""
        self._pass = weakref.ref(iterator) if hasattr(iterator, "_shutdown_workers") else lambda: None
        return iterator

    def end(self) -> None:
        """End the workers, if any; a no-op the second time."""
        iterator = self._pass()
        if iterator is not None:
            iterator._shutdown_workers()


class _IndexFeed:
    """User's batch sampler (or sampler, without batching) that can start in the middle."""

    def __init__(self, lists: Any, *, seeded: bool, watch: bool):
        self.lists = lists
        self.seeded = seeded
        self.watch = watch
        self.skip = 0
        self.turns = 0
        self.seed = 0
        self.workers_are_running = False
        self.generator: torch.Generator | None = None
        self.current: _EpochFeed | None = None

    def __iter__(self) -> Iterator[Any]:
        seed = self.seed if self.seeded else None
        self.current = _EpochFeed(self.lists, skip=self.skip, seed=seed, watch=self.watch, turns=self.turns)
        if self.workers_are_running:
            draw_worker_seed(self.generator)
        return self.current

    def __len__(self) -> int:
        return len(self.lists)


class IndexedSource:
    """Source that opens the epochs of a map-style DataLoader at any position.

    Args:
        loader: the user's loader, which is neither changed nor iterated.
    """

    kind = "indexed"
    counts_epochs = False

    def __init__(self, loader: DataLoader[Any]):
        self.loader = loader
        self.length = length_of(loader)
        batched = loader.batch_sampler is not None
        lists = loader.batch_sampler if batched else loader.sampler
        self._seeded = loader.num_workers > 0
        known = has_known_order(loader)
        self.exact = self.length is not None and known
        self.feed = _IndexFeed(lists, seeded=self._seeded, watch=not known and not self._seeded)
        self.feed.generator = loader.generator
        self._watch = WatchedState({"dataset": loader.dataset, "collate_fn": loader.collate_fn})
        self._own = self._build_loader(loader, batched=batched)
        self._workers = Workers()

    def _build_loader(self, loader: DataLoader[Any], *, batched: bool) -> DataLoader[Any]:
        dataset: Any = _SeededDataset(loader.dataset, self._watch) if self._seeded else loader.dataset
        settings: dict[str, Any] = (
            {"batch_sampler": self.feed} if batched else {"sampler": self.feed, "batch_size": None}
        )
        if self._seeded:
            settings["prefetch_factor"] = loader.prefetch_factor
            settings["persistent_workers"] = loader.persistent_workers
            settings["multiprocessing_context"] = loader.multiprocessing_context
            settings["in_order"] = loader.in_order
        return DataLoader(
            dataset,
            num_workers=loader.num_workers,
            collate_fn=_WatchedCollate(loader.collate_fn, self._watch) if self._seeded else loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=_WorkerInit(loader.worker_init_fn) if self._seeded else loader.worker_init_fn,
            generator=loader.generator,
            pin_memory_device=loader.pin_memory_device,
            **settings,
        )

    def open(self, *, skip: int, seed: int, state: Any, cut: bool = False) -> Iterator[Any]:
        """Open an epoch after ``skip`` micro-batches, under the RNG of the epoch's opening."""
        self.feed.skip, self.feed.seed = skip, seed
        self.feed.turns = skip % self._own.num_workers if self._seeded and self._own.in_order else 0
        iterator = self._workers.of(iter(self._own))
        self._watch.stop()  # copies in workers that start later need not check again
        self.feed.workers_are_running = self._own.persistent_workers
        if skip and self.feed.current is not None:
            self.feed.current.prime()
        for _ in range(self.feed.turns):
            next(iterator)
        return iterator

    def measure(self) -> None:
        """Update the length, since a data set may grow between two epochs."""
        self.length = length_of(self.loader)

    def finish(self, iterator: Iterator[Any]) -> None:
        """Exhaust the sampler, as a plain loop does: its generator may advance once more."""
        for _ in self.feed.current or ():
            raise RuntimeError(f"the sampler of {self.feed.lists!r} yields more than its length")

    def is_over_at(self, position: int) -> bool:
        """Return whether the epoch has no more than ``position`` batches."""
        return self.feed.current is not None and self.feed.current.is_over_at(position)

    def ids_at(self, position: int) -> Any:
        """Return the index list of the batch at ``position``; None if workers may reorder batches."""
        return self.feed.current.ids_at(position) if self.feed.current is not None and self._own.in_order else None

    def state(self) -> Any:
        """Return whether batches are seeded, as they are in workers."""
        return {"seeded": self._seeded}

    def warnings(self, *, resuming: bool) -> list[str]:
        """Return warnings about exact resume with this loader."""
        sentences = hidden_generators(self.loader)
        if not self._own.in_order:
            sentences.append("in_order=False: batches come as workers finish them, so no run can be repeated exactly")
        if self.feed.current is not None and self.feed.current.draws_while_running:
            sentences.append(
                "the sampler draws from the global RNG between batches, so a resume inside an epoch cannot reproduce "
                "its order; give the sampler its own generator"
            )
        return sentences

    def close(self) -> None:
        """End the workers."""
        self._workers.end()
        self._own._iterator = None
        self.feed.workers_are_running = False
