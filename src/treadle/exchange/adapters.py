"""Registry of adapters for models that other packages implement under different names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.distributed import unwrap
from treadle.exchange.foreign import ForeignCheckpoint
from treadle.exchange.reading import without_wrapper
from treadle.optim.optimizer import parameter_names

Adapter = Callable[[Any, ForeignCheckpoint, "Optimizer | None"], ForeignCheckpoint]

_ADAPTERS: dict[type[nn.Module], Adapter] = {}


def register_adapter(kind: type[nn.Module], adapt: Adapter) -> None:
    """Register a function that renames weights of other packages for a class of models.

    Args:
        kind: the class; subclasses are adapted too.
        adapt: takes the model, the foreign checkpoint and the live optimizer or None; returns the weights, and the
            optimizer state if an optimizer is given, under the model's names. It returns unknown checkpoints unchanged.

    Example:
        >>> class Renamed(nn.Linear): pass
        >>> register_adapter(Renamed, lambda model, found, optimizer: found)
    """
    _ADAPTERS[kind] = adapt


def adapted(model: nn.Module, found: ForeignCheckpoint, optimizer: Optimizer | None = None) -> ForeignCheckpoint:
    """Return a checkpoint under the model's names, if an adapter of its class knows those of the file."""
    target = unwrap(model)
    for kind in type(target).__mro__:
        if kind in _ADAPTERS:
            return _ADAPTERS[kind](target, without_wrapper(found), optimizer)
    return found


def shaped_like(value: Tensor, live: Any) -> Tensor:
    """Return a tensor reshaped like another if they differ only in dimensions of size 1, else unchanged.

    Example:
        >>> import torch
        >>> shaped_like(torch.zeros(1, 1, 3), torch.zeros(3)).shape
        torch.Size([3])
    """
    if not isinstance(live, Tensor) or value.shape == live.shape:
        return value
    theirs, ours = ([size for size in shape if size != 1] for shape in (value.shape, live.shape))
    return value.reshape(live.shape) if theirs == ours else value


def state_in_groups(
    state: Mapping[str, Any], names: Sequence[Sequence[str]], optimizer: Optimizer, model: nn.Module
) -> dict[str, Any]:
    """Return an optimizer state stored by position as the state of a live optimizer's groups, by name.

    Settings of a group, such as its learning rate, come from the group with the same number in the file, or from the
    last.

    Args:
        state: with as many groups as ``names``, of as many parameters each.
        names: the model's names of the parameters in each group.
        optimizer: the live one.
        model: the model whose parameters it holds.
    """
    live = dict(model.named_parameters())
    entries: dict[str, Any] = {}
    for group, saved in zip(names, state["param_groups"], strict=True):
        for name, index in zip(group, saved["params"], strict=True):
            if index in state["state"]:
                entries[name] = {key: _like(value, live[name]) for key, value in state["state"][index].items()}
    own = parameter_names(model)
    numbered: dict[int, Any] = {}
    groups = []
    for number, kept in enumerate(optimizer.param_groups):
        of_group = [own[id(parameter)] for parameter in kept["params"]]
        first = len(numbered)
        numbered.update({first + offset: entries.get(name, {}) for offset, name in enumerate(of_group)})
        settings = dict(state["param_groups"][min(number, len(state["param_groups"]) - 1)])
        for kernel in ("fused", "foreach"):  # how a step is computed, not its result
            if kernel in settings:
                settings[kernel] = kept.get(kernel)
        groups.append({**settings, "params": list(range(first, len(numbered))), "param_names": of_group})
    return {"state": {index: entry for index, entry in numbered.items() if entry}, "param_groups": groups}


def _like(value: Any, parameter: Tensor) -> Any:
    return shaped_like(value, parameter) if isinstance(value, Tensor) and value.dim() else value
