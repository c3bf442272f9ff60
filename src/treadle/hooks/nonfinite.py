"""NonFiniteHook: flight recorder and policy for steps with non-finite gradients."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from treadle import distributed
from treadle.checkpoint.files import TEMPORARY, remove_leftover
from treadle.checkpoint.find_step import nearest_state, stamp_of, states_in
from treadle.checkpoint.order import by_progress
from treadle.checkpoint.store import open_checkpoint, sync_folder, write_bytes, write_text
from treadle.device.host_transfer import read_scalars
from treadle.engine.hook import BaseHook
from treadle.errors import CheckpointError, ConfigError
from treadle.errors.arguments import check_least, check_within, checked
from treadle.hooks.files import in_workspace, set_aside, to_json
from treadle.hooks.flight import (
    AttemptStart,
    Finding,
    bad_inputs,
    batch_as_plain,
    find_non_finite,
    ids_as_plain,
    is_finite,
)
from treadle.optim.nonfinite import RefusalPlan
from treadle.optim.optimizer import parameter_names, scale_learning_rate

if TYPE_CHECKING:
    from treadle.engine import Engine

Policy = Literal["raise", "skip", "retry", "rollback"]


class NonFiniteHook(BaseHook):
    """Hook that records every refused step and decides how the run continues.

    A folder per event, ``step_00000012_try_1``, holds ``event.json`` (sample ids, the first module whose output and the
    first parameter whose gradient was not finite, position, learning rates, losses, norm, the nearest checkpoint),
    ``rng.pt`` and, if it is made of plain tensors, ``batch.pt``; both load with ``weights_only=True``. To find the
    first module, the refused forward and backward pass is rerun with the same random numbers.

    With every policy, the engine's ``max_non_finite_grad_retries`` come first. An fp16 overflow that only lowers the
    scale is not an event. Buffers such as the running mean of a batch norm are restored to their values before the
    refused attempt.

    Args:
        policy: ``"raise"``: raise NonFiniteError. ``"skip"``: the step changes nothing and the run continues with the
            next data. ``"retry"``: fresh data for the same step, up to the engine's retries. ``"rollback"``: back to
            the weights, optimizer and schedule of the last good checkpoint with a lower learning rate; the data
            continues after the refused batch and the step count continues too.
        max_in_a_row: number of consecutive refused steps after which NonFiniteError is raised anyway.
        path: folder of the events; relative to the trainer's workspace. A fresh run renames an existing one.
        checkpoints: folder of checkpoints for ``"rollback"``; relative to the trainer's workspace.
        max_rollbacks: number of rollbacks in the whole run after which NonFiniteError is raised.
        lr_factor: factor by which a rollback multiplies the learning rate, in (0, 1].
        max_events: number of events to write; later ones are only logged.

    Raises:
        ConfigError: a value is outside its range, or ``"retry"`` without ``max_non_finite_grad_retries``.

    Example:
        >>> hook = NonFiniteHook("skip", max_in_a_row=5)
    """

    writes = True

    @checked
    def __init__(
        self,
        policy: Policy = "raise",
        max_in_a_row: int = 3,
        path: str | Path = "nonfinite",
        *,
        checkpoints: str | Path = "checkpoints",
        max_rollbacks: int = 3,
        lr_factor: float = 0.5,
        max_events: int = 20,
    ):
        check_least(1, max_in_a_row=max_in_a_row, max_rollbacks=max_rollbacks)
        check_within("(0, 1]", lr_factor=lr_factor)
        check_least(0, max_events=max_events)
        self.policy = policy
        self.max_in_a_row = max_in_a_row
        self.path = Path(path)
        self.checkpoints = Path(checkpoints)
        self.max_rollbacks = max_rollbacks
        self.lr_factor = lr_factor
        self.max_events = max_events
        self.in_a_row = 0
        self.refused_steps = 0
        self.rollbacks = 0
        self._attempt: AttemptStart | None = None
        self.foreign_states: set[tuple[str, int, int]] = set()  # checkpoints of another run, never rolled back to

    # -- declaration and events -----------------------------------------------------------------------------------

    def refusal_plan(self, trainer: Engine) -> RefusalPlan:
        """Return a plan, so that the engine checks every step at once."""
        if self.policy == "retry" and not trainer.max_non_finite_grad_retries:
            raise ConfigError(
                "='retry': the trainer's max_non_finite_grad_retries is not set, so there would be no retry; "
                "set it to 1 or more, or choose policy='skip'",
                argument="policy",
            )
        described = {
            "skip": f"the step is skipped, at most {self.max_in_a_row} in a row, then an error",
            "rollback": f"back to the last good checkpoint and learning rate x {self.lr_factor:g}, at most "
            f"{self.max_rollbacks} times, then an error",
        }.get(self.policy, "an error")
        return RefusalPlan(
            f"{described}; each is recorded", lambda: self._noted(trainer).note(), lambda: self._refused(trainer)
        )

    def on_before_train(self, trainer: Engine) -> None:
        """Move the events of another run aside."""
        folder = in_workspace(trainer, self.path)
        for leftover in folder.glob(f".*{TEMPORARY}"):
            remove_leftover(leftover)
        if trainer.step == 0:
            files = states_in(in_workspace(trainer, self.checkpoints)) if self.policy == "rollback" else []
            self.foreign_states = {stamp_of(path) for path in files}
        if trainer.step == 0 and distributed.rank() == 0 and folder.is_dir() and any(folder.iterdir()):
            set_aside(trainer, folder)

    def on_after_step(self, trainer: Engine) -> None:
        """Count consecutive refused steps."""
        if trainer.step_info["applied"]:
            self.in_a_row = 0

    def on_state_dict(self, trainer: Engine, state_dict: dict[str, Any]) -> None:
        """Save the counts, so that the limits hold across a resume."""
        state_dict["hooks"][self.state_key] = {
            "in_a_row": self.in_a_row,
            "refused_steps": self.refused_steps,
            "rollbacks": self.rollbacks,
        }

    def on_load_state_dict(self, trainer: Engine, state_dict: Mapping[str, Any]) -> None:
        """Restore the counts."""
        saved = self._saved_in(state_dict)
        self.in_a_row = int(saved.get("in_a_row", 0))
        self.refused_steps = int(saved.get("refused_steps", 0))
        self.rollbacks = int(saved.get("rollbacks", 0))

    def _saved_in(self, tree: Mapping[str, Any]) -> Mapping[str, Any]:
        saved: Mapping[str, Any] = (tree.get("hooks") or {}).get(self.state_key) or {}
        return saved

    def _noted(self, trainer: Engine) -> AttemptStart:
        if self._attempt is None:
            self._attempt = AttemptStart(trainer.model)
        return self._attempt

    # -- a refused step -------------------------------------------------------------------------------------------

    def _refused(self, trainer: Engine) -> bool:
        """Record the refused attempt and apply the policy; return whether the run continues without the step."""
        event = self._described(trainer)
        self._noted(trainer).restore_buffers()
        action, goes_on = self._decide(trainer)
        event["action"] = action
        trainer.step_info["reason"] = f"non-finite gradient: {action}"
        folder = self._write(trainer, event)
        trainer.logger.warning(
            "step %d: the gradient is not finite (norm %s); first in %s; sample ids %s; %s%s",
            trainer.step, event["grad_norm"], event["where"], _shortened(event["sample_ids"]), action,
            f". See {folder}" if folder is not None else "",
        )  # fmt: skip
        return goes_on

    def _decide(self, trainer: Engine) -> tuple[str, bool]:
        if trainer.progress.tries <= trainer.max_non_finite_grad_retries:
            return f"retry {trainer.progress.tries} of {trainer.max_non_finite_grad_retries}", False
        self.in_a_row += 1
        self.refused_steps += 1
        if self.policy not in ("skip", "rollback"):
            return "raised", False
        if self.in_a_row > self.max_in_a_row:
            return f"raised, after {self.max_in_a_row} refused steps in a row", False
        return ("skipped", True) if self.policy == "skip" else self._roll_back(trainer)

    def _roll_back(self, trainer: Engine) -> tuple[str, bool]:
        if self.rollbacks >= self.max_rollbacks:
            return f"raised, after {self.max_rollbacks} rollbacks", False
        folder = in_workspace(trainer, self.checkpoints)
        # The last checkpoint may still be being written: the rollback must not depend on disk speed.
        for hook in trainer.hooks:
            hook.wait_for_writes()
        found = nearest_state(folder, trainer.step - 1, without=self.foreign_states, load=open_checkpoint)
        if distributed.agree(int(found is None)) or found is None:
            return f"raised, as {folder} holds no good checkpoint of this run", False
        path, tree = found
        trainer.state.roll_back(trainer, tree)
        self.rollbacks += 1
        undone = self.rollbacks - int(self._saved_in(tree).get("rollbacks", 0))
        scale_learning_rate(trainer.optimizer, trainer.lr_scheduler, self.lr_factor**undone)
        rates = ", ".join(f"{value:g}" for value in _rates(trainer))
        return f"rolled back to step {tree['global_step']} ({path.name}), learning rate now {rates}", True

    # -- the record -----------------------------------------------------------------------------------------------

    def _described(self, trainer: Engine) -> dict[str, Any]:
        """Return the event as plain values; clears its gradients."""
        names = parameter_names(trainer.model)
        groups = trainer.optimizer.param_groups
        with_gradient = [p for group in groups for p in group["params"] if p.grad is not None]
        bad = [names.get(id(p), "<unnamed>") for p in with_gradient if not is_finite(p.grad)]
        info, group = trainer.step_info, trainer.attempt.group
        finding = find_non_finite(trainer, self._noted(trainer))
        position, count = trainer.cursor.position, len(group.batches)
        losses = [None if loss is None else float(loss) for loss in info["loss"]]
        return {
            "step": trainer.step, "try": trainer.progress.tries, "epoch": trainer.epoch + 1, "position": position,
            "batches": [max(position - count + 1, 1), position], "applied_steps": trainer.applied_steps,
            "lr": read_scalars(info["lr"]).tolist(), "grad_norm": _text(float(info["grad_norm"])),
            "losses": [_text(loss) for loss in losses],
            "sample_ids": [ids_as_plain(ids) for ids in group.sample_ids] or [None] * count,
            "non_finite_inputs": bad_inputs(group.batches), "where": _where(finding, bad),
            "first_module": finding.module, "first_module_type": finding.module_type,
            "first_module_micro_batch": finding.micro_batch if finding.module is not None else None,
            "first_parameter": finding.parameter, "non_finite_gradients": len(bad), "gradients": len(with_gradient),
            "second_run": finding.error or ("same losses" if _same(finding.losses, losses) else "other losses"),
            "policy": self.policy, "rank": distributed.rank(), "checkpoint": self._nearest_file(trainer),
            "replay": f"treadle replay RUN --step {trainer.step}",
        }  # fmt: skip

    def _nearest_file(self, trainer: Engine) -> str | None:
        """Return the name of the furthest checkpoint, or None."""
        if self.checkpoints.is_absolute() or trainer.workspace is not None:
            files = states_in(in_workspace(trainer, self.checkpoints))
            files = [path for path in files if stamp_of(path) not in self.foreign_states]
            if files:
                return by_progress(files)[0].name
        return None

    def _write(self, trainer: Engine, event: dict[str, Any]) -> Path | None:
        """Write the folder of an event atomically; a failure must not end the run."""
        if self.max_events == 0:
            return None
        parent = in_workspace(trainer, self.path)
        rank = f"_rank_{distributed.rank()}" if distributed.world_size() > 1 else ""
        target = parent / f"step_{trainer.step:08d}_try_{trainer.progress.tries}{rank}"
        staged = parent / f".{target.name}.{os.getpid()}{TEMPORARY}"
        try:
            if not target.exists() and parent.is_dir() and len(list(parent.iterdir())) >= self.max_events:
                trainer.logger.debug(
                    "max_events=%d records have been written; this event is only logged", self.max_events
                )
                return None
            event["batch"] = _save_batch(trainer, staged / "batch.pt")
            rng = self._noted(trainer).rng
            if rng is not None:
                plain = rng.to_plain()
                write_bytes(lambda file: torch.save(plain, file), staged / "rng.pt")
            write_text(json.dumps(to_json(event), indent=2, allow_nan=False) + "\n", staged / "event.json")
            shutil.rmtree(target, ignore_errors=True)  # of the same step, from before a kill and resume
            staged.replace(target)
            sync_folder(parent)
        except (CheckpointError, OSError) as error:
            trainer.logger.error("the record of step %d cannot be written: %s", trainer.step, error)
            shutil.rmtree(staged, ignore_errors=True)
            return None
        return target


def _save_batch(trainer: Engine, path: Path) -> str:
    """Save the micro-batches as a list; return the name of the file, or the reason for its absence."""
    try:
        plain = [batch_as_plain(batch) for batch in trainer.attempt.group.batches]
    except TypeError as error:
        return f"not saved: {error}"
    write_bytes(lambda file: torch.save(plain, file), path)
    return path.name


def _where(finding: Finding, bad: list[str]) -> str:
    if not bad and finding.module is None and finding.loss_finite:
        return "the norm, which overflowed while every gradient was finite"
    return finding.where


def _same(again: list[float | None], before: list[float | None]) -> bool:
    return [repr(loss) for loss in again] == [repr(loss) for loss in before]


def _text(value: float | None) -> float | str | None:
    """Return a finite number, or the name of a non-finite one, which matters here."""
    return value if value is None or is_finite(value) else repr(value)


def _rates(trainer: Engine) -> list[float]:
    rates: list[float] = read_scalars(group["lr"] for group in trainer.optimizer.param_groups).tolist()
    return rates


def _shortened(ids: list[Any]) -> str:
    text = str(ids)
    return text if len(text) <= 200 else f"{text[:200]}..."
