"""The command ``treadle compare``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from treadle.cli.console import errors_as_one_line, message_console, result_console
from treadle.cli.pack_options import AsJson

if TYPE_CHECKING:
    from treadle.population.results import Results


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="A folder of runs with several seeds.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another such folder.")],
    metric: Annotated[
        Optional[str],  # noqa: UP045  (typer on Python 3.10 reads this form)
        typer.Option(
            show_default=False, help="A final metric of the runs; by default every one that both groups have."
        ),
    ] = None,
    level: Annotated[float, typer.Option(help="Confidence level of the interval.")] = 0.95,
    as_json: AsJson = False,
) -> None:
    """Compare two groups of runs and test whether they differ by more than the noise of their seeds.

    Runs with the same settings are paired if settings differ within a group, otherwise runs with the same seed: what
    both share, such as their split, then does not count as noise. The interval of the mean difference B - A is a
    bootstrap over pairs, or over the runs of each group, widened for small groups. A folder is one that `treadle train
    ... --seeds 0..7` or a Population wrote, or any other that holds runs.

    \b
    Examples:
      treadle compare runs/wide runs/narrow
      treadle compare runs/wide runs/narrow --metric val_loss --json
    """
    console = result_console()
    with errors_as_one_line(message_console()):
        from treadle.errors import ConfigError
        from treadle.population.comparison import difference

        one, two = read_group(a), read_group(b)
        shared = [name for name in one.metrics() if name in two.metrics()]
        if not shared:
            raise ConfigError(
                f"{a} and {b} have no number in common: {', '.join(one.metrics()) or 'none'} against "
                f"{', '.join(two.metrics()) or 'none'}"
            )
        if len(one.rows) == len(two.rows) == 1:
            raise ConfigError(
                f"{a} and {b} hold one run each, and the noise of seeds needs at least two; to see both side by side: "
                f"treadle report {a} {b}"
            )
        found = [difference(one, two, name, level=level) for name in ([metric] if metric else shared)]
        if as_json:
            console.print(json.dumps([each.as_json() for each in found], indent=1), markup=False, soft_wrap=True)
            return
        for each in found:
            console.print(
                f"A {one.summary(each.metric)}   B {two.summary(each.metric)}\n  {each}", markup=False, soft_wrap=True
            )


def read_group(folder: Path) -> Results:
    """Return the final metrics of the runs in a folder, from its ``population.json`` or from each run below it.

    Raises:
        ConfigError: there are no runs.
    """
    from treadle.errors import ConfigError
    from treadle.population.population import FILE
    from treadle.population.results import Results, read_rows

    if not folder.is_dir():
        problem = "not a folder" if folder.exists() else "no such folder"
        raise ConfigError(f"{folder}: {problem}; give the folder of a population, or one of runs")
    rows = read_rows(folder / FILE) or [row for row in map(_row_of, _runs_below(folder)) if row.metrics]
    if not rows:
        raise ConfigError(f"{folder}: holds no runs with numbers; give the folder of a population, or one of runs")
    return Results(rows)


def _runs_below(folder: Path) -> list[Path]:
    from treadle.cli.runpage.files import runs_below

    return list(runs_below(folder))


def _row_of(folder: Path) -> Any:
    """Return a run as a row: its best value, the loss of its last step, and the seed from its record or its name."""
    from treadle.cli.runpage.records import read_run
    from treadle.cli.runpage.summary import summarize
    from treadle.population.results import Row

    run = summarize(read_run(folder, brief=True))
    numbers = {} if run.metric is None or run.best is None else {f"best_{run.metric}": run.best}
    if run.loss is not None:
        numbers["loss"] = run.loss
    seed = _seed_of(folder)
    settings = {} if seed is None else {"seed": seed}
    return Row(
        folder.name, settings, run.status, run.step or 0, run.epoch or 0, numbers, run.seconds or 0.0, run.reason
    )


def _seed_of(folder: Path) -> int | None:
    from treadle.runs.folder import read_record, stored_json

    record = read_record(folder)
    config = (stored_json(folder / "settings.json") or {}) if record is None else record.config or {}
    named = re.search(r"seed=(\d+)", folder.name)
    seed = config.get("seed", None if named is None else int(named[1]))
    return seed if isinstance(seed, int) else None
