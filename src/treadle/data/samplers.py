"""The samplers of a loader, and the random generators that its samplers and data sets draw from."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
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


def kept_values(loader: Any) -> dict[tuple[int, str], Any]:
    """Returns the numbers and texts that the data sets of a loader have as attributes, however deep, by their names.

    Example:
        >>> class Counts(list): ...
        >>> counts = Counts([1.0]); counts.read = 3
        >>> list(kept_values(torch.utils.data.DataLoader(counts)).values())
        [3]
    """
    return {
        (id(owner), f"{type(owner).__name__}.{name}"): value
        for owner in _with_those_inside([getattr(loader, "dataset", None)], set())
        for name, value in vars(owner).items()
        if type(value) in (bool, int, float, str)
    }


def changed_values(loader: Any, before: Mapping[tuple[int, str], Any]) -> list[str]:
    """Returns warnings of what data sets changed in themselves since :func:`kept_values`: no checkpoint holds it.

    Example:
        >>> loader = torch.utils.data.DataLoader([1.0])
        >>> changed_values(loader, kept_values(loader))
        []
    """
    now = kept_values(loader)
    return [
        f"{name} changes while the data are read, and no checkpoint holds it: a resume is exact only if no item "
        "depends on it. Make items from their index and the global random generators alone"
        for (owner, name), value in before.items()
        if (owner, name) in now and now[owner, name] != value and value == value  # NaN stays NaN
    ]


def _with_those_inside(owners: Iterable[Any], seen: set[int]) -> Iterator[Any]:
    """Yields data sets and samplers, and those that they hold as ``dataset`` and ``datasets``, but for those seen."""
    waiting = list(owners)
    while waiting:
        owner = waiting.pop()
        if id(owner) in seen or not hasattr(owner, "__dict__"):
            continue
        seen.add(id(owner))
        several = vars(owner).get("datasets")
        waiting += [vars(owner).get("dataset"), *(several if isinstance(several, (list, tuple)) else ())]
        yield owner


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
    of_data = [] if getattr(loader, "num_workers", 0) else known
    seen: set[int] = set()
    found = [
        f"{type(owner).__name__}.{name}"
        for owners, held in (([getattr(loader, "dataset", None)], of_data), (samplers_of(loader), known))
        for owner in _with_those_inside(owners, seen)
        for name, value in vars(owner).items()
        if isinstance(value, _KINDS_OF_GENERATORS) and all(value is not generator for generator in held)
    ]
    return [
        f"{name} is a random generator that no checkpoint holds: if data or their order are drawn with it, a resume is "
        "not exact. Draw from the global generators of torch, NumPy or Python; a sampler may have a torch.Generator as "
        "its generator"
        for name in found
    ]
