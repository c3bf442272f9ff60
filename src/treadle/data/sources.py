"""Interface to four kinds of loaders: known index lists, own state of a loader or of a stream, and replay."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from treadle.checkpoint.introspection import has_state, is_user_object
from treadle.data.amount import length_of
from treadle.data.indexed import IndexedSource, Workers, draw_worker_seed, has_known_order
from treadle.data.own_state import hidden_generators, unrepeatable_shuffles
from treadle.data.read_ahead import checked_to_resume, warning_of_drawing_threads
from treadle.data.rows import RowLoader
from treadle.data.samplers import samplers_of
from treadle.data.samples import refuse_single_graphs
from treadle.data.source import EXACT_REPLAY, FromStart, Source, skipped
from treadle.data.stateful_workers import drop_iterator, drop_unread_iterator, seeded_workers, seeds_workers
from treadle.data.streamed import StreamSource, is_stateful_stream
from treadle.data.transfer import TransferLoader, TransferredSource
from treadle.errors import ConfigError
from treadle.seed import RngState


class _Stateful:
    kind = "stateful"

    def __init__(self, loader: Any):
        self.loader = loader
        self.length = length_of(loader)
        certain = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        certain = (certain and has_known_order(loader)) or getattr(loader, "exact_length", False)
        self.exact = self.length is not None and certain
        self._ids = loader.last_ids if isinstance(loader, RowLoader) else None
        self.counts_epochs = not isinstance(loader, (RowLoader, DataLoader))  # their epochs come from elsewhere
        self._workers = Workers()
        self._proved = False
        # The state of such a sampler may be that of its pass rather than its position, and the loader would load it
        # there.
        self._replays = isinstance(loader, DataLoader) and any(map(_is_users_with_state, samplers_of(loader)))

    def open(self, *, skip: int, seed: int, state: Any, cut: bool = False) -> Iterator[Any]:
        if skip and state is not None and not self._replays:
            self.loader.load_state_dict(state)
            with _without_restart(self.loader), seeded_workers(self.loader, seed):
                return self._workers.of(iter(self.loader))
        if state is not None and self.counts_epochs:
            self._pass_the_end(state, cut=cut)
        drop_unread_iterator(self.loader)
        if isinstance(self.loader, RowLoader):
            self.loader.pass_over(skip)
            return iter(self.loader)
        if seeds_workers(self.loader):
            with seeded_workers(self.loader, seed):
                return skipped(self._workers.of(iter(self.loader)), skip)
        _draw_for_running_workers(self.loader)
        iterator = skipped(self._workers.of(iter(self.loader)), skip)
        if skip or self._proved:
            return iterator
        self._proved = True
        watch = checked_to_resume if is_user_object(self.loader) else warning_of_drawing_threads
        return watch(self.loader, iterator)

    def _pass_the_end(self, state: Any, *, cut: bool) -> None:
        """Load the state of an epoch's end and iterate over the end, unless the loader begins the next epoch there.

        A batch after the end is the first of the next epoch, or the next one of an epoch that was cut, to be dropped.
        """
        before = RngState.capture()
        self.loader.load_state_dict(state)
        with _without_restart(self.loader):
            if next(iter(self.loader), None) is not None and not cut:
                self.loader.load_state_dict(state)
        before.restore()

    def measure(self) -> None:
        self.length = length_of(self.loader)

    def finish(self, iterator: Iterator[Any]) -> None:
        next(iterator, None)

    def is_over_at(self, position: int) -> bool:
        return True

    def ids_at(self, position: int) -> Any:
        return self._ids() if self._ids is not None else None

    def state(self) -> Any:
        return self.loader.state_dict()

    def close(self) -> None:
        self._workers.end()
        _end_persistent_workers(self.loader)

    def warnings(self, *, resuming: bool) -> list[str]:
        if resuming and self._replays:
            return [
                f"the sampler of this {type(self.loader).__name__} keeps state: the epoch is replayed from its "
                "start, and the consumed batches are read again and dropped; a plain DataLoader skips them"
            ]
        if resuming and getattr(self.loader, "num_workers", 0) > 0 and not seeds_workers(self.loader):
            return [
                f"{type(self.loader).__name__} restores its position but not the random state of its workers: "
                "random augmentation in workers is not exact after a resume; a plain DataLoader is"
            ]
        return []


class _Replayed(FromStart):
    kind = "replayed"
    exact = False

    def __init__(self, loader: Iterable[Any]):
        self.loader = loader
        self.length = length_of(loader)
        self.one_shot = isinstance(loader, Iterator)
        self._watched = False
        self._workers = Workers()

    def open(self, *, skip: int, seed: int, state: Any, cut: bool = False) -> Iterator[Any]:
        _draw_for_running_workers(self.loader)
        iterator = skipped(self._workers.of(iter(self.loader)), skip)
        if skip or self._watched or self.one_shot:
            return iterator
        self._watched = True
        return warning_of_drawing_threads(self.loader, iterator)

    def state(self) -> Any:
        return None

    def close(self) -> None:
        self._workers.end()
        _end_persistent_workers(self.loader)

    def warnings(self, *, resuming: bool) -> list[str]:
        name = type(self.loader).__name__
        if self.one_shot:
            return [
                f"the data comes from a {name}, which can be iterated only once: there is one epoch and no exact "
                "resume; pass an iterable that returns a new iterator each time"
            ]
        sentences = hidden_generators(self.loader) + unrepeatable_shuffles(self.loader)
        if resuming and type(self.loader) not in (list, tuple, range):  # replay does not change these
            sentences.append(
                f"a {name} cannot resume inside an epoch: the epoch is replayed from the start and the consumed "
                f"batches are read again and dropped. {EXACT_REPLAY}"
                + (
                    "; its persistent workers keep their random state from epoch to epoch, which a resume cannot "
                    "restore"
                    if _keeps_workers(self.loader)
                    else ""
                )
            )
        return sentences


def _is_users_with_state(sampler: Any) -> bool:
    return has_state(sampler) and type(sampler).__module__.partition(".")[0] not in ("torch", "torchdata")


@contextlib.contextmanager
def _without_restart(loader: Any) -> Iterator[None]:
    """Keep a loader with a state at the end of an epoch from starting the next one, as ``torchdata.nodes`` would."""
    restarts = getattr(loader, "restart_on_stop_iteration", None) is True
    if restarts:
        loader.restart_on_stop_iteration = False
    try:
        yield
    finally:
        if restarts:
            loader.restart_on_stop_iteration = True


def _keeps_workers(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and loader.persistent_workers


def _draw_for_running_workers(loader: Any) -> None:
    """Make the draws that torch omits when persistent workers begin another epoch, as new workers would.

    These are an extra iterator of the sampler (torchdata's samplers draw when creating one) and a seed of workers.
    """
    if _keeps_workers(loader) and getattr(loader, "_iterator", None) is not None:
        iter(loader._index_sampler)
        draw_worker_seed(getattr(loader, "generator", None))


def _end_persistent_workers(loader: Any) -> None:
    """End persistent workers of the loader."""
    if isinstance(loader, DataLoader) and hasattr(loader._iterator, "_shutdown_workers"):
        drop_iterator(loader)


def refuse_dataset(loader: Any, argument: str = "loader") -> None:
    """Raise ConfigError for a data set or list of single samples, a tensor or a tuple of tensors, instead of batches.

    Args:
        loader: the user's argument.
        argument: name of the argument.
    """
    if isinstance(loader, Dataset) and not hasattr(type(loader), "__iter__"):
        raise ConfigError(
            f"a {type(loader).__name__} is a data set, whose items are single samples, not batches; pass "
            "DataLoader(dataset, batch_size=..., shuffle=True), with batch_size=None if its items are batches",
            argument=argument,
        )
    refuse_single_graphs(loader, argument)
    if isinstance(loader, Mapping):
        raise ConfigError("is a dict, whose keys would be taken for batches; pass one loader", argument=argument)
    if isinstance(loader, (Tensor, np.ndarray)) and loader.ndim <= 2:
        raise ConfigError(
            f"is a {type(loader).__name__} of shape {tuple(loader.shape)}, and each row would be taken for a batch; "
            "pass DataLoader(TensorDataset(...), batch_size=...), or a TensorLoader",
            argument=argument,
        )
    if isinstance(loader, tuple) and len(loader) > 1 and all(isinstance(item, Tensor) and item.ndim for item in loader):
        shapes = [tuple(item.shape) for item in loader]
        if len({shape[0] for shape in shapes}) == 1 < len(set(shapes)):  # equal shapes may be batches
            raise ConfigError(
                f"a tuple of tensors of shapes {', '.join(map(str, shapes))}: each of them would be taken for a batch; "
                "pass DataLoader(TensorDataset(...), batch_size=..., shuffle=True) over the rows of all",
                argument=argument,
            )


def _iterates_like_torch(loader: Any) -> bool:
    """Return whether a DataLoader iterates like torch's class, so that one rebuilt from its parts is equivalent.

    Example:
        >>> _iterates_like_torch(DataLoader([1.0]))
        True
    """
    return all(
        getattr(type(loader), name) is getattr(DataLoader, name) and name not in vars(loader)
        for name in ("__iter__", "_get_iterator", "_index_sampler", "_auto_collation")
    )


def _refuse_sample_counts(loader: Any) -> None:
    """Raise ConfigError for a loader or a stream whose state is a sample count that does not determine their order.

    These are litdata and mosaicml-streaming: the ``state_dict`` of their data sets needs numbers from their own
    loaders.
    """
    dataset = getattr(loader, "dataset", None)
    named = callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None))
    if not named or not isinstance(dataset, IterableDataset) or is_stateful_stream(dataset):
        return
    if hasattr(dataset, "next_epoch"):  # mosaicml-streaming
        raise ConfigError(
            f"{type(dataset).__name__} counts its epochs in memory that processes share, which no checkpoint holds: "
            "after a resume the samples would come in another order. Read it by index, from a map-style data set "
            "whose __getitem__ calls its own, or use treadle.data.ShardedStream",
            argument="loader",
        )
    if hasattr(loader, "state_dict"):
        raise ConfigError(
            f"the state of a {type(loader).__name__} counts samples, so a resume gives different batches; use "
            f"torch.utils.data.DataLoader over the same {type(dataset).__name__}: its epoch is replayed exactly",
            argument="loader",
        )


def open_source(loader: Any) -> Source:
    """Return the source for a loader.

    Args:
        loader: a DataLoader, a loader with ``state_dict``/``load_state_dict``, any iterable, or one of these in a
            TransferLoader.

    Raises:
        ConfigError: it is not iterable, or is a data set of single samples.

    Example:
        >>> open_source([1, 2]).kind
        'replayed'
    """
    if isinstance(loader, TransferLoader):
        return TransferredSource(open_source(loader.loader), loader)
    refuse_dataset(loader)
    _refuse_sample_counts(loader)
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return _Stateful(loader)
    map_style = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if map_style and _iterates_like_torch(loader) and hasattr(loader.dataset, "__getitem__"):
        return IndexedSource(loader)
    if isinstance(loader, DataLoader) and _iterates_like_torch(loader) and is_stateful_stream(loader.dataset):
        return StreamSource(loader)
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise ConfigError(
            f"a {type(loader).__name__} is not iterable; pass a DataLoader or another iterable of batches",
            argument="loader",
        )
    return _Replayed(loader)
