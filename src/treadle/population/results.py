"""Results of a population: means and standard deviations over seeds, and comparison of two populations."""

from __future__ import annotations

import csv
import json
import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from statistics import NormalDist
from typing import Any

from treadle.checkpoint.store import write_text
from treadle.errors import ConfigError, nearest
from treadle.errors.arguments import check_whole
from treadle.hooks.files import to_json
from treadle.population.member import member_name, varied


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
            lines.append(f"{group}: {len(ended)} of {len(rows)} members{more}; {', '.join(cells) or 'no numbers'}")
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


@dataclass(frozen=True)
class Difference:
    """Mean difference between two populations, with a confidence interval.

    Attributes:
        metric: name of the number.
        mean: mean of B - A.
        low: lower end of the interval.
        high: its upper end.
        level: confidence level, such as 0.95.
        count: pairs, or members of the smaller population.
        paired: whether members with the same settings, or the same seed, were paired.
        pairs: what paired members share: ``"seeds"`` or ``"settings"``.
        left_out: members of both without a partner; 0 if there are no pairs.
    """

    metric: str
    mean: float
    low: float
    high: float
    level: float
    count: int
    paired: bool
    pairs: str = "seeds"
    left_out: int = 0

    @property
    def is_real(self) -> bool:
        """Whether the interval excludes 0, so that the difference is more than noise."""
        return not self.low <= 0 <= self.high

    def __str__(self) -> str:
        alone = f"; {self.left_out} members have no partner" if self.left_out else ""
        paired = f"paired over {self.count} {self.pairs}{alone}"
        over = paired if self.paired else f"{self.count} members and more, not paired"
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
    """Return the mean difference of a number between two populations, with a bootstrap confidence interval.

    Members with the same settings are paired if settings differ within a population, otherwise those with the same
    seed; each must be unique. The differences of the pairs are resampled. Without pairs, the members of each population
    are resampled separately. Bootstrap intervals of few members are too narrow, so they are widened by the ratio of
    Student's t to normal quantiles. Only finished members are used, see :func:`counted`.

    Args:
        a: one population.
        b: the other.
        metric: name of the number.
        level: confidence level, between 0 and 1.
        resamples: number of bootstrap samples, >= 100.
        seed: seed of the bootstrap.

    Raises:
        ConfigError: a population lacks the number, or both have only one member.

    Example:
        >>> rows = [Row(f"seed={n}", {"seed": n}, "finished", 9, 1, {"loss": n * 1.0}) for n in range(6)]
        >>> more = [Row(f"seed={n}", {"seed": n}, "finished", 9, 1, {"loss": n + 0.5}) for n in range(6)]
        >>> difference(Results(rows), Results(more), "loss").is_real
        True
    """
    if not 0 < level < 1:
        raise ConfigError("must be between 0 and 1", argument="level", value=level)
    check_whole(100, resamples=resamples)
    rows = [_with_number(each, metric) for each in (a, b)]
    pairs, gaps = _gaps(rows, metric)
    rng = random.Random(seed)
    if gaps:
        mean, count = math.fsum(gaps) / len(gaps), len(gaps)
        drawn = [_mean_of(rng.choices(gaps, k=len(gaps))) for _ in range(resamples)]
    else:
        one, two = ([row.metrics[metric] for row in each] for each in rows)
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
    wide = _widened(count, level)
    ends = mean + (low - mean) * wide, mean + (high - mean) * wide
    left_out = sum(map(len, rows)) - 2 * len(gaps) if gaps else 0
    return Difference(metric, mean, *ends, level, count, bool(gaps), pairs, left_out)


def _mean_of(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _widened(count: int, level: float) -> float:
    """Return the widening factor of a bootstrap interval of few values: the ratio of t and normal quantiles."""
    normal = NormalDist().inv_cdf((1 + level) / 2)
    return _t_quantile(count - 1, level) / normal * math.sqrt(count / (count - 1))


def _t_quantile(freedom: int, level: float) -> float:
    """Return the two-sided quantile of Student's t.

    As a function of the angle with tangent t / sqrt(freedom), the density is a power of its cosine.
    """
    width = math.pi / 2 / 4096
    powers = [math.cos((number + 0.5) * width) ** (freedom - 1) for number in range(4096)]
    wanted, total = level * math.fsum(powers), 0.0
    for number, power in enumerate(powers):
        if total + power >= wanted:
            return math.sqrt(freedom) * math.tan((number + (wanted - total) / power) * width)
        total += power
    return math.inf


def _with_number(results: Results, metric: str) -> list[Row]:
    rows = [row for row in counted(results.rows) if math.isfinite(row.metrics.get(metric, math.nan))]
    if metric not in results.metrics():
        raise ConfigError(f"no member has it; {nearest(metric, results.metrics())}", argument="metric", value=metric)
    if not rows:
        raise ConfigError("no member that counts has a finite one", argument="metric", value=metric)
    return rows


def _gaps(rows: Sequence[Sequence[Row]], metric: str) -> tuple[str, list[float]]:
    """Return what paired members share, and the difference of each pair; empty for fewer than two pairs."""
    names = sorted({name for each in rows for name in varied(row.settings for row in each)})
    for chosen in (names, ["seed"]):
        one, two = ({tuple(repr(row.settings.get(name)) for name in chosen): row for row in each} for each in rows)
        apart = len(one) == len(rows[0]) and len(two) == len(rows[1])
        known = all(name in row.settings for each in rows for row in each for name in chosen)
        common = [key for key in one if key in two]
        if apart and known and chosen and len(common) >= 2:
            what = "seeds" if chosen == ["seed"] else "settings"
            return what, [two[key].metrics[metric] - one[key].metrics[metric] for key in common]
    return "seeds", []
