"""Outputs of batches, kept on the CPU and concatenated in the loader's order."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from treadle.errors import ConfigError


def outputs_on_cpu(outputs: Any) -> Any:
    """Return the tensors of one batch's outputs on the CPU, in plain containers; other values are dropped.

    Example:
        >>> outputs_on_cpu({"logits": torch.zeros(1), "cache": object()})
        {'logits': tensor([0.])}
    """
    if isinstance(outputs, Tensor):
        return outputs.detach().cpu()
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, Mapping):
        outputs = {field.name: getattr(outputs, field.name) for field in dataclasses.fields(outputs)}
    if isinstance(outputs, Mapping):
        kept = {str(name): outputs_on_cpu(value) for name, value in outputs.items()}
        return {name: value for name, value in kept.items() if value is not None} or None
    if isinstance(outputs, (list, tuple)):
        parts = [outputs_on_cpu(value) for value in outputs]
        return None if all(part is None for part in parts) else tuple(parts)
    return None


def joined(outputs: list[Any], name: str = "outputs") -> Any:
    """Concatenate the results of :func:`outputs_on_cpu` along dimension 0; 0-d tensors are stacked.

    Raises:
        ConfigError: there is nothing to concatenate, or the batches differ in more than dimension 0.

    Example:
        >>> joined([torch.zeros(2, 3), torch.ones(1, 3)]).shape
        torch.Size([3, 3])
    """
    first = next((value for value in outputs if value is not None), None)
    if first is None:
        raise ConfigError(f"{name}: no batch gave a tensor; is the loader empty?", argument="predict")
    if isinstance(first, Mapping):
        return {key: joined([part[key] for part in outputs], f"{name}[{key!r}]") for key in first}
    if isinstance(first, tuple):
        columns = list(zip(*outputs, strict=True))
        return tuple(
            None if all(value is None for value in column) else joined(list(column), f"{name}[{place}]")
            for place, column in enumerate(columns)
        )
    shapes = {tuple(value.shape[1:]) for value in outputs}
    if len(shapes) > 1:
        raise ConfigError(
            f"{name} of the batches have the shapes {sorted(shapes)} behind dimension 0 and cannot be "
            "joined; pad all batches to one length, or go through the loader yourself",
            argument="predict",
        )
    return torch.cat(outputs) if first.dim() else torch.stack(outputs)
