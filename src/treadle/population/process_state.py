"""Process-wide state that belongs to one member of a population and is swapped with it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treadle.engine.observers import exchange_observers


@dataclass
class ProcessState:
    """Process-wide state that belongs to the running member."""

    python: Any
    numpy: Any
    cpu: Tensor
    cuda: list[torch.Generator]
    observers: list[Any]
    threads: int
    deterministic: tuple[bool, bool]
    cudnn: tuple[bool, bool, bool]
    matmul_tf32: bool
    dtype: torch.dtype

    @classmethod
    def capture(cls) -> ProcessState:
        """Read the current state; for CUDA the generators themselves, which graphs refer to."""
        return cls(
            python=random.getstate(),
            numpy=np.random.get_state(),
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
        np.random.set_state(self.numpy)
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
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return []
    return list(torch.cuda.default_generators)


def cloned(generators: list[torch.Generator]) -> list[torch.Generator]:
    """Return generators with the same state that share nothing with the given ones or their graphs."""
    return [generator.clone_state() for generator in generators]
