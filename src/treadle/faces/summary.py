"""Summary of a model: its modules with their parameters, and the shapes of their outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from treadle.device import to_device
from treadle.distributed import unwrap
from treadle.distributed.state_names import clean_name
from treadle.engine.evaluation import evaluation_rules
from treadle.errors.arguments import check_least, checked


@dataclass(frozen=True)
class SummaryRow:
    """Row of a summary.

    Attributes:
        name: path of the module; empty for the model itself.
        kind: name of its class.
        num_parameters: number of elements of all its parameters, each counted once.
        num_trainable: number of elements that require gradients.
        shape: shape of its output, or nested shapes; None if it was not called.
    """

    name: str
    kind: str
    num_parameters: int
    num_trainable: int
    shape: Any = None


@dataclass(frozen=True)
class ModelSummary:
    """Table of the modules of a model.

    Attributes:
        rows: one per module, the model itself first.
        num_bytes: size of parameters and buffers.
    """

    rows: list[SummaryRow]
    num_bytes: int

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters, each counted once."""
        return self.rows[0].num_parameters

    @property
    def num_trainable(self) -> int:
        """Number of elements that require gradients."""
        return self.rows[0].num_trainable

    def __str__(self) -> str:
        shown = any(row.shape is not None for row in self.rows)
        head = ("module", "class", "parameters", *(("output",) if shown else ()))
        lines = [head]
        for row in self.rows:
            name = f"{'  ' * row.name.count('.')}{row.name.rpartition('.')[2]}" if row.name else "(model)"
            frozen = row.num_parameters - row.num_trainable
            count = f"{row.num_parameters:,}" + (f" ({frozen:,} frozen)" if frozen else "")
            lines.append((name, row.kind, count, *((_shown(row.shape),) if shown else ())))
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
        table = ["  ".join(line).rstrip() for line in padded]
        counts = f"{self.num_parameters:,} parameters, {self.num_trainable:,} of them trainable"
        return "\n".join([
            table[0], "-" * max(map(len, table)), *table[1:],
            f"{counts}, {self.num_bytes / 1e6:,.1f} MB",
        ])  # fmt: skip


@checked
def summary(model: nn.Module, input: Any = None, *, depth: int | None = 2) -> ModelSummary:
    """Return a table of the modules of a model; print it.

    With an input, the model is called once, in eval mode without gradients; RNG and modes are restored.

    Args:
        model: wrapped or not.
        input: a batch of inputs, passed as ``model(**input)`` for a mapping, ``model(*input)`` for a tuple, else
            ``model(input)``; None shows no shapes.
        depth: levels of modules below the model; None for all.

    Raises:
        ConfigError: ``depth`` is negative.

    Example:
        >>> import torch
        >>> print(summary(nn.Sequential(nn.Linear(4, 2), nn.ReLU()), torch.zeros(3, 4)))
        module   class       parameters  output
        ---------------------------------------
        (model)  Sequential  10          (3, 2)
        0        Linear      10          (3, 2)
        1        ReLU        0           (3, 2)
        10 parameters, 10 of them trainable, 0.0 MB
    """
    check_least(0, depth=depth)
    inner = unwrap(model)
    shapes: dict[int, Any] = {}
    if input is not None:
        _call(inner, input, shapes)
    rows = []
    for name, module in inner.named_modules():
        if not name or depth is None or name.count(".") < depth:
            parameters = list(module.parameters())
            count = sum(parameter.numel() for parameter in parameters)
            trainable = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
            rows.append(SummaryRow(clean_name(name), type(module).__name__, count, trainable, shapes.get(id(module))))
    tensors = [*inner.parameters(), *inner.buffers()]
    return ModelSummary(rows, sum(tensor.numel() * tensor.element_size() for tensor in tensors))


def _call(model: nn.Module, input: Any, shapes: dict[int, Any]) -> None:
    first = next(iter(model.parameters()), next(iter(model.buffers()), None))
    given = input if first is None else to_device(input, first.device)
    with _noting(model, shapes), evaluation_rules(model, ()):
        if isinstance(given, Mapping):
            model(**given)
        elif isinstance(given, tuple):
            model(*given)
        else:
            model(given)


@contextlib.contextmanager
def _noting(model: nn.Module, shapes: dict[int, Any]) -> Iterator[None]:
    def note(module: nn.Module, arguments: Any, output: Any, *, key: int) -> None:
        shapes[key] = _shape_of(output)

    handles = [module.register_forward_hook(partial(note, key=id(module))) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _shape_of(output: Any) -> Any:
    if isinstance(output, Tensor):
        return tuple(output.shape)
    if isinstance(output, Mapping):
        return {str(name): shape for name, value in output.items() if (shape := _shape_of(value)) is not None}
    if isinstance(output, (list, tuple)):
        return [shape for value in output if (shape := _shape_of(value)) is not None]
    return None


def _shown(shape: Any) -> str:
    if isinstance(shape, dict):
        return ", ".join(f"{name} {_shown(inner)}" for name, inner in shape.items())
    if isinstance(shape, list):
        return ", ".join(map(_shown, shape))
    return "" if shape is None else str(shape)
