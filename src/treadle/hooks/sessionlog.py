"""SessionLogHook: log of the processes of a run, with their devices, speed and exit status."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from treadle import distributed
from treadle.checkpoint.schema import versions
from treadle.engine.hook import BaseHook
from treadle.errors.arguments import checked
from treadle.hooks.files import append_lines, continue_lines, file_in_workspace, to_json
from treadle.hooks.tracking import Guard

if TYPE_CHECKING:
    from treadle.engine import Engine

_SHORTEST, _LONGEST = 1.0, 60.0  # seconds between lines


class SessionLogHook(BaseHook):
    """File ``sessions.jsonl``: a line at the start of a process, lines with the step at intervals, one at the end.

    Each line has ``event``, ``step``, ``epoch``, ``time`` (seconds since 1970) and ``total_steps`` (null if unknown).
    ``start`` also has ``target``, ``device``, ``ranks``, ``threads``, ``precision``, ``num_parameters``, ``versions``
    and the ``limits`` that are set; ``end`` has ``status``: ``finished``, ``stopped`` (by a signal, or before the
    target; with ``reason`` if that is ``max_time``) or ``failed`` with ``error``. A killed process leaves no ``end``.
    Lines ``step`` are written at most every second, and at least every minute that has a step. They provide the time
    axis of ``treadle report`` and the status in ``treadle runs``; every front end adds this log to its run folders
    automatically.

    A resumed run first truncates the lines after its step; a fresh run renames an existing file. An unwritable file
    causes a warning and does not end training.

    Args:
        path: the file; relative to the trainer's workspace.

    Example:
        >>> hook = SessionLogHook()
    """

    writes = True
    _may_fail_to_write = True  # with a warning: the session log must not end a run

    @checked
    def __init__(self, path: str | Path = "sessions.jsonl"):
        self.path = Path(path)
        self._guard = Guard()
        self._file: Path | None = None
        self._started = 0.0
        self._due = 0.0

    def on_before_train(self, trainer: Engine) -> None:
        """Write the start line."""
        path = file_in_workspace(trainer, self.path)
        if distributed.rank() != 0:
            return
        self._started = time.monotonic()  # the system clock may be set back
        self._due = self._started + _SHORTEST
        with self._guard(trainer, self, "opening the file"):
            continue_lines(trainer, path)
            self._file = path
            self._write(trainer, "start", **_surroundings(trainer))

    def on_after_step(self, trainer: Engine) -> None:
        """Write a line if a hundredth of this process's time has passed since the last one."""
        now = time.monotonic()
        if self._file is None or now < self._due:
            return
        self._due = now + min(max((now - self._started) / 100, _SHORTEST), _LONGEST)
        with self._guard(trainer, self, f"writing at step {trainer.step}"):
            self._write(trainer, "step")

    def steps_ahead(self, trainer: Engine) -> int | None:
        """Allow any number of steps: the session log is written by time, not by step."""
        return None

    def on_close(self, trainer: Engine, error: BaseException | None = None) -> None:
        """Write the end line."""
        if self._file is None:
            return
        status = "failed"
        if error is None:
            status = "finished" if trainer.target.reached(trainer) else "stopped"
        elif isinstance(error, (SystemExit, KeyboardInterrupt)):
            status = "stopped"
        reason = {"error": f"{type(error).__name__}: {error}"[:1000]} if status == "failed" else {}
        if error is None and status == "stopped" and trainer.target.out_of_time:
            reason = {"reason": "max_time"}
        with self._guard(trainer, self, "writing the end"):
            self._write(trainer, "end", status=status, **reason)
        self._file = None

    def _write(self, trainer: Engine, event: str, **more: Any) -> None:
        assert self._file is not None
        line = {"event": event, "step": trainer.step, "epoch": trainer.epoch, "time": round(time.time(), 3)}
        whole = to_json({**line, "total_steps": trainer.total_steps, **more})
        append_lines(self._file, [json.dumps(whole, allow_nan=False)])


def _surroundings(trainer: Engine) -> dict[str, Any]:
    """Return the environment of a run beyond its settings, without identifying machine or user."""
    device, limits = trainer.device, trainer.settings.limits.given()
    return {
        **({"limits": limits} if limits else {}),
        "target": {"max_steps": trainer.target.max_steps, "epochs": trainer.target.epochs},
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "ranks": distributed.world_size(),
        "threads": torch.get_num_threads(),
        "cpu_count": os.cpu_count(),
        "system": sys.platform,
        "precision": trainer.precision.name or "full",
        "num_parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "versions": versions() | ({} if torch.version.cuda is None else {"cuda": torch.version.cuda}),
    }
