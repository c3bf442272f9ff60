"""The tables of a page; every string is escaped."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from html import escape
from pathlib import PurePosixPath
from typing import Any

from treadle.cli.runpage import words
from treadle.cli.runpage.curves import event_text, events_of
from treadle.cli.runpage.records import RunRecords
from treadle.cli.runpage.sessions import read_sessions
from treadle.cli.runpage.summary import device_of

_MOST_EVENTS, _FEW = 50, 20
_BESIDE = 3  # runs whose columns fit into half the width
_SURROUNDINGS = {
    "precision": "precision", "num_parameters": "parameters", "threads": "threads", "cpu_count": "CPU cores",
    "device_name": "processor", "system": "system",
}  # fmt: skip


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    marked: Sequence[bool] = (),
    numbers: Collection[int] = (),
    name: str = "plain",
) -> str:
    """Return a table.

    Args:
        head: the names of the columns.
        rows: the cells of each row, as strings.
        marked: for each row, whether to highlight it.
        numbers: which columns hold numbers.
        name: the CSS class; the long values of ``settings`` are wrapped.

    Example:
        >>> "<td>a &lt; b</td>" in table(["what"], [["a < b"]])
        True
    """
    if not rows:
        return ""
    tags = [' class="number"' if index in numbers else "" for index in range(len(head))]
    lines = ["<tr>" + "".join(f"<th{tag}>{escape(text)}</th>" for tag, text in zip(tags, head, strict=True)) + "</tr>"]
    for index, row in enumerate(rows):
        mark = ' class="marked"' if index < len(marked) and marked[index] else ""
        cells = "".join(f"<td{tag}>{escape(text)}</td>" for tag, text in zip(tags, row, strict=True))
        lines.append(f"<tr{mark}>{cells}</tr>")
    head_line, body = lines[0], "\n".join(lines[1:])
    inside = f"<thead>{head_line}</thead>\n<tbody>\n{body}\n</tbody>"
    return f'<div class="wide"><table class="{name}">\n{inside}\n</table></div>'


def section(title: str, *parts: str, wide: bool = False) -> str:
    """Return a section with a heading, of full or half width; "" if it is empty."""
    inside = "\n".join(part for part in parts if part)
    width = ' class="whole"' if wide else ""
    return f"<section{width}>\n<h2>{escape(title)}</h2>\n{inside}\n</section>" if inside else ""


def _of_runs(
    runs: Sequence[RunRecords], head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Collection[int] = ()
) -> str:
    """Return a table whose first column names the run, or without that column if there is only one run."""
    if len(runs) > 1:
        return table(head, rows, numbers=numbers)
    return table(head[1:], [row[1:] for row in rows], numbers=[index - 1 for index in numbers])


def folded(title: str, inside: str) -> str:
    """Return a collapsed part of a section."""
    return f"<details>\n<summary>{escape(title)}</summary>\n{inside}\n</details>" if inside else ""


def checkpoints(runs: Sequence[RunRecords]) -> str:
    """Return the table of the checkpoints; a link is shown with its target."""
    rows = []
    for run in runs:
        links = {str(PurePosixPath(one.name).parent / one.link): one.name for one in run.checkpoints if one.link}
        for one in run.checkpoints:
            if one.link is not None and not one.problem:
                continue
            also = f" (also {PurePosixPath(links[one.name]).name})" if one.name in links else ""
            rows.append([
                run.name, one.name + also, words.number(one.step), words.number(one.epoch), words.size(one.size),
                words.date(one.written), one.problem or one.kind,
            ])  # fmt: skip
    head = ["run", "file", "step", "epoch", "size", "written", "kind"]
    return section("Checkpoints", _of_runs(runs, head, rows, numbers=range(2, 5)), wide=True)


def events(runs: Sequence[RunRecords]) -> str:
    """Return the table of skipped and retried steps."""
    rows, more = [], 0
    for run in runs:
        found = sorted((row for rows in events_of(run.steps).values() for row in rows), key=lambda row: row["step"])
        rows += [[run.name, event_text(row)] for row in found[:_MOST_EVENTS]]
        more += max(len(found) - _MOST_EVENTS, 0)
    note = f'<p class="note">and {more:,} more</p>' if more else ""
    return section("Skipped and retried steps", _of_runs(runs, ["run", "what happened"], rows), note)


def sessions(runs: Sequence[RunRecords]) -> str:
    """Return the table of the sessions of each run."""
    rows = []
    for run in runs:
        found = read_sessions(run.sessions)
        for one in found:
            first, last = one.marks[0][0], one.marks[-1][0]
            status = "running" if one is found[-1] and run.holder is not None else one.status
            rows.append([
                run.name, words.date(one.marks[0][1]), status or "no end recorded", f"{first:,} to {last:,}",
                words.duration(one.seconds), words.number((last - first) / one.seconds if one.seconds else None),
            ])  # fmt: skip
    head = ["run", "started", "how it ended", "steps", "time", "steps/s"]
    inside = _of_runs(runs, head, rows, numbers=range(3, 6))
    return section(
        "Sessions", inside if len(rows) <= _FEW else folded(f"{len(rows)} sessions", inside), wide=len(runs) > 1
    )


def results(runs: Sequence[RunRecords]) -> str:
    """Return the final metrics: of one run in columns, of several side by side."""
    numbers = _beside([run.results for run in runs])
    rows = [[key, *(words.number(value) for value in values)] for key, values in numbers.items()]
    inside = table(["", *(run.name for run in runs)], rows, numbers=range(1, len(runs) + 1))
    if len(runs) > 1:
        return section("Results", folded(f"{len(rows)} numbers of metrics.json", inside), wide=True) if rows else ""
    pairs = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in rows)
    return section("Results", f'<dl class="results">{pairs}</dl>', wide=True) if rows else ""


def settings(runs: Sequence[RunRecords]) -> str:
    """Return the differences between the configurations, followed by all settings.

    Runs started with a configuration are not compared with runs for which only the trainer's settings are known.
    """
    started = [run for run in runs if run.config_file] or [run for run in runs if run.config]
    left_out = ", ".join(run.name for run in runs if run not in started)
    note = f'<p class="note">Without a file of settings: {escape(left_out)}</p>' if left_out and started else ""
    return _compared("Configuration", started, [run.config for run in started], "settings", note)


def environment(runs: Sequence[RunRecords]) -> str:
    """Return device, threads and versions from the last session of each run."""
    return _compared("Environment", runs, [_environment(run) for run in runs], "lines")


def _compared(
    title: str, runs: Sequence[RunRecords], values: Sequence[Mapping[str, Any]], what: str, note: str = ""
) -> str:
    keys, head = list(_beside(values)), ["", *(run.name for run in runs)]
    texts = {key: [words.NONE if key not in one else words.plain(one[key]) for one in values] for key in keys}
    different = [key for key in keys if len(set(texts[key])) > 1]
    marked = [key in different for key in keys]
    everything = table(head, [[key, *texts[key]] for key in keys], marked=marked, name="settings")
    if len(runs) <= 1:
        return section(title, everything if len(keys) <= _FEW else folded(f"{len(keys)} {what}", everything), note)
    same = f'<p class="note">No difference between the {len(runs)} runs.</p>' if keys and not different else ""
    return section(
        title, same, table(head, [[key, *texts[key]] for key in different], name="settings"), note,
        folded(f"All {len(keys)} {what}", everything), wide=len(runs) > _BESIDE,
    )  # fmt: skip


def _beside(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    keys = dict.fromkeys(key for run in runs for key in run)
    return {key: [run.get(key) for run in runs] for key in keys}


def _environment(run: RunRecords) -> dict[str, Any]:
    sessions = read_sessions(run.sessions)
    if not sessions:
        values = {} if run.state is None else run.state.values
        return {key.removeprefix("versions."): value for key, value in values.items() if key.startswith("versions.")}
    start = sessions[-1].start
    found = {"device": device_of(start)}
    asked = {text: start[key] for key, text in _SURROUNDINGS.items() if key in start}
    found |= {key: words.number(value) if isinstance(value, int) else value for key, value in asked.items()}
    versions = start.get("versions")
    return {**found, **(versions if isinstance(versions, dict) else {})}
