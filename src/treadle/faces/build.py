"""The engine of a face: its model on a device, its default hooks, its settings; and the counters of a face."""

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
    """Move a model and the state of its optimizer to a device, compile and spread the model.

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
    if not isinstance(model, nn.Module):
        raise ConfigError("must be a model: an object of a subclass of nn.Module", argument="model", value=model)
    moved = model.to(where)
    made = optimizer(moved) if callable(optimizer) else optimizer
    checkpoint_model(moved, gradient_checkpointing)
    ready = spread(compile_model(moved, check_compile(compile)), parallel, made)
    move_optimizer_state(made)
    check_scheduler(scheduler, made)
    return Placed(ready, made, where)


class EngineArguments(TypedDict, total=False):
    """Arguments that a face passes on to :class:`Engine` as they are."""

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
    """Build the engine of a face, with the hooks of the face, the user's, the trackers and the default ones, in order.

    Args:
        face: its name, also that of its logger: ``treadle.<face>``.
        model: as :func:`place` returned it.
        optimizer: the same.
        task: turns a batch into a loss.
        arguments: further ones of the engine.
        own_hooks: hooks of the face.
        hooks: the user's.
        trackers: as :func:`treadle.with_trackers` takes them.
        progress: False shows nothing of a run where no handler of the user's logs it.
        log_every: steps between log lines, unless one of the user's hooks shows progress; None or 0 off.
        make: the class of the engine.

    Raises:
        ConfigError: a value is outside its range, or there is no such tracker.
    """
    given = with_trackers(hooks, trackers)
    lines = [ProgressHook(log_every)] if log_every and not shows_progress(given) else []
    every = with_default_hooks([*own_hooks, *lines, *given], given=given, progress=progress)
    logger = logging.getLogger(f"treadle.{face}")
    return make(model, optimizer, task, hooks=every, progress=progress, logger=logger, face=face, **arguments)


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
        """Step that changed the weights."""
        return self._engine.applied_steps

    @property
    def micro_steps(self) -> int:
        """Micro-batches trained on."""
        return self._engine.micro_steps

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self._engine.epoch
