"""Coordinates of a point on the three x axes of a page: steps, epochs, training time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from treadle.cli.runpage.files import Row
from treadle.cli.runpage.sessions import Timeline

Axis = Sequence[float | None]


class RunAxes:
    """Conversion between steps, epochs and time, as far as the records of a run allow.

    Args:
        rows: rows of the step log.
        values: plain values of the newest checkpoint, which gives the length of an epoch if there is no step log.
        timeline: the timeline of the run.

    Example:
        >>> rows = [{"step": 1, "epoch": 1, "position": 4}, {"step": 2, "epoch": 1, "position": 8}]
        >>> axes = RunAxes(rows, {}, Timeline([]))
        >>> axes.of_steps([1, 2])
        {'step': [1, 2], 'epoch': [0.5, 1.0], 'time': [None, None]}
        >>> axes.of_epochs([1])
        {'step': [2], 'epoch': [1], 'time': [None]}
    """

    def __init__(self, rows: Sequence[Row], values: Mapping[str, Any], timeline: Timeline):
        self.timeline = timeline
        rows = [row for row in rows if type(row.get("epoch")) is int and type(row.get("position")) is int]
        lengths: dict[int, int] = {}
        self._last_step: dict[int, int] = {}
        for row in rows:
            lengths[row["epoch"]] = max(lengths.get(row["epoch"], 1), row["position"])
            self._last_step[row["epoch"]] = row["step"]
        if lengths:  # the last epoch may be incomplete
            lengths[max(lengths)] = max(lengths.values())
        self._steps = [row["step"] for row in rows]
        self._epochs = [row["epoch"] - 1 + row["position"] / lengths[row["epoch"]] for row in rows]
        self._per_epoch = None if rows else _steps_per_epoch(values)

    def of_steps(self, steps: Sequence[int]) -> dict[str, Axis]:
        """Return the coordinates of steps."""
        return {"step": steps, "epoch": self._epochs_at(steps), "time": self.timeline.at(steps)}

    def of_epochs(self, epochs: Sequence[int]) -> dict[str, Axis]:
        """Return the coordinates of the ends of epochs."""
        steps = [self._step_of(epoch) for epoch in epochs]
        return {"step": steps, "epoch": epochs, "time": self.timeline.at(steps)}

    def _epochs_at(self, steps: Sequence[int]) -> Axis:
        if self._per_epoch is not None:
            return [round(step / self._per_epoch, 4) for step in steps]
        if not self._steps:
            return [None] * len(steps)
        found = np.interp(steps, self._steps, self._epochs).tolist()
        return [round(value, 4) for value in found]

    def _step_of(self, epoch: int) -> int | None:
        if self._per_epoch is not None:
            return round(epoch * self._per_epoch)
        return self._last_step.get(epoch)


def _steps_per_epoch(values: Mapping[str, Any]) -> float | None:
    """Return the steps per epoch from the position stored in a checkpoint; None if it stores none."""
    step, epoch = values.get("global_step"), values.get("epoch")
    position, length = values.get("data.position", 0), values.get("data.length")
    if not isinstance(step, int) or not isinstance(epoch, int):
        return None
    done = epoch + (position / length if isinstance(length, int) and length and isinstance(position, int) else 0)
    return step / done if done > 0 and math.isfinite(done) else None
