"""Optimizers with train and eval modes, such as schedule-free ones, which move the weights between two points."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

NAME = "evaluation point"
"""The name under which a checkpoint keeps the weights of the evaluation point, among its averages."""


def has_modes(optimizer: Any) -> bool:
    """Return whether an optimizer has ``train()`` and ``eval()``, which move the weights.

    Example:
        >>> has_modes(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
        False
    """
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def into_training_point(optimizer: Any) -> None:
    """Call ``train()`` of an optimizer that has ``train()`` and ``eval()``."""
    if has_modes(optimizer):
        optimizer.train()


@contextlib.contextmanager
def at_evaluation_point(optimizer: Any) -> Iterator[None]:
    """Move the weights to the evaluation point inside the block, and restore them to the bit afterwards."""
    if not has_modes(optimizer):
        yield
        return
    groups = optimizer.param_groups
    raw = [(parameter, parameter.detach().clone()) for group in groups for parameter in group["params"]]
    settings = [
        {key: value for key, value in group.items() if not isinstance(value, (list, Tensor))} for group in groups
    ]
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()
        with torch.no_grad():
            for parameter, value in raw:
                parameter.copy_(value)
        for group, before in zip(groups, settings, strict=True):
            group.update(before)
