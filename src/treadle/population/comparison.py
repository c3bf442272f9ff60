"""Difference between two populations, with a bootstrap confidence interval."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

from treadle.errors import ConfigError, nearest
from treadle.errors.arguments import check_whole
from treadle.hooks.files import to_json
from treadle.population.member import varied
from treadle.population.results import Results, Row, counted


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
                f"A has {len(one)} members with it and B has {len(two)}; estimating noise needs at least 2 of each",
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
        raise ConfigError("no comparable member has a finite value", argument="metric", value=metric)
    return rows


def _gaps(rows: Sequence[Sequence[Row]], metric: str) -> tuple[str, list[float]]:
    """Return what paired members share, and the difference of each pair; empty for fewer than two pairs."""
    names = sorted({name for each in rows for name in varied(row.settings for row in each)})
    for chosen in (names, ["seed"]):
        one, two = ({tuple(repr(row.settings.get(name)) for name in chosen): row for row in each} for each in rows)
        unique = len(one) == len(rows[0]) and len(two) == len(rows[1])
        known = all(name in row.settings for each in rows for row in each for name in chosen)
        common = [key for key in one if key in two]
        if unique and known and chosen and len(common) >= 2:
            what = "seeds" if chosen == ["seed"] else "settings"
            return what, [two[key].metrics[metric] - one[key].metrics[metric] for key in common]
    return "seeds", []
