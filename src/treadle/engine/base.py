"""Attributes of an engine, and the properties of a run that hooks and front ends read."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from treadle import distributed
from treadle.data.amount import Amount
from treadle.data.cursor import Cursor, Group
from treadle.device import get_device
from treadle.distributed.exchange import GradientExchange
from treadle.engine.attempt import Attempt
from treadle.engine.events import Events
from treadle.engine.hook import BaseHook
from treadle.engine.progress import Progress
from treadle.engine.session import HookDeclarations, notices_of_ranks
from treadle.engine.settings import Capture, EngineSettings, Steps
from treadle.engine.signals import ExitPlan, SignalListener
from treadle.engine.state import Driver, RunState
from treadle.engine.state_options import StateOptions
from treadle.engine.stopping import Target
from treadle.errors import ConfigError
from treadle.means import RunningMeans
from treadle.optim.ema import Ema
from treadle.optim.late_flags import StepLocation
from treadle.optim.nonfinite import FiniteGuard
from treadle.optim.precision import Precision, PrecisionName
from treadle.task import StepOutput, Task


class EngineBase:
    """Typed parts of an engine and properties that read them; the loop is in ``Engine``."""

    # -- parts, as the user gave them
    model: nn.Module
    optimizer: Optimizer
    lr_scheduler: LRScheduler | None
    task: Task
    precision: Precision  # autocast and gradient scaling, and the device
    settings: EngineSettings
    logger: logging.Logger
    config: Any  # plain values, written into checkpoints

    # -- may be assigned at any time
    hooks: list[BaseHook]
    workspace: Path | None
    should_stop: bool

    # -- the run
    target: Target
    cursor: Cursor  # position in the training data
    eval_cursor: Cursor
    progress: Progress  # counters, means of the running epoch
    attempt: Attempt  # latest attempt at a step
    state: RunState  # parts of a checkpoint, and where the current state came from
    num_ranks: int

    # -- machinery, made by prepare()
    declared: HookDeclarations  # what hooks declare: averages, messages between ranks
    events: Events
    signals: SignalListener
    exchange: GradientExchange
    guard: FiniteGuard
    steps: Steps  # train_step, or its captured form
    stray_parameters: list[nn.Parameter]  # trainable, but in no group of the optimizer

    def _configure(
        self,
        settings: EngineSettings,
        precision: PrecisionName | None,
        *,
        logger: logging.Logger,
        state_options: StateOptions | None = None,
    ) -> None:
        """Keep the settings and set every counter to 0; build nothing."""
        self.settings = settings
        self.precision = Precision(precision, get_device(settings.device_asked))
        self.logger = logger
        self.config = None
        self.hooks = []
        self.workspace = None
        self.should_stop = False
        self.target = Target(max_steps=0)
        limits = settings.limits
        self.cursor = Cursor(ranks="equal", limit=limits.train, only=limits.overfit_batches)
        self.eval_cursor = Cursor()
        self.progress = Progress()
        self.attempt = Attempt()
        self.state = RunState(state_options or StateOptions())
        self.num_ranks = 1
        self.declared = HookDeclarations()
        self.events = Events()
        self.signals = SignalListener()
        self.guard = FiniteGuard()
        self.stray_parameters = []

    @property
    def _recorded_config(self) -> Any:
        """Configuration that a checkpoint records."""
        return self.config

    # -- what hooks read ------------------------------------------------------------------------------------------

    @property
    def micro_steps(self) -> int:
        """Micro-batches taken."""
        return self.progress.micro_steps

    @property
    def total_steps(self) -> int | None:
        """The step at which the run ends, if known."""
        return self.target.total_steps(self)

    @property
    def last_lr(self) -> Sequence[Any]:
        """Learning rates of the epoch's last applied step, by parameter group."""
        return self.progress.last_lr

    @property
    def epoch_means(self) -> RunningMeans:
        """Weighted means of the running epoch on this rank."""
        return self.progress.epoch_means

    @property
    def step_outputs(self) -> list[StepOutput]:
        """Detached losses and records of the latest step's micro-batches."""
        return self.attempt.outputs

    @property
    def group(self) -> Group:
        """Micro-batches of the latest attempt."""
        return self.attempt.group

    @property
    def averages(self) -> Mapping[str, Ema]:
        """Averaged models that hooks keep, by name."""
        return self.declared.averages

    @property
    def state_parts(self) -> list[Driver]:
        """Objects that add keys to the engine's checkpoints; append one to save its state."""
        return self.state.drivers

    @property
    def exit_plans(self) -> list[ExitPlan]:
        """Exit plans of the hooks for signals; empty outside a run."""
        return self.signals.plans

    @property
    def resume_source(self) -> str | None:
        """The checkpoint that the run resumed from."""
        return self.state.source

    @property
    def device(self) -> torch.device:
        """Device of the model; may be assigned before anything is built."""
        return self.precision.device

    @device.setter
    def device(self, value: torch.device | str) -> None:
        self.precision = Precision(self.precision.name, get_device(value))

    @property
    def face(self) -> str:
        """Name of the front end."""
        return self.settings.face

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches per step; may be assigned unless steps are captured."""
        return self.settings.accumulation_steps

    @accumulation_steps.setter
    def accumulation_steps(self, value: int) -> None:
        if self.settings.capture is not False:
            raise ConfigError(
                "a captured step has a fixed number of micro-batches; pass capture=False to change it while training",
                argument="accumulation_steps",
                value=value,
            )
        self.settings = dataclasses.replace(self.settings, accumulation_steps=value)

    @property
    def grad_clip(self) -> float | None:
        """Total 2-norm to which gradients are clipped, or None; may be assigned."""
        return self.settings.grad_clip

    @grad_clip.setter
    def grad_clip(self, value: float | None) -> None:
        self.settings = dataclasses.replace(self.settings, grad_clip=value)

    @property
    def grad_clip_value(self) -> float | None:
        """Absolute value to which elements of gradients are clipped, or None; may be assigned."""
        return self.settings.grad_clip_value

    @grad_clip_value.setter
    def grad_clip_value(self, value: float | None) -> None:
        self.settings = dataclasses.replace(self.settings, grad_clip_value=value)

    @property
    def scheduler_interval(self) -> Literal["step", "epoch"]:
        """Interval of the scheduler, ``"step"`` or ``"epoch"``."""
        return self.settings.scheduler_interval

    @property
    def max_non_finite_grad_retries(self) -> int:
        """Fresh groups to try before NonFiniteError."""
        return self.settings.max_non_finite_grad_retries or 0

    @property
    def eval_seed(self) -> int:
        """Seed of every evaluation."""
        return self.settings.eval_seed

    @property
    def capture(self) -> Capture:
        """Whether steps are captured."""
        return self.settings.capture

    def rank_notices(self, notice: Callable[[], float]) -> list[float]:
        """Return the number that each rank sent for a hook in the current step; see ``BaseHook.notice``."""
        return notices_of_ranks(self, notice)

    heard_of = rank_notices  # former name

    def location(self) -> StepLocation:
        """Return the location of the current step, for error messages."""
        position, tries = self.cursor.position, self.progress.tries
        return StepLocation(self.progress.step, self.cursor.epoch, position, len(self.attempt.info["loss"]), tries)

    def train_means(self) -> dict[str, Any]:
        """Return the running epoch's weighted mean ``loss`` and ``records`` over all ranks; read the device."""
        return self.progress.epoch_means.compute(distributed.sum_over_ranks)

    def refuse_training(self, reason: str) -> None:
        """Raise an error in every later call that would train; evaluating and saving stay possible."""
        self.state.closed = reason

    def _refuse_if_closed(self) -> None:
        if self.state.closed is not None:
            raise ConfigError(self.state.closed)

    @contextlib.contextmanager
    def evaluations_limited_to(self, limit: Amount | None) -> Iterator[None]:
        """Limit evaluations inside the block to a number of batches or a fraction of a loader; None lifts the limit."""
        limits = dataclasses.replace(
            self.settings.limits, limit_eval_batches=limit, overfit_batches=None, fast_dev_run=False
        )
        with self.temporarily(settings=dataclasses.replace(self.settings, limits=limits)):
            yield

    def temporarily(self, **parts: Any) -> AbstractContextManager[None]:
        """Replace parts of the engine inside the block, such as ``optimizer=`` or ``guard=``."""
        return temporarily(self, **parts)

    def set_group(self, group: Group) -> None:
        """Make a group the current one before its attempt begins, for a task that looks up where a batch comes from."""
        self.attempt = Attempt(group)

    def isolated_step(self, guard: FiniteGuard) -> AbstractContextManager[None]:
        """Run steps inside the block without recording them in the engine."""
        return self.temporarily(guard=guard, attempt=self.attempt, progress=copy.copy(self.progress))


@contextlib.contextmanager
def temporarily(owner: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of an object inside the block, and restore them."""
    before = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
