"""The samplers of a loader, and the random generators that its samplers and data sets draw from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

_DEEPEST = 8  # samplers inside samplers
_KINDS_OF_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def samplers_of(loader: Any) -> list[Any]:
    """Returns the samplers of a loader and those that they wrap, outermost first."""
    found: list[Any] = []
    owners = [loader]
    for _ in range(_DEEPEST):
        inside = [getattr(owner, name, None) for owner in owners for name in ("batch_sampler", "sampler")]
        owners = []
        for sampler in inside:
            if sampler is not None and all(sampler is not other for other in found):
                found.append(sampler)
                owners.append(sampler)
    return found


def generators_of(loader: Any) -> list[torch.Generator]:
    """Returns the torch generators that belong to a loader and its samplers, each once."""
    found: list[torch.Generator] = []
    for owner in (loader, *samplers_of(loader)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not other for other in found):
            found.append(generator)
    return found


def hidden_generators(loader: Any) -> list[str]:
    """Returns warnings of random generators that samplers and data sets keep for themselves, however deep.

    What :func:`generators_of` gives is part of every state; but a worker has a copy of its own.

    Args:
        loader: a DataLoader, or any other iterable.

    Example:
        >>> class Noisy(list): ...
        >>> noisy = Noisy([1.0]); noisy.chance = random.Random(0)
        >>> hidden_generators(torch.utils.data.DataLoader(noisy))[0][:37]
        'Noisy.chance is a random generator th'
    """
    known = generators_of(loader)
    of_samplers = [(sampler, known) for sampler in samplers_of(loader)]
    waiting = [*of_samplers, (getattr(loader, "dataset", None), [] if getattr(loader, "num_workers", 0) else known)]
    found, seen = [], set()
    while waiting:
        owner, held = waiting.pop()
        if id(owner) in seen or not hasattr(owner, "__dict__"):
            continue
        seen.add(id(owner))
        inside = vars(owner)
        several = inside.get("datasets")
        below = [inside.get("dataset"), *(several if isinstance(several, (list, tuple)) else ())]
        waiting += [(part, held) for part in below]
        for name, value in inside.items():
            if isinstance(value, _KINDS_OF_GENERATORS) and all(value is not generator for generator in held):
                found.append(f"{type(owner).__name__}.{name}")
    return [
        f"{name} is a random generator that no checkpoint holds: if data or their order are drawn with it, a resume is "
        "not exact. Draw from the global generators of torch, NumPy or Python; a sampler may have a torch.Generator as "
        "its generator"
        for name in found
    ]
