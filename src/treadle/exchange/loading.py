"""Loading of another framework's weights and optimizer state, checked before anything is changed."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.distributed import unwrap
from treadle.distributed.state_names import clean_name, load_model_state, model_state, state_mismatches
from treadle.errors import CheckpointError, ConfigError
from treadle.errors.arguments import checked
from treadle.exchange.adapters import adapted
from treadle.exchange.foreign import ForeignCheckpoint
from treadle.exchange.reading import read_as_named, without_prefix
from treadle.optim.optimizer import live_order, load_optimizer_state, parameter_names

_log = logging.getLogger("treadle.exchange")
# Keys that the parameter groups of any optimizer may have, added by torch and schedules.
_ANY = {"params", "param_names", "initial_lr", "max_lr", "min_lr"}


@checked
def load_foreign(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    optimizer: Optimizer | None = None,
    prefix: str | None = None,
) -> ForeignCheckpoint:
    """Copy the weights of another framework's checkpoint into a model, in place and strictly.

    Everything is checked before anything is changed. Whatever cannot be imported is logged as one warning.

    Args:
        model: built as in the original run, on any device, wrapped or not.
        path: a file or folder, see :func:`read_foreign`.
        optimizer: also loads the optimizer's state, including its learning rate. torch stores this by position, so it
            is loaded only if groups, counts and shapes match, or by name if the file has names.
        prefix: loads only the weights whose names begin with it, and removes it: ``"model."`` for the ``self.model`` of
            a LightningModule. None removes the common prefix before the model's own names, if any.

    Returns:
        The checkpoint, under the model's names.

    Raises:
        CheckpointError: weights are missing, unexpected or of the wrong shape; the optimizer's state is missing or does
            not fit; or the checkpoint cannot be read.
        ConfigError: no weight has the prefix.

    Example:
        >>> torch.save({"model": nn.DataParallel(nn.Linear(2, 1)).state_dict(), "epoch": 3}, "old.pt")
        >>> load_foreign(nn.Linear(2, 1), "old.pt").prefix
        'module.'
    """
    found = take_over(model, path, optimizer=optimizer, prefix=prefix)
    if found.not_taken:
        _log.warning("%r: not taken over: %s", os.fspath(path), "; ".join(found.not_taken))
    return found


def take_over(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    optimizer: Optimizer | None = None,
    prefix: str | None = None,
) -> ForeignCheckpoint:
    """Load like :func:`load_foreign`, leaving the warning about ``not_taken`` to the caller."""
    found = _named_as_in(model, adapted(model, read_as_named(path), optimizer), prefix)
    where = repr(os.fspath(path))
    weights = _with_tied(model, found.model, where)
    wrong = state_mismatches(model, weights)
    if wrong:
        raise CheckpointError(f"{where} does not fit this model: {wrong}. {_advice(model, found)}")
    if optimizer is not None:
        saved = _fitting_state(found, optimizer, model, where)
        load_model_state(model, weights)
        load_optimizer_state(optimizer, model, saved)
    else:
        load_model_state(model, weights)
        if found.optimizer is not None:
            found = replace(found, not_taken=["optimizer: pass optimizer= to load it too", *found.not_taken])
    return found


def _named_as_in(model: nn.Module, found: ForeignCheckpoint, prefix: str | None) -> ForeignCheckpoint:
    if prefix is None:
        live = model_state(model)
        common = _prefix_before(live, found.model)
        return found if common is None else without_prefix(found, common)
    inside = {name: value for name, value in found.model.items() if name.startswith(prefix)}
    if not inside:
        first = next(iter(found.model))
        raise ConfigError(
            f"no weight in {str(found.path)!r} begins with it; the first is {first!r}", argument="prefix", value=prefix
        )
    others = [name for name in found.model if name not in inside]
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    left_out = [f"{', '.join(others[:3])}{more}: outside prefix={prefix!r}"] if others else []
    return without_prefix(replace(found, model=inside, not_taken=[*left_out, *found.not_taken]), prefix)


def _prefix_before(live: Mapping[str, Any], saved: Mapping[str, Any]) -> str | None:
    """Return the prefix of every saved name before a name of the model; None if some names match without one."""
    if set(live) & set(saved):
        return None
    prefix = _likely_prefix(live, saved)
    if prefix and all(name.startswith(prefix) and name.removeprefix(prefix) in live for name in saved):
        return prefix
    return None


def _likely_prefix(live: Mapping[str, Any], saved: Mapping[str, Any]) -> str | None:
    for own in live:
        for name in saved:
            if name.endswith(f".{own}"):
                return name.removesuffix(own)
    return None


def _advice(model: nn.Module, found: ForeignCheckpoint) -> str:
    live = model_state(model)
    prefix = None if set(live) & set(found.model) else _likely_prefix(live, found.model)
    if prefix:
        return f"Pass prefix={prefix!r} to load only that part of the file"
    return "Build the model as it was, or pass a checkpoint of this one"


def _with_tied(model: nn.Module, weights: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Add the further names of the model's tied weights that the file lacks.

    Raises:
        CheckpointError: the file holds two different weights for one tied weight of the model.
    """
    completed = dict(weights)
    first: dict[tuple[Any, ...], str] = {}
    for name, value in unwrap(model).state_dict().items():
        if not isinstance(value, Tensor) or value.numel() == 0 or value.device.type == "meta":
            continue
        one = first.setdefault((value.data_ptr(), value.shape, value.stride(), value.dtype), clean_name(name))
        kept, twin = completed.get(one), completed.get(clean_name(name))
        if kept is None and twin is not None:
            completed[one] = twin
        elif kept is not None and twin is None:
            completed[clean_name(name)] = kept
        elif kept is not None and twin is not None and kept.shape == twin.shape and not torch.equal(kept, twin):
            raise CheckpointError(
                f"{where} does not fit this model: {one} and {clean_name(name)} are one tied weight here and two "
                "different ones in the file; build the model without tying them"
            )
    return completed


