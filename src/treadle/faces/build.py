"""Construction of a front end's engine: model on its device, default hooks, settings; and its counters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from treadle.capture.checkpointing import Checkpointing, checkpoint_model
from treadle.capture.compile import Compile, check_compile, compile_model
from treadle.device import get_device
from treadle.engine import Engine
from treadle.engine.hook import BaseHook
from treadle.engine.limits import Limits
from treadle.engine.preflight import refuse_meta
from treadle.engine.settings import Capture
from treadle.errors import ConfigError
from treadle.faces.parallel import ParallelConfig, spread
from treadle.faces.run_files import shows_progress, with_default_hooks
from treadle.hooks.progress import ProgressHook
from treadle.hooks.trackers import TrackerChoice, with_trackers
from treadle.optim.optimizer import check_scheduler, move_optimizer_state
from treadle.optim.precision import PrecisionName
from treadle.task import Task


class Placed(NamedTuple):
    """Model on its device, compiled and parallelized as requested, with its optimizer."""

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
    """Move a model and its optimizer's state to a device, then compile and parallelize the model.

    Args:
        model: moved in place.
        optimizer: optimizer of its parameters, or a function that creates one for the moved model.
        device: None takes CUDA, then MPS, then the CPU.
        scheduler: must be built for the optimizer; None is not checked.
        compile: see :func:`treadle.compile_model`.
        gradient_checkpointing: see :func:`treadle.checkpoint_model`.
        parallel: see :func:`treadle.parallelize`; None for a single process.

    Raises:
        ConfigError: the device is not available, the scheduler belongs to another optimizer, or ``compile`` or
            ``parallel`` is refused.

    Example:
        >>> placed = place(nn.Linear(1, 1), lambda model: torch.optim.SGD(model.parameters(), lr=0.1), device="cpu")
        >>> placed.device.type, placed.optimizer.defaults["lr"]
        ('cpu', 0.1)
    """
    where = get_device(device)
    if not isinstance(model, nn.Module):
        raise ConfigError("must be a model: an object of a subclass of nn.Module", argument="model", value=model)
    refuse_meta(model)
    moved = model.to(where)
    made = optimizer(moved) if callable(optimizer) else optimizer
    checkpoint_model(moved, gradient_checkpointing)
    ready = spread(compile_model(moved, check_compile(compile)), parallel, made)
    move_optimizer_state(made)
    check_scheduler(scheduler, made)
    return Placed(ready, made, where)


class EngineArguments(TypedDict, total=False):
    """Arguments that a front end passes unchanged to :class:`Engine`."""

    scheduler: LRScheduler | None
    scheduler_interval: Literal["step", "epoch"]
    device: torch.device | str | int | None
    precision: PrecisionName | None
    grad_clip: float | None
    grad_clip_value: float | None
    accumulation_steps: int
    max_non_finite_grad_retries: int | None
    eval_seed: int
    capture: Capture
    limits: Limits | Mapping[str, Any] | None
    config: Any
    workspace: Path | str | None


def build_engine(
    face: str,
    model: nn.Module,
    optimizer: Optimizer,
    task: Task,
    arguments: EngineArguments,
    *,
    own_hooks: Sequence[BaseHook],
    hooks: Sequence[BaseHook],
    trackers: str | Sequence[TrackerChoice],
    progress: bool,
    log_every: int | None = None,
    make: Callable[..., Engine] = Engine,
) -> Engine:
    """Build the engine of a front end, with its hooks, the user's, trackers and default hooks, in this order.

    Args:
        face: name of the front end; its logger is ``treadle.<face>``.
        model: model from :func:`place`.
        optimizer: optimizer from :func:`place`.
        task: turns a batch into a loss.
        arguments: further arguments of the engine.
        own_hooks: hooks of the front end.
        hooks: hooks of the user.
        trackers: see :func:`treadle.with_trackers`.
        progress: False keeps a run silent unless the user configured a logging handler.
        log_every: steps between log lines, unless one of the user's hooks shows progress; None or 0 turns them off.
        make: class of the engine.

    Raises:
        ConfigError: a value is outside its range, or a tracker is unknown.
    """
    given = with_trackers(hooks, trackers)
    lines = [ProgressHook(log_every)] if log_every and not shows_progress(given) else []
    every = with_default_hooks([*own_hooks, *lines, *given], given=given, progress=progress)
    logger = logging.getLogger(f"treadle.{face}")
    return make(model, optimizer, task, hooks=every, progress=progress, logger=logger, face=face, **arguments)


class EngineCounters:
    """Counters of a front end, read from its engine."""

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
