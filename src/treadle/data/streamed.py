"""DataLoaders over stateful streams, resumed in the middle from the streams' own state.

Each worker of such a loader has a copy of the data set. The loader built here wraps that copy: it seeds Python, NumPy
and torch before each batch, and sends the state after the batch along with it. So a checkpoint holds the state after
the consumed batches, regardless of prefetching, and random augmentation does not depend on prefetching either.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from treadle.checkpoint.introspection import has_state
from treadle.checkpoint.schema import to_plain
from treadle.data.amount import length_of
from treadle.data.indexed import Workers, seed_worker
from treadle.data.own_state import hidden_generators
from treadle.data.source import EXACT_REPLAY, FromStart, skipped
from treadle.data.stream_check import CpuRngState, StreamCheck, shuffle_buffer_of_datasets, stages_of_datasets
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
        checks_state: whether some samples are read a second time, to test that the state restores the position.
    """

    def __init__(self, dataset: Any, *, batch_size: int | None, seeded: bool):
        self.dataset = dataset
        self.batch_size = batch_size or 1
        self.seeded = seeded
        self.seed = 0
        self.start: list[Mapping[str, Any] | None] = []
        self.first = 0
        self.checks_state = False
        self.check: StreamCheck | None = None
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
        self.check = StreamCheck(self.dataset) if self.checks_state and worker == 0 and state is None else None
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
            before = None if self.check is None else CpuRngState()
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
            if self.check is not None and before is not None:
                self.check.record(sample, before)
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


def _problem_of_workers(loader: DataLoader[Any]) -> str | None:
    """Return why the states of a loader's workers cannot be loaded; None if no problem is known."""
    if loader.num_workers > 0 and not loader.in_order:
        return "batches come as workers finish them (in_order=False)"
    joined = stages_of_datasets(loader.dataset, "VerticallyConcatenatedMultiSourcesExamplesIterable")
    if loader.num_workers > 1 and next(joined, None) is not None:
        # datasets 5.2 loads the state of a worker's share into the whole, whose list of sources is longer.
        return "datasets cannot load a worker's state of concatenated streams after the first epoch"
    return None


@dataclass
class _BatchWithState:
    """Batch with the state of its worker after it."""

    batch: Any
    worker: int
    state: Any
    check_finished: bool
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
        batch, check = self.collate(samples), self.stream.check
        finished, problem = (False, None) if check is None else (check.finished, check.problem)
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
        self.stream.checks_state = not self._enters and not states and self.problem is None
        self._states = states or [None] * self._num_workers
        self._enters = self._enters or bool(states)
        batches = self._batches(self._workers.of(iter(self._own)))
        return skipped(batches, skip) if state is None else batches

    def _batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for sent in iterator:
            self._enters = self._enters or (sent.check_finished and sent.problem is None)
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
                f"the stream {name} cannot resume inside an epoch from its state_dict: {self.problem}. The epoch is "
                f"replayed from the start, and the consumed batches are read again and dropped. {EXACT_REPLAY}. "
                "treadle.data.ShardedStream, or treadle.data.ShuffleBuffer around an unshuffled stream, resumes at "
                "its position"
            )
        return sentences

    def close(self) -> None:
        """End the workers."""
        self._workers.end()
