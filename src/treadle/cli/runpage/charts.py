"""The charts of a page: their titles and series, as plain values for the page's script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.cli.runpage.curves import Series

# In the order of the page; others follow in the order in which they were found.
_TITLES = {
    "loss": "Loss", "accuracy": "Accuracy", "grad_norm": "Gradient norm", "lr": "Learning rate",
    "speed": "Speed (steps/s)", "time": "Time per epoch (s)", "r2": "R²", "mae": "Mean absolute error",
    "rmse": "Root mean squared error", "mse": "Mean squared error", "perplexity": "Perplexity",
}  # fmt: skip
_LAST = ("grad_norm", "lr", "speed", "time")


def title_of(chart: str) -> str:
    """Return the title of a chart.

    Example:
        >>> title_of("grad_norm"), title_of("loss_ce")
        ('Gradient norm', 'Loss ce')
    """
    words = chart.replace("_", " ").replace("/", ", ")
    unit = " (s)" if chart.endswith("_time") else ""
    return _TITLES.get(chart, words[:1].upper() + words[1:] + unit)


def charts_of(runs: Sequence[Sequence[Series]]) -> list[dict[str, Any]]:
    """Return the charts of a page.

    Args:
        runs: the series of each run.

    Returns:
        For each chart its ``key``, its ``title``, whether it may be smoothed, and its ``series``, each with the number
        of its ``run``.
    """
    series: dict[str, list[dict[str, Any]]] = {}
    for number, found in enumerate(runs):
        for one in found:
            values = {key: value for key, value in vars(one).items() if key != "chart"}
            series.setdefault(one.chart, []).append({"run": number, **values})
    return [
        {"key": key, "title": title_of(key), "smooth": key != "lr", "series": series[key]}
        for key in _ordered(list(series))
    ]


def axes_in(charts: Sequence[dict[str, Any]]) -> list[str]:
    """Return the axes that at least one series has, ``step`` first."""
    found = [one["axes"] for chart in charts for one in chart["series"]]
    return [
        name for name in ("step", "epoch", "time") if any(value is not None for axes in found for value in axes[name])
    ]


def _ordered(keys: list[str]) -> list[str]:
    first = [key for key in _TITLES if key in keys and key not in _LAST]
    others = [key for key in keys if key not in _TITLES]
    return [*first[:1], *[key for key in _LAST[:2] if key in keys], *first[1:], *others, *[
        key for key in _LAST[2:] if key in keys
    ]]  # fmt: skip
