"""The optimizer of the graph face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from treadle.errors import ConfigError, nearest, refuse_unknown
from treadle.optim import can_be_fused, decay_groups

_OPTIMIZERS = ("adamw", "adam", "sgd")
_KEYS = ("type", "lr", "weight_decay", "betas", "eps", "momentum")


def get_optimizer(
    model: nn.Module,
    optimizer_type: str = "adamw",
    lr: float = 1e-4,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    momentum: float = 0.9,
) -> Optimizer:
    """Builds an optimizer with two groups: parameters that decay, then parameters that do not.

    There is no decay for parameters with fewer than two dimensions, nor for those of normalisation layers, whatever
    their names. Frozen parameters are left out. The fused kernel is used where torch has one.

    Args:
        model: the model.
        optimizer_type: ``"adamw"``, ``"adam"`` or ``"sgd"``.
        lr: learning rate.
        weight_decay: of the first group.
        betas: of Adam and AdamW.
        eps: of Adam and AdamW.
        momentum: of SGD.

    Raises:
        ConfigError: the type is unknown (the nearest is named), or no parameter requires a gradient.
        ValueError: a number is out of range.

    Example:
        >>> optimizer = get_optimizer(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)), lr=1e-3)
        >>> [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups]
        [(1, 0.01), (3, 0.0)]
    """
    if optimizer_type not in _OPTIMIZERS:
        raise ConfigError(f"optimizer_type={optimizer_type!r} is unknown; {nearest(str(optimizer_type), _OPTIMIZERS)}")
    groups = decay_groups(model, weight_decay)
    trainable = [parameter for group in groups for parameter in group["params"]]
    shared: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "fused": can_be_fused(trainable) or None}
    if optimizer_type == "sgd":
        return torch.optim.SGD(groups, momentum=momentum, **shared)
    make = torch.optim.AdamW if optimizer_type == "adamw" else torch.optim.Adam
    return make(groups, betas=(betas[0], betas[1]), eps=eps, **shared)


def get_optimizer_from_config(model: nn.Module, cfg: Mapping[str, Any]) -> Optimizer:
    """Builds an optimizer from the keys ``type``, ``lr``, ``weight_decay``, ``betas``, ``eps``, ``momentum``.

    Args:
        model: the model.
        cfg: a mapping; what it lacks takes the defaults of `get_optimizer`.

    Raises:
        ConfigError: a key or the type is unknown; the nearest is named.

    Example:
        >>> get_optimizer_from_config(nn.Linear(2, 3), {"type": "sgd", "lr": 0.1}).param_groups[0]["lr"]
        0.1
    """
    refuse_unknown("optimizer", cfg, _KEYS)
    settings = {("optimizer_type" if key == "type" else key): value for key, value in cfg.items()}
    return get_optimizer(model, **settings)
