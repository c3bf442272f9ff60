"""The page of one or several runs: one HTML file with charts, tables, pictures and the plotting library."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any

from treadle.cli.runpage import sweep, tables, words
from treadle.cli.runpage.charts import axes_in, charts_of
from treadle.cli.runpage.curves import constants_of, resumes_of, series_of
from treadle.cli.runpage.pictures import pictures, samples
from treadle.cli.runpage.records import RunRecords
from treadle.cli.runpage.sessions import read_sessions
from treadle.cli.runpage.summary import RunSummary, summarize
from treadle.errors import MissingExtraError
from treadle.hooks.files import to_json
from treadle.requirements import own_version

_AXES = {"step": "Step", "epoch": "Epoch", "time": "Time"}
_SMOOTH, _MANY = 0.8, 50  # initial smoothing, for curves with more points than this


def run_page(runs: Sequence[RunRecords], *, reload: float | None = None) -> str:
    """Return the page as HTML.

    Args:
        runs: the records of each; their names are distinct.
        reload: seconds after which an open page reloads itself; None for never.

    Raises:
        ImportError: plotly is not installed.
        OSError: a picture cannot be read.
    """
    rows = [summarize(run) for run in runs]
    charts = charts_of([series_of(run) for run in runs])
    title = ", ".join(run.name for run in runs) if len(runs) <= 3 else f"{len(runs)} runs"
    columns = sweep.columns_of(runs, rows)
    sections = [
        tables.events(runs), tables.sessions(runs), tables.settings(runs), pictures(runs), samples(runs),
        tables.checkpoints(runs), tables.environment(runs),
    ]  # fmt: skip
    return Template(_asset("page.html")).substitute(
        title=escape(title),
        lead=escape(_lead(rows)),
        notes="".join(f'<p class="note">{escape(note)}</p>' for note in _notes(runs, rows)),
        style=_asset("page.css"),
        first="\n".join(part for part in (sweep.overview(runs, rows, columns), tables.results(runs)) if part),
        controls=_controls(runs, charts),
        charts="\n".join(_frame(chart) for chart in charts) + _parallel_frame(runs, columns),
        sections="\n".join(part for part in sections if part),
        written=words.date(time.time()),
        version=own_version(),
        reload=f"It reloads itself every {reload:g} seconds." if reload else "",
        library=plotting_library(),
        data=_data(runs, charts, columns, title=title, reload=reload),
        script=_asset("page.js") + _asset("runs.js"),
    )


def plotting_library() -> str:
    """Return the source of plotly.js.

    Raises:
        ImportError: plotly is not installed; the message names the extra.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingExtraError(
            f"a run page needs plotly ({error}): pip install 'treadle[cli]'", name="plotly"
        ) from error
    return str(get_plotlyjs())


def _asset(name: str) -> str:
    return (resources.files("treadle.cli.runpage") / name).read_text(encoding="utf-8")


def _lead(rows: Sequence[RunSummary]) -> str:
    if len(rows) > 1:
        counts = {
            status: sum(row.status == status for row in rows) for status in dict.fromkeys(row.status for row in rows)
        }
        return ", ".join(f"{count} {status}" for status, count in counts.items())
    (row,) = rows
    facts = [row.status]
    facts += [f"step {words.steps_done(row)}"] if row.step is not None else []
    facts += [f"epoch {row.epoch}"] if row.epoch is not None else []
    facts += [f"best {words.best_metric(row)}"] if row.metric is not None and row.best is not None else []
    facts += [f"{words.duration(row.seconds)} of training"] if row.seconds is not None else []
    return " · ".join([*facts, *([row.device] if row.device else [])])