def _fitting_state(found: ForeignCheckpoint, optimizer: Optimizer, model: nn.Module, where: str) -> dict[str, Any]:
    """Return the file's optimizer state under the model's names, if it fits an optimizer.

    Raises:
        CheckpointError: there is none, or groups, counts, settings or shapes differ.
    """
    if found.optimizer is None:
        raise CheckpointError(f"{where} holds no optimizer state that could be taken; load it without optimizer=")
    saved = {**found.optimizer, "param_groups": [dict(group) for group in found.optimizer["param_groups"]]}
    groups, names = saved["param_groups"], parameter_names(model)
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{where}: its optimizer has {len(groups)} parameter groups and this one {len(optimizer.param_groups)}; "
            "build the groups as they were, or load without optimizer="
        )
    for number, (group, live) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        strange, lacking = sorted(set(group) - set(live) - _ANY), sorted(set(optimizer.defaults) - set(group))
        if strange and lacking:  # only one of the two: a custom key, or another version of torch
            raise CheckpointError(
                f"{where}: its optimizer has the settings {', '.join(strange)}, where {type(optimizer).__name__} has "
                f"{', '.join(lacking)}; build the optimizer that was used, or load without optimizer="
            )
        if "param_names" in group:
            group["param_names"] = [clean_name(name).removeprefix(found.prefix) for name in group["param_names"]]
        order = live_order(number, group, [names.get(id(parameter), "") for parameter in live["params"]])
        for index, parameter in zip(order, live["params"], strict=True):
            _check_shapes(saved["state"].get(index, {}), parameter, names.get(id(parameter), f"number {index}"), where)
    return saved


def _check_shapes(entries: Mapping[str, Any], parameter: Tensor, name: str, where: str) -> None:
    """Raise for state that cannot belong to a parameter; scalars, such as step counts, fit any."""
    for key, value in entries.items():
        if isinstance(value, Tensor) and value.numel() != 1 and value.shape != parameter.shape:
            raise CheckpointError(
                f"{where}: its optimizer's {key} is {tuple(value.shape)} where {name} is {tuple(parameter.shape)}: its "
                "parameters have a different order; build model and optimizer as they were, or load without optimizer="
            )
