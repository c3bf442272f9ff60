"""Results of many runs: loaded from their folders, aggregated over seeds, and written as LaTeX or CSV tables."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.checkpoint.store import write_text
from treadle.config import load_config
from treadle.errors import ConfigError, nearest
from treadle.nested import flatten_nested_dict

Row = dict[str, Any]
_LOWER = ("loss", "mae", "mse", "rmse", "time", "ms", "flops")


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over several runs.

    Attributes:
        mean: mean of the runs.
        std: standard deviation; NaN for one run.
        count: number of runs.
    """

    mean: float
    std: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Compute the spread of values.

        Example:
            >>> Spread.of([1.0, 3.0])
            Spread(mean=2.0, std=1.4142135623730951, count=2)
        """
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan, len(values))

    def text(self, digits: int = 4, sign: str = "±") -> str:
        """Format the mean and, for several runs, the deviation.

        Example:
            >>> Spread(0.12345, 0.01, 3).text(3), Spread(0.5, math.nan, 1).text(2)
            ('0.123 ± 0.010', '0.50')
        """
        return f"{self.mean:.{digits}f}" + ("" if math.isnan(self.std) else f" {sign} {self.std:.{digits}f}")


def load_results(folder: str | os.PathLike[str], *, settings: Sequence[str] = ()) -> list[Row]:
    """Load the results of every run below a folder.

    Args:
        folder: contains run folders, each with ``test_results.json`` and ``config.yaml``.
        settings: dotted settings of a run to include as columns, such as ``"pe.node.type"``.

    Returns:
        One row per run, sorted by path: ``run``, ``seed``, the settings, and the test metrics by name.

    Raises:
        ConfigError: there are no runs, or a run lacks a setting.
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
    """Aggregate rows that differ only in their seed.

    Args:
        rows: rows of runs.
        group_keys: columns that define the groups.
        metrics: numeric columns; missing values are ignored.

    Returns:
        One row per group, in the order of its first run: the keys, and a :class:`Spread` for each metric.

    Raises:
        ConfigError: a row lacks a key, or no row of a group has a metric.

    Example:
        >>> runs = [{"pe": "lap", "mae": 1.0}, {"pe": "lap", "mae": 3.0}, {"pe": "none", "mae": 5.0}]
        >>> [(row["pe"], row["mae"].text(1)) for row in aggregate_by_seed(runs, ["pe"], ["mae"])]
        [('lap', '2.0 ± 1.4'), ('none', '5.0')]
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
        found.append(dict(zip(group_keys, values, strict=True)) | {name: Spread.of(spreads[name]) for name in metrics})
    return found


def lower_is_better(metric: str) -> bool:
    """Return whether a lower value of a metric is better, by its name.

    Example:
        >>> lower_is_better("mae"), lower_is_better("roc_auc")
        (True, False)
    """
    return metric.lower().replace("/", "_").split("_")[-1] in _LOWER


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows as CSV; a spread becomes the columns ``<name>_mean``, ``_std`` and ``_count``.

    Example:
        >>> print(to_csv([{"pe": "lap", "mae": Spread(2.0, 0.5, 3)}]), end="")
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
        if isinstance(value, Spread):
            std = "" if math.isnan(value.std) else value.std
            flat |= {f"{name}_mean": value.mean, f"{name}_std": std, f"{name}_count": value.count}
        else:
            flat[name] = value
    return flat


def to_latex(rows: Sequence[Mapping[str, Any]], *, digits: int = 4, bold_best: bool = True) -> str:
    r"""Format rows as a LaTeX table with ``booktabs``, with the best mean of each metric in bold.

    Args:
        rows: rows with the same columns.
        digits: digits of numbers.
        bold_best: whether to mark the best of several rows; the metric's name determines the direction.

    Raises:
        ConfigError: there are no rows.

    Example:
        >>> print(to_latex([{"pe": "lap_pe", "mae": Spread(0.5, 0.25, 3)}], digits=2))
        \begin{tabular}{lr}
        \toprule
        pe & mae \\
        \midrule
        lap\_pe & $0.50 \pm 0.25$ \\
        \bottomrule
        \end{tabular}
    """
    if not rows:
        raise ConfigError("there are none to write", argument="rows")
    columns = list(rows[0])
    best = {name: _best(rows, name) for name in columns} if bold_best and len(rows) > 1 else {}

    def cell(name: str, value: Any) -> str:
        if not isinstance(value, (Spread, float)):
            return _escaped(str(value))
        text = value.text(digits, r"\pm") if isinstance(value, Spread) else f"{value:.{digits}f}"
        return f"$\\mathbf{{{text}}}$" if best.get(name) == _mean_of(value) else f"${text}$"

    numeric = [isinstance(rows[0][name], (Spread, float)) for name in columns]
    lines = [
        f"\\begin{{tabular}}{{{''.join('r' if one else 'l' for one in numeric)}}}", r"\toprule",
        " & ".join(map(_escaped, columns)) + r" \\", r"\midrule",
        *(" & ".join(cell(name, row[name]) for name in columns) + r" \\" for row in rows),
        r"\bottomrule", r"\end{tabular}",
    ]  # fmt: skip
    return "\n".join(lines)


def _mean_of(value: Any) -> float:
    return float(value.mean if isinstance(value, Spread) else value)


def _best(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    means = [_mean_of(row[name]) for row in rows if isinstance(row[name], (Spread, float))]
    means = [mean for mean in means if not math.isnan(mean)]
    choose: Callable[[Iterable[float]], float] = min if lower_is_better(name) else max
    return choose(means) if means else None


def _escaped(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(special.get(char, f"\\{char}" if char in "&%$#_{}" else char) for char in text)


def export_table(rows: Sequence[Mapping[str, Any]], path: str | os.PathLike[str]) -> None:
    """Write a table to a ``.tex`` or ``.csv`` file, atomically.

    Raises:
        ConfigError: the extension is neither.
    """
    writers: dict[str, Callable[[], str]] = {".tex": lambda: to_latex(rows) + "\n", ".csv": lambda: to_csv(rows)}
    suffix = Path(path).suffix
    if suffix not in writers:
        raise ConfigError("must end in .tex or .csv", argument="path", value=os.fspath(path))
    write_text(writers[suffix](), Path(path))
