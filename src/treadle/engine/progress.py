"""Progress of a run: counters, sums of the running epoch, learning rates of its last applied step."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from treadle import distributed
from treadle.errors import ConfigError
from treadle.means import RunningMeans
from treadle.task import StepOutput, add_output


class Progress:
    """Counters of a run.

    Attributes:
        step: optimizer steps attempted.
        applied_steps: steps that changed the weights.
        micro_steps: micro-batches taken by attempts.
        tries: groups tried for the current step, from 1.
        in_step: whether a step has begun and has not been counted as applied, skipped or refused.
        step_started: start of the current step, in seconds of ``time.perf_counter``.
        epoch_applied_steps: applied steps of the running epoch.
        last_lr: learning rates of the epoch's last applied step, by parameter group; before there is one, of an
            attempt.
        epoch_means: weighted means of the running epoch's losses and records, on this rank.
        moved_settings: settings of the engine changed by a hook during training, by name.

    Example:
        >>> progress = Progress()
        >>> progress.begin_step(); progress.apply([0.1])
        >>> progress.step, progress.applied_steps, progress.last_lr
        (1, 1, [0.1])
    """

    def __init__(self) -> None:
        self.step = 0
        self.applied_steps = 0
        self.micro_steps = 0
        self.tries = 1
        self.in_step = False
        self.step_started = 0.0
        self.epoch_applied_steps = 0
        self.schedule_moves = 0  # made by the engine in this process
        self.last_lr: Sequence[Any] = []
        self.epoch_means = RunningMeans()
        self.moved_settings: dict[str, Any] = {}
        self._rates = LearningRates()

    def begin_step(self) -> None:
        """Count a step."""
        self.step += 1
        self.tries = 1
        self.in_step = True
        self.step_started = time.perf_counter()

    def end_step(self, outputs: Sequence[StepOutput]) -> float:
        """Add the losses and records of a step to the running epoch's means; return its seconds."""
        seconds = time.perf_counter() - self.step_started
        self.in_step = False
        for output in outputs:
            add_output(self.epoch_means, output)
        return seconds

    def forget_step(self) -> bool:
        """Drop a step that an error interrupted; return whether there was one."""
        interrupted, self.in_step = self.in_step, False
        return interrupted

    def count_own_step(self, optimizer: Optimizer) -> None:
        """Count an applied step of one micro-batch that a user's loop has made."""
        self.begin_step()
        self.apply(self.begin_attempt(1, optimizer))
        self.in_step = False

    def begin_attempt(self, num_micro_batches: int, optimizer: Optimizer) -> list[Any]:
        """Count the micro-batches of an attempt; return the learning rate of each parameter group."""
        self.micro_steps += num_micro_batches
        rates = self._rates.read(optimizer)
        if not self.epoch_applied_steps:
            self.last_lr = rates
        return rates

    def read_rates(self, optimizer: Optimizer) -> list[Any]:
        """Return the learning rate of each parameter group."""
        return self._rates.read(optimizer)

    def retry(self) -> None:
        """Count another try at the current step."""
        self.tries += 1

    def apply(self, rates: Sequence[Any], *, moves_schedule: bool = False) -> None:
        """Count an applied step, whose learning rates are ``rates``, and the move of the schedule that it causes."""
        self.applied_steps += 1
        self.schedule_moves += moves_schedule
        self.epoch_applied_steps += 1
        self.last_lr = rates

    def count_schedule_move(self) -> None:
        """Count a move of the schedule at the end of an epoch."""
        self.schedule_moves += 1

    def count_block(self, count: int, rates: Sequence[Any]) -> None:
        """Count applied steps of one micro-batch each, whose learning rates are ``rates``."""
        self.step += count
        self.applied_steps += count
        self.epoch_applied_steps += count
        self.micro_steps += count
        self.tries = 1
        self.last_lr = rates

    def subtract_applied(self, num_applied: int) -> None:
        """Subtract applied steps that turn out to be refused."""
        self.applied_steps -= num_applied
        self.epoch_applied_steps -= num_applied

    def undo_step(self, num_micro_batches: int) -> None:
        """Subtract a step that was aborted before it changed anything."""
        self.step -= 1
        self.micro_steps -= num_micro_batches

    def roll_back(self, applied_steps: int) -> None:
        """Set the count of applied steps to that of a checkpoint; attempted steps stay counted."""
        self.applied_steps = applied_steps

    def end_epoch(self) -> None:
        """Reset what belongs to the running epoch."""
        self.epoch_means.reset()
        self.epoch_applied_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return everything but ``step``, which has its own key in a checkpoint."""
        return {
            "applied_steps": self.applied_steps,
            "micro_steps": self.micro_steps,
            "epoch_applied_steps": self.epoch_applied_steps,
            "epoch_means": self.epoch_means.state_dict(),
            "lr": self.last_lr,
            **({"settings": dict(self.moved_settings)} if self.moved_settings else {}),
        }

    def load_state_dict(self, saved: Mapping[str, Any], *, step: int, device: torch.device) -> None:
        """Restore what :meth:`state_dict` returned.

        Args:
            saved: saved state; may lack any key, as in checkpoints of other libraries.
            step: optimizer steps attempted.
            device: device of the sums.
        """
        self.step = step
        self.applied_steps = int(saved.get("applied_steps", step))
        self.micro_steps = int(saved.get("micro_steps", 0))
        self.epoch_applied_steps = int(saved.get("epoch_applied_steps", 0))
        self.last_lr = list(saved.get("lr", []))
        self.moved_settings = dict(saved.get("settings") or {})
        self.epoch_means.reset()
        if "epoch_means" in saved:
            self._load_means(saved["epoch_means"], device)

    def _load_means(self, saved: Mapping[str, Any], device: torch.device) -> None:
        """Restore the sums of the running epoch; if the number of ranks differs, rank 0 takes all of them."""
        of_ranks = saved.get("ranks") or [saved]
        if len(of_ranks) == distributed.world_size():
            self.epoch_means.load_state_dict(of_ranks[distributed.rank()], device=device)
            return
        for state in of_ranks:
            part = RunningMeans()
            part.load_state_dict(state, device=device)
            self.epoch_means.include(part)
        if distributed.rank() != 0:
            names = self.epoch_means.names()
            self.epoch_means.reset()
            self.epoch_means.align_keys([names])  # sums over ranks need the same names on all ranks


class LearningRates:
    """Reader of an optimizer's learning rates, which copies rates that are tensors.

    The schedule changes such a tensor in place, so the record of a step needs a copy of its value.
    """

    def __init__(self) -> None:
        self._copied_from: list[Any] = []  # tensors that were copied, with their versions
        self._copies: list[Any] = []

    def read(self, optimizer: Optimizer) -> list[Any]:
        """Return the current rate of each parameter group.

        Raises:
            ConfigError: one is not finite.
        """
        rates = [group["lr"] for group in optimizer.param_groups]
        for number, rate in enumerate(rates):
            if isinstance(rate, Tensor):
                break
            if rate is None:  # the optimizer computes it
                rates[number] = math.nan
            elif not math.isfinite(rate):
                raise ConfigError(
                    "a learning rate must be finite; the weights are still those of the previous step. Check the "
                    "optimizer's arguments and the schedule", argument="lr", value=rate,
                )  # fmt: skip
        else:
            return rates
        state = [(id(rate), rate._version) if isinstance(rate, Tensor) else rate for rate in rates]
        if self._copied_from != state:  # they change with the schedule, if there is one
            self._copies = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]
            self._copied_from = state
        return self._copies
