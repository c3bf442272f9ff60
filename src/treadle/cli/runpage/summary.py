"""Summary of a run in one row: progress, best metric, time, device."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.checkpoint.lock import LOCK_NAME
from treadle.cli.runpage.files import HISTORIES, POINTS, STEPS, find
from treadle.cli.runpage.records import RunRecords
from treadle.cli.runpage.sessions import Timeline, read_sessions
from treadle.runs.record import SESSIONS

_RECENT = 180.0  # seconds; SessionLogHook writes a line in every minute with a step
RUNNING, FINISHED, STOPPED, FAILED, ENDED = "running", "finished", "stopped", "failed", "ended"


@dataclass(frozen=True)
class RunSummary:
    """Row of ``treadle runs``; values that were not recorded are None.

    Attributes:
        folder: the run folder.
        status: ``running``, ``finished``, ``stopped``, ``failed``, or ``ended`` if the reason was not recorded.
        reason: the error of a failed run, or the process of a running one.
        step: optimizer steps attempted.
        total_steps: the step at which the run ends.
        epoch: epochs completed.
        metric: the metric that selects the best epoch.
        best: the best value of the metric.
        best_epoch: the epoch of that value.
        loss: of the last step.
        seconds: training time, without pauses.
        device: the type of device, with its name if it is an accelerator.
        updated: time of the last write, in seconds since 1970.
    """

    folder: Path
    status: str
    reason: str | None
    step: int | None
    total_steps: int | None
    epoch: int | None
    metric: str | None
    best: float | None
    best_epoch: int | None
    loss: float | None
    seconds: float | None
    device: str | None
    updated: float | None

    def as_json(self) -> dict[str, Any]:
        """Return the row as plain values."""
        return {**vars(self), "folder": str(self.folder)}


def summarize(records: RunRecords) -> RunSummary:
    """Return the row of a run."""
    sessions = read_sessions(records.sessions)
    state = records.state
    values = {} if state is None else state.values
    status, reason = _status(records)
    metric, best_epoch = values.get("selection.metric"), values.get("selection.best_epoch")
    epochs = [row["epoch"] for row in [*records.epochs, *records.sessions[-1:]] if isinstance(row.get("epoch"), int)]
    return RunSummary(
        folder=records.folder,
        status=status,
        reason=reason,
        step=_last_step(records),
        total_steps=_total_steps(records),
        epoch=max([*epochs, *([] if state is None or state.epoch is None else [state.epoch])], default=None),
        metric=metric if isinstance(metric, str) else None,
        best=_number(values.get("selection.best")),
        best_epoch=best_epoch if isinstance(best_epoch, int) else None,
        loss=_number(records.steps[-1].get("loss")) if records.steps else None,
        seconds=_seconds(records, running=status == RUNNING),
        device=device_of(sessions[-1].start) if sessions else _text(records.config.get("device")),
        updated=_updated(records),
    )


def device_of(start: dict[str, Any]) -> str:
    """Return the device recorded at the start of a session, with the number of ranks if there are several.

    Example:
        >>> device_of({"device": "cuda:0", "device_name": "NVIDIA H200", "ranks": 2})
        'cuda:0 (NVIDIA H200), 2 ranks'
    """
    device, ranks = str(start.get("device", "unknown")), start.get("ranks", 1)
    name = f" ({start['device_name']})" if device != "cpu" and start.get("device_name") else ""
    return f"{device}{name}" + (f", {ranks} ranks" if ranks != 1 else "")


def _status(records: RunRecords) -> tuple[str, str | None]:
    sessions = read_sessions(records.sessions)
    if records.holder is not None:
        pid, host = records.holder.get("pid"), records.holder.get("host")
        return RUNNING, None if pid is None else f"process {pid} on {host}"
    if sessions:
        last = sessions[-1]
        if last.status in (FINISHED, STOPPED, FAILED):
            return last.status, None if last.end is None else _text(last.end.get("error"))
        if find(records.folder, LOCK_NAME) is None and time.time() - last.marks[-1][1] < _RECENT:
            return RUNNING, "no lock in its folder; a line was written just now"
        return STOPPED, "its process ended without a record"
    step, total = _last_step(records), _total_steps(records)
    if records.results or (step is not None and total is not None and step >= total):
        return FINISHED, None
    return ENDED, None


def _last_step(records: RunRecords) -> int | None:
    """Return the furthest recorded step; None if a history without steps is ahead of every state."""
    logged, state = bool(records.steps or records.points or records.sessions), records.state
    epochs = [row["epoch"] for row in records.epochs if isinstance(row.get("epoch"), int)]
    if not logged and state is not None and max(epochs, default=0) > (state.epoch or 0):
        return None
    found = [rows[-1]["step"] for rows in (records.steps, records.points, records.sessions) if rows]
    return max([*found, *([] if records.state is None else [records.state.step or 0])], default=None)


def _total_steps(records: RunRecords) -> int | None:
    totals = [line.get("total_steps") for line in records.sessions if line.get("total_steps") is not None]
    if not totals and records.state is not None:
        totals = [records.state.values.get("config.max_steps")]
    return totals[-1] if totals and isinstance(totals[-1], int) else None


def _seconds(records: RunRecords, *, running: bool) -> float | None:
    sessions = read_sessions(records.sessions)
    total = Timeline(sessions).total
    if total is None or not running or sessions[-1].end is not None:
        return total
    return total + max(time.time() - sessions[-1].marks[-1][1], 0.0)


def _updated(records: RunRecords) -> float | None:
    names = (STEPS, POINTS, SESSIONS, *HISTORIES)
    files = [path for name in names if (path := find(records.folder, name)) is not None]
    written = [os.path.getmtime(path) for path in files] + [one.written for one in records.checkpoints]
    return max(written, default=None)


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
