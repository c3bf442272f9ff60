"""Samplers of a loader, and their random generators."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from treadle.checkpoint.introspection import has_state

_DEEPEST = 8  # nesting depth of samplers


def samplers_of(loader: Any) -> list[Any]:
    """Return the samplers of a loader and the samplers that they wrap, outermost first."""
    found = list(samplers_of_nodes(loader))
    owners = [loader, *found]
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


def samplers_of_nodes(loader: Any) -> Iterator[Any]:
    """Yield the stateless samplers of a ``torchdata.nodes.Loader``, whose state counts their items.

    Example:
        >>> list(samplers_of_nodes([1, 2]))
        []
    """
    nodes = sys.modules.get("torchdata.nodes")
    if nodes is None or not isinstance(loader, nodes.Loader):
        return
    waiting, seen = [loader.root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        sampler = getattr(node, "sampler", None)
        if sampler is not None and not has_state(sampler):
            yield sampler
        held = [item for value in vars(node).values() for item in (value.values() if type(value) is dict else [value])]
        waiting += [value for value in held if isinstance(value, nodes.BaseNode)]
