"""The samplers of a loader, and the random generators that its samplers and data sets draw from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from treadle.checkpoint.attributes import GENERATORS

_DEEPEST = 8  # samplers inside samplers


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
    """Returns warnings of random generators that data sets keep for themselves while workers read them.

    Each worker has a copy, which no checkpoint holds. Without workers they are part of every state.

    Args:
        loader: a DataLoader, or any other iterable.

    Example:
        >>> import random
        >>> class Noisy(list): ...
        >>> noisy = Noisy([1.0]); noisy.chance = random.Random(0)
        >>> hidden_generators(torch.utils.data.DataLoader(noisy, num_workers=1))[0][:37]
        'Noisy.chance is a random generator th'
    """
    if not getattr(loader, "num_workers", 0):
        return []
    return [
        f"{type(owner).__name__}.{name} is a random generator that no checkpoint holds, since each worker has a "
        "copy: if data are drawn with it, a resume is not exact. Draw from the global generators of torch, NumPy or "
        "Python, or use num_workers=0"
        for owner in _with_those_inside([getattr(loader, "dataset", None)], set())
        for name, value in vars(owner).items()
        if isinstance(value, GENERATORS)
    ]
