"""Jobs of the processes of a verification, and the lines in which they report."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Kill:
    """Planned kill.

    Attributes:
        step: the step of the kill.
        signal: ``"SIGKILL"`` or ``"SIGTERM"``.
        place: ``"inside"`` the step, ``"before"`` or ``"after"`` its checkpoint.
    """

    step: int
    signal: str
    place: str


@dataclass(frozen=True)
class Job:
    """Job of one process that runs the target.

    Attributes:
        target: path of a script or a configuration, or the name of a pack.
        arguments: arguments of the script, or settings.
        folder: the folder of the workspace, log and records of this run.
        number: the number of this process within the run, from 0.
        steps: the number of steps to train, from the first step of this process.
        stop_at: the absolute step to stop at, which takes precedence; None if ``steps`` applies.
        interval: the most steps between two checkpoints.
        kill: when to kill the process, or None.
        limit: seconds after which it is ended, or None.
    """

    target: str
    arguments: list[str]
    folder: str
    number: int
    steps: int
    stop_at: int | None
    interval: int
    kill: Kill | None = None
    limit: float | None = None

    @property
    def workspace(self) -> Path:
        """The output folder of the target."""
        return Path(self.folder) / "workspace"

    @property
    def log(self) -> Path:
        """The file with the output of the target."""
        return Path(self.folder) / "output.log"

    @property
    def records(self) -> Path:
        """The file of records, one JSON line per step."""
        return Path(self.folder) / "records.jsonl"

    def to_line(self) -> str:
        """Return the job as one line of JSON."""
        return json.dumps(dataclasses.asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Job:
        """Parse the result of :meth:`to_line`.

        Example:
            >>> job = Job("train.py", [], "runs", 0, 24, None, 3, Kill(5, "SIGKILL", "inside"))
            >>> Job.from_line(job.to_line()) == job
            True
        """
        values = json.loads(line)
        kill = values.pop("kill")
        return cls(**values, kill=None if kill is None else Kill(**kill))


class RecordFile:
    """Append-only file whose lines are complete whatever happens to the process: each is a single write."""

    def __init__(self, path: Path, number: int):
        self.number = number
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, kind: str, **values: Any) -> None:
        """Append one line."""
        line = json.dumps({"kind": kind, "process": self.number, **values})
        os.write(self._file, (line + "\n").encode())


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the lines that were written; empty if there is no file."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]
