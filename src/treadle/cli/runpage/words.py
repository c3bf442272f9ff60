"""Formatting of values as short strings, for pages and terminal tables alike."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from treadle.cli.runpage.summary import RunSummary

NONE = "–"


def number(value: float | None) -> str:
    """Format a number with four significant digits, an integer with all.

    Example:
        >>> number(0.123456), number(12345), number(None)
        ('0.1235', '12,345', '–')
    """
    if value is None:
        return NONE
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def size(num_bytes: int) -> str:
    """Format a size in a suitable unit.

    Example:
        >>> size(1_591_837)
        '1.6 MB'
    """
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def duration(seconds: float | None) -> str:
    """Format a duration in hours, minutes and seconds.

    Example:
        >>> duration(3725)
        '1:02:05'
    """
    return NONE if seconds is None else str(timedelta(seconds=round(seconds)))


def date(seconds: float | None) -> str:
    """Format a time, in seconds since 1970, as local time to the minute."""
    return NONE if not seconds else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def ago(seconds: float | None, now: float) -> str:
    """Format how long ago a time was.

    Example:
        >>> ago(100.0, 220.0)
        '2 min ago'
    """
    if seconds is None:
        return NONE
    past = max(now - seconds, 0.0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if past >= length:
            return f"{past // length:.0f} {unit} ago"
    return f"{past:.0f} s ago"


def steps_done(run: RunSummary) -> str:
    """Return the progress of a run, such as ``600 / 1,000``."""
    total = "" if run.total_steps is None else f" / {run.total_steps:,}"
    return number(run.step) + (total if run.step is not None else "")


def best_metric(run: RunSummary) -> str:
    """Return the best value of a run's metric, or the loss of its last step in brackets if it has none."""
    if run.metric is not None and run.best is not None:
        return f"{run.metric} {number(run.best)}"
    return NONE if run.loss is None else f"(loss {number(run.loss)})"


def plain(value: Any) -> str:
    """Format a setting as a string.

    Example:
        >>> plain(None), plain(0.001), plain([1, 2]), plain("adam")
        ('none', '0.001', '[1, 2]', 'adam')
    """
    return "none" if value is None else str(value)
