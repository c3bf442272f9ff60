"""The numbers of a population: means over seeds with their deviation, and whether two differ by more than noise."""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from treadle.checkpoint.store import write_text
from treadle.errors import ConfigError, nearest
from treadle.hooks.files import to_json
from treadle.population.member import member_name


@dataclass(frozen=True)
class Row:
    """The end of a member, as ``population.json`` keeps it.

    Attributes:
        name: of the member.
        settings: its settings.
        status: see ``Outcome``.
        step: optimizer steps attempted.
        epoch: epochs completed.
        metrics: numbers by name.
        seconds: of all processes that trained it.
        error: of a failed member.
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
        """Return the end of the member in one line.

        Example:
            >>> Row("seed=0", {"seed": 0}, "finished", 20, 2, {"val_loss": 0.5}, 1.25).line()
            'seed=0: finished at step 20, epoch 2, in 1.2 s; val_loss 0.5'
        """
        numbers = " ".join(f"{key} {value:.4g}" for key, value in list(self.metrics.items())[:4])
        end = self.error if self.error is not None else numbers
        return f"{self.name}: {self.status} at step {self.step}, epoch {self.epoch}, in {self.seconds:.1f} s; {end}"


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a ``population.json``; none where there is no such file.

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
    """Mean and deviation of a number over members.

    Attributes:
        mean: over the members that have it.
        deviation: standard deviation of the sample (divided by ``count - 1``); NaN for one member.
        count: how many have it.
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
    """The rows of a population.

    Args:
        rows: one for each member.

    Example:
        >>> rows = [Row(f"seed={n}", {"seed": n}, "finished", 9, 1, {"loss": float(n)}) for n in range(3)]
        >>> Results(rows).summary("loss").mean
        1.0
    """

    def __init__(self, rows: Sequence[Row]):
        self.rows = list(rows)

    @property
    def failed(self) -> list[Row]:
        """The members that failed."""
        return [row for row in self.rows if row.status == "failed"]

    def metrics(self) -> list[str]:
        """Return the names of the numbers, in order."""
        return list(dict.fromkeys(name for row in self.rows for name in row.metrics))

    def groups(self) -> dict[str, list[Row]]:
        """Return the rows by their settings without the seed, under the name of these."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            rest = {key: value for key, value in row.settings.items() if key != "seed"}
            found.setdefault(member_name(rest) if rest else "all", []).append(row)
        return found

    def summary(self, metric: str, group: str | None = None) -> Summary:
        """Return mean and deviation of a number over all members that did not fail, or over those of a group.

        Raises:
            ConfigError: no member has the number.
        """
        if metric not in self.metrics():
            raise ConfigError(f"no member has it; {nearest(metric, self.metrics())}", argument="metric", value=metric)
        rows = self.rows if group is None else self.groups()[group]
        return Summary.of(row.metrics[metric] for row in rows if metric in row.metrics and row.status != "failed")

    def lines(self) -> list[str]:
        """Return a table as lines: of each group mean ± deviation (members) of every number, then the failed."""
        lines = []
        for group, rows in self.groups().items():
            ended = [row for row in rows if row.status != "failed"]
            names = list(dict.fromkeys(name for row in ended for name in row.metrics))
            cells = [f"{name} {self.summary(name, group)}" for name in names[:6]]
            lines.append(f"{group}: {len(ended)} of {len(rows)} members; {', '.join(cells) or 'no numbers'}")
        return [*lines, *(f"{row.name} failed: {row.error}" for row in self.failed)]

    def to_csv(self, path: str | Path) -> Path:
        """Write a line a member: name, settings, status, step, epoch, seconds, numbers; return the path."""
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


@dataclass(frozen=True)
class Difference:
    """The mean difference between two populations, with its interval.

    Attributes:
        metric: the number.
        mean: of B - A.
        low: lower end of the interval.
        high: its upper end.
        level: of the interval, such as 0.95.
        count: pairs, or members of the smaller population.
        paired: whether members of one seed were compared with each other.
    """

    metric: str
    mean: float
    low: float
    high: float
    level: float
    count: int
    paired: bool

    @property
    def is_real(self) -> bool:
        """Whether 0 is outside the interval: the difference is more than noise."""
        return not self.low <= 0 <= self.high

    def __str__(self) -> str:
        over = f"paired over {self.count} seeds" if self.paired else f"{self.count} members and more, not paired"
        verdict = "more than noise" if self.is_real else "no more than noise"
        return (
            f"{self.metric}: B - A = {self.mean:+.4g}, {self.level:.0%} interval {self.low:+.4g} to {self.high:+.4g} "
            f"({over}): {verdict}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        found: dict[str, Any] = to_json({**asdict(self), "is_real": self.is_real})
        return found


def difference(
    a: Results, b: Results, metric: str, *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Difference:
    """Return how far two populations differ in a number, with a bootstrap interval of the mean difference.

    Members of the same seed are pairs where every seed occurs once in both; the differences of the pairs are resampled.
    Where that is not so, the members of either are resampled for themselves. With fewer than 5 members a bootstrap
    interval is too narrow, so that is widened as Student's t would do.

    Args:
        a: one population.
        b: the other.
        metric: the number.
        level: of the interval, between 0 and 1.
        resamples: of the bootstrap, >= 100.
        seed: of the bootstrap.

    Raises:
        ConfigError: a population has no such number, or both have only one member.

    Example:
        >>> rows = [Row(f"seed={n}", {"seed": n}, "finished", 9, 1, {"loss": n * 1.0}) for n in range(6)]
        >>> more = [Row(f"seed={n}", {"seed": n}, "finished", 9, 1, {"loss": n + 0.5}) for n in range(6)]
        >>> difference(Results(rows), Results(more), "loss").is_real
        True
    """
    if not 0 < level < 1:
        raise ConfigError("must be between 0 and 1", argument="level", value=level)
    if not isinstance(resamples, int) or resamples < 100:
        raise ConfigError("must be a whole number >= 100", argument="resamples", value=resamples)
    of_a, of_b = _by_seed(a, metric), _by_seed(b, metric)
    common = [key for key in of_a if key in of_b]
    rng = random.Random(seed)
    paired = len(common) >= 2 and None not in common
    if paired:
        gaps = [of_b[key][0] - of_a[key][0] for key in common]
        mean, count = math.fsum(gaps) / len(gaps), len(gaps)
        drawn = [_mean_of(rng.choices(gaps, k=len(gaps))) for _ in range(resamples)]
    else:
        one, two = ([x for values in each.values() for x in values] for each in (of_a, of_b))
        count = min(len(one), len(two))
        if count < 2:
            raise ConfigError(
                f"A has {len(one)} members with it and B has {len(two)}; noise needs at least 2 of each",
                argument="metric", value=metric,
            )  # fmt: skip
        mean = _mean_of(two) - _mean_of(one)
        drawn = [
            _mean_of(rng.choices(two, k=len(two))) - _mean_of(rng.choices(one, k=len(one))) for _ in range(resamples)
        ]
    drawn.sort()
    low, high = (drawn[min(int(part * resamples), resamples - 1)] for part in ((1 - level) / 2, (1 + level) / 2))
    wide = _widened(count)
    return Difference(metric, mean, mean + (low - mean) * wide, mean + (high - mean) * wide, level, count, paired)


def _mean_of(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _widened(count: int) -> float:
    """Return the factor by which a bootstrap of so few values is too narrow: t's quantile over the normal one's."""
    t_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
    return t_95.get(count, 2.262 if count < 20 else 2.05) / 1.96 * math.sqrt(count / (count - 1))


def _by_seed(results: Results, metric: str) -> dict[Any, list[float]]:
    """Return the values of a number by seed; under None where seeds do not tell the members apart."""
    rows = [row for row in results.rows if row.status != "failed" and math.isfinite(row.metrics.get(metric, math.nan))]
    if not rows:
        raise ConfigError(f"no member has it; {nearest(metric, results.metrics())}", argument="metric", value=metric)
    seeds = [row.settings.get("seed") for row in rows]
    if None in seeds or len(set(seeds)) < len(seeds):
        return {None: [row.metrics[metric] for row in rows]}
    return {seed: [row.metrics[metric]] for seed, row in zip(seeds, rows, strict=True)}
