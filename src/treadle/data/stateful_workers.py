"""Per-batch seeding of workers in loaders that save the state of their data sets, like StatefulDataLoader.

Such a loader restores the position of each worker, but not its RNG. Its workers get a data set that seeds them before
each batch, with a number that is part of the state that the loader saves anyway.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from treadle.checkpoint.introspection import has_state
from treadle.data.indexed import seed_worker
from treadle.data.streamed import SeededStream, StatefulSeededStream, StreamInit
from treadle.seed import mix_seed


class SeededReads(Dataset[Any]):
    """Wrapper of a map-style data set with a separate seed for each batch of this worker.

    Args:
        dataset: the user's data set.
        seed: seed of the epoch.
    """

    def __init__(self, dataset: Any, seed: int):
        self.dataset = dataset
        self.seed = seed
        self.first = 0
        self._reads = 0

    @property
    def worker(self) -> int:
        """Index of the worker that holds this copy."""
        info = get_worker_info()
        return 0 if info is None else info.id

    def _seed(self) -> None:
        seed_worker(mix_seed(self.seed, self.worker, self._reads))
        self._reads += 1

    def __getitem__(self, index: Any) -> Any:
        """Read one item, which is a batch."""
        self._seed()
        return self.dataset[index]

    def __getitems__(self, index: Any) -> Any:
        """Read the items of a batch."""
        self._seed()
        getitems = getattr(self.dataset, "__getitems__", None)
        return getitems(index) if getitems else [self.dataset[i] for i in index]

    def __len__(self) -> int:
        return len(self.dataset)

    def state_dict(self) -> dict[str, Any]:
        """Return how many batches this worker has read, and the state of the user's data set if it has one."""
        return {
            "seed": self.seed,
            "reads": self._reads,
            "dataset": self.dataset.state_dict() if has_state(self.dataset) else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`, or a bare state of the user's data set."""
        if not {"seed", "reads", "dataset"} <= set(state):
            state = {"seed": self.seed, "reads": 0, "dataset": state}
        self.seed, self._reads = int(state["seed"]), int(state["reads"])
        if state["dataset"] is not None:
            self.dataset.load_state_dict(state["dataset"])


@contextlib.contextmanager
def seeded_workers(loader: Any, seed: int) -> Iterator[None]:
    """Make workers that a loader starts inside the block seed themselves before each batch.

    Args:
        loader: loader with state; loaders without workers, or other than a DataLoader, are not changed.
        seed: seed of the epoch.
    """
    if not seeds_workers(loader):
        yield
        return
    if loader.persistent_workers:
        drop_iterator(loader)  # its workers have the seed of another epoch
    dataset, init = loader.dataset, loader.worker_init_fn
    seeded: Any = SeededReads(dataset, seed)
    if isinstance(dataset, IterableDataset):
        kind = StatefulSeededStream if has_state(dataset) else SeededStream
        seeded = kind(dataset, batch_size=loader.batch_size, seeded=True)
        seeded.seed = seed
    # DataLoader refuses setattr after construction, but reads these two when it starts its workers.
    object.__setattr__(loader, "dataset", seeded)
    object.__setattr__(loader, "worker_init_fn", StreamInit(seeded, init))
    try:
        yield
    finally:
        object.__setattr__(loader, "dataset", dataset)
        object.__setattr__(loader, "worker_init_fn", init)


def seeds_workers(loader: Any) -> bool:
    """Return whether the workers of a stateful loader can be seeded per batch.

    Example:
        >>> seeds_workers(DataLoader([1.0]))
        False
    """
    return isinstance(loader, DataLoader) and loader.num_workers > 0 and _starts_workers_as_torchdata(loader)


def _starts_workers_as_torchdata(loader: Any) -> bool:
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        return False
    return isinstance(loader, StatefulDataLoader) and type(loader)._get_iterator is StatefulDataLoader._get_iterator


def drop_iterator(loader: Any) -> None:
    """End the iterator that a ``DataLoader`` keeps, with its workers."""
    iterator, loader._iterator = loader._iterator, None
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()
    if getattr(loader, "_initial_iter_for_state_dict", False):  # torchdata's __iter__ would reuse that iterator
        loader._initial_iter_for_state_dict = False


def drop_unread_iterator(loader: Any) -> None:
    """End the iterator created by torchdata's ``state_dict`` before the epoch was opened, which has drawn its seeds."""
    if getattr(loader, "_initial_iter_for_state_dict", False):
        state = loader.state_dict()
        entered = loader._iterator._num_yielded > 0  # in the middle of an epoch, from a state loaded by the user
        drop_iterator(loader)
        if entered:
            loader.load_state_dict(state)
