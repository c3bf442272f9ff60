"""Adapters of models that other packages have under other names: a registry that packs write and loading reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from treadle.distributed import unwrap
from treadle.exchange.foreign import ForeignCheckpoint
from treadle.exchange.reading import without_wrapper

Adapter = Callable[[Any, ForeignCheckpoint, "Optimizer | None"], ForeignCheckpoint]

_ADAPTERS: dict[type[nn.Module], Adapter] = {}


def register_adapter(kind: type[nn.Module], adapt: Adapter) -> None:
    """Registers the function that renames the weights of other packages for a class of models.

    Args:
        kind: the class; its subclasses are adapted too.
        adapt: takes the model, what was read and the live optimizer or None; returns the weights, and the state where
            an optimizer is given, by the names of the model. What it does not know it returns unchanged.

    Example:
        >>> class Renamed(nn.Linear): pass
        >>> register_adapter(Renamed, lambda model, found, optimizer: found)
    """
    _ADAPTERS[kind] = adapt


def adapted(model: nn.Module, found: ForeignCheckpoint, optimizer: Optimizer | None = None) -> ForeignCheckpoint:
    """Returns a checkpoint with the names of the model, where an adapter of its class knows those of the file."""
    target = unwrap(model)
    for kind in type(target).__mro__:
        if kind in _ADAPTERS:
            return _ADAPTERS[kind](target, without_wrapper(found), optimizer)
    return found
