"""Results of a population: means and standard deviations over seeds, and comparison of two populations."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from treadle.checkpoint.store import write_text
from treadle.errors import ConfigError, nearest, number_of
from treadle.population.member import member_name


@dataclass(frozen=True)
class Row:
    """Outcome of a member in ``population.json``.

    Attributes:
        name: name of the member.
        settings: its settings.
        status: see ``Outcome``.
        step: optimizer steps attempted.
        epoch: epochs completed.
        metrics: numbers by name.
        seconds: total duration in all processes that trained it.
        error: error of a failed member.
    """

    name: str
    settings: Mapping[str, Any]
    status: str
    step: int
    epoch: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    error: str | None = None

    def as_values(self) -> dict[str, Any]:
        """Return the row as plain values."""
        return asdict(self)

    def line(self) -> str:
        """Return a one-line summary of the member.

        Example:
            >>> Row("seed=0", {"seed": 0}, "finished", 20, 2, {"val_loss": 0.5}, 1.25).line()
            'seed=0: finished at step 20, epoch 2, in 1.2 s; val_loss 0.5'
        """
        numbers = " ".join(f"{key} {value:.4g}" for key, value in list(self.metrics.items())[:4])
        end = self.error or numbers
        reached = f"{self.status} at step {self.step}, epoch {self.epoch}, in {self.seconds:.1f} s"
        return f"{self.name}: {reached}; {end}" if end else f"{self.name}: {reached}"


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a ``population.json``; empty if there is no such file.

    Example:
        >>> read_rows(Path("no_such_file.json"))
        []
    """
    if not path.is_file():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))["members"]
    return [
        Row(**{**row, "metrics": {key: math.nan if x is None else x for key, x in row["metrics"].items()}})
        for row in found
    ]


@dataclass(frozen=True)
class Summary:
    """Mean and standard deviation of a number over members.

    Attributes:
        mean: mean over the members that have it.
        deviation: sample standard deviation (divided by ``count - 1``); NaN for one member.
        count: number of members that have it.
    """

    mean: float
    deviation: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Summary:
        """Return the summary of some values.

        Example:
            >>> str(Summary.of([1.0, 2.0, 3.0]))
            '2 ± 1 (3)'
        """
        found = [value for value in values if math.isfinite(value)]
        if not found:
            return cls(math.nan, math.nan, 0)
        mean = math.fsum(found) / len(found)
        if len(found) == 1:
            return cls(mean, math.nan, 1)
        return cls(mean, math.sqrt(math.fsum((value - mean) ** 2 for value in found) / (len(found) - 1)), len(found))

    def __str__(self) -> str:
        if self.count < 2:
            return f"{self.mean:.4g} ({self.count})"
        return f"{self.mean:.4g} ± {self.deviation:.2g} ({self.count})"


class Results:
    """Results of a population.

    Args:
        rows: one row per member.

    Example:
        >>> rows = [Row(f"seed={n}", {"seed": n}, "finished", 9, 1, {"loss": float(n)}) for n in range(3)]
        >>> Results(rows).summary("loss").mean
        1.0
    """

    def __init__(self, rows: Sequence[Row]):
        self.rows = list(rows)

    @property
    def failed(self) -> list[Row]:
        """Failed members."""
        return [row for row in self.rows if row.status == "failed"]

    def metrics(self) -> list[str]:
        """Return the names of the numbers, in order."""
        return list(dict.fromkeys(name for row in self.rows for name in row.metrics))

    def groups(self) -> dict[str, list[Row]]:
        """Return the rows grouped by their settings without the seed, by name."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            rest = {key: value for key, value in row.settings.items() if key != "seed"}
            found.setdefault(member_name(rest) if rest else "all", []).append(row)
        return found

    def summary(self, metric: str, group: str | None = None) -> Summary:
        """Return mean and standard deviation of a number over all finished members, or those of a group.

        If none has finished, paused or stopped members are used; otherwise they would be averaged with runs that are
        further.

        Raises:
            ConfigError: no member has the number.
        """
        if metric not in self.metrics():
            raise ConfigError(f"no member has it; {nearest(metric, self.metrics())}", argument="metric", value=metric)
        rows = self.rows if group is None else self.groups()[group]
        return Summary.of(row.metrics[metric] for row in counted(rows) if metric in row.metrics)

    def lines(self) -> list[str]:
        """Return a table as lines: mean ± deviation (members) of each group's numbers, then the failed members."""
        lines = []
        for group, rows in self.groups().items():
            ended = counted(rows)
            names = list(dict.fromkeys(name for row in ended for name in row.metrics))
            cells = [f"{name} {self.summary(name, group)}" for name in names[:6]]
            others = Counter(row.status for row in rows if row.status not in ("finished", "failed"))
            more = "".join(f", {count} {status}" for status, count in others.items())
            lines.append(
                f"{group}: {len(ended)} of {number_of(len(rows), 'member')}{more}; {', '.join(cells) or 'no numbers'}"
            )
        return [*lines, *(f"{row.name} failed: {row.error}" for row in self.failed)]

    def to_csv(self, path: str | Path) -> Path:
        """Write one line per member: name, settings, status, step, epoch, seconds, numbers; return the path."""
        settings = list(dict.fromkeys(key for row in self.rows for key in row.settings))
        text = StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["member", *settings, "status", "step", "epoch", "seconds", *self.metrics(), "error"])
        for row in self.rows:
            own = [row.settings.get(key, "") for key in settings]
            numbers = [row.metrics.get(name, "") for name in self.metrics()]
            writer.writerow(
                [row.name, *own, row.status, row.step, row.epoch, f"{row.seconds:.3f}", *numbers, row.error or ""]
            )
        write_text(text.getvalue(), Path(path))
        return Path(path)


def counted(rows: Sequence[Row]) -> list[Row]:
    """Return the rows to average: those of finished members, else of members that did not fail.

    Example:
        >>> rows = [Row(status, {}, status, 9, 1) for status in ("finished", "paused", "failed")]
        >>> [row.name for row in counted(rows)], [row.name for row in counted(rows[1:])]
        (['finished'], ['paused'])
    """
    finished = [row for row in rows if row.status == "finished"]
    return finished or [row for row in rows if row.status != "failed"]