def _notes(runs: Sequence[RunRecords], rows: Sequence[RunSummary]) -> list[str]:
    """Return notes on how runs failed, and on what is missing from the page and why."""
    notes = [f"{run.name}, {row.status}: {row.reason}" for run, row in zip(runs, rows, strict=True) if row.reason]
    for run in runs:
        if not (run.steps or run.points or run.epochs):
            notes.append(f"{run.name}: no curves were recorded; a StepLogHook writes every step.")
        elif not run.sessions:
            notes.append(f"{run.name}: no times were recorded; a SessionLogHook writes them.")
        same = ", ".join(f"{key} {words.number(value)}" for key, value in constants_of(run).items())
        if len(runs) == 1 and len(read_sessions(run.sessions)) > 1:
            notes.append("A vertical dotted line: a later process resumed the run there.")
        notes += [f"{run.name}, equal in every epoch: {same}."] if same and len(runs) <= 3 else []
    if len(runs) > 1 and any(run.epochs for run in runs):
        notes.append("Dots on a dotted line: validation. Star: best epoch.")
    return notes


def _controls(runs: Sequence[RunRecords], charts: Sequence[dict[str, Any]]) -> str:
    seeds = sweep.seeds_of(runs)
    axes = [f'<button type="button" data-axis="{name}">{_AXES[name]}</button>' for name in axes_in(charts)]
    groups = [
        _chips("run", [run.name for run in runs]) if len(runs) > 1 else "",
        _chips("seeds", seeds.names) if seeds else "",
        '<div class="group"><label><input id="fold" type="checkbox">seeds as mean and deviation</label></div>'
        if seeds
        else "",
        f'<div class="group"><span>x axis</span>{"".join(axes)}</div>' if len(axes) > 1 else "",
        '<div class="group"><label><span>smoothing</span>'
        '<input id="smooth" type="range" min="0" max="0.98" step="0.02"></label></div>',
        '<div class="group"><label><input id="log" type="checkbox">log scale</label>'
        '<button id="reset" type="button">Whole range</button></div>',
    ]
    return f'<nav class="controls"{"" if charts else " hidden"}>{"".join(groups)}</nav>'


def _chips(kind: str, names: Sequence[str]) -> str:
    """Return the buttons that show and hide runs, or groups of runs."""
    buttons = [
        f'<button type="button" class="run" data-{kind}="{index}"><i class="swatch"></i>{escape(name)}</button>'
        for index, name in enumerate(names)
    ]
    return f'<div class="group chips" aria-label="{kind}">{"".join(buttons)}</div>'


def _parallel_frame(runs: Sequence[RunRecords], columns: Sequence[sweep.Column]) -> str:
    axes = sweep.parallel(columns) if len(runs) > 1 else None
    if axes is None:
        return ""
    return (
        '\n<figure class="chart whole"><h3>Settings and results, one line per run</h3><div class="wide">'
        f'<div class="plot" id="parallel" style="min-width:{6 * len(axes)}rem" role="img" '
        'aria-label="Settings and results of each run"></div></div></figure>'
    )


def _frame(chart: dict[str, Any]) -> str:
    key, title = escape(chart["key"], quote=True), escape(chart["title"])
    plot = f'<div class="plot" id="chart-{key}" role="img" aria-label="{escape(chart["title"], quote=True)}"></div>'
    return f'<figure class="chart"><h3>{title}</h3>{plot}</figure>'


def _data(
    runs: Sequence[RunRecords],
    charts: Sequence[dict[str, Any]],
    columns: Sequence[sweep.Column],
    *,
    title: str,
    reload: float | None,
) -> str:
    many = any(len(one["y"]) > _MANY for chart in charts for one in chart["series"] if one["style"] == "line")
    values = {
        "title": title, "runs": [run.name for run in runs], "charts": charts, "axes": axes_in(charts) or ["step"],
        "smooth": _SMOOTH if many else 0, "many": _MANY, "reload": reload, "written": time.time(),
        "resumes": resumes_of(runs[0]) if len(runs) == 1 else None, **sweep.as_data(runs, columns),
    }  # fmt: skip
    # Inside a script element, nothing may look like its end or like a comment.
    return json.dumps(to_json(values), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
