"""Optimizer state by parameter name, parameter coverage, decay groups and fused kernels."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from treadle.checkpoint.schema import to_plain
from treadle.distributed import unwrap
from treadle.distributed.shards import placed_state
from treadle.distributed.state_names import clean_name
from treadle.errors import CheckpointError, ConfigError
from treadle.optim.optimizer_state import (
    INNER,
    OWN,
    added_groups,
    has_torchs_form,
    inner_optimizers,
    load_exactly,
    load_inner,
    shared_groups,
)

# nn.modules.batchnorm._NormBase is the common base of BatchNorm*, SyncBatchNorm and InstanceNorm*.
_NORM_TYPES = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_FUSED_DEVICES = ("cpu", "cuda")
# Keys of parameter groups added by a schedule or the user.
_OF_NO_OPTIMIZER = {
    "params", "param_names", "name", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr",
}  # fmt: skip


def is_torch_optimizer(optimizer: Any) -> bool:
    """Return whether an optimizer's class is torch's."""
    return type(optimizer).__module__.startswith("torch.")


def is_normalisation(module: nn.Module) -> bool:
    """Return whether a module is one of torch's normalisation layers, by type rather than name.

    Example:
        >>> is_normalisation(nn.LayerNorm(2)), is_normalisation(nn.Linear(2, 2))
        (True, False)
    """
    return isinstance(module, _NORM_TYPES)


def decay_groups(
    model: nn.Module, weight_decay: float, *, undecayed: tuple[type[nn.Module], ...] = ()
) -> list[dict[str, Any]]:
    """Return two parameter groups: matrices with weight decay and the rest without; frozen parameters are left out.

    The rest are parameters with fewer than two dimensions, and those of normalisation layers, whatever their names.

    Args:
        model: the model.
        weight_decay: weight decay of the first group.
        undecayed: module types whose own matrices belong to the rest too.

    Raises:
        ConfigError: no parameter requires grad.

    Example:
        >>> groups = decay_groups(nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3)), 0.1, undecayed=(nn.Embedding,))
        >>> [(len(group["params"]), group["weight_decay"]) for group in groups]
        [(1, 0.1), (2, 0.0)]
    """
    spared = [module for module in model.modules() if is_normalisation(module) or isinstance(module, undecayed)]
    spared_ids = {id(parameter) for module in spared for parameter in module.parameters()}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ConfigError(
            f"{type(model).__name__} has no parameter that requires a gradient; unfreeze one", argument="model"
        )
    decayed = [parameter for parameter in trainable if parameter.dim() >= 2 and id(parameter) not in spared_ids]
    rest = [parameter for parameter in trainable if parameter.dim() < 2 or id(parameter) in spared_ids]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


def can_be_fused(parameters: Iterable[Tensor]) -> bool:
    """Return whether torch's fused optimizers support all of these parameters."""
    return all(p.device.type in _FUSED_DEVICES and p.is_floating_point() for p in parameters)


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Return the clean name of each parameter by its identity."""
    return {id(parameter): clean_name(name) for name, parameter in unwrap(model).named_parameters()}


def uncovered_parameters(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that require grad but are in no group of the optimizer."""
    covered = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [
        (clean_name(name), parameter)
        for name, parameter in unwrap(model).named_parameters()
        if parameter.requires_grad and id(parameter) not in covered
    ]


def scale_learning_rate(optimizer: Optimizer, scheduler: Any, factor: float) -> None:
    """Multiply every learning rate, and the initial rates of schedules, in place; a checkpoint holds both.

    Composed schedules are traversed; a lower limit such as ``eta_min`` is kept.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        >>> scale_learning_rate(optimizer, None, 0.5)
        >>> optimizer.param_groups[0]["lr"]
        0.5
    """
    for group in optimizer.param_groups:
        for name in ("lr", "initial_lr", "max_lr"):
            if isinstance(group.get(name), Tensor):
                group[name].mul_(factor)
            elif name in group:
                group[name] *= factor
    schedulers = [] if scheduler is None else [scheduler]
    while schedulers:
        part = schedulers.pop()
        schedulers += getattr(part, "_schedulers", [])
        for name in ("base_lrs", "max_lrs", "_last_lr"):
            if isinstance(getattr(part, name, None), list):
                setattr(part, name, [value * factor for value in getattr(part, name)])


