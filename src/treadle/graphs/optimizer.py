"""Optimizer of the graph trainer."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from treadle.errors import ConfigError, nearest, refuse_unknown
from treadle.errors.arguments import check_least, checked
from treadle.optim.optimizer import can_be_fused, decay_groups

_log = logging.getLogger("treadle.graphs")

_OPTIMIZERS = ("adamw", "adam", "sgd")
_KEYS = ("type", "lr", "weight_decay", "betas", "eps", "momentum")


@checked
def get_optimizer(
    model: nn.Module,
    optimizer_type: str = "adamw",
    lr: float = 1e-4,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    momentum: float = 0.9,
) -> Optimizer:
    """Build an optimizer with two groups: parameters with weight decay, then parameters without.

    Parameters with fewer than two dimensions and those of normalisation layers, whatever their names, are not decayed.
    Frozen parameters are left out. The fused kernel is used if torch has one.

    Args:
        model: the model.
        optimizer_type: ``"adamw"``, ``"adam"`` or ``"sgd"``.
        lr: learning rate.
        weight_decay: weight decay of the first group.
        betas: for Adam and AdamW.
        eps: for Adam and AdamW.
        momentum: for SGD.

    Raises:
        ConfigError: the type is unknown (the closest match is named), or no parameter requires a gradient.
        ValueError: a number is out of range.

    Example:
        >>> optimizer = get_optimizer(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)), lr=1e-3)
        >>> [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups]
        [(1, 0.01), (3, 0.0)]
    """
    if optimizer_type not in _OPTIMIZERS:
        raise ConfigError(
            f" is unknown; {nearest(str(optimizer_type), _OPTIMIZERS)}", argument="optimizer_type", value=optimizer_type
        )
    betas = (betas[0], betas[1])
    check_least(0, lr=lr, weight_decay=weight_decay, eps=eps, momentum=momentum)
    given = {"betas": (betas, (0.9, 0.999)), "eps": (eps, 1e-8), "momentum": (momentum, 0.9)}
    say_what_is_idle(optimizer_type, given, ("momentum",) if optimizer_type == "sgd" else ("betas", "eps"))
    groups = decay_groups(model, weight_decay)
    trainable = [parameter for group in groups for parameter in group["params"]]
    shared: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "fused": can_be_fused(trainable) or None}
    if optimizer_type == "sgd":
        return torch.optim.SGD(groups, momentum=momentum, **shared)
    make = torch.optim.AdamW if optimizer_type == "adamw" else torch.optim.Adam
    return make(groups, betas=betas, eps=eps, **shared)


def say_what_is_idle(kind: str, given: Mapping[str, tuple[Any, Any]], used: Collection[str]) -> None:
    """Warn about given settings that this type of optimizer or schedule does not read.

    Args:
        kind: name of the type.
        given: value and default of each setting.
        used: settings that it reads.
    """
    idle = [f"{name}={value!r}" for name, (value, default) in given.items() if name not in used and value != default]
    if idle:
        _log.warning("%r has no %s, so it has no effect; leave it out, or choose another type", kind, ", ".join(idle))


@checked
def get_optimizer_from_config(model: nn.Module, cfg: Mapping[str, Any]) -> Optimizer:
    """Build an optimizer from the keys ``type``, ``lr``, ``weight_decay``, ``betas``, ``eps``, ``momentum``.

    Args:
        model: the model.
        cfg: a mapping; missing keys use the defaults of `get_optimizer`.

    Raises:
        ConfigError: a key or the type is unknown; the closest match is named.

    Example:
        >>> get_optimizer_from_config(nn.Linear(2, 3), {"type": "sgd", "lr": 0.1}).param_groups[0]["lr"]
        0.1
    """
    refuse_unknown("optimizer", cfg, _KEYS)
    settings = {("optimizer_type" if key == "type" else key): value for key, value in cfg.items()}
    return get_optimizer(model, **settings)
