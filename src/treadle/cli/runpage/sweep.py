"""Settings and results of several runs: a table, parallel coordinates, and groups of runs that differ only by seed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from treadle.cli.runpage import words
from treadle.cli.runpage.records import RunRecords
from treadle.cli.runpage.summary import RunSummary
from treadle.cli.runpage.tables import section
from treadle.errors import number_of

_MOST_SETTINGS, _MOST_RESULTS = 8, 6
# Settings determined by the location or the machine of a run rather than chosen.
_PLACES = re.compile(r"(.*[._])?(out|out_dir|workspace|save_dir|output_dir|checkpoint_dir|path|device|name|run_name)")
# Numbers of weights, which follow from the chosen sizes.
_COUNTS = re.compile(r"(model|optimizer)\.(parameters|trainable)")
_NUMBERS = re.compile(r"((?<==)-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|\d+)")  # the value of a setting, or digits
_SEED = re.compile(r"(.*[._])?seed")


@dataclass(frozen=True)
class Column:
    """Column of the table of runs.

    Attributes:
        title: the dotted name of a setting or a result.
        values: one per run; None if the run has none.
        texts: the values as displayed.
        result: whether it is an outcome rather than a setting.
    """

    title: str
    values: Sequence[Any]
    texts: Sequence[str]
    result: bool = False

    @property
    def places(self) -> list[float | None]:
        """The positions in [0, 1] along an axis: numbers by size, logarithmic over decades, others in order."""
        known = [value for value in self.values if value is not None]
        if known and all(_is_number(value) for value in known):
            scale = math.log10 if min(known) > 0 and max(known) >= 100 * min(known) else float
            least, most = scale(min(known)), scale(max(known))
            width = (most - least) or 1.0
            return [None if value is None else (scale(value) - least) / width for value in self.values]
        order = list(dict.fromkeys(self.texts))
        return [order.index(text) / max(len(order) - 1, 1) for text in self.texts]

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """The labels of the axis: the extremes of numbers, every value otherwise."""
        pairs = {place: text for place, text in zip(self.places, self.texts, strict=True) if place is not None}
        ends = sorted(pairs.items())
        numbers = all(_is_number(value) for value in self.values if value is not None)
        return [ends[0], ends[-1]] if numbers and len(ends) > 1 else ends[:12]


@dataclass(frozen=True)
class Seeds:
    """Groups of runs that differ only by seed.

    Attributes:
        group: the number of the group of each run.
        names: the names of the groups.
    """

    group: Sequence[int]
    names: Sequence[str]


def columns_of(runs: Sequence[RunRecords], rows: Sequence[RunSummary]) -> list[Column]:
    """Return the settings that differ between runs and their results, as columns.

    Example:
        >>> columns_of([], [])
        []
    """
    settings = [Column(key, values, _texts(values)) for key, values in _different(runs).items()][:_MOST_SETTINGS]
    metric = {row.metric for row in rows if row.metric is not None and row.best is not None}
    found: dict[str, list[Any]] = {}
    if metric:
        title = f"best {metric.pop()}" if len(metric) == 1 else "best metric"
        found[title] = [row.best for row in rows]
    if any(row.loss is not None for row in rows):
        found["last loss"] = [row.loss for row in rows]
    shared = [key for key in dict.fromkeys(key for run in runs for key in run.results) if _shared(runs, key)]
    found |= {key: [run.results.get(key) for run in runs] for key in shared}
    results = [Column(key, values, _texts(values), result=True) for key, values in found.items()]
    return [*settings, *results[:_MOST_RESULTS]]


def seeds_of(runs: Sequence[RunRecords]) -> Seeds | None:
    """Return runs grouped by all settings except seeds; None if no two runs differ only by seed."""
    if len(runs) < 2 or not all(run.config for run in runs):
        return None
    different = _different(runs)
    if not any(_SEED.fullmatch(key) for key in different):
        return None
    chosen = {key: values for key, values in different.items() if not _SEED.fullmatch(key)}
    keys = [tuple(_texts([values[index] for values in chosen.values()])) for index in range(len(runs))]
    order = list(dict.fromkeys(keys))
    if len(order) == len(runs):
        return None
    names = [", ".join(f"{key}={text}" for key, text in zip(chosen, one, strict=True)) or "all seeds" for one in order]
    counts = [keys.count(one) for one in order]
    named = [f"{name} ({number_of(count, 'seed')})" for name, count in zip(names, counts, strict=True)]
    return Seeds([order.index(key) for key in keys], named)


def overview(runs: Sequence[RunRecords], rows: Sequence[RunSummary], columns: Sequence[Column]) -> str:
    """Return the table of several runs, with sortable columns and rows that isolate a run; "" for a single run."""
    if len(runs) < 2:
        return ""
    fixed = [
        Column("run", [run.name for run in runs], [run.name for run in runs]),
        Column("status", [row.status for row in rows], [row.status for row in rows]),
    ]
    progress = [
        Column("step", [row.step for row in rows], [words.steps_done(row) for row in rows]),
        Column("epoch", [row.epoch for row in rows], [words.number(row.epoch) for row in rows]),
        Column("at epoch", [row.best_epoch for row in rows], [words.number(row.best_epoch) for row in rows]),
        Column("time", [row.seconds for row in rows], [words.duration(row.seconds) for row in rows]),
        Column("device", [row.device for row in rows], [row.device or words.NONE for row in rows]),
        Column("last written", [row.updated for row in rows], [words.date(row.updated) for row in rows]),
    ]
    kept = [one for one in progress if one.title in ("step", "time") or len(set(one.texts)) > 1]
    every = [*fixed, *columns, *kept]
    head = "".join(
        f'<th{_class(one)} aria-sort="none"><button type="button" data-sort="{index}">{escape(one.title)}</button></th>'
        for index, one in enumerate(every)
    )
    body = "\n".join(
        f'<tr data-row="{run}">' + "".join(_cell(one, run) for one in every) + "</tr>" for run in range(len(runs))
    )
    tools = (
        '<div class="group tools"><label><span>filter</span><input id="filter" type="search" '
        'placeholder="text, lr=0.1, loss&lt;0.5"></label>'
        '<button type="button" id="all">All runs</button></div>'
        '<p class="note">Click a column to sort by it, a row to show that run alone, the row again to show all.</p>'
    )
    inside = f'<table class="runs" id="runs">\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>'
    return section("Settings and results", tools, f'<div class="wide">{inside}</div>', wide=True)


def parallel(columns: Sequence[Column]) -> list[dict[str, Any]] | None:
    """Return the axes of parallel coordinates, settings before results; None without at least one of each."""
    axes = [one for one in columns if len({text for text in one.texts if text != words.NONE}) > 1]
    if not any(one.result for one in axes) or all(one.result for one in axes):
        return None
    return [
        {"title": one.title, "places": one.places, "texts": list(one.texts), "ticks": one.ticks, "result": one.result}
        for one in axes
    ]


def natural(text: str) -> list[tuple[int, float, str]]:
    """Return a key that sorts ``run2`` before ``run10``, and values of settings by size.

    Example:
        >>> sorted(["run10", "run2", "lr=0.1,seed=0", "lr=0.01,seed=1", "lr=1e-3,seed=2"], key=natural)
        ['lr=1e-3,seed=2', 'lr=0.01,seed=1', 'lr=0.1,seed=0', 'run2', 'run10']
    """
    parts = enumerate(_NUMBERS.split(text))  # every second one is a number
    return [(0, float(part), "") if index % 2 else (1, 0.0, part) for index, part in parts if part]


def _different(runs: Sequence[RunRecords]) -> dict[str, list[Any]]:
    """Return the settings with more than one value, seeds last, with the value of each run."""
    keys = dict.fromkeys(key for run in runs for key in run.config if not _PLACES.fullmatch(key))
    found = {key: [run.config.get(key) for run in runs] for key in keys}
    different = {key: values for key, values in found.items() if len(set(_texts(values))) > 1}
    chosen = {key: values for key, values in different.items() if not _COUNTS.fullmatch(key)}
    if _distinct(chosen) == _distinct(different):
        different = chosen
    else:  # counts that are equal in every run are one column
        counts = {tuple(_texts(values)): key for key, values in reversed(different.items()) if key not in chosen}
        different = {key: values for key, values in different.items() if key in chosen or key in counts.values()}
    return dict(sorted(different.items(), key=lambda item: bool(_SEED.fullmatch(item[0]))))


def _distinct(settings: Mapping[str, Sequence[Any]]) -> int:
    """Return the number of different combinations of settings without seeds."""
    chosen = [_texts(values) for key, values in settings.items() if not _SEED.fullmatch(key)]
    return len(set(zip(*chosen, strict=True)))


def _shared(runs: Sequence[RunRecords], key: str) -> bool:
    """Return whether at least half of the runs have a result and it differs between them."""
    values = [run.results[key] for run in runs if key in run.results]
    return 2 * len(values) >= len(runs) and len(set(values)) > 1


def _texts(values: Sequence[Any]) -> list[str]:
    return [words.NONE if value is None else words.plain(value) if not isinstance(value, float) else words.number(value)
            for value in values]  # fmt: skip


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _class(column: Column) -> str:
    known = [value for value in column.values if value is not None]
    return ' class="number"' if known and all(_is_number(value) for value in known) else ""


def _cell(column: Column, run: int) -> str:
    value = column.values[run]
    order = "" if value is None else f' data-value="{escape(str(value), quote=True)}"'
    return f"<td{_class(column)}{order}>{escape(column.texts[run])}</td>"


def as_data(runs: Sequence[RunRecords], columns: Sequence[Column]) -> Mapping[str, Any]:
    """Return the data that the page's script needs for several runs."""
    seeds = seeds_of(runs)
    return {
        "parallel": parallel(columns) if len(runs) > 1 else None,
        "groups": None if seeds is None else list(seeds.group),
        "groupNames": None if seeds is None else list(seeds.names),
    }
