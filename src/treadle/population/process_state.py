"""Process-wide state that belongs to one member of a population and is swapped with it."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treadle.engine.observers import exchange_observers


class _WatchedLock:
    """Lock that NumPy takes for every draw and for every change of the state."""

    def __init__(self) -> None:
        self.taken = False  # since this was last set to False
        self._lock = threading.RLock()

    def __enter__(self) -> bool:
        self.taken = True
        return self._lock.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._lock.release()


class MT19937(np.random.MT19937):
    """Bit generator of ``np.random`` for one member; it has NumPy's name, which states contain.

    Members exchange these instead of copying their 624 words. Only the second number of a pair of normal draws, which
    ``np.random`` keeps elsewhere, must be copied, and only if the lock was taken since.
    """

    def __init__(self, seed: Any = 0):
        super().__init__(seed)
        self._watched = _WatchedLock()

    @property
    def lock(self) -> Any:  # type: ignore[override]
        """Lock of this generator."""
        return self._watched

    def untouched(self) -> bool:
        """Return whether nothing has used the generator since this was last called."""
        untouched, self._watched.taken = not self._watched.taken, False
        return untouched


@dataclass(frozen=True)
class NumpyState:
    """State of ``np.random``: its bit generator, and its whole state while it keeps the second of two normal draws."""

    generator: Any
    keeps: Any

    @classmethod
    def capture(cls, before: NumpyState | None = None) -> NumpyState:
        """Return the current state; ``before`` is the one last restored."""
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        known = before is not None and generator is before.generator
        if known and isinstance(generator, MT19937) and generator.untouched():
            assert before is not None
            return before
        state: Any = np.random.get_state(legacy=False)
        return cls(generator, state if state["has_gauss"] else None)

    def restore(self) -> None:
        """Restore the state."""
        np.random.set_bit_generator(self.generator)  # type: ignore[attr-defined]  # drops a kept draw
        if self.keeps is not None:
            np.random.set_state(self.keeps)
        if isinstance(self.generator, MT19937):
            self.generator.untouched()

    def cloned(self) -> NumpyState:
        """Return the same state, of a separate generator."""
        generator = MT19937()
        if isinstance(self.generator, np.random.MT19937):
            generator.state = self.generator.state
        return NumpyState(generator, self.keeps)


@dataclass
class ProcessState:
    """Process-wide state that belongs to the running member."""

    python: Any
    numpy: NumpyState
    cpu: Tensor
    cuda: list[torch.Generator]
    observers: list[Any]
    threads: int
    deterministic: tuple[bool, bool]
    cudnn: tuple[bool, bool, bool]
    matmul_tf32: bool
    dtype: torch.dtype

    @classmethod
    def capture(cls, before: ProcessState | None = None) -> ProcessState:
        """Read the current state; for CUDA the generators themselves, which graphs refer to.

        Args:
            before: the state that was last restored, if known, which makes this faster.
        """
        return cls(
            python=random.getstate(),
            numpy=NumpyState.capture(None if before is None else before.numpy),
            cpu=torch.get_rng_state(),
            cuda=[generator.graphsafe_get_state() for generator in _cuda_generators()],
            observers=exchange_observers([]),
            threads=torch.get_num_threads(),
            deterministic=(
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            cudnn=(
                torch.backends.cudnn.deterministic,
                torch.backends.cudnn.benchmark,
                torch.backends.cudnn.allow_tf32,
            ),
            matmul_tf32=torch.backends.cuda.matmul.allow_tf32,
            dtype=torch.get_default_dtype(),
        )

    def restore(self) -> None:
        """Restore the state."""
        random.setstate(self.python)
        self.numpy.restore()
        torch.set_rng_state(self.cpu)
        for generator, state in zip(_cuda_generators(), self.cuda, strict=False):
            generator.graphsafe_set_state(state)
        exchange_observers(self.observers)
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        now = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        if now != self.deterministic:
            torch.use_deterministic_algorithms(self.deterministic[0], warn_only=self.deterministic[1])
        cudnn = torch.backends.cudnn
        if (cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32) != self.cudnn:
            cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32 = self.cudnn
        if torch.backends.cuda.matmul.allow_tf32 != self.matmul_tf32:
            torch.backends.cuda.matmul.allow_tf32 = self.matmul_tf32
        if torch.get_default_dtype() != self.dtype:
            torch.set_default_dtype(self.dtype)


def _cuda_generators() -> list[torch.Generator]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    return list(torch.cuda.default_generators)


def cloned(generators: list[torch.Generator]) -> list[torch.Generator]:
    """Return generators with the same state that share nothing with the given ones or their graphs."""
    return [generator.clone_state() for generator in generators]
