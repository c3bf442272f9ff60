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
from treadle.checkpoint.buffers import HostBuffers
from treadle.data.cursor import Group
from treadle.distributed.gradients import gradient_exchange
from treadle.engine import session
from treadle.engine.attempt import (
    apply_step_effects,
    finish_step,
    raise_late_refusal,
    refuse,
    run_gradient_hooks,
    skip,
    start_attempt,
)
from treadle.engine.base import EngineBase
from treadle.engine.block import run_ahead
from treadle.engine.epoch_end import finish_epoch, fresh_group
from treadle.engine.evaluation import evaluate
from treadle.engine.failure import errors_logged_with_rank, non_finite_error
from treadle.engine.hook import BaseHook, reaches_hooks
from treadle.engine.limits import Deadline, Limits
from treadle.engine.observers import announce_running
from treadle.engine.preflight import refuse_fsdp_1
from treadle.engine.run_log import run_log_shown
from treadle.engine.schedule_checks import check_length_of_schedule
from treadle.engine.session import resume_from_hooks, training_session
from treadle.engine.settings import Capture, EngineSettings, Outcome
from treadle.engine.signal_exit import exit_on_signal, interruption
from treadle.engine.stopping import Target
from treadle.errors.arguments import check_argument, checked
from treadle.optim.evaluation_point import at_evaluation_point
from treadle.optim.gradients import Gradients, clip_, clip_values_, divide_, total_norm
from treadle.optim.precision import PrecisionName
from treadle.task import Task, as_step_output


