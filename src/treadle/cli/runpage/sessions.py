"""Sessions of a run, one per process, and the training time by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from treadle.cli.runpage.files import Row


@dataclass(frozen=True)
class Session:
    """Session of a run: one process.

    Attributes:
        start: the line of its start.
        marks: (step, seconds since 1970), the start first.
        end: the line of its end; None for a process that was killed or still trains.
    """

    start: Row
    marks: Sequence[tuple[int, float]]
    end: Row | None = None

    @property
    def seconds(self) -> float:
        """Seconds from the start to the last line."""
        return self.marks[-1][1] - self.marks[0][1]

    @property
    def status(self) -> str:
        """``finished``, ``stopped``, ``failed``, or "" without an end."""
        return "" if self.end is None else str(self.end.get("status", ""))


def read_sessions(lines: Sequence[Row]) -> list[Session]:
    """Return the sessions of a run, in order.

    Args:
        lines: of ``sessions.jsonl``; lines before the first start are ignored.

    Example:
        >>> lines = [{"event": "start", "step": 0, "time": 5.0}, {"event": "step", "step": 9, "time": 7.0}]
        >>> read_sessions(lines)[0].seconds
        2.0
    """
    sessions: list[Session] = []
    for line in lines:
        time = line.get("time")
        if not isinstance(time, (int, float)) or not math.isfinite(time):
            continue
        mark = (line["step"], float(time))
        if line.get("event") == "start":
            sessions.append(Session(line, [mark]))
        elif sessions:
            last = sessions[-1]
            end = line if line.get("event") == "end" else None
            sessions[-1] = Session(last.start, [*last.marks, mark], end)
    return sessions


class Timeline:
    """Training time by step, without pauses between sessions and without work lost by a kill.

    Args:
        sessions: the sessions of one run.

    Example:
        >>> lines = [{"event": "start", "step": 0, "time": 5.0}, {"event": "end", "step": 10, "time": 7.0}]
        >>> Timeline(read_sessions(lines)).at([5])
        [1.0]
    """

    def __init__(self, sessions: Sequence[Session]):
        self.steps: list[int] = []
        self.seconds: list[float] = []
        before = 0.0
        for session in sessions:
            first = session.marks[0][1]
            self.steps += [step for step, _ in session.marks]
            self.seconds += [before + time - first for _, time in session.marks]
            before += session.seconds

    @property
    def total(self) -> float | None:
        """Seconds of all sessions; None if none were recorded."""
        return self.seconds[-1] if self.seconds else None

    def at(self, steps: Sequence[float | None]) -> list[float | None]:
        """Return the seconds at steps; None where unknown, as before the first session."""
        if not self.steps:
            return [None] * len(steps)
        import numpy as np  # here, since `treadle runs` does not need it

        asked = [math.nan if step is None else step for step in steps]
        found = np.interp(asked, self.steps, self.seconds, left=math.nan)
        return [None if math.isnan(value) else round(value, 3) for value in found.tolist()]

    def speeds(self) -> tuple[list[int], list[float]]:
        """Return steps and, for each, the steps per second since the previous mark."""
        steps, rates = [], []
        for index in range(1, len(self.steps)):
            done = self.steps[index] - self.steps[index - 1]
            took = self.seconds[index] - self.seconds[index - 1]
            if done > 0 and took > 0:
                steps.append(self.steps[index])
                rates.append(done / took)
        return steps, rates
