"""Seeding and random state of chemomae."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from treadle.errors import ConfigError
from treadle.errors.arguments import checked
from treadle.seed import RngState, set_seed
from treadle.spectra.originals import own_rng


class RNGState(TypedDict):
    """Random state of Python, NumPy and torch in chemomae's format."""

    format_version: int
    python: tuple[Any, ...]
    numpy: dict[str, Any]
    torch_cpu: Tensor
    torch_cuda: list[Tensor]


@checked
def set_global_seed(seed: int = 42, *, fix_cudnn: bool = True) -> None:
    """Seed Python, NumPy and torch, and set ``PYTHONHASHSEED`` for processes started later.

    Args:
        seed: an integer.
        fix_cudnn: use deterministic cuDNN kernels.

    Example:
        >>> set_global_seed(7, fix_cudnn=False); a = torch.rand(1); set_global_seed(7, fix_cudnn=False)
        >>> torch.equal(a, torch.rand(1))
        True
    """
    set_seed(int(seed))
    os.environ["PYTHONHASHSEED"] = str(int(seed))
    if fix_cudnn:
        enable_deterministic()


@checked
def enable_deterministic(enable: bool = True) -> None:
    """Enable cuDNN's ``deterministic`` flag and disable ``benchmark``, or the reverse.

    Example:
        >>> before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
        >>> enable_deterministic(False); torch.backends.cudnn.benchmark
        True
        >>> torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before
    """
    torch.backends.cudnn.deterministic = bool(enable)
    torch.backends.cudnn.benchmark = not enable


def capture_rng_state() -> RNGState:
    """Return the random state of Python, NumPy, torch and the CUDA devices in use.

    Example:
        >>> state = capture_rng_state(); a = torch.rand(1); restore_rng_state(state); torch.equal(a, torch.rand(1))
        True
    """
    now = RngState.capture()
    name, keys, position, has_gauss, cached = now.numpy
    return {
        "format_version": 1,
        "python": now.python,
        "numpy": {
            "algorithm": name, "keys": torch.from_numpy(keys.astype(np.int64)), "position": int(position),
            "has_gauss": int(has_gauss), "cached_gaussian": float(cached),
        },
        "torch_cpu": now.torch.clone(),
        "torch_cuda": [state.cpu().clone() for state in now.accelerators.get("cuda", [])],
    }  # fmt: skip


def restore_rng_state(state: Any, *, restore_cuda: bool = True) -> None:
    """Restore a state returned by :func:`capture_rng_state`; a state that does not match changes nothing.

    Args:
        state: a state from this library or from chemomae.
        restore_cuda: False leaves the CUDA devices unchanged.

    Raises:
        ConfigError: the state is of another kind, or its number of CUDA devices differs.
    """
    if not isinstance(state, Mapping) or state.get("format_version") != 1:
        raise ConfigError("must be what capture_rng_state returned, of format_version 1", argument="state")
    cuda = list(state.get("torch_cuda") or []) if restore_cuda else []
    if cuda and len(cuda) != torch.cuda.device_count():
        raise ConfigError(
            f"has {len(cuda)} CUDA devices and this machine {torch.cuda.device_count()}; pass restore_cuda=False",
            argument="state",
        )
    before = RngState.capture()
    try:
        RngState.from_plain(own_rng({**state, "torch_cuda": cuda})).restore()
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        before.restore()
        raise ConfigError(f"is incomplete or damaged ({error})", argument="state") from error