class Engine(EngineBase):
    """Loop over a model, an optimizer, a task and a loader, one optimizer step at a time.

    Args:
        model: model, already on the device.
        optimizer: optimizer of the model's parameters.
        task: turns a batch into a loss.
        scheduler: stepped on applied steps or epochs only.
        scheduler_interval: ``"step"`` or ``"epoch"``; ReduceLROnPlateau ignores it.
        device: None takes CUDA, then MPS, then the CPU.
        precision: None, ``"bf16"`` or ``"fp16"``.
        grad_clip: total 2-norm; None or 0 off.
        grad_clip_value: largest absolute value of a gradient's element; None or 0 off.
        accumulation_steps: micro-batches per step, >= 1.
        max_non_finite_grad_retries: fresh groups to try before NonFiniteError; None or 0: none.
        hooks: hooks of the run, in order.
        eval_seed: seeds the RNG of every evaluation.
        capture: whether the step is replayed as one CUDA graph, see ``treadle.capture``: True, False, or ``"auto"``,
            which warns with the reason if that is impossible.
        logger: by default ``treadle.engine``.
        progress: False keeps a run silent unless the user configured a logging handler.
        limits: limits of time and batches, and short trial runs; a :class:`Limits` or a mapping of its fields.
        face: name of the front end, written into checkpoints.
        config: plain values, written into checkpoints.
        workspace: folder of the run, or None.

    Raises:
        ConfigError: a value is outside its range.

    Example:
        >>> from treadle import StepOutput
        >>> class Square:
        ...     def step(self, model, batch, totals=None, generator=None):
        ...         return StepOutput(((model(batch) - 1) ** 2).mean())
        >>> model = nn.Linear(1, 1)
        >>> engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), Square(), device="cpu")
        >>> engine.run([torch.ones(2, 1)] * 3, max_steps=3)
        >>> engine.step
        3
    """

    @checked
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
        grad_clip_value: float | None = None,
        accumulation_steps: int = 1,
        max_non_finite_grad_retries: int | None = None,
        hooks: Sequence[BaseHook] = (),
        eval_seed: int = 0,
        capture: Capture = False,
        logger: logging.Logger | None = None,
        progress: bool = True,
        limits: Limits | Mapping[str, Any] | None = None,
        face: str = "engine",
        config: Any = None,
        workspace: Path | str | None = None,
    ):
        self.model = model
        self.optimizer = optimizer
        self.lr_scheduler = scheduler
        self.task = task
        settings = EngineSettings(
            face=face, scheduler_interval=scheduler_interval, device_asked=device, grad_clip=grad_clip,
            grad_clip_value=grad_clip_value, accumulation_steps=accumulation_steps, eval_seed=eval_seed,
            max_non_finite_grad_retries=max_non_finite_grad_retries, capture=capture, progress=progress,
            limits=Limits.of(limits),
        )  # fmt: skip
        self._configure(settings, precision, logger=logger or logging.getLogger("treadle.engine"))
        check_argument("hooks", hooks, list | tuple)
        self.hooks = list(hooks)
        self.config = config
        self.workspace = None if workspace is None else Path(workspace)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Make an overridden ``log`` or ``log_images`` reach the hooks, with or without ``super()``."""
        super().__init_subclass__(**kwargs)
        for name in ("log", "log_images"):
            if name in cls.__dict__:
                setattr(cls, name, reaches_hooks(cls.__dict__[name], f"on_{name}"))

    # -- the loop -------------------------------------------------------------------------------------------------

    def run(
        self,
        loader: Iterable[Any],
        *,
        max_steps: int | None = None,
        epochs: int | None = None,
        score_epoch: Callable[[], float | None] | None = None,
        after_epoch: Callable[[], None] | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        """Train to an absolute target; see ``treadle.hooks.base`` for the loop with every event.

        Args:
            loader: any iterable of micro-batches; re-iterated for each epoch.
            max_steps: optimizer steps to have attempted at the end.
            epochs: epochs to have completed at the end.
            score_epoch: evaluates a complete epoch and appends its record; returns the value of the best metric.
            after_epoch: writes epoch checkpoints and calls user callbacks, after ``on_after_epoch``.
            deadline: deadline of a call that runs several times; None starts ``max_time`` now.

        Raises:
            ConfigError: not exactly one target is given.
            DataExhaustedError: the loader is empty or cannot be re-iterated.
            NonFiniteError: a gradient is not finite and the retries are used up.
        """
        self._refuse_if_closed()
        steps, epochs = self.settings.limits.target(max_steps, epochs)
        self.target = Target(steps, epochs, score_epoch, after_epoch, deadline or self.settings.limits.deadline())
        with errors_logged_with_rank(self), run_log_shown(self):
            self.prepare()
            self.state.leave_out(loader)
            resume_from_hooks(self)
            if self.target.reached(self):
                session.pass_over(self, loader)
                return
        self.should_stop = False
        if self.step == 0 and not self.state.loaded:
            for ema in self.averages.values():  # the weights may have changed since the averages were created
                ema.restart_from(self.model)
        with training_session(self):
            while not (self.target.reached(self) or session.agree_to_stop(self)):
                self.cursor.open(loader)
                check_length_of_schedule(self)
                exit_on_signal(self)
                while (group := self.cursor.take(self.settings.accumulation_steps)).batches:
                    self.progress.begin_step()
                    self.events.emit(self, "on_before_step")
                    while (outcome := self.steps(group)) == "refused":
                        group = fresh_group(self, loader)
                        if not group.batches:
                            break
                    finish_step(self, outcome)
                    if self._stops_here() or self.target.reached(self) or (self.settings.capture and self._run_ahead()):
                        break
                session.agree_to_stop(self)
                if self.target.completes_epoch(self):
                    finish_epoch(self)
            self.raise_if_refused()
            self.emit("on_after_train")
            self.events.write_requested()

    def _stops_here(self) -> bool:
        """Return whether the run stops after this step, the same on all ranks: a stop counts once all know of it."""
        return self.should_stop if self.num_ranks == 1 else any(sent[1] for sent in self.attempt.rank_notices)

    def _run_ahead(self) -> bool:
        """Run captured steps ahead while no hook must see a single one; return whether the run ends there."""
        while run_ahead(self):
            if self._stops_here() or self.target.reached(self):
                return True
        return False

    def train_step(self, group: Group) -> Outcome:
        """Run one optimizer step over a group of micro-batches.

        Returns:
            ``"applied"`` if the weights changed; ``"skipped"`` if there was no loss or the fp16 scale was lowered;
            ``"refused"`` if the gradient was not finite. Only an applied step advances schedule and averages.
        """
        loss_weights = start_attempt(self, group)
        attempt = self.attempt
        for number, batch in enumerate(group.batches, start=1):
            with self.exchange.micro_batch(syncs=number == len(group.batches) or self.settings.syncs_each):
                with self.precision.autocast():
                    output = as_step_output(self.forward(batch), training=True)
                loss = self.exchange.loss_of(output, loss_weights.scaled)
                if loss is not None:
                    self.precision.scale(loss).backward()  # type: ignore[no-untyped-call]
            attempt.record_output(output)
        attempt.receive(loss_weights.rank_notices)
        if not loss_weights.any_loss():
            return skip(self, "no micro-batch had a loss")

        divisor = loss_weights.divisor()
        self.precision.unscale(self.optimizer)
        grads = Gradients.of(self.optimizer)
        divide_(grads, divisor)
        attempt.info["grad_norm"] = norm = total_norm(grads)
        if self.events.hooks_for(self.hooks, "on_before_optimizer_step"):
            grads, norm = run_gradient_hooks(self, grads)  # which may change them
        verdict = self.guard.judge(norm, loss_weights.total)
        if verdict.late is not None:
            raise_late_refusal(self, verdict.late)
        if not verdict.counted:
            return skip(self, "the total weight is 0")
        if not verdict.finite:
            return refuse(self)

        if self.settings.grad_clip is not None:
            clip_(grads, self.settings.grad_clip, norm)
        elif self.settings.grad_clip_value is not None:
            clip_values_(grads, self.settings.grad_clip_value)
        self.guard.apply(self.optimizer, norm, loss_weights.total, locate=self.location)
        return apply_step_effects(self)

    def forward(self, batch: Any) -> Any:
        """Turn one micro-batch into a StepOutput, under autocast."""
        return self.task.step(self.model, batch, totals=self.attempt.term_totals)

    def step_group(self, batches: Sequence[Any]) -> bool:
        """Run one step, with its events, on the given micro-batches; return whether it was applied.

        Raises:
            NonFiniteError: the gradient is not finite.
        """
        self._refuse_if_closed()
        self.prepare()
        self.target = Target(epochs=self.epoch + 1)  # no step is the last one here
        self.progress.begin_step()
        self.events.emit(self, "on_before_step")
        if self.guard.skips is not None:
            self.guard.skips.wait_for_next(True)
        with contextlib.closing(self.exchange):
            outcome = self.steps(Group(list(batches), [0.0] * len(batches)))
        if outcome == "refused":
            raise non_finite_error(self)
        finish_step(self, outcome)
        return outcome == "applied"

    # -- events and files -----------------------------------------------------------------------------------------

    def emit(self, event: str, *args: Any) -> None:
        """Call one event of every hook, in order."""
        self.events.emit(self, event, *args)

    def log(self, records: Mapping[str, Any], dry_run: bool = False) -> None:
        """Pass aggregated records to ``on_log`` of every hook; may be overridden, with or without ``super()``."""
        self.events.serve(self, "on_log", records, dry_run=dry_run)

    def log_images(self, records: Mapping[str, Any], dry_run: bool = False) -> None:
        """Pass nested images to ``on_log_images`` of every hook; may be overridden like ``log``."""
        self.events.serve(self, "on_log_images", records, dry_run=dry_run)

    def request_write(self, write: Callable[[], Any]) -> None:
        """Request a file to be written once every hook has seen the step, so that hook order cannot matter."""
        self.events.request_write(write)

    def write_requested(self) -> None:
        """Write the requested files."""
        self.events.write_requested()

    # -- where the run is -----------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Optimizer steps attempted."""
        return self.progress.step

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self.cursor.epoch

    @property
    def step_info(self) -> dict[str, Any]:
        """Record of the latest step: ``loss``, ``weight``, ``records`` by micro-batch, ``applied``, ``reason``, ..."""
        return self.attempt.info

    @property
    def applied_steps(self) -> int:
        """Steps that changed the weights."""
        if self.guard.skips is not None:
            self.raise_if_refused()  # which subtracts skipped steps
        return self.progress.applied_steps

    @property
    def is_last_step(self) -> bool:
        """Whether the current step is the last one before the target."""
        return self._stops_here() or self.target.is_last_step(self)

    def raise_if_refused(self, *, wait: bool = True) -> None:
        """Raise NonFiniteError if the device refused a step that the host has not checked yet.

        Args:
            wait: whether to wait for all steps so far, which reads the device; False checks what has arrived on the
                host.
        """
        late = self.guard.late_refusal(wait=wait)
        if late is not None:
            raise_late_refusal(self, late)

    def evaluate(self, loader: Iterable[Any], task: Task | None = None) -> dict[str, Any]:
        """Return the weighted mean loss, records and epoch metrics of a task over a loader, without affecting training.

        Args:
            loader: any iterable of micro-batches.
            task: task to evaluate; the training task by default.
        """
        self.raise_if_refused()
        self.state.leave_out(loader)
        with at_evaluation_point(self.optimizer):
            return evaluate(
                self.model, loader, task or self.task, precision=self.precision, eval_seed=self.settings.eval_seed,
                cursor=self.eval_cursor, interrupted=interruption(self), limit=self.settings.limits.evaluation,
            )  # fmt: skip

    # -- state ----------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Collect what hooks declare, once; called before any state is collected or loaded."""
        self.num_ranks = distributed.world_size()
        if self.declared.complete:
            return
        if self.settings.limits.fast_dev_run:
            session.leave_out_writers(self)
        announce_running(self)
        refuse_fsdp_1(self.model)
        self.declared = session.hook_declarations(self)
        self.state.prepare(self)
        self.exchange = gradient_exchange(self.model)
        self.guard = session.finite_guard(self)
        self.steps = self.train_step
        if self.settings.capture is not False:
            from treadle.capture.steps import steps_of  # the only import from a higher floor: it replays steps

            self.steps = steps_of(self)

    def state_dict(self, *, buffers: HostBuffers | None = None, parts: bool = False) -> dict[str, Any]:
        """Return the whole training state as plain values and CPU copies, in ``buffers`` if given; see ``state``."""
        self.prepare()
        self.raise_if_refused()
        return self.state.collect(self, buffers, parts=parts)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, in place.

        Raises:
            CheckpointError: the state does not fit the model or optimizer.
        """
        self.prepare()
        if self.guard.late is not None:
            self.guard.late.forget()
        self.state.restore(self, state_dict)
