"""DataLoaders over stateful streams, resumed in the middle from the streams' own state.

Each worker of such a loader has a copy of the data set. The loader built here wraps that copy: it seeds Python, NumPy
and torch before each batch, and sends the state after the batch along with it. So a checkpoint holds the state after
the consumed batches, regardless of prefetching, and random augmentation does not depend on prefetching either.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from treadle.checkpoint.comparison import same
from treadle.checkpoint.introspection import has_state
from treadle.checkpoint.schema import to_plain
from treadle.data.amount import length_of
from treadle.data.indexed import Workers, seed_worker
from treadle.data.own_state import hidden_generators
from treadle.data.source import EXACT_REPLAY, FromStart, skipped
from treadle.errors import CheckpointError
from treadle.seed import mix_seed


def is_stateful_stream(dataset: Any) -> bool:
    """Return whether a stream has a state that may be its position: ``state_dict()`` without arguments.

    Example:
        >>> is_stateful_stream([1, 2])
        False
    """
    if not isinstance(dataset, IterableDataset) or not has_state(dataset):
        return False
    stateful: Any = dataset
    try:
        inspect.signature(stateful.state_dict).bind()
    except TypeError:  # those of litdata and mosaicml-streaming need numbers that only their loaders have
        return False
    except ValueError:  # no signature
        return True
    return True


class ResumableStream(IterableDataset[Any]):
    """Stream whose state is known to restore its position; others are tested."""


class SeededStream(IterableDataset[Any]):
    """Stream that is seeded before each batch, with a state that holds its position.

    It is iterated in a worker, or with 0 workers in the main process, where it does not seed.

    Args:
        dataset: the user's stream.
        batch_size: samples in a batch; None if each item is a batch.
        seeded: whether batches are seeded.

    Attributes:
        seed: of the epoch.
        start: initial states of all workers; empty starts from the beginning.
        first: the worker to be read first.
        tests_state: whether some samples are read a second time, to test that the state restores the position.
    """

    def __init__(self, dataset: Any, *, batch_size: int | None, seeded: bool):
        self.dataset = dataset
        self.batch_size = batch_size or 1
        self.seeded = seeded
        self.seed = 0
        self.start: list[Mapping[str, Any] | None] = []
        self.first = 0
        self.tests_state = False
        self.test: _StateTest | None = None
        self._reads = 0
        self._ended = False

    @property
    def worker(self) -> int:
        """Index of the worker that holds this copy, counted as at the start of the epoch; 0 in the main process."""
        info = get_worker_info()
        return 0 if info is None else (info.id + self.first) % info.num_workers

    def __iter__(self) -> Iterator[Any]:
        """Begin the epoch, or continue at the position in this worker's state."""
        worker = self.worker
        state = self.start[worker] if self.start else None
        self._reads, self._ended = (0, False) if state is None else (int(state["reads"]), bool(state["ended"]))
        self.test = _StateTest(self.dataset) if self.tests_state and worker == 0 and state is None else None
        if state is not None and not self._ended and state["dataset"] is not None:
            self.dataset.load_state_dict(to_plain(state["dataset"], "dataset"))
        iterator = iter(self.dataset)
        if state is not None and state.get("iterator") is not None and has_state(iterator):
            iterator.load_state_dict(to_plain(state["iterator"], "iterator"))
        self._iterator = iterator
        samples = self._samples(worker)
        return samples if has_state(self.dataset) or not has_state(iterator) else _StatefulPass(self, samples)

    def _samples(self, worker: int) -> Iterator[Any]:
        fresh = not self.start
        while not self._ended:
            if self.seeded and self._reads % self.batch_size == 0:
                seed_worker(mix_seed(self.seed, worker, self._reads // self.batch_size))
            before = None if self.test is None else Draws()
            try:
                sample = next(self._iterator)
            except StopIteration:
                if fresh:  # its state was loaded at the end of an epoch, whose empty rest this was: now comes the next
                    fresh, self._iterator = False, iter(self.dataset)
                    continue
                self._ended = True
                return
            fresh = False
            self._reads += 1
            if self.test is not None and before is not None:
                self.test.record(sample, before)
            yield sample

    def enter(self, state: Mapping[str, Any]) -> None:
        """Move a new pass to the position of a state, by the iterator's own state."""
        if "reads" not in state:
            state = {"reads": 0, "ended": False, "iterator": state}
        self._reads, self._ended = int(state["reads"]), bool(state["ended"])
        self.start = self.start or [state]
        self._iterator.load_state_dict(to_plain(state["iterator"], "iterator"))

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the sample that was given last."""
        iterator: Any = getattr(self, "_iterator", None)
        own = iterator is not self.dataset and has_state(iterator)
        return {
            "reads": self._reads,
            "ended": self._ended,
            "dataset": self.dataset.state_dict() if has_state(self.dataset) else None,
            "iterator": iterator.state_dict() if own else None,
        }

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_iterator"}


class StatefulSeededStream(SeededStream):
    """A :class:`SeededStream` for loaders that save the state of each worker's data set themselves."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of ``state_dict``, or a bare state of the data set, before the next iteration."""
        if "reads" not in state:
            state = {"reads": 0, "ended": False, "dataset": state}
        info = get_worker_info()
        self.start = [state] * (1 if info is None else info.num_workers)


class _StatefulPass:
    """Pass over a stream whose iterator, rather than the data set, holds the position."""

    def __init__(self, stream: SeededStream, samples: Iterator[Any]):
        self._stream = stream
        self._samples = samples

    def __iter__(self) -> _StatefulPass:
        return self

    def __next__(self) -> Any:
        return next(self._samples)

    def state_dict(self) -> dict[str, Any]:
        return self._stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._stream.enter(state)


class Draws:
    """State of the CPU's random generators at construction."""

    def __init__(self) -> None:
        self._states = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def restore(self) -> None:
        """Restore the generators."""
        random.setstate(self._states[0])
        np.random.set_state(self._states[1])
        torch.set_rng_state(self._states[2])


class _StateTest:
    """Test that a stream's state restores its position, by reading some samples from a copy too.

    Tests run after 1, 8, 64, ... samples, to find states that become wrong when an inner buffer is refilled.

    Attributes:
        problem: why the test failed; None if it passed or is not finished.
        finished: whether the first test is finished.
    """

    def __init__(self, dataset: Any):
        self._dataset = dataset
        self._copy: Any = None
        self._reads = 0
        self._next = 1
        self._last: Any = None  # state after the previous sample, while the current one is tested
        self.finished = False
        self.problem = shuffle_buffer_of_datasets(dataset)
        if self.problem is None:
            try:
                self._copy = copy.deepcopy(dataset)
            except Exception as error:  # noqa: BLE001  (a data set of any kind)
                self.problem = f"it cannot be copied to try it ({type(error).__name__})"

    def record(self, sample: Any, before: Draws) -> None:
        """Record a sample and the random state before it."""
        if self.problem is not None:
            return
        self._reads += 1
        if self._last is not None:
            after = Draws()
            try:
                self.problem = self._test_state(sample, before)
            except Exception as error:  # noqa: BLE001  (a data set of any kind)
                self.problem = f"loading it raises {type(error).__name__}"
            finally:
                after.restore()
            self.finished, self._last = True, None
        if self._reads == self._next:
            self._last, self._next = copy.deepcopy(self._dataset.state_dict()), self._next * 8

    def _test_state(self, sample: Any, before: Draws) -> str | None:
        after = f"after {self._reads - 1:,} samples"
        if _alike(self._dataset.state_dict(), self._last):
            return f"it is the same {after} and after one more"
        before.restore()
        self._copy.load_state_dict(self._last)
        again = next(iter(self._copy), None)
        return None if _alike(sample, again) else f"taken {after} and loaded, it does not give the next one"


def shuffle_buffer_of_datasets(dataset: Any) -> str | None:
    """Return why a ``datasets.IterableDataset`` with a shuffle buffer cannot be resumed; None for all others.

    Example:
        >>> shuffle_buffer_of_datasets([1, 2]) is None
        True
    """
    for stage in _stages_of_datasets(dataset, "BufferShuffledExamplesIterable"):
        return f"the {stage.buffer_size} samples in its shuffle buffer are in no state, and would be lost"
    return None


def _stages_of_datasets(dataset: Any, kind_name: str) -> Iterator[Any]:
    """Yield the parts of a ``datasets.IterableDataset`` that are instances of the library's classes."""
    library = sys.modules.get("datasets")
    if library is None or not isinstance(dataset, library.IterableDataset):
        return
    kind = getattr(library.iterable_dataset, kind_name, ())
    waiting: list[Any] = [getattr(dataset, "_ex_iterable", None)]
    while waiting:
        stage = waiting.pop()
        if isinstance(stage, kind):
            yield stage
        waiting += [stage.ex_iterable] if hasattr(stage, "ex_iterable") else getattr(stage, "ex_iterables", None) or []


def _problem_of_workers(loader: DataLoader[Any]) -> str | None:
    """Return why the states of a loader's workers cannot be loaded; None if no problem is known."""
    if loader.num_workers > 0 and not loader.in_order:
        return "batches come as workers finish them (in_order=False)"
    joined = _stages_of_datasets(loader.dataset, "VerticallyConcatenatedMultiSourcesExamplesIterable")
    if loader.num_workers > 1 and next(joined, None) is not None:
        # datasets 5.2 loads the state of a worker's share into the whole, whose list of sources is longer.
        return "datasets cannot load a worker's state of concatenated streams after the first epoch"
    return None


def _alike(one: Any, other: Any) -> bool:
    try:
        return same(one, other)
    except Exception:  # noqa: BLE001  (arrays, pictures: whatever a sample is)
        return pickle.dumps(one) == pickle.dumps(other)


@dataclass
class _BatchWithState:
    """Batch with the state of its worker after it."""

    batch: Any
    worker: int
    state: Any
    test_finished: bool
    problem: str | None

    def pin_memory(self) -> _BatchWithState:
        pinned = pin_memory(self.batch)  # type: ignore[no-untyped-call]
        return dataclasses.replace(self, batch=pinned)


class _StateCollate:
    """User's collate function, whose result is sent with the state of the stream."""

    def __init__(self, stream: SeededStream, collate: Callable[[Any], Any]):
        self.stream = stream
        self.collate = collate

    def __call__(self, samples: Any) -> _BatchWithState:
        batch, test = self.collate(samples), self.stream.test
        finished, problem = (False, None) if test is None else (test.finished, test.problem)
        state = None if problem is not None else self.stream.state_dict()
        return _BatchWithState(batch, self.stream.worker, state, finished, problem)


class StreamInit:
    """User's ``worker_init_fn``, called with the user's data set and worker index in ``get_worker_info()``."""

    def __init__(self, stream: Any, user_fn: Callable[[int], None] | None):
        self.stream = stream
        self.user_fn = user_fn

    def __call__(self, worker_id: int) -> None:
        """Set the worker's index as at the start of the epoch, seed it, and call the user's function."""
        info: Any = get_worker_info()
        worker = self.stream.worker
        # WorkerInfo refuses setattr; a data set selects its files by this index.
        object.__setattr__(info, "id", worker)
        object.__setattr__(info, "dataset", self.stream.dataset)
        self.stream.first = 0
        seed_worker(mix_seed(self.stream.seed, worker))
        if self.user_fn is not None:
            self.user_fn(worker)


class StreamSource(FromStart):
    """Source that opens the epochs of a DataLoader over a stateful stream at any position.

    Args:
        loader: the user's loader, which is neither changed nor iterated.

    Attributes:
        problem: why the stream cannot be resumed in the middle, or None.
    """

    kind = "streamed"
    exact = False

    def __init__(self, loader: DataLoader[Any]):
        self.loader = loader
        self.length = length_of(loader)
        self._num_workers = max(1, loader.num_workers)
        self.stream = SeededStream(loader.dataset, batch_size=loader.batch_size, seeded=loader.num_workers > 0)
        self.problem = _problem_of_workers(loader) or shuffle_buffer_of_datasets(loader.dataset)
        self._enters = isinstance(loader.dataset, ResumableStream)
        self._states: list[Any] = []
        self._next = 0
        self._workers = Workers()
        self._own = self._build_loader(loader)

    def _build_loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        settings: dict[str, Any] = {}
        if loader.num_workers > 0:  # not persistent: each epoch has a seed, which workers get at their start
            settings["prefetch_factor"] = loader.prefetch_factor
            settings["multiprocessing_context"] = loader.multiprocessing_context
            settings["in_order"] = loader.in_order
            settings["worker_init_fn"] = StreamInit(self.stream, loader.worker_init_fn)
        return DataLoader(
            self.stream,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
            num_workers=loader.num_workers,
            collate_fn=_StateCollate(self.stream, loader.collate_fn),
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            generator=loader.generator,
            pin_memory_device=loader.pin_memory_device,
            **settings,
        )

    def open(self, *, skip: int, seed: int, state: Any, cut: bool = False) -> Iterator[Any]:
        """Open an epoch at the position of ``state``, or at its start and drop ``skip`` batches.

        Raises:
            CheckpointError: the state has another number of workers.
        """
        state = state if skip else None
        states = [] if state is None else list(state["workers"])
        if states and len(states) != self._num_workers:
            raise CheckpointError(
                f"the stream's state was saved with num_workers={len(states)} and cannot be loaded with "
                f"num_workers={self._num_workers}: keep the number"
            )
        self.stream.seed, self.stream.start = seed, states
        self.stream.first = self._next = 0 if state is None else int(state["next"])
        self.stream.tests_state = not self._enters and not states and self.problem is None
        self._states = states or [None] * self._num_workers
        self._enters = self._enters or bool(states)
        batches = self._batches(self._workers.of(iter(self._own)))
        return skipped(batches, skip) if state is None else batches

    def _batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for sent in iterator:
            self._enters = self._enters or (sent.test_finished and sent.problem is None)
            self.problem = self.problem or sent.problem
            self._states[sent.worker] = sent.state
            self._next = (sent.worker + 1) % self._num_workers
            yield sent.batch

    def state(self) -> dict[str, Any] | None:
        """Return the position after the last batch; None if it is known only as a count."""
        if not self._enters or self.problem is not None:
            return None
        return {"workers": to_plain(self._states, "data.loader"), "next": self._next}

    def warnings(self, *, resuming: bool) -> list[str]:
        """Return warnings about exact resume with this stream."""
        sentences = hidden_generators(self.loader)
        name = type(self.loader.dataset).__name__
        if self.problem is not None:
            sentences.append(
                f"the stream {name} cannot be entered in the middle by its state_dict: {self.problem}. A resume "
                "replays its epoch from the start, reads the consumed batches again and drops them. "
                f"{EXACT_REPLAY}; treadle.data.ShardedStream and a treadle.data.ShuffleBuffer around a stream that "
                "is not shuffled itself are entered where they are"
            )
        return sentences

    def close(self) -> None:
        """End the workers."""
        self._workers.end()
