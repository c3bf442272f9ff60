"""The command ``treadle runs``."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from treadle.cli.console import errors_as_one_line, message_console, result_console
from treadle.cli.pack_options import AsJson

if TYPE_CHECKING:
    from treadle.cli.runpage.summary import RunSummary

_COLUMNS = ("run", "status", "step", "epoch", "best metric", "time", "device", "written")
_DROPPED = ("written", "device", "epoch", "time", "best metric")
_GAP = 2
_STYLES = {"running": "cyan", "finished": "green", "stopped": "yellow", "failed": "red"}


def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Where to look, including all folders below.")
    ] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List the runs below a folder with status, step, best metric, time and device, most recently written first.

    Status: running (a process holds the folder), finished, stopped (by a signal, or killed), failed, or ended if no
    record tells how. A run without a best metric shows the loss of its last step in brackets. A value that was not
    recorded is a dash. The time is training time, without pauses. For runs with several seeds, means and deviations
    follow below.

    \b
    Examples:
      treadle runs
      treadle runs outputs/sweep
      treadle runs --json
    """
    console = result_console()
    with errors_as_one_line(message_console()):
        from treadle.cli.runpage.files import runs_below
        from treadle.cli.runpage.records import read_run
        from treadle.cli.runpage.summary import summarize
        from treadle.errors import ConfigError

        if not folder.is_dir():
            raise ConfigError("no such folder; give the one that holds your runs", argument="FOLDER", value=str(folder))
        found = [summarize(read_run(path, brief=True)) for path in runs_below(folder)]
        found.sort(key=lambda run: run.updated or 0.0, reverse=True)
        if as_json:
            console.print(json.dumps([run.as_json() for run in found], indent=1), markup=False, soft_wrap=True)
        elif not found:
            message_console().print(f"no runs below {folder}", markup=False, soft_wrap=True)
        else:
            _show(found, folder, console)
            _show_populations(folder, console)


def _show(found: Sequence[RunSummary], folder: Path, console: Console) -> None:
    if not console.is_terminal:  # in a file or a pipe, as wide as needed
        console.width = 1000
    rows = [_cells(run, folder, now=time.time()) for run in found]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    shown = _fitting(rows, console.width)
    for number in shown:
        name = _COLUMNS[number]
        table.add_column(name, justify="right" if name in ("step", "epoch", "time") else "left", no_wrap=True)
    for cells in rows:
        table.add_row(*[cells[number] for number in shown])
    console.print(table)
    for run in found:
        if run.status == "failed" and run.reason:
            console.print(f"{run.folder}: {run.reason}", markup=False, soft_wrap=True)


def _show_populations(folder: Path, console: Console) -> None:
    """Print mean ± deviation over the members of each population at and below a folder."""
    paths = sorted(folder.rglob("population.json"))
    if not paths:
        return
    from treadle.population.results import Results, read_rows  # which loads torch

    for path in paths:
        console.print()
        for line in Results(read_rows(path)).lines():
            console.print(f"{path.parent}: {line}", markup=False, soft_wrap=True)


def _cells(run: RunSummary, folder: Path, *, now: float) -> list[Text]:
    from treadle.cli.runpage import words

    return [
        Text(run.folder.relative_to(folder).as_posix() if run.folder != folder else str(folder)),
        Text(run.status, style=_STYLES.get(run.status, "")),
        Text(words.steps_done(run)),
        Text(words.number(run.epoch)),
        Text(words.best_metric(run)),
        Text(words.duration(run.seconds)),
        Text(run.device or words.NONE),
        Text(words.ago(run.updated, now)),
    ]


def _fitting(rows: Sequence[Sequence[Text]], width: int) -> list[int]:
    """Return the columns that fit the terminal, dropping the least important ones if it is narrow."""
    wide = [max(len(name), *(row[number].cell_len for row in rows)) for number, name in enumerate(_COLUMNS)]
    shown = list(range(len(_COLUMNS)))
    for name in _DROPPED:
        if sum(wide[number] for number in shown) + _GAP * (len(shown) - 1) <= width:
            break
        shown.remove(_COLUMNS.index(name))
    return shown
