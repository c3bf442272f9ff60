"""Random number generators: seed, capture, restore and fork."""

from __future__ import annotations

import contextlib
import operator
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treadle.errors import ConfigError
from treadle.errors.arguments import checked

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def as_seed(name: str, seed: Any) -> int:
    """Convert a seed of any integer type to an int.

    Args:
        name: name of the argument, for errors.
        seed: from -2**63 to 2**64 - 1.

    Raises:
        ConfigError: the seed is not a whole number or is outside torch's range.

    Example:
        >>> as_seed("seed", np.int64(7))
        7
    """
    try:
        number = operator.index(seed)
    except TypeError as error:
        raise ConfigError("must be a whole number", argument=name, value=seed) from error
    if not -(2**63) <= number < 2**64:
        raise ConfigError(
            f"={seed}: must be from -2**63 to 2**64 - 1, which torch takes; choose a smaller number", argument=name
        )
    return number


@checked
def set_seed(seed: int = 42, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch (all devices).

    Args:
        seed: an integer from -2**63 to 2**64 - 1; NumPy gets it modulo 2**32.
        deterministic: also make torch use deterministic algorithms, set the cuDNN flags, and set
            ``CUBLAS_WORKSPACE_CONFIG=:4096:8`` if it is unset.

    Raises:
        ConfigError: the seed is not a whole number or is outside torch's range.

    Example:
        >>> set_seed(7); a = torch.rand(1); set_seed(7); torch.equal(a, torch.rand(1))
        True
    """
    seed = as_seed("seed", seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault(_CUBLAS, ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False


@dataclass(frozen=True)
class RngState:
    """State of every global generator: Python, NumPy, torch on the CPU and on each accelerator in use.

    Attributes:
        python: result of ``random.getstate``.
        numpy: result of ``numpy.random.get_state``.
        torch: uint8 tensor of the CPU generator.
        accelerators: device type -> one uint8 tensor per device.
    """

    python: Any
    numpy: Any
    torch: Tensor
    accelerators: dict[str, list[Tensor]]

    @classmethod
    def capture(cls) -> RngState:
        """Read the current state; an accelerator that was never used is not initialized."""
        return cls(
            python=random.getstate(),
            numpy=np.random.get_state(),
            torch=torch.get_rng_state(),
            accelerators={name: _read_accelerator(name) for name in _accelerators()},
        )

    @classmethod
    def seeded(cls, seed: int) -> RngState:
        """Return the state that :func:`set_seed` sets, without changing the current one."""
        with forked_rng(seed):
            return cls.capture()

    def restore(self) -> None:
        """Set every generator to this state."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        present = _accelerators()
        for name, states in self.accelerators.items():
            if name in present:
                _write_accelerator(name, states)

    def to_plain(self) -> dict[str, Any]:
        """Return the state as lists, numbers and tensors, loadable with ``weights_only=True``."""
        version, words, gauss = self.python
        name, keys, position, has_gauss, cached = self.numpy
        return {
            "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
            "numpy": [
                name,
                torch.from_numpy(keys.astype(np.int64)),
                int(position),
                int(has_gauss),
                float(cached),
            ],
            "torch": self.torch,
            "accelerators": {name: list(states) for name, states in self.accelerators.items()},
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> RngState:
        """Invert :meth:`to_plain`."""
        version, words, gauss = plain["python"]
        name, keys, position, has_gauss, cached = plain["numpy"]
        return cls(
            python=(version, tuple(words.tolist()), gauss),
            numpy=(name, keys.numpy().astype(np.uint32), position, has_gauss, cached),
            torch=plain["torch"].cpu(),
            accelerators={key: [state.cpu() for state in states] for key, states in plain["accelerators"].items()},
        )


def _accelerators() -> list[str]:
    names = []
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        names.append("cuda")
    if torch.backends.mps.is_available():
        names.append("mps")
    if torch.xpu.is_available() and torch.xpu.is_initialized():  # type: ignore[no-untyped-call]
        names.append("xpu")
    return names


def _read_accelerator(name: str) -> list[Tensor]:
    if name == "mps":
        return [torch.mps.get_rng_state()]
    return list(torch.get_device_module(name).get_rng_state_all())


def _write_accelerator(name: str, states: list[Tensor]) -> None:
    if name == "mps":
        torch.mps.set_rng_state(states[0])
        return
    module = torch.get_device_module(name)
    for index in range(min(len(states), module.device_count())):
        module.set_rng_state(states[index], index)


def mix_seed(*numbers: int) -> int:
    """Mix integers into one 63-bit seed (SplitMix64), so that neighbouring values give unrelated streams.

    Example:
        >>> mix_seed(1, 2) != mix_seed(2, 1)
        True
    """
    mask = (1 << 64) - 1
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & mask)) * 0xBF58476D1CE4E5B9 & mask
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & mask
        state ^= state >> 31
    return state >> 1


@contextlib.contextmanager
def forked_rng(seed: int | None = None) -> Iterator[None]:
    """Run a block with its own random streams, then restore the outer ones.

    Args:
        seed: seeds the inner streams; None starts them as copies of the outer ones.

    Example:
        >>> before = torch.get_rng_state()
        >>> with forked_rng(0):
        ...     _ = torch.rand(3)
        >>> torch.equal(before, torch.get_rng_state())
        True
    """
    outer = RngState.capture()
    try:
        if seed is not None:
            set_seed(seed)
        yield
    finally:
        outer.restore()


class ReproducibilityContext:
    """Context that seeds everything inside a ``with`` block and restores every generator and flag on exit.

    Args:
        seed: as in :func:`set_seed`.
        deterministic: as in :func:`set_seed`.

    Example:
        >>> with ReproducibilityContext(3):
        ...     a = torch.rand(2)
        >>> with ReproducibilityContext(3):
        ...     b = torch.rand(2)
        >>> torch.equal(a, b)
        True
    """

    @checked
    def __init__(self, seed: int = 42, deterministic: bool = False):
        self.seed = seed
        self.deterministic = deterministic
        self._outer: list[tuple[RngState, tuple[bool, bool, bool, bool, str | None]]] = []

    def __enter__(self) -> ReproducibilityContext:
        flags = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
            os.environ.get(_CUBLAS),
        )
        self._outer.append((RngState.capture(), flags))  # a stack: the context is reentrant
        set_seed(self.seed, self.deterministic)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        rng, (enabled, warn_only, deterministic, benchmark, cublas) = self._outer.pop()
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.backends.cudnn.deterministic = deterministic
        torch.backends.cudnn.benchmark = benchmark
        if cublas is None:
            os.environ.pop(_CUBLAS, None)
        else:
            os.environ[_CUBLAS] = cublas
        rng.restore()
