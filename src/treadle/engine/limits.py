"""Limits of a run: time, batches, and short trial runs."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

from treadle.data.amount import Amount, check_amount
from treadle.errors import ConfigError, refuse_unknown
from treadle.errors.arguments import is_whole_number

Duration = float | str | timedelta | Mapping[str, float]
"""Seconds, ``"HH:MM:SS"``, ``"DD:HH:MM:SS"``, ``"1h30m"``, a timedelta, or its arguments such as ``{"hours": 2}``."""

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_CLOCK = re.compile(r"(?:(\d+):)?(\d+):(\d\d):(\d\d)")
_WORDS = re.compile(r"(?:\s*(\d+(?:\.\d+)?)\s*([dhms]))+\s*")


def as_seconds(value: Duration) -> float:
    """Return ``max_time`` in seconds.

    Raises:
        ConfigError: it is not a duration above 0.

    Example:
        >>> as_seconds("00:12:30"), as_seconds("1h30m"), as_seconds({"hours": 2}), as_seconds(0.5)
        (750.0, 5400.0, 7200.0, 0.5)
    """
    seconds = _seconds(value)
    if seconds is None or not 0 < seconds < math.inf:
        raise ConfigError(
            "must be a time above 0: seconds, 'HH:MM:SS', 'DD:HH:MM:SS', a text such as '1h30m', or a timedelta",
            argument="max_time",
            value=value,
        )
    return seconds


def _seconds(value: Any) -> float | None:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        try:
            return timedelta(**value).total_seconds()
        except TypeError:
            return None
    if isinstance(value, str):
        if (clock := _CLOCK.fullmatch(value.strip())) is not None:
            days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
            return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
        if _WORDS.fullmatch(value) is None:
            return None
        return sum(float(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+(?:\.\d+)?)\s*([dhms])", value))
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


@dataclass(frozen=True)
class Limits:
    """Limits of a run, for a trainer that takes ``limits=``; other trainers take them as separate arguments.

    An amount of batches is a whole number, or a float in (0, 1] as a fraction of an epoch. A limited run resumes as
    exactly as an unlimited one.

    Attributes:
        max_time: time limit of one call; it ends after the step in which time runs out, and the next call resumes
            there. Seconds, ``"HH:MM:SS"``, ``"DD:HH:MM:SS"``, ``"1h30m"`` or a timedelta.
        limit_train_batches: micro-batches of an epoch; the rest of the loader is not used.
        limit_eval_batches: batches of ``evaluate`` and ``validate``, also during training; ``test`` uses all.
        overfit_batches: train on the first batches in every epoch, read once and kept in memory, and evaluate on
            equally many.
        fast_dev_run: True or a number of batches: train and evaluate on that many batches, once; hooks that write are
            left out, nothing is written, and nothing is resumed.
        num_sanity_eval_steps: batches to evaluate before the first step of a fresh run; -1 evaluates all.

    Raises:
        ConfigError: a value is outside its range.

    Example:
        >>> Limits(max_time="00:10:00", limit_train_batches=0.5).seconds
        600.0
    """

    max_time: Duration | None = None
    limit_train_batches: Amount | None = None
    limit_eval_batches: Amount | None = None
    overfit_batches: Amount | None = None
    fast_dev_run: bool | int = False
    num_sanity_eval_steps: int = 0

    def __post_init__(self) -> None:
        if self.max_time is not None:
            as_seconds(self.max_time)
        for name in ("limit_train_batches", "limit_eval_batches", "overfit_batches"):
            check_amount(getattr(self, name), name)
        trial, sanity = self.fast_dev_run, self.num_sanity_eval_steps
        if not isinstance(trial, int) or trial < 0:
            raise ConfigError("must be True, False or a number of batches >= 1", argument="fast_dev_run", value=trial)
        if not is_whole_number(sanity, -1):
            raise ConfigError(
                "must be a number of batches >= 0, or -1 for all", argument="num_sanity_eval_steps", value=sanity
            )

    @classmethod
    def of(cls, given: Limits | Mapping[str, Any] | None) -> Limits:
        """Return limits from an instance, a mapping of their names, or None.

        Raises:
            ConfigError: a name is unknown or a value is outside its range.

        Example:
            >>> Limits.of({"fast_dev_run": True}).train
            1
        """
        if isinstance(given, Limits):
            return given
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError("must be a treadle.Limits or a mapping of its names", argument="limits", value=given)
        refuse_unknown("limits", given or {}, NAMES)
        return cls(**(given or {}))

    @classmethod
    def among(cls, values: Mapping[str, Any]) -> Limits:
        """Pick the limits out of a mapping of settings; None means the default.

        Example:
            >>> Limits.among({"lr": 0.1, "fast_dev_run": 2, "max_time": None}) == Limits(fast_dev_run=2)
            True
        """
        return cls(**{name: values[name] for name in NAMES if values.get(name) is not None})

    @property
    def seconds(self) -> float | None:
        """Seconds of ``max_time``."""
        return None if self.max_time is None else as_seconds(self.max_time)

    def deadline(self) -> Deadline | None:
        """Return the deadline of a call that starts now; None without ``max_time``."""
        return None if self.seconds is None else Deadline(self.seconds)

    @property
    def train(self) -> Amount | None:
        """Limit of micro-batches per training epoch."""
        return int(self.fast_dev_run) or self.limit_train_batches

    @property
    def evaluation(self) -> Amount | None:
        """Limit of batches per evaluation."""
        if self.fast_dev_run:
            return int(self.fast_dev_run)
        return self.overfit_batches if self.limit_eval_batches is None else self.limit_eval_batches

    @property
    def sanity(self) -> Amount | None:
        """Limit of batches for the evaluation before step 1; None for all."""
        return None if self.num_sanity_eval_steps == -1 else self.num_sanity_eval_steps

    def target(self, max_steps: int | None, epochs: int | None) -> tuple[int | None, int | None]:
        """Return the target of a run in steps and in epochs; one of them is None."""
        if not self.fast_dev_run:
            return max_steps, epochs
        trial = None if max_steps is None else min(max_steps, int(self.fast_dev_run))
        return trial, None if epochs is None else min(epochs, 1)

    def given(self) -> dict[str, Any]:
        """Return the limits that are set, as plain values.

        Example:
            >>> Limits(max_time=timedelta(hours=1), overfit_batches=2).given()
            {'max_time': 3600.0, 'overfit_batches': 2}
        """
        default = Limits()
        found = {name: getattr(self, name) for name in NAMES if getattr(self, name) != getattr(default, name)}
        return found if self.seconds is None else {**found, "max_time": self.seconds}


NO_LIMITS = Limits()
NAMES: Iterable[str] = tuple(field.name for field in fields(Limits))


class Deadline:
    """Deadline of a call, counted from its creation.

    Args:
        seconds: time until the deadline.

    Example:
        >>> Deadline(60.0).over
        False
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end = now() + seconds

    @property
    def over(self) -> bool:
        """Whether the deadline has passed."""
        return now() >= self._end


def now() -> float:
    """Return the seconds of a monotonic clock."""
    return time.monotonic()
