"""Settings of an engine, with range checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from treadle.data.cursor import Group
from treadle.engine.limits import NO_LIMITS, Limits
from treadle.errors import ConfigError
from treadle.errors.arguments import check_least, checked, is_whole_number
from treadle.seed import as_seed

Capture = bool | Literal["auto"]
Outcome = Literal["applied", "skipped", "refused"]
Steps = Callable[[Group], Outcome]

MOVABLE = ("grad_clip", "grad_clip_value", "accumulation_steps", "max_non_finite_grad_retries", "eval_seed")
"""Settings that a hook may change while it trains: checkpoints hold those that changed."""


@checked
@dataclass(frozen=True)
class EngineSettings:
    """Settings of an engine, checked.

    Attributes:
        face: name of the front end, written into checkpoints.
        scheduler_interval: ``"step"`` or ``"epoch"``.
        device_asked: the device as the user gave it.
        grad_clip: total 2-norm; None turns clipping off.
        grad_clip_value: largest absolute value of a gradient's element; None turns this clipping off.
        accumulation_steps: micro-batches per step, >= 1.
        syncs_each: whether ranks exchange gradients with every micro-batch, not only with the last of a step.
        max_non_finite_grad_retries: fresh groups to try before NonFiniteError; None is 0.
        eval_seed: seeds the random state of every evaluation.
        capture: True, False or ``"auto"``.
        progress: whether a run shows its log if the user's handlers do not; see ``treadle.engine.run_log``.
        limits: limits of time and batches.

    Raises:
        ConfigError: a value is outside its range.

    Example:
        >>> EngineSettings(grad_clip=0).grad_clip is None
        True
    """

    face: str = "engine"
    scheduler_interval: Literal["step", "epoch"] = "step"
    device_asked: torch.device | str | int | None = None
    grad_clip: float | None = None
    grad_clip_value: float | None = None
    accumulation_steps: int = 1
    syncs_each: bool = False
    max_non_finite_grad_retries: int | None = 0
    eval_seed: int = 0
    capture: Capture = False
    progress: bool = True
    limits: Limits = NO_LIMITS

    def __post_init__(self) -> None:
        retries = self.max_non_finite_grad_retries
        check_least(0, grad_clip=self.grad_clip, grad_clip_value=self.grad_clip_value)
        check_least(0, max_non_finite_grad_retries=retries)
        for name in ("grad_clip", "grad_clip_value"):
            object.__setattr__(self, name, getattr(self, name) or None)
        if self.grad_clip and self.grad_clip_value:
            raise ConfigError(
                f"gradients are clipped by their norm already, to {self.grad_clip}; keep one of the two",
                argument="grad_clip_value",
                value=self.grad_clip_value,
            )
        check_accumulation(self.accumulation_steps)
        object.__setattr__(self, "max_non_finite_grad_retries", retries or 0)
        object.__setattr__(self, "eval_seed", as_seed("eval_seed", self.eval_seed))


def check_accumulation(steps: int, *, argument: str = "accumulation_steps") -> None:
    """Raise ConfigError unless it is a valid number of micro-batches per step."""
    if not is_whole_number(steps, 1):
        raise ConfigError("a step needs a whole number of micro-batches, >= 1", argument=argument, value=steps)


def check_capture(capture: Any) -> Capture:
    """Return a checked capture setting.

    Raises:
        ConfigError: the value is unknown.

    Example:
        >>> check_capture("auto")
        'auto'
    """
    if capture is True or capture is False or capture == "auto":
        return capture  # type: ignore[no-any-return]
    raise ConfigError("use True, False or 'auto'", argument="capture", value=capture)


_ACCUMULATION = ("accumulation_steps", "gradient_accumulation_steps", "grad_accum_steps")
_OF_A_STEP = (
    "grad_clip", "max_grad_norm", "grad_clip_value", "mixed_precision", "amp", "amp_dtype", *_ACCUMULATION,
    "scheduler_interval", "scheduler_step_per_batch", "ema_decay", "enable_tf32", "n_mask", "augmenter", "precision",
    "eval_seed", "selection", "early_stop_min_delta", "training.seed",
)  # fmt: skip
"""Settings of the faces that change what a step computes, and that nothing else compares."""


def other_settings(saved: Any, given: Any) -> list[str]:
    """Return the settings of a step that a checkpoint has in another value than this run.

    One that the checkpoint does not have, since an earlier version or another library wrote it, is not compared.
    """
    if not isinstance(saved, Mapping) or not isinstance(given, Mapping):
        return []
    saved, given = _with_training(saved), _with_training(given)
    both = [name for name in _OF_A_STEP if name in saved and name in given]
    names = [name for name in both if saved[name] != given[name]]
    if None in (saved.get("ema_decay"), given.get("ema_decay")):  # an average that starts or ends is named elsewhere
        names = [name for name in names if name != "ema_decay"]
    return [f"{name}={saved.get(name)!r} (here {given.get(name)!r})" for name in names]


def _with_training(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with those of a section ``training`` besides them; its seed keeps its section's name."""
    section = config.get("training")
    if not isinstance(section, Mapping):
        return dict(config)
    return {**section, **config, "training.seed": section.get("seed")}


def holds_accumulation(config: Any) -> bool:
    """Return whether settings hold the micro-batches of a step, so that :func:`other_settings` compares them."""
    return isinstance(config, Mapping) and any(name in config for name in _ACCUMULATION)
