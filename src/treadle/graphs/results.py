"""Results of many runs: read from their folders, summed up over seeds, and written as tables for LaTeX or as CSV."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from treadle.checkpoint.store import write_text
from treadle.config import load_config
from treadle.errors import ConfigError, nearest
from treadle.nested import flatten_nested_dict
from treadle.population import Summary

Row = dict[str, Any]
_LOWER_IS_BETTER = ("loss", "mae", "mse", "rmse", "time", "ms", "flops")


def load_results(folder: str | os.PathLike[str], *, settings: Sequence[str] = ()) -> list[Row]:
    """Read the results of every run below a folder.

    Args:
        folder: holds run folders, each with ``test_results.json`` and ``config.yaml``.
        settings: dotted settings of a run that become columns, such as ``"pe.node.type"``.

    Returns:
        A row for each run, by path: ``run``, ``seed``, the settings, and the test metrics by name.

    Raises:
        ConfigError: there is no run, or a run has no such setting.
    """
    home = Path(folder)
    rows = [_row(path, home, settings) for path in sorted(home.rglob("test_results.json"))]
    if not rows:
        raise ConfigError(f"{home} has no run with test_results.json", argument="folder")
    return rows


def _row(path: Path, home: Path, settings: Sequence[str]) -> Row:
    found = json.loads(path.read_text(encoding="utf-8"))
    row: Row = {"run": path.parent.relative_to(home).as_posix(), "seed": found.get("seed")}
    if settings:
        config = flatten_nested_dict(load_config(path.parent / "config.yaml"))
        known = {".".join(key): value for key, value in config.items()}
        for name in settings:
            if name not in known:
                raise ConfigError(f"{path.parent}: no setting {name!r}; {nearest(name, known)}", argument="settings")
            row[name] = known[name]
    return {**row, **found["test_metrics"]}


def aggregate_by_seed(
    rows: Iterable[Mapping[str, Any]], group_keys: Sequence[str], metrics: Sequence[str]
) -> list[Row]:
    """Sum up rows that differ in nothing but their seed.

    Args:
        rows: of runs.
        group_keys: columns that tell groups apart.
        metrics: columns of numbers; those of a row that lacks one are left out.

    Returns:
        A row for each group, in the order of its first run: the keys, and of each metric a
        :class:`treadle.population.Summary`.

    Raises:
        ConfigError: a row lacks a key, or no row of a group has a metric.

    Example:
        >>> runs = [{"pe": "lap", "mae": 1.0}, {"pe": "lap", "mae": 3.0}, {"pe": "none", "mae": 5.0}]
        >>> [(row["pe"], str(row["mae"])) for row in aggregate_by_seed(runs, ["pe"], ["mae"])]
        [('lap', '2 ± 1.4 (2)'), ('none', '5 (1)')]
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        for key in group_keys:
            if key not in row:
                raise ConfigError(f"no column {key!r}; {nearest(key, row)}", argument="group_keys")
        groups.setdefault(tuple(row[key] for key in group_keys), []).append(row)
    found = []
    for values, members in groups.items():
        spreads = {name: [float(row[name]) for row in members if row.get(name) is not None] for name in metrics}
        empty = [name for name, numbers in spreads.items() if not numbers]
        if empty:
            raise ConfigError(
                f"no run has the column {empty[0]!r}; {nearest(empty[0], members[0])}", argument="metrics"
            )
        found.append(dict(zip(group_keys, values, strict=True)) | {name: Summary.of(spreads[name]) for name in metrics})
    return found


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write rows as CSV; a spread becomes the columns ``<name>_mean``, ``_std`` and ``_count``.

    Example:
        >>> print(to_csv([{"pe": "lap", "mae": Summary(2.0, 0.5, 3)}]), end="")
        pe,mae_mean,mae_std,mae_count
        lap,2.0,0.5,3
    """
    flat = [_flat(row) for row in rows]
    columns = list(dict.fromkeys(name for row in flat for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _flat(row: Mapping[str, Any]) -> Row:
    flat: Row = {}
    for name, value in row.items():
        if isinstance(value, Summary):
            std = "" if math.isnan(value.deviation) else value.deviation
            flat |= {f"{name}_mean": value.mean, f"{name}_std": std, f"{name}_count": value.count}
        else:
            flat[name] = value
    return flat


def to_latex(rows: Sequence[Mapping[str, Any]], *, digits: int = 4, bold_best: bool = True) -> str:
    r"""Write rows as a LaTeX table with ``booktabs``, the best mean of each metric in bold.

    Args:
        rows: with equal columns.
        digits: of numbers.
        bold_best: whether the best of several rows is marked; which direction is better follows from the metric's name.

    Raises:
        ConfigError: there are no rows.

    Example:
        >>> print(to_latex([{"pe": "lap_pe", "mae": Summary(0.5, 0.25, 3)}], digits=2))
        \begin{tabular}{lr}
        \toprule
        pe & mae \\
        \midrule
        lap\_pe & $0.50 \pm 0.25$ \\
        \bottomrule
        \end{tabular}
    """
    if not rows:
        raise ConfigError("there are no rows to write", argument="rows")
    columns = list(rows[0])
    best = {name: _best(rows, name) for name in columns} if bold_best and len(rows) > 1 else {}

    def cell(name: str, value: Any) -> str:
        if not isinstance(value, (Summary, float)):
            return _escaped(str(value))
        text = f"{_mean_of(value):.{digits}f}"
        if isinstance(value, Summary) and value.count > 1:
            text += f" \\pm {value.deviation:.{digits}f}"
        return f"$\\mathbf{{{text}}}$" if best.get(name) == _mean_of(value) else f"${text}$"

    numeric = [isinstance(rows[0][name], (Summary, float)) for name in columns]
    lines = [
        f"\\begin{{tabular}}{{{''.join('r' if one else 'l' for one in numeric)}}}", r"\toprule",
        " & ".join(map(_escaped, columns)) + r" \\", r"\midrule",
        *(" & ".join(cell(name, row[name]) for name in columns) + r" \\" for row in rows),
        r"\bottomrule", r"\end{tabular}",
    ]  # fmt: skip
    return "\n".join(lines)


def _mean_of(value: Any) -> float:
    return float(value.mean if isinstance(value, Summary) else value)


def _best(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    means = [_mean_of(row[name]) for row in rows if isinstance(row[name], (Summary, float))]
    means = [mean for mean in means if not math.isnan(mean)]
    if not means:
        return None
    last = name.lower().replace("/", "_").split("_")[-1]
    return min(means) if last in _LOWER_IS_BETTER else max(means)


def _escaped(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(special.get(char, f"\\{char}" if char in "&%$#_{}" else char) for char in text)


def export_table(rows: Sequence[Mapping[str, Any]], path: str | os.PathLike[str]) -> None:
    """Write a table to a ``.tex`` or ``.csv`` file, atomically.

    Raises:
        ConfigError: the name ends in neither.
    """
    writers: dict[str, Callable[[], str]] = {".tex": lambda: to_latex(rows) + "\n", ".csv": lambda: to_csv(rows)}
    suffix = Path(path).suffix
    if suffix not in writers:
        raise ConfigError("must end in .tex or .csv", argument="path", value=os.fspath(path))
    write_text(writers[suffix](), Path(path))
