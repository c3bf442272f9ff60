"""Test of a stream: whether its state restores its position."""

from __future__ import annotations

import copy
import pickle
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from treadle.checkpoint.comparison import same


class CpuRngState:
    """State of the CPU's random generators at construction."""

    def __init__(self) -> None:
        self._states = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def restore(self) -> None:
        """Restore the generators."""
        random.setstate(self._states[0])
        np.random.set_state(self._states[1])
        torch.set_rng_state(self._states[2])


class StreamCheck:
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
                self.problem = f"it cannot be copied for a trial ({type(error).__name__})"

    def record(self, sample: Any, before: CpuRngState) -> None:
        """Record a sample and the random state before it."""
        if self.problem is not None:
            return
        self._reads += 1
        if self._last is not None:
            after = CpuRngState()
            try:
                self.problem = self._check_state(sample, before)
            except Exception as error:  # noqa: BLE001  (a data set of any kind)
                self.problem = f"loading it raises {type(error).__name__}"
            finally:
                after.restore()
            self.finished, self._last = True, None
        if self._reads == self._next:
            self._last, self._next = copy.deepcopy(self._dataset.state_dict()), self._next * 8

    def _check_state(self, sample: Any, before: CpuRngState) -> str | None:
        after = f"after {self._reads - 1:,} samples"
        if _alike(self._dataset.state_dict(), self._last):
            return f"it is the same {after} and after one more"
        before.restore()
        self._copy.load_state_dict(self._last)
        again = next(iter(self._copy), None)
        return None if _alike(sample, again) else f"taken {after} and loaded, it does not give the next sample"


def shuffle_buffer_of_datasets(dataset: Any) -> str | None:
    """Return why a ``datasets.IterableDataset`` with a shuffle buffer cannot be resumed; None for all others.

    Example:
        >>> shuffle_buffer_of_datasets([1, 2]) is None
        True
    """
    for stage in stages_of_datasets(dataset, "BufferShuffledExamplesIterable"):
        return f"the {stage.buffer_size} samples in its shuffle buffer are not in its state and would be lost"
    return None


def stages_of_datasets(dataset: Any, kind_name: str) -> Iterator[Any]:
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


def _alike(one: Any, other: Any) -> bool:
    try:
        return same(one, other)
    except Exception:  # noqa: BLE001  (arrays, pictures: whatever a sample is)
        return pickle.dumps(one) == pickle.dumps(other)
