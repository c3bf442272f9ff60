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
        raise ConfigError(f"scheduler_interval={interval!r}: must be 'step' or 'epoch'")
    if grad_clip is not None and not (isinstance(grad_clip, (int, float)) and grad_clip >= 0):
        raise ConfigError(f"grad_clip={grad_clip!r}: must be a number >= 0; use None or 0 to turn clipping off")
    check_accumulation(accumulation)
    if retries is not None and not (isinstance(retries, int) and retries >= 0):
        raise ConfigError(f"max_non_finite_grad_retries={retries!r}: must be None or >= 0")


def check_accumulation(steps: int, *, argument: str = "accumulation_steps") -> None:
    """Raises ConfigError unless it is a number of micro-batches that a step can have.

    Example:
        >>> check_accumulation(4)
    """
    if not isinstance(steps, int) or steps < 1:
        raise ConfigError(f"{argument}={steps!r}: a step needs a whole number of micro-batches, >= 1")


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
    raise ConfigError(f"capture={capture!r}: use True, False or 'auto'")
