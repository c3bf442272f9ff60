"""The curves of a run: series of points for the charts of a page, thinned out for the browser."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from treadle.cli.runpage.files import Row
from treadle.cli.runpage.records import RunRecords
from treadle.cli.runpage.sessions import Timeline, read_sessions

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


MOST_POINTS = 1500
_PARTS = {"train": "training", "val": "validation", "eval": "validation", "valid": "validation", "test": "test"}
_PLACES = ("step", "epoch", "global_step")
_RATE_OF_A_GROUP = re.compile(r"lr[_/](group_?)?\d+")  # a step log has the learning rates already


@dataclass(frozen=True)
class Series:
    """Points of one chart.

    Attributes:
        chart: the key of the chart.
        label: the name of the series within its run: ``training``, ``validation``, or another word.
        style: ``line`` for many points, which are smoothed; ``dots`` for few, joined; ``mark`` for single events.
        axes: coordinates by axis: ``step``, ``epoch``, ``time`` in seconds; None where unknown.
        y: the values; None where there is none.
        raw: coordinates and values before averaging; None if all points are kept.
        texts: for marks, what happened.
    """

    chart: str
    label: str
    style: str
    axes: Mapping[str, Axis]
    y: Axis
    raw: Mapping[str, Any] | None = None
    texts: Sequence[str] = field(default_factory=list)


def series_of(records: RunRecords) -> list[Series]:
    """Return the series of a run: those by step first, then those by epoch, then the marks."""
    axes = _axes_of(records)
    found = list(_of_steps(records.steps, axes))
    for series in (_of_points(records.points, axes), _of_epochs(records.epochs, axes)):
        shown = {(one.chart, one.label) for one in found}
        has_rates = any(one.chart == "lr" for one in found)
        found += [
            one
            for one in series
            if (one.chart, one.label) not in shown and not (has_rates and _RATE_OF_A_GROUP.fullmatch(one.chart))
        ]
    steps, rates = axes.timeline.speeds()
    if rates:
        found.append(_line("speed", "training", axes.of_steps(steps), rates))
    return [*found, *_marks(records, axes)]


def resumes_of(records: RunRecords) -> dict[str, Axis]:
    """Return the coordinates at which a later process resumed the run."""
    starts = [session.marks[0][0] for session in read_sessions(records.sessions)[1:]]
    return _axes_of(records).of_steps(starts)


def _axes_of(records: RunRecords) -> RunAxes:
    values = {} if records.state is None else records.state.values
    return RunAxes(records.steps, values, Timeline(read_sessions(records.sessions)))


def _of_steps(rows: Sequence[Row], axes: RunAxes) -> Iterator[Series]:
    if not rows:
        return
    places = axes.of_steps([row["step"] for row in rows])
    for key in ("loss", "grad_norm"):
        values = [_number(row.get(key)) for row in rows]
        if any(value is not None for value in values):
            yield _line(key, "training", places, values)
    groups = max((len(row["lr"]) for row in rows if isinstance(row.get("lr"), list)), default=0)
    columns = [[_item(row.get("lr"), index) for row in rows] for index in range(groups)]
    different = [column for index, column in enumerate(columns) if column not in columns[:index]]
    for column in different:
        label = "training" if len(different) == 1 else f"group {columns.index(column)}"
        yield _line("lr", label, places, column)


def _of_points(points: Sequence[Row], axes: RunAxes) -> Iterator[Series]:
    """Yield the curves of a log of points, each over the steps that have its key."""
    keys = dict.fromkeys(key for row in points for key in row if key not in _PLACES)
    for key in keys:
        rows = {row["step"]: row[key] for row in points if _number(row.get(key)) is not None}
        if rows:
            chart, label = chart_of(key)
            steps = sorted(rows)
            yield _line(chart, label, axes.of_steps(steps), [rows[step] for step in steps])


def _of_epochs(epochs: Sequence[Row], axes: RunAxes) -> Iterator[Series]:
    places = axes.of_epochs([row["epoch"] for row in epochs])
    for key in dict.fromkeys(key for row in epochs for key in row if key not in _PLACES):
        values = [_number(row.get(key)) for row in epochs]
        known = {value for value in values if value is not None}
        if known and not (len(known) == 1 and len(values) > 1):  # a constant is not shown as a curve
            chart, label = chart_of(key)
            yield Series(chart, label, "dots", places, values)


def constants_of(records: RunRecords) -> dict[str, float]:
    """Return the values that are equal in every epoch of a run, which get no chart."""
    found: dict[str, float] = {}
    for key in dict.fromkeys(key for row in records.epochs for key in row if key not in _PLACES):
        known = {_number(row.get(key)) for row in records.epochs}
        (value, *others) = known
        if len(records.epochs) > 1 and not others and value is not None:
            found[key] = value
    return found


def chart_of(key: str) -> tuple[str, str]:
    """Return the chart that a value belongs to, and its label there.

    Example:
        >>> chart_of("val_loss"), chart_of("train/loss"), chart_of("lr")
        (('loss', 'validation'), ('loss', 'training'), ('lr', 'training'))
    """
    found = re.fullmatch(rf"({'|'.join(_PARTS)})[_/](.+)", key)
    return (found[2], _PARTS[found[1]]) if found else (key, "training")


def _marks(records: RunRecords, axes: RunAxes) -> Iterator[Series]:
    for label, rows in events_of(records.steps).items():
        steps = [row["step"] for row in rows]
        yield Series("loss", label, "mark", axes.of_steps(steps), _heights(records.steps, steps), texts=[
            event_text(row) for row in rows
        ])  # fmt: skip
    values = {} if records.state is None else records.state.values
    metric, epoch, best = (values.get(f"selection.{key}") for key in ("metric", "best_epoch", "best"))
    if isinstance(metric, str) and isinstance(epoch, int) and epoch > 0 and _number(best) is not None:
        yield Series(
            chart_of(metric)[0], "best", "mark", axes.of_epochs([epoch]), [best], texts=[f"best epoch {epoch}"]
        )


def events_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the skipped steps and the retried steps, if any."""
    skipped = [row for row in rows if row.get("applied") is False]
    retried = [row for row in rows if row.get("applied") is not False and row.get("retries")]
    return {label: found for label, found in (("skipped", skipped), ("retried", retried)) if found}


