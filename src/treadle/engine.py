"""The engine: the only code that runs forward, backward and the optimizer step. It counts in optimizer steps."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from treadle import distributed
from treadle.data.cursor import Cursor, Group
from treadle.device import get_device
from treadle.ema import Ema
from treadle.errors import ConfigError, DataExhaustedError, NonFiniteError
from treadle.evaluation import EvaluationAbandoned, evaluate
from treadle.hooks.base import BaseHook
from treadle.means import RunningMeans
from treadle.precision import Precision, PrecisionName
from treadle.session import leave_on_signal, training_session
from treadle.signals import ExitPlan, SignalListener
from treadle.state import StatePart, collect_state, restore_state
from treadle.task import StepOutput, Task, WeighsTerms, add_output, as_step_output
from treadle.weights import GroupWeights, divide_

Outcome = Literal["applied", "skipped", "refused"]


class Engine:
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
        logger: logging.Logger | None = None,
    ):
        self.model = model
        self.optimizer = optimizer
        self.lr_scheduler = scheduler
        self.task = task
        self.hooks = list(hooks)
        self._configure(
            scheduler_interval=scheduler_interval,
            device=get_device(device),
            precision=precision,
            grad_clip=grad_clip,
            accumulation_steps=accumulation_steps,
            max_non_finite_grad_retries=max_non_finite_grad_retries,
            eval_seed=eval_seed,
            logger=logger or logging.getLogger("treadle.engine"),
        )

    def _configure(
        self,
        *,
        scheduler_interval: Literal["step", "epoch"],
        device: torch.device,
        precision: PrecisionName | None,
        grad_clip: float | None,
        accumulation_steps: int,
        max_non_finite_grad_retries: int | None,
        eval_seed: int,
        logger: logging.Logger,
    ) -> None:
        """Checks and keeps the settings, and starts every counter at 0; builds nothing."""
        _check_settings(scheduler_interval, grad_clip, accumulation_steps, max_non_finite_grad_retries)
        self.scheduler_interval = scheduler_interval
        self.device = device
        self.precision = Precision(precision, device)
        self.grad_clip = grad_clip or None
        self.accumulation_steps = accumulation_steps
        self.max_non_finite_grad_retries = max_non_finite_grad_retries or 0
        self.eval_seed = eval_seed
        self.logger = logger
        self.step = 0
        self.applied_steps = 0
        self.micro_steps = 0
        self.should_stop = False
        self.scored: str | None = None
        self.config: Any = None
        self.workspace: Path | None = None
        self.step_info: dict[str, Any] = {}
        self.cursor = Cursor()
        self.signals = SignalListener()
        self.averages: dict[str, Ema] = {}
        self.state_parts: list[StatePart] = []
        self.exit_plans: list[ExitPlan] = []
        self.stray_parameters: list[nn.Parameter] = []
        self.epoch_means = RunningMeans()
        self.epoch_applied_steps = 0
        self.last_lr: list[Any] = []
        self._totals: Mapping[str, float] | None = None
        self._tries = 1
        self.step_outputs: list[StepOutput] = []
        self._writes: list[Callable[[], Any]] = []
        self.eval_cursor = Cursor()
        self._prepared = False
        self._loaded = False
        self._resumed = False
        self._max_steps: int | None = None
        self._epochs: int | None = None
        self._started = 0.0
        self._logged = False

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
        if (max_steps is None) == (epochs is None):
            raise ConfigError(f"run: give exactly one of max_steps={max_steps} and epochs={epochs}")
        self._max_steps, self._epochs = max_steps, epochs
        self.prepare()
        self._resume()
        if self._reached():
            self.logger.info("nothing to do: at step %d, epoch %d the target is reached", self.step, self.epoch)
            return
        self.should_stop = False
        if self.step == 0 and not self._loaded:
            for ema in self.averages.values():  # the weights may have changed since the averages were made
                ema.restart_from(self.model)
        with training_session(self):
            while not (self._reached() or self.should_stop):
                self.cursor.open(loader)
                leave_on_signal(self)
                while (group := self.cursor.take(self.accumulation_steps)).batches:
                    self._begin_step()
                    while (outcome := self.train_step(group)) == "refused":
                        group = self._fresh_group(loader)
                        if not group.batches:
                            break
                    self._finish_step(outcome)
                    if self.should_stop or self._reached():
                        break
                if self.cursor.ended and not (self._reached() or (self.should_stop and self._epochs is None)):
                    self._finish_epoch(score_epoch, after_epoch)
            self.emit("on_after_train")

    def train_step(self, group: Group) -> Outcome:
        """Runs one optimizer step over a group of micro-batches, top to bottom.

        Returns:
            ``"applied"`` if the weights changed; ``"skipped"`` if there was no loss or the fp16 scale was lowered;
            ``"refused"`` if the gradient was not finite. Only an applied step moves schedule and averages.
        """
        info = self._new_step_info(group)
        self._zero_grad()
        self._totals = self._term_totals(group.batches)
        weights = GroupWeights(len(group.batches), device=self.device, undivided=self._totals is not None)
        for number, batch in enumerate(group.batches, start=1):
            with self._gradient_sync(last=number == len(group.batches)):
                with self.precision.autocast():
                    output = as_step_output(self.forward(batch), training=True)
                loss = weights.scaled(output)
                if loss is not None:
                    self.precision.scale(loss).backward()  # type: ignore[no-untyped-call]
            self._note(output)
        if not distributed.agree(weights.num_losses, self.device):
            return self._skip("no micro-batch had a loss")

        self.precision.unscale(self.optimizer)
        params = [p for group_ in self.optimizer.param_groups for p in group_["params"] if p.grad is not None]
        grads = [p.grad for p in params if p.grad is not None]
        divide_(grads, weights.divisor())
        info["grad_norm"] = norm = get_total_norm(grads)
        self.emit("on_before_optimizer_step")
        finite, counted = self._decide(norm, weights.total)
        if not counted:
            return self._skip("the total weight is 0")
        if not finite:
            return self._refuse()

        if self.grad_clip is not None:
            clip_grads_with_norm_(params, self.grad_clip, norm)
        self.optimizer.step()
        self.precision.applied()
        self.applied_steps += 1
        self.epoch_applied_steps += 1
        if self.lr_scheduler is not None and self.scheduler_interval == "step" and not self._plateau:
            self.lr_scheduler.step()
        for ema in self.averages.values():
            ema.update(self.model, applied_steps=self.applied_steps)
        return "applied"

    def forward(self, batch: Any) -> Any:
        """Turns one micro-batch into a StepOutput, under autocast."""
        return self.task.step(self.model, batch, totals=self._totals)

    def step_group(self, batches: Sequence[Any]) -> bool:
        """Runs one step on given micro-batches, with its events; returns whether it was applied.

        Raises:
            NonFiniteError: the gradient is not finite.
        """
        self.prepare()
        self._begin_step()
        outcome = self.train_step(Group(list(batches), [0.0] * len(batches)))
        if outcome == "refused":
            raise self._non_finite()
        self._finish_step(outcome)
        return outcome == "applied"

    # -- the parts of a step --------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        self.step += 1
        self._tries = 1
        self._started = time.perf_counter()
        self.emit("on_before_step")

    def _new_step_info(self, group: Group) -> dict[str, Any]:
        self.micro_steps += len(group.batches)
        self.last_lr = [_frozen(param_group["lr"]) for param_group in self.optimizer.param_groups]
        self.step_outputs = []
        self.step_info = {
            "loss": [], "weight": [], "records": [], "data_time": group.data_time, "lr": self.last_lr,
            "applied": False, "retries": self._tries - 1, "reason": None, "num_samples": 0,
        }  # fmt: skip
        return self.step_info

    def _note(self, output: StepOutput) -> None:
        """Keeps a micro-batch's loss and records on the device, free of their graph."""
        loss = None if output.loss is None else output.loss.detach()
        self.step_outputs.append(replace(output, loss=loss, outputs=None))
        self.step_info["loss"].append(loss)
        self.step_info["weight"].append(1.0 if output.weight is None else output.weight)
        self.step_info["records"].append(output.records)
        self.step_info["num_samples"] += output.num_samples or 0

    def _zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for parameter in self.stray_parameters:
            parameter.grad = None

    def _term_totals(self, batches: Sequence[Any]) -> Mapping[str, float] | None:
        """Sums the counts of each loss term over the group and the ranks, before the first forward."""
        if not isinstance(self.task, WeighsTerms):
            return None
        totals: dict[str, float] = {}
        for batch in batches:
            counts = self.task.weights(batch)
            if counts is None:
                return None
            for term, count in counts.items():
                totals[term] = totals.get(term, 0.0) + float(count)
        summed = distributed.sum_over_ranks(torch.tensor(list(totals.values()), dtype=torch.float64), self.device)
        return dict(zip(totals, summed.tolist(), strict=True))

    def _gradient_sync(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Keeps ranks from exchanging gradients before the last micro-batch of a step."""
        return contextlib.nullcontext() if last else distributed.no_sync(self.model)

    def _decide(self, norm: Tensor, total_weight: float | Tensor) -> tuple[bool, bool]:
        """Reads on the host, once a step and for all ranks: is the norm finite, and is anything counted?"""
        flags = [torch.isfinite(norm)]
        if isinstance(total_weight, Tensor):
            flags.append(total_weight.to(norm.device) > 0)
        bad = distributed.max_over_ranks((~torch.stack(flags)).to(torch.uint8), self.device)
        verdict = bad.tolist()
        return not verdict[0], len(verdict) == 1 or not verdict[1]

    def _skip(self, reason: str) -> Outcome:
        self.step_info["reason"] = reason
        self._zero_grad()
        return "skipped"

    def _refuse(self) -> Outcome:
        self._zero_grad()
        if self.precision.refused():
            self.step_info["reason"] = "non-finite gradient: the fp16 scale was lowered"
            return "skipped"
        self.step_info["reason"] = "non-finite gradient"
        return "refused"

    def _fresh_group(self, loader: Iterable[Any]) -> Group:
        """Returns other data for a refused step; an empty group where an epoch face has none left."""
        if self._tries > self.max_non_finite_grad_retries:
            raise self._non_finite()
        self._tries += 1
        group = self.cursor.take(self.accumulation_steps)
        if not group.batches and self._epochs is None:
            self._finish_epoch(None, None)
            self.cursor.open(loader)
            group = self.cursor.take(self.accumulation_steps)
        if not group.batches:
            self.logger.warning(
                "step %d is skipped: its gradient was not finite and the epoch has no fresh data to retry",
                self.step,
            )
        return group

    def _non_finite(self) -> NonFiniteError:
        norm = float(self.step_info.get("grad_norm", math.nan))
        last = self.cursor.position
        first = max(last - len(self.step_info["loss"]) + 1, min(last, 1))
        where = f"batch {last}" if first == last else f"batches {first} to {last}"
        return NonFiniteError(
            f"the gradient of step {self.step} is not finite (norm {norm}) after {self._tries} tries: {where} of epoch "
            f"{self.epoch + 1}. The weights are those of the last applied step ({self.applied_steps}). Look at that "
            "batch, lower the learning rate, clip gradients, or set max_non_finite_grad_retries",
            step=self.step, norm=norm, epoch=self.epoch, batch_index=last, tries=self._tries,
        )  # fmt: skip

    def _finish_step(self, outcome: Outcome) -> None:
        info = self.step_info
        info["applied"] = outcome == "applied"
        info["step_time"] = time.perf_counter() - self._started
        if outcome != "refused":
            for output in self.step_outputs:
                add_output(self.epoch_means, output)
        self.emit("on_after_step")
        self._write_requested()
        leave_on_signal(self)

    def request_write(self, write: Callable[[], Any]) -> None:
        """Asks for a file to be written once every hook has seen the step, so that hook order cannot matter."""
        self._writes.append(write)

    def _write_requested(self) -> None:
        writes, self._writes = self._writes, []
        for write in writes:
            write()

    # -- epochs ---------------------------------------------------------------------------------------------------

    def _finish_epoch(
        self, score_epoch: Callable[[], float | None] | None, after_epoch: Callable[[], None] | None
    ) -> None:
        if self.cursor.position == 0:
            target = f"step {self._max_steps}" if self._max_steps is not None else f"epoch {self._epochs}"
            raise DataExhaustedError(
                f"the loader gave no batch at step {self.step}, epoch {self.epoch + 1}, and the target is {target}: it "
                "is empty, or a one-shot iterator that is used up; pass an iterable that can be opened again"
            )
        try:
            value = score_epoch() if score_epoch is not None else self.train_means().get("loss")
        except EvaluationAbandoned:
            leave_on_signal(self)
            raise
        self._step_epoch_scheduler(value)
        self.cursor.next_epoch()
        self.epoch_means.reset()
        self.epoch_applied_steps = 0
        self.emit("on_after_epoch")
        self._write_requested()
        if after_epoch is not None:
            after_epoch()

    def _step_epoch_scheduler(self, value: float | None) -> None:
        if isinstance(self.lr_scheduler, ReduceLROnPlateau):
            if value is not None:
                self.lr_scheduler.step(value)
        elif self.lr_scheduler is not None and self.scheduler_interval == "epoch" and self.epoch_applied_steps:
            self.lr_scheduler.step()

    @property
    def _plateau(self) -> bool:
        return isinstance(self.lr_scheduler, ReduceLROnPlateau)

    def train_means(self) -> dict[str, Any]:
        """Returns the running epoch's weighted mean ``loss`` and ``records`` over all ranks; reads the device."""
        return self.epoch_means.compute(lambda table: distributed.sum_over_ranks(table, self.device))

    @property
    def total_steps(self) -> int | None:
        """The step at which the run ends, where that is known."""
        if self._max_steps is not None:
            return self._max_steps
        length = self.cursor.length
        if self._epochs is None or length is None:
            return None
        in_this_epoch = math.ceil((length - self.cursor.position) / self.accumulation_steps)
        per_epoch = math.ceil(length / self.accumulation_steps)
        return self.step + in_this_epoch + (self._epochs - self.epoch - 1) * per_epoch

    @property
    def is_last_step(self) -> bool:
        """Whether the present step is the last one of this run, as far as the target says."""
        if self.should_stop:
            return True
        if self._max_steps is not None:
            return self.step >= self._max_steps
        return self._epochs is not None and self.cursor.ended and self.epoch + 1 >= self._epochs

    def _reached(self) -> bool:
        if self._max_steps is not None:
            return self.step >= self._max_steps
        stopped_early = any(part.finished for part in self.state_parts)
        return stopped_early or (self._epochs is not None and self.epoch >= self._epochs)

    def evaluate(self, loader: Iterable[Any], task: Task | None = None) -> dict[str, Any]:
        """Returns the weighted mean loss, records and epoch metrics of a task over a loader; training does not notice.

        Args:
            loader: any iterable of micro-batches.
            task: by default the training task.
        """
        return evaluate(
            self.model,
            loader,
            task or self.task,
            precision=self.precision,
            eval_seed=self.eval_seed,
            cursor=self.eval_cursor,
            interrupted=self._signalled if self.exit_plans else None,
        )

    def _signalled(self) -> bool:
        return bool(distributed.agree(self.signals.received or 0, self.device))

    # -- state ----------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Collects what hooks declare, once; runs before any state is made or loaded."""
        if self._prepared:
            return
        self._prepared = True
        keys: set[str] = set()
        for hook in self.hooks:
            if hook.state_key in keys:
                raise ConfigError(f"hooks: two hooks have the state key {hook.state_key!r}; override state_key in one")
            keys.add(hook.state_key)
            for name, ema in hook.averages(self).items():
                if name in self.averages:
                    raise ConfigError(f"hooks: two averages are named {name!r}; pass another name= to one")
                self.averages[name] = ema

    def state_dict(self) -> dict[str, Any]:
        """Returns the whole training state as plain values and CPU copies; see ``treadle.checkpoint.schema``."""
        self.prepare()
        return collect_state(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned, in place.

        Raises:
            CheckpointError: the model or optimizer does not fit.
        """
        self.prepare()
        restore_state(self, state_dict)
        self._loaded = True

    def _resume(self) -> None:
        """Loads what a hook names, before any event of the first run; a state loaded by hand wins."""
        if self._resumed or (self.step > 0 and not self._loaded):
            return  # this object goes on from where it stands
        self._resumed = True
        for hook in self.hooks:
            tree = hook.checkpoint_to_resume(self)
            if tree is not None and self._loaded:
                self.logger.warning("%s: a state was loaded already and wins", type(hook).__name__)
            elif tree is not None:
                self.load_state_dict(tree)

    def progress_state(self) -> dict[str, Any]:
        """Returns the ``progress`` entry of a checkpoint."""
        return {
            "applied_steps": self.applied_steps,
            "micro_steps": self.micro_steps,
            "epoch_applied_steps": self.epoch_applied_steps,
            "epoch_means": self.epoch_means.state_dict(),
            "lr": self.last_lr,
        }

    def load_progress_state(self, tree: Mapping[str, Any]) -> None:
        """Restores the counters from a checkpoint tree."""
        progress = tree.get("progress") or {}
        self.step = int(tree.get("global_step") or 0)
        self.cursor.epoch = int(tree.get("epoch") or 0)
        self.applied_steps = int(progress.get("applied_steps", self.step))
        self.micro_steps = int(progress.get("micro_steps", 0))
        self.epoch_applied_steps = int(progress.get("epoch_applied_steps", 0))
        self.last_lr = list(progress.get("lr", []))
        if "epoch_means" in progress:
            self.epoch_means.load_state_dict(progress["epoch_means"], device=self.device)

    # -- events ---------------------------------------------------------------------------------------------------

    def emit(self, event: str, *args: Any) -> None:
        """Calls one event of every hook, in order."""
        for hook in self.hooks:
            getattr(hook, event)(self, *args)

    def log(self, records: Mapping[str, Any], dry_run: bool = False) -> None:
        """Hands aggregated records to ``on_log`` of every hook; may be overridden, with or without ``super()``."""
        self._logged = True
        self.emit("on_log", records, dry_run)

    def emit_log(self, records: Mapping[str, Any], dry_run: bool = False) -> None:
        """Calls :meth:`log` and sees to it that every hook gets the records exactly once."""
        self._logged = False
        self.log(records, dry_run)
        if not self._logged:
            self.emit("on_log", records, dry_run)


def _check_settings(interval: str, grad_clip: float | None, accumulation: int, retries: int | None) -> None:
    if interval not in ("step", "epoch"):
        raise ConfigError(f"scheduler_interval={interval!r}: must be 'step' or 'epoch'")
    if grad_clip is not None and not grad_clip >= 0:
        raise ConfigError(f"grad_clip={grad_clip!r}: a norm cannot be negative; use None or 0 to turn clipping off")
    if accumulation < 1:
        raise ConfigError(f"accumulation_steps={accumulation!r}: a step needs at least 1 micro-batch")
    if retries is not None and retries < 0:
        raise ConfigError(f"max_non_finite_grad_retries={retries!r}: must be None or >= 0")


def _frozen(lr: Any) -> Any:
    return lr.clone() if isinstance(lr, Tensor) else lr  # a capturable optimizer changes its tensor in place
