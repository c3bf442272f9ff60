"""States of torch, NumPy and Python random generators as plain values."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treadle.errors import CheckpointError

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def is_generator(value: Any) -> bool:
    """Return whether a value is a random generator that has a state.

    Example:
        >>> is_generator(random.Random()), is_generator(random.SystemRandom())
        (True, False)
    """
    return isinstance(value, GENERATORS) and not isinstance(value, random.SystemRandom)


def generator_like(state: Any) -> Any:
    """Return a new generator of the type that a state belongs to."""
    if isinstance(state, Tensor):
        return torch.Generator()
    if isinstance(state, list):
        return random.Random()
    if "has_gauss" in state:
        return np.random.RandomState()
    return np.random.Generator(new_bit_generator(state["bit_generator"]))


def new_bit_generator(name: str) -> np.random.BitGenerator:
    """Return a new bit generator of NumPy.

    Raises:
        CheckpointError: NumPy has no bit generator of this name.

    Example:
        >>> type(new_bit_generator("PCG64")).__name__
        'PCG64'
    """
    kind = getattr(np.random, name, None)
    if not isinstance(kind, type) or not issubclass(kind, np.random.BitGenerator):
        raise CheckpointError(f"the checkpoint holds a NumPy bit generator {name!r}, which this NumPy does not have")
    return kind()


def state_of(generator: Any) -> Any:
    """Return the state of a generator as a plain tree.

    Example:
        >>> state_of(torch.Generator()).dtype
        torch.uint8
    """
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        version, state, gauss = generator.getstate()
        return [version, list(state), gauss]
    if not isinstance(generator, np.random.Generator):
        return _without_arrays(generator.get_state(False))
    seeds: Any = getattr(generator.bit_generator, "seed_seq", None)  # what spawn() draws from
    is_drawn = getattr(seeds, "n_children_spawned", 0) > 0
    spawned = {"seeds": {**seeds.state, "spawn_key": list(seeds.spawn_key)}} if is_drawn else {}
    return _without_arrays({**generator.bit_generator.state, **spawned})


def _without_arrays(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _without_arrays(value) for key, value in state.items()}
    return {"array": torch.from_numpy(state.astype(np.int64))} if isinstance(state, np.ndarray) else state


def set_state(generator: Any, state: Any) -> None:
    """Set a generator to a state from :func:`state_of`."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate((state[0], tuple(state[1]), state[2]))
    elif isinstance(generator, np.random.Generator):
        _set_numpy(generator.bit_generator, dict(_with_arrays(state)))
    else:
        generator.set_state(_with_arrays(state))


def _set_numpy(generator: Any, state: dict[str, Any]) -> None:
    held: Any = getattr(generator, "seed_seq", None)
    seeds = state.pop("seeds", None)
    if seeds is None and getattr(held, "n_children_spawned", 0) > 0:
        seeds = {**held.state, "n_children_spawned": 0}
    generator.state = state
    if seeds is not None:
        generator.__setstate__((state, np.random.SeedSequence(**seeds)))


def _with_arrays(state: Any) -> Any:
    if not isinstance(state, Mapping):
        return state
    if "array" in state:
        array = state["array"].numpy()
        return (
            array.astype(np.uint64)
            if array.max(initial=0) >= 2**32 or array.min(initial=0) < 0
            else array.astype(np.uint32)
        )
    return {key: _with_arrays(value) for key, value in state.items()}
