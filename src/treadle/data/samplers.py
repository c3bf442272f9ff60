"""The samplers of a loader, and the random generators that it and they draw from."""

from __future__ import annotations

from typing import Any

import torch

_DEEPEST = 8  # samplers inside samplers


def samplers_of(loader: Any) -> list[Any]:
    """Return the samplers of a loader and those that they wrap, outermost first."""
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
    """Return the torch generators that belong to a loader and its samplers, each once."""
    found: list[torch.Generator] = []
    for owner in (loader, *samplers_of(loader)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not other for other in found):
            found.append(generator)
    return found
