"""The engine: the only code that runs forward, backward and the optimizer step. It counts in optimizer steps."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from treadle import distributed
from treadle.checkpoint.base_fingerprints import FrozenBase
from treadle.checkpoint.buffers import HostBuffers
from treadle.data.cursor import Cursor, Group
from treadle.device import get_device
from treadle.distributed.gradients import GradientExchange, gradient_exchange
from treadle.engine import session
from treadle.engine.bookkeeping import (
    begin_step,
    finish_step,
    move_on,
    non_finite_error,
    note_output,
    place_of,
    refuse,
    settle,
    show_gradients,
    skip,
    start_attempt,
)
from treadle.engine.epoch_end import finish_epoch, fresh_group
from treadle.engine.evaluation import evaluate
from treadle.engine.events import Events
from treadle.engine.failure import failing_by_name
from treadle.engine.hook import BaseHook
from treadle.engine.observers import announce_running
from treadle.engine.session import averages_of_hooks, finite_guard, leave_on_signal, resume_from_hooks, training_session
from treadle.engine.settings import Capture, Outcome, Steps, check_capture, check_settings
from treadle.engine.signals import ExitPlan, SignalListener
from treadle.engine.state import StatePart, collect_state, restore_state
from treadle.engine.state_options import StateOptions
from treadle.engine.stopping import Target
from treadle.means import RunningMeans
from treadle.optim.ema import Ema
from treadle.optim.gradients import Gradients, clip_, divide_, total_norm
from treadle.optim.nonfinite import FiniteGuard
from treadle.optim.precision import Precision, PrecisionName
from treadle.seed import as_seed
from treadle.task import StepOutput, Task, as_step_output


class Engine(Events):
    """Runs a model, an optimizer and a task over a loader, one optimizer step at a time.

    Args:
        model: on the device already.
        optimizer: over the model's parameters.
        task: turns a batch into a loss.
        scheduler: stepped on applied steps or epochs only.
        scheduler_interval: ``"step"`` or ``"epoch"``; ReduceLROnPlateau ignores it.
        device: None takes CUDA, then MPS, then the CPU.
        precision: None, ``"bf16"`` or ``"fp16"``.
        grad_clip: total 2-norm; None or 0 off.
        accumulation_steps: micro-batches per step, >= 1.
        max_non_finite_grad_retries: fresh groups to try before NonFiniteError; None or 0: none.
        hooks: what watches the run, in order.
        eval_seed: seeds the RNG of every evaluation.
        capture: whether the step is replayed as one CUDA graph, see ``treadle.capture``: True, False, or ``"auto"``,
            which says in a warning why it is not where that is impossible.
        logger: by default ``treadle.engine``.

    Raises:
        ConfigError: a value is outside its range.

    Example:
        >>> class Square:
        ...     def step(self, model, batch, totals=None, generator=None):
        ...         return StepOutput(((model(batch) - 1) ** 2).mean())
        >>> model = nn.Linear(1, 1)
        >>> engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), Square(), device="cpu")
        >>> engine.run([torch.ones(2, 1)] * 3, max_steps=3)
        >>> engine.step
        3
    """

    face = "engine"
    state_options = StateOptions()
    asked_hooks: Sequence[BaseHook] = ()  # what they declare is in force

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        task: Task,
        *,
        scheduler: LRScheduler | None = None,
        scheduler_interval: Literal["step", "epoch"] = "step",
        device: torch.device | str | int | None = None,
        precision: PrecisionName | None = None,
        grad_clip: float | None = None,
        accumulation_steps: int = 1,
        max_non_finite_grad_retries: int | None = None,
        hooks: Sequence[BaseHook] = (),
        eval_seed: int = 0,
        capture: Capture = False,
        logger: logging.Logger | None = None,
    ):
        self.model = model
        self.optimizer = optimizer
        self.lr_scheduler = scheduler
        self.task = task
        self._configure(
            scheduler_interval=scheduler_interval,
            device=device,
            precision=precision,
            grad_clip=grad_clip,
            accumulation_steps=accumulation_steps,
            max_non_finite_grad_retries=max_non_finite_grad_retries,
            eval_seed=eval_seed,
            capture=capture,
            logger=logger or logging.getLogger("treadle.engine"),
        )
        self.hooks = list(hooks)

    def _configure(
        self,
        *,
        scheduler_interval: Literal["step", "epoch"],
        device: torch.device | str | int | None,
        precision: PrecisionName | None,
        grad_clip: float | None,
        accumulation_steps: int,
        max_non_finite_grad_retries: int | None,
        eval_seed: int,
        capture: Capture,
        logger: logging.Logger,
    ) -> None:
        """Checks and keeps the settings, and starts every counter at 0; builds nothing."""
        super().__init__()
        check_settings(scheduler_interval, grad_clip, accumulation_steps, max_non_finite_grad_retries)
        self.scheduler_interval = scheduler_interval
        self.device_asked = device
        self.device = get_device(device)
        self.precision = Precision(precision, self.device)
        self.grad_clip = grad_clip or None
        self.accumulation_steps = accumulation_steps
        self.max_non_finite_grad_retries = max_non_finite_grad_retries or 0
        self.eval_seed = as_seed("eval_seed", eval_seed)
        self.capture: Capture = check_capture(capture)
        self.logger = logger
        self.step = 0
        self.applied_steps = 0
        self.micro_steps = 0
        self.should_stop = False
        self.scored: str | None = None
        self.config: Any = None
        self.workspace: Path | None = None
        self.step_info: dict[str, Any] = {}
        self.cursor = Cursor(ranks="together")
        self.signals = SignalListener()
        self.averages: dict[str, Ema] = {}
        self.state_parts: list[StatePart] = []
        self.exit_plans: list[ExitPlan] = []
        self.num_ranks = 1
        self.stray_parameters: list[nn.Parameter] = []
        self.epoch_means = RunningMeans()
        self.epoch_applied_steps = 0
        self.last_lr: list[Any] = []  # of the epoch's last applied step, of an attempt before there is one
        self.rates_copied: tuple[list[Any], list[Any]] = ([], [])  # from what, in which version; and the copies
        self.term_totals: Mapping[str, float] | None = None
        self.tries = 1
        self.group = Group()
        self.step_started = 0.0
        self.step_outputs: list[StepOutput] = []
        self.heard: list[list[float]] = []
        self.eval_cursor = Cursor()
        self.target = Target(max_steps=0)
        self.guard = FiniteGuard()
        self.steps: Steps = self.train_step
        self._prepared = False
        self.num_loads = 0
        self.loaded = False
        self.resumed = False
        self.resume_source: str | None = None

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self.cursor.epoch

    # -- the loop -------------------------------------------------------------------------------------------------

    def run(
        self,
        loader: Iterable[Any],
        *,
        max_steps: int | None = None,
        epochs: int | None = None,
        score_epoch: Callable[[], float | None] | None = None,
        after_epoch: Callable[[], None] | None = None,
    ) -> None:
        """Trains to an absolute target; see ``treadle.hooks.base`` for the loop with every event at its place.

        Args:
            loader: any iterable of micro-batches; re-iterated for each epoch.
            max_steps: optimizer steps to have attempted at the end.
            epochs: epochs to have completed at the end.
            score_epoch: evaluates a complete epoch and appends its record; returns the value of the best metric.
            after_epoch: writes epoch checkpoints and calls user callbacks, after ``on_after_epoch``.

        Raises:
            ConfigError: not exactly one target is given.
            DataExhaustedError: the loader is empty or cannot be opened again.
            NonFiniteError: a gradient is not finite and the retries are used up.
        """
        self.target = Target(max_steps, epochs, score_epoch, after_epoch)
        with failing_by_name(self):
            self.prepare()
            resume_from_hooks(self)
        if self.target.reached(self):
            self.logger.info("nothing to do: at step %d, epoch %d the target is reached", self.step, self.epoch)
            return
        self.should_stop = False
        if self.step == 0 and not self.loaded:
            for ema in self.averages.values():  # the weights may have changed since the averages were made
                ema.restart_from(self.model)
        with training_session(self):
            while not (self.target.reached(self) or session.ranks_stop(self)):
                self.cursor.open(loader)
                leave_on_signal(self)
                while (group := self.cursor.take(self.accumulation_steps)).batches:
                    begin_step(self)
                    while (outcome := self.steps(group)) == "refused":
                        group = fresh_group(self, loader)
                        if not group.batches:
                            break
                    finish_step(self, outcome)
                    if session.stops_here(self) or self.target.reached(self):
                        break
                session.ranks_stop(self)
                if self.target.completes_epoch(self):
                    finish_epoch(self)
            settle(self)
            self.emit("on_after_train")
            self.write_requested()

    def train_step(self, group: Group) -> Outcome:
        """Runs one optimizer step over a group of micro-batches, top to bottom.

        Returns:
            ``"applied"`` if the weights changed; ``"skipped"`` if there was no loss or the fp16 scale was lowered;
            ``"refused"`` if the gradient was not finite. Only an applied step moves schedule and averages.
        """
        info, weights = start_attempt(self, group)
        for number, batch in enumerate(group.batches, start=1):
            with self.exchange.micro_batch(syncs=self._syncs(last=number == len(group.batches))):
                with self.precision.autocast():
                    output = as_step_output(self.forward(batch), training=True)
                loss = self.exchange.loss_of(output, weights.scaled)
                if loss is not None:
                    self.precision.scale(loss).backward()  # type: ignore[no-untyped-call]
            note_output(self, output)
        self.heard = weights.heard
        if not weights.any_loss():
            return skip(self, "no micro-batch had a loss")

        self.precision.unscale(self.optimizer)
        grads = Gradients.of(self.optimizer)
        divide_(grads, weights.divisor())
        info["grad_norm"] = norm = total_norm(grads)
        if self.hears("on_before_optimizer_step"):
            grads, norm = show_gradients(self, grads)  # to hooks, which may change them
        settle(self, wait=self.guard.decides_now(weights.total))
        verdict = self.guard.judge(norm, weights.total)
        if not verdict.counted:
            return skip(self, "the total weight is 0")
        if not verdict.finite:
            return refuse(self)

        if self.grad_clip is not None:
            clip_(grads, self.grad_clip, norm)
        self.guard.apply(self.optimizer, norm, weights.total, place=place_of(self))
        return move_on(self)

    def forward(self, batch: Any) -> Any:
        """Turns one micro-batch into a StepOutput, under autocast."""
        return self.task.step(self.model, batch, totals=self.term_totals)

    def step_group(self, batches: Sequence[Any]) -> bool:
        """Runs one step on given micro-batches, with its events; returns whether it was applied.

        Raises:
            NonFiniteError: the gradient is not finite.
        """
        self.prepare()
        begin_step(self)
        with contextlib.closing(self.exchange):
            outcome = self.steps(Group(list(batches), [0.0] * len(batches)))
        if outcome == "refused":
            raise non_finite_error(self)
        finish_step(self, outcome)
        return outcome == "applied"

    def _syncs(self, *, last: bool) -> bool:
        """Says whether ranks exchange gradients with a micro-batch: with the last of a step only."""
        return last

    # -- what a run says about itself -----------------------------------------------------------------------------

    def train_means(self) -> dict[str, Any]:
        """Returns the running epoch's weighted mean ``loss`` and ``records`` over all ranks; reads the device."""
        return self.epoch_means.compute(distributed.sum_over_ranks)

    def raise_if_refused(self) -> None:
        """Raises NonFiniteError if the device has refused a step that the host has not heard of; reads the device."""
        settle(self)

    @property
    def total_steps(self) -> int | None:
        """The step at which the run ends, where that is known."""
        return self.target.total_steps(self)

    @property
    def is_last_step(self) -> bool:
        """Whether the present step is the last one of this run, as far as the target says."""
        stops = self.should_stop if self.num_ranks == 1 else session.stops_here(self)
        return stops or self.target.is_last_step(self)

    def evaluate(self, loader: Iterable[Any], task: Task | None = None) -> dict[str, Any]:
        """Returns the weighted mean loss, records and epoch metrics of a task over a loader; training does not notice.

        Args:
            loader: any iterable of micro-batches.
            task: by default the training task.
        """
        settle(self)
        return evaluate(
            self.model,
            loader,
            task or self.task,
            precision=self.precision,
            eval_seed=self.eval_seed,
            cursor=self.eval_cursor,
            interrupted=session.interruption(self),
        )

    def heard_of(self, notice: Callable[[], float]) -> list[float]:
        """Returns what each rank told by a hook's notice in the present step; see ``BaseHook.notice``."""
        return session.heard_of(self, notice)

    # -- state ----------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Collects what hooks declare, once; runs before any state is made or loaded."""
        self.num_ranks = distributed.world_size()
        if self._prepared:
            return
        announce_running(self)
        self.asked_hooks = list(self.hooks)
        self.averages = averages_of_hooks(self)
        self.notices: list[Callable[[], float]] = [
            notice for hook in self.hooks if (notice := hook.notice(self)) is not None
        ]
        self.base = FrozenBase(self.model, asked=self.state_options.ignore_frozen_params)
        self.exchange: GradientExchange = gradient_exchange(self.model)
        self.guard = finite_guard(self)
        self.steps = self.train_step
        if self.capture is not False:
            from treadle.capture.steps import (
                steps_of,  # the one import that points up: captured steps replay the engine's
            )

            self.steps = steps_of(self)
        self._prepared = True

    def state_dict(self, *, buffers: HostBuffers | None = None, parts: bool = False) -> dict[str, Any]:
        """Returns the whole training state as plain values and CPU copies, in ``buffers`` if given; see ``state``."""
        self.prepare()
        settle(self)
        return collect_state(self, buffers, parts=parts)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned, in place.

        Raises:
            CheckpointError: the model or optimizer does not fit.
        """
        self.prepare()
        restore_state(self, state_dict)
        self.loaded = True
