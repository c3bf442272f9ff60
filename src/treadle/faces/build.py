"""Placement of model and optimizer before a face builds its engine, and the counters of a face."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from treadle.capture.checkpointing import Checkpointing, checkpoint_model
from treadle.capture.compile import Compile, compile_model
from treadle.device import get_device
from treadle.engine import Engine
from treadle.faces.parallel import ParallelConfig, spread
from treadle.optim.optimizer import check_scheduler, move_optimizer_state


class Placed(NamedTuple):
    """A model on its device, compiled and spread as asked, with its optimizer."""

    model: nn.Module
    optimizer: Optimizer
    device: torch.device


def place(
    model: nn.Module,
    optimizer: Optimizer | Callable[[nn.Module], Optimizer],
    *,
    device: torch.device | str | int | None,
    scheduler: Any = None,
    compile: Compile = False,
    gradient_checkpointing: Checkpointing = False,
    parallel: ParallelConfig | Mapping[str, Any] | str | None = None,
) -> Placed:
    """Moves a model and the state of its optimizer to a device, compiles and spreads the model.

    Args:
        model: moved in place.
        optimizer: over its parameters, or a function that makes one for the moved model.
        device: None takes CUDA, then MPS, then the CPU.
        scheduler: must be built over the optimizer; None is not checked.
        compile: as :func:`treadle.compile_model` takes it.
        gradient_checkpointing: as :func:`treadle.checkpoint_model` takes it.
        parallel: as :func:`treadle.parallelize` takes it; None for one process.

    Raises:
        ConfigError: the device is not available, the scheduler moves another optimizer, or ``compile`` or ``parallel``
            is refused.

    Example:
        >>> placed = place(nn.Linear(1, 1), lambda model: torch.optim.SGD(model.parameters(), lr=0.1), device="cpu")
        >>> placed.device.type, placed.optimizer.defaults["lr"]
        ('cpu', 0.1)
    """
    where = get_device(device)
    moved = model.to(where)
    made = optimizer(moved) if callable(optimizer) else optimizer
    checkpoint_model(moved, gradient_checkpointing)
    ready = spread(compile_model(moved, compile), parallel, made)
    move_optimizer_state(made)
    check_scheduler(scheduler, made)
    return Placed(ready, made, where)


class EngineCounters:
    """The counters of a face, which are those of its engine."""

    _engine: Engine

    @property
    def step(self) -> int:
        """Optimizer steps attempted."""
        return self._engine.step

    @property
    def global_step(self) -> int:
        """Optimizer steps attempted; the same as ``step``."""
        return self._engine.step

    @property
    def applied_steps(self) -> int:
        """Steps that changed the weights."""
        return self._engine.applied_steps

    @property
    def micro_steps(self) -> int:
        """Micro-batches trained on."""
        return self._engine.micro_steps

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self._engine.epoch
