"""State of optimizers beyond torch's own form: nested optimizers, other formats, dtypes, groups that hooks add."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, ValuesView
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.errors import CheckpointError
from treadle.nested import map_nested_tensor

OWN = "own"
"""Key of the state of an optimizer with its own format."""
INNER = "inner"
"""Key of the states of optimizers inside an optimizer, which its inherited state dict leaves out."""


def has_torchs_form(optimizer: Any, state: Any) -> bool:
    """Return whether a state dict has torch's form: groups like the live ones, and state by parameter.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        >>> has_torchs_form(optimizer, optimizer.state_dict()), has_torchs_form(optimizer, {"slow": []})
        (True, False)
    """
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return False
    groups = state.get("param_groups")
    return isinstance(groups, list) and [len(group.get("params", ())) for group in groups] == [
        len(group["params"]) for group in optimizer.param_groups
    ]


def inner_optimizers(optimizer: Any) -> dict[str, Optimizer]:
    """Return optimizers that are attributes of an optimizer and missing from its state dict.

    A class that defines ``state_dict`` is responsible for them.

    Example:
        >>> import torch
        >>> inner_optimizers(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
        {}
    """
    if getattr(type(optimizer), "state_dict", None) is not Optimizer.state_dict:
        return {}
    found: dict[str, Optimizer] = {}
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            found[name] = value
        elif isinstance(value, (list, tuple)):
            found |= {f"{name}[{number}]": one for number, one in enumerate(value) if isinstance(one, Optimizer)}
        elif isinstance(value, dict):
            found |= {f"{name}.{key}": one for key, one in value.items() if isinstance(one, Optimizer)}
    return found


def load_inner(
    optimizer: Any, inner: Mapping[str, Optimizer], saved: Mapping[str, Any], shared: Mapping[Any, int]
) -> None:
    """Load the states of inner optimizers, sharing groups with the outer one as before.

    Args:
        optimizer: the outer optimizer, already loaded.
        inner: inner optimizers by path.
        saved: their states, by path.
        shared: result of :func:`shared_groups` before the outer one was loaded.

    Raises:
        CheckpointError: a state is missing.
    """
    for path, one in inner.items():
        if path not in saved:
            raise CheckpointError(f"optimizer.{path}: the checkpoint has no state of this {type(one).__name__}")
        load_exactly(one, copy.deepcopy(dict(saved[path])))
        for number in range(len(one.param_groups)):
            if (path, number) in shared:
                outer = optimizer.param_groups[shared[path, number]]
                outer.update({key: value for key, value in one.param_groups[number].items() if key not in outer})
                one.param_groups[number] = outer


def shared_groups(optimizer: Any, inner: Mapping[str, Optimizer]) -> dict[tuple[str, int], int]:
    """Return which groups of inner optimizers are identical with groups of the outer one."""
    own = {id(group): number for number, group in enumerate(optimizer.param_groups)}
    return {
        (path, number): own[id(group)]
        for path, one in inner.items()
        for number, group in enumerate(one.param_groups)
        if id(group) in own
    }


def load_exactly(optimizer: Any, state: dict[str, Any]) -> None:
    """Load a state dict without torch's casts to the parameter's dtype or changes of containers."""
    optimizer.load_state_dict(state)
    if getattr(type(optimizer), "load_state_dict", None) is not Optimizer.load_state_dict:
        return
    for saved, live in zip(state["param_groups"], optimizer.param_groups, strict=False):
        for index, parameter in zip(saved["params"], live["params"], strict=False):
            own, entries = optimizer.state.get(parameter), state["state"].get(index)
            if isinstance(own, dict) and isinstance(entries, Mapping):
                for key, value in entries.items():
                    if not isinstance(value, Tensor):
                        own[key] = copy.deepcopy(_on_device_of(value, parameter))
                    elif isinstance(own.get(key), Tensor) and own[key].dtype != value.dtype:
                        own[key] = value.detach().clone().to(own[key].device)


def _on_device_of(value: Any, parameter: Tensor) -> Any:
    """Return a value with its tensors moved to the device of a parameter."""
    return map_nested_tensor(lambda inner: inner.to(parameter.device), value)


def added_groups(optimizer: Any, names: Mapping[str, nn.Parameter], saved: list[Any]) -> list[dict[str, Any]]:
    """Return the groups that a checkpoint has beyond the live ones, with the model's parameters.

    A hook that unfreezes a layer adds a group during training; a fresh optimizer does not have it yet.

    Args:
        optimizer: optimizer as built.
        names: the model's parameters by clean name.
        saved: groups of the checkpoint.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found = []
    for group in saved[len(optimizer.param_groups) :]:
        parameters = [names.get(name) for name in group.get("param_names") or [""]]
        if any(parameter is None or id(parameter) in held for parameter in parameters):
            return []
        found.append({"params": parameters})
    return found


def by_position(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state by parameter name, or by group and position, to compare states in other orders."""
    if "param_groups" not in state or "state" not in state:
        return dict(state)
    entries: dict[str, Any] = {}
    for number, group in enumerate(state["param_groups"]):
        names = group.get("param_names") or []
        for place, index in enumerate(group["params"]):
            name = names[place] if place < len(names) and names[place] else f"{number}.{place}"
            if index in state["state"]:
                entries[name] = state["state"][index]
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in state["param_groups"]
    ]
    rest = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    return {**{f"state.{name}": value for name, value in entries.items()}, "param_groups": groups, **rest}


def hidden_tensors(optimizer: Any) -> str | None:
    """Return an attribute of an optimizer with tensors that its inherited state dict misses, or None.

    Example:
        >>> import torch
        >>> hidden_tensors(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)) is None
        True
    """
    kind = type(optimizer)
    if getattr(kind, "state_dict", None) is not Optimizer.state_dict or kind.__module__.startswith("torch."):
        return None
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, value in vars(optimizer).items():
        if name in ("param_groups", "state", "defaults"):
            continue
        items = [value.values(), value] if isinstance(value, Mapping) else [value]
        for item in (inner for part in items for inner in (part if _is_many(part) else [part])):
            if isinstance(item, Tensor) and id(item) not in parameters:
                return str(name)
    return None


def _is_many(value: Any) -> bool:
    return isinstance(value, (list, tuple, Mapping, ValuesView))


def try_state(optimizer: Any, state: Mapping[str, Any]) -> Iterator[str]:
    """Load a state of torch's form into a copy without parameters; yield what is lost.

    Raises:
        Exception: any error of the optimizer when it loads its own state.
    """
    shadow = copy.copy(optimizer)
    shadow.__dict__.update(state=defaultdict(dict), param_groups=[dict(group) for group in optimizer.param_groups])
    shadow.load_state_dict({key: value for key, value in state.items() if key not in (INNER, "attributes")})
    held = sum(1 for entries in optimizer.state.values() if entries) if isinstance(optimizer.state, Mapping) else 0
    kept = sum(1 for entries in shadow.state.values() if entries)
    if kept < held:
        yield f"{held} parameters have state, and {kept} after loading it again"
