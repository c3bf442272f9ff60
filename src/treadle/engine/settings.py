"""Settings of an engine and the checks of their ranges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from treadle.data.cursor import Group
from treadle.errors import ConfigError

Capture = bool | Literal["auto"]
Outcome = Literal["applied", "skipped", "refused"]
Steps = Callable[[Group], Outcome]


def check_settings(interval: str, grad_clip: float | None, accumulation: int, retries: int | None) -> None:
    """Raises ConfigError for a setting of the engine that is outside its range.

    Example:
        >>> check_settings("step", None, 1, None)
    """
    if interval not in ("step", "epoch"):
        raise ConfigError("must be 'step' or 'epoch'", argument="scheduler_interval", value=interval)
    if grad_clip is not None and not (isinstance(grad_clip, (int, float)) and grad_clip >= 0):
        raise ConfigError(
            "must be a number >= 0; use None or 0 to turn clipping off", argument="grad_clip", value=grad_clip
        )
    check_accumulation(accumulation)
    if retries is not None and not (isinstance(retries, int) and retries >= 0):
        raise ConfigError("must be None or >= 0", argument="max_non_finite_grad_retries", value=retries)


def check_accumulation(steps: int, *, argument: str = "accumulation_steps") -> None:
    """Raises ConfigError unless it is a number of micro-batches that a step can have.

    Example:
        >>> check_accumulation(4)
    """
    if not isinstance(steps, int) or steps < 1:
        raise ConfigError("a step needs a whole number of micro-batches, >= 1", argument=argument, value=steps)


def check_capture(capture: Any) -> Capture:
    """Returns the setting.

    Raises:
        ConfigError: it is another value.

    Example:
        >>> check_capture("auto")
        'auto'
    """
    if capture is True or capture is False or capture == "auto":
        return capture  # type: ignore[no-any-return]
    raise ConfigError("use True, False or 'auto'", argument="capture", value=capture)