def optimizer_state(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """Return the optimizer's state dict with ``param_names`` in each group, so it can be loaded by name.

    A state of a form other than torch's is saved whole under ``own``; states of optimizers inside an optimizer that
    inherits its ``state_dict`` are saved under ``inner``.
    """
    names = parameter_names(model)
    state = optimizer.state_dict()
    if not has_torchs_form(optimizer, state):
        return {OWN: state}
    groups = []
    for saved, live in zip(state["param_groups"], optimizer.param_groups, strict=True):
        groups.append({**saved, "param_names": [names.get(id(parameter), "") for parameter in live["params"]]})
    inner = {path: one.state_dict() for path, one in inner_optimizers(optimizer).items()}
    entries = {index: _exactly(entry) for index, entry in state["state"].items()}
    # It may contain more than the first two.
    return {**state, "state": entries, "param_groups": groups, **({INNER: inner} if inner else {})}


def _exactly(entry: Any) -> Any:
    """Return the state of a parameter, encoded so that tuples are restored as tuples."""
    if not isinstance(entry, dict):
        return entry
    plain = (Tensor, int, float, str, type(None))
    return {
        key: value if isinstance(value, plain) else to_plain(value, str(key), encoding="exact")
        for key, value in entry.items()
    }


def load_optimizer_state(optimizer: Optimizer, model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Restore the result of :func:`optimizer_state`, matching parameters by name if names are known.

    For a sharded parameter, every rank takes its shard of the state. Groups that a hook had added are added again.

    Raises:
        CheckpointError: the groups hold parameters other than the checkpoint's.
    """
    if OWN in saved:
        optimizer.load_state_dict(copy.deepcopy(saved[OWN]))
        return
    for group in added_groups(optimizer, _parameters_by_name(model), saved["param_groups"]):
        optimizer.add_param_group(group)
    groups = aligned_groups(optimizer, model, saved)
    state = dict(saved["state"])
    for group, live in zip(groups, optimizer.param_groups, strict=True):
        for index, parameter in zip(group["params"], live["params"], strict=True):
            if isinstance(state.get(index), Mapping):
                state[index] = {key: _cloned(placed_state(value, parameter)) for key, value in state[index].items()}
        if "param_names" not in live:
            group.pop("param_names", None)
        for key, value in live.items():  # plain trees hold lists in place of torch's tuples, as in betas
            if isinstance(value, tuple) and isinstance(group.get(key), list):
                group[key] = tuple(group[key])
            if isinstance(group.get(key), Tensor) and (isinstance(value, Tensor) or live.get("capturable")):
                # A rate on another device than before rounds otherwise.
                beside = value if isinstance(value, Tensor) else live["params"][0]
                group[key] = group[key].to(beside.device)
    inner = inner_optimizers(optimizer)
    shared = shared_groups(optimizer, inner)
    whole = {key: value for key, value in saved.items() if key != INNER}
    load_exactly(optimizer, {**whole, "state": state, "param_groups": groups})
    load_inner(optimizer, inner, saved.get(INNER) or {}, shared)


def _parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    return {clean_name(name): parameter for name, parameter in unwrap(model).named_parameters()}


def aligned_groups(optimizer: Optimizer, model: nn.Module, saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return copies of the saved parameter groups, with the parameters in the order of the live ones.

    Raises:
        CheckpointError: the groups hold parameters other than the checkpoint's, or are another optimizer's.
    """
    if OWN in saved or "param_groups" not in saved:
        _refuse_another_form(optimizer, saved)
        return []
    groups = [dict(group) for group in saved["param_groups"]]
    lives = [*optimizer.param_groups, *added_groups(optimizer, _parameters_by_name(model), groups)]
    if len(groups) != len(lives):
        raise CheckpointError(
            f"optimizer: the checkpoint has {len(groups)} parameter groups, this optimizer has "
            f"{len(optimizer.param_groups)}; build the optimizer as it was, or start a new run in another folder"
        )
    names = parameter_names(model)
    for number, (group, live) in enumerate(zip(groups, lives, strict=True)):
        _refuse_another_kind(optimizer, group)
        group["params"] = live_order(number, group, [names.get(id(parameter), "") for parameter in live["params"]])
    return groups


def _refuse_another_form(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    if has_torchs_form(optimizer, optimizer.state_dict()):
        raise CheckpointError(
            "optimizer: the checkpoint's state has its own format "
            f"({', '.join(map(str, saved.get(OWN, saved)))}), and the "
            f"{type(optimizer).__name__} of this run has torch's; build the optimizer as it was"
        )


def _refuse_another_kind(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Raise for a group of another optimizer, which has other settings and lacks some of this one's.

    Flags are ignored: torch adds some from version to version and fills them in.
    """
    own = {
        key: value for group in optimizer.param_groups for key, value in group.items() if key not in _OF_NO_OPTIMIZER
    }
    flag = "decoupled_weight_decay"
    if flag in saved and flag in own and saved[flag] != own[flag]:
        kinds = ("AdamW", "Adam") if saved[flag] else ("Adam", "AdamW")
        raise CheckpointError(
            f"optimizer: the checkpoint's decays weights as {kinds[0]} does, the {type(optimizer).__name__} of this "
            f"run as {kinds[1]} does ({flag}={saved[flag]}). Build the optimizer as it was, or start a new run from "
            "load_weights(...)"
        )
    missing = [key for key, value in own.items() if key not in saved and not isinstance(value, (bool, type(None)))]
    strange = [key for key in saved if key not in own and key not in _OF_NO_OPTIMIZER]
    if missing and strange:
        raise CheckpointError(
            f"optimizer: the checkpoint's is of another kind: it has {', '.join(strange)}, the "
            f"{type(optimizer).__name__} of this run has {', '.join(missing)}. Build the optimizer as it was, or start "
            "a new run from load_weights(...)"
        )


def overridden_settings(
    optimizer: Optimizer, saved: Mapping[str, Any], *, scheduled: bool, built: Sequence[Mapping[str, Any]] = ()
) -> list[str]:
    """Return settings that a checkpoint overrides in the optimizer as built: ``"lr=0.1 (built as 0.2)"``.

    Args:
        optimizer: optimizer as built, before the checkpoint is loaded.
        saved: result of :func:`optimizer_state`.
        scheduled: whether a schedule changes learning rate and momentum; then only their initial values are compared.
        built: initial settings, by group, of those that the run which wrote the checkpoint has changed.

    Example:
        >>> import torch
        >>> old, new = (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=lr) for lr in (0.1, 0.2))
        >>> overridden_settings(new, old.state_dict(), scheduled=False)
        ['lr=0.1 (built as 0.2)']
    """
    left_out = {"params", "param_names", "capturable", *(("lr", "momentum", "betas", "max_lr") if scheduled else ())}
    found: list[str] = []
    groups: Iterable[Any] = itertools.zip_longest(saved.get("param_groups", ()), built, fillvalue={})
    for (group, before), live in zip(groups, optimizer.param_groups, strict=False):
        for key in live.keys() & group.keys() - left_out:
            old, new = _comparable(group[key]), _comparable(live[key])
            if not is_same_setting(old, new) and not (key in before and is_same_setting(_comparable(before[key]), new)):
                found.append(f"{key}={old!r} (built as {new!r})")
    return sorted(set(found))


def _comparable(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def is_same_setting(old: Any, new: Any) -> bool:
    """Return whether two values of a setting are equal, regardless of container types; a rate may be float32.

    Example:
        >>> is_same_setting([0.9, 0.95], (0.9, 0.95)), is_same_setting(1, 2)
        (True, False)
    """
    old, new = _comparable(old), _comparable(new)
    numbers = isinstance(old, float) and isinstance(new, float)
    return bool(math.isclose(old, new, rel_tol=1e-6) if numbers else old == new)


def _cloned(value: Any) -> Any:
    """Return a copy of a tensor, since torch would use the checkpoint's, which every step would change."""
    return value.clone() if isinstance(value, Tensor) else value


def live_order(number: int, group: Mapping[str, Any], live_names: list[str]) -> list[Any]:
    """Return the indices of a saved parameter group in the order of a live one, by name if both have names.

    Args:
        number: index of the group, for messages.
        group: the saved one.
        live_names: names of the live parameters; empty if unknown.

    Raises:
        CheckpointError: the groups hold other parameters, or a different number of them.

    Example:
        >>> live_order(0, {"params": [0, 1], "param_names": ["bias", "weight"]}, ["weight", "bias"])
        [1, 0]
    """
    indices, saved_names = list(group["params"]), group.get("param_names")
    if len(indices) != len(live_names):
        raise CheckpointError(
            f"optimizer: group {number} has {len(live_names)} parameters, the checkpoint's has {len(indices)}"
        )
    if not saved_names or "" in saved_names or "" in live_names:
        return indices
    by_name = dict(zip(saved_names, indices, strict=True))
    missing = [name for name in live_names if name not in by_name]
    if missing:
        raise CheckpointError(f"optimizer: group {number} of the checkpoint has no state for {', '.join(missing[:5])}")
    return [by_name[name] for name in live_names]


def move_optimizer_state(optimizer: Optimizer) -> None:
    """Move state tensors to the devices of their parameters, in place.

    Step counters of non-fused optimizers stay on the CPU, where torch keeps them.
    """
    for parameter, entries in optimizer.state.items():
        for key, value in entries.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.device != parameter.device:
                entries[key] = value.to(parameter.device)


def check_scheduler(scheduler: Any, optimizer: Optimizer) -> None:
    """Raise ConfigError if a scheduler belongs to another optimizer, or its ``step`` needs an argument."""
    if isinstance(scheduler, type):
        raise ConfigError(
            f"is the class {scheduler.__name__}; make an object: {scheduler.__name__}(optimizer, ...)",
            argument="scheduler",
        )
    built_over = getattr(scheduler, "optimizer", optimizer)
    if built_over is not optimizer and getattr(built_over, "param_groups", None) is not optimizer.param_groups:
        raise ConfigError(
            f"the {type(scheduler).__name__} was built over another optimizer and would never move this "
            "one's learning rate; build it over the optimizer that you pass",
            argument="scheduler",
        )
    if scheduler is None or isinstance(scheduler, ReduceLROnPlateau):
        return
    if wants := _required_argument(scheduler):
        raise ConfigError(
            f"step() of the {type(scheduler).__name__} needs {wants!r}, like those of timm, but is called without "
            "arguments, like those of torch. Use a scheduler of torch.optim.lr_scheduler, or wrap this one in an "
            "object whose step() counts and calls it",
            argument="scheduler",
        )


def _required_argument(scheduler: Any) -> str | None:
    """Return the first required argument of a scheduler's ``step``, or None."""
    try:
        parameters = inspect.signature(scheduler.step).parameters.values()
    except (AttributeError, TypeError, ValueError):
        return None
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [one.name for one in parameters if one.default is inspect.Parameter.empty and one.kind not in kinds]
    return needed[0] if needed else None