def event_text(row: Row) -> str:
    """Describe what happened in a skipped or retried step.

    Example:
        >>> event_text({"step": 3, "applied": False, "retries": 0, "reason": "no micro-batch had a loss"})
        'step 3 skipped: no micro-batch had a loss'
    """
    what = "skipped" if row.get("applied") is False else "applied"
    retries = row.get("retries") or 0
    after = f" after {retries} {'retry' if retries == 1 else 'retries'}" if retries else ""
    return f"step {row['step']} {what}{after}" + (f": {row['reason']}" if row.get("reason") else "")


def _heights(rows: Sequence[Row], steps: Sequence[int]) -> list[float | None]:
    """Return the loss at steps; if a step has none, the loss before it."""
    wanted, last, found = set(steps), None, []
    for row in rows:
        last = _number(row.get("loss")) if row.get("loss") is not None else last
        if row["step"] in wanted:
            found.append(last)
    return found


def _line(chart: str, label: str, axes: Mapping[str, Axis], values: Axis) -> Series:
    """Return a line; many points are reduced to means and extremes, so that no spike is lost."""
    count = len(values)
    if count <= MOST_POINTS:
        return Series(chart, label, "line", axes, values)
    edges = [round(index * count / (MOST_POINTS // 2)) for index in range(MOST_POINTS // 2 + 1)]
    means: list[float | None] = []
    ends, extremes = [], []
    for first, last in itertools.pairwise(edges):
        known = [index for index in range(first, last) if values[index] is not None]
        ends.append(last - 1)
        means.append(sum(values[index] or 0.0 for index in known) / len(known) if known else None)
        if known:
            extremes += sorted({min(known, key=lambda i: values[i] or 0.0), max(known, key=lambda i: values[i] or 0.0)})
    raw = {"axes": _take(axes, extremes), "y": [values[index] for index in extremes]}
    return Series(chart, label, "line", _take(axes, ends), means, raw)


def _take(axes: Mapping[str, Axis], places: Sequence[int]) -> dict[str, Axis]:
    return {name: [axis[index] for index in places] for name, axis in axes.items()}


def _number(value: Any) -> float | None:
    return value if type(value) in (int, float) else None


def _item(values: Any, index: int) -> float | None:
    return _number(values[index]) if isinstance(values, list) and index < len(values) else None
