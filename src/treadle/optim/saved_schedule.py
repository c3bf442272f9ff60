"""Comparison of a saved learning-rate schedule with the one of this run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from treadle.checkpoint.variables import Variables
from treadle.errors import CheckpointError
from treadle.optim.optimizer import is_same_setting

# Values of torch's schedulers that change with the steps, or belong to the optimizer's groups. The rest are settings.
_MOVING = {
    "base_lrs", "max_lrs", "last_epoch", "T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter", "mode_worse",
    "total_size", "verbose",
}  # fmt: skip


def rate_jump(scheduler: Any, saved: Mapping[str, Any], objects: Mapping[str, Any]) -> str | None:
    """Return a warning if a LambdaLR's function, which no checkpoint holds, returns a different rate than before."""
    if type(scheduler) is not LambdaLR or any(saved.get("lr_lambdas") or ()):  # the state of callables is loaded
        return None
    if _loads_its_functions(scheduler, objects):
        return None
    moves, bases, old = saved["last_epoch"], saved["base_lrs"], saved.get("_last_lr") or ()
    rates = [float(base * factor(moves)) for base, factor in zip(bases, scheduler.lr_lambdas, strict=False)]
    for rate, before in zip(rates, map(float, old), strict=False):
        if not math.isclose(rate, before, rel_tol=1e-6):
            return (
                f"after {moves} scheduler steps the learning rate is {rate:g} in this run and was {before:g} in the "
                "checkpoint; it follows this run's schedule from here on. To keep the old curve, build the scheduler "
                "as it was, with the same length"
            )
    return None


def _loads_its_functions(scheduler: Any, objects: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint sets what the functions of a LambdaLR use, once it is loaded.

    Args:
        scheduler: of this run.
        objects: entries of the checkpoint with the attributes and variables that have changed.
    """
    if any(path.startswith("scheduler.lr_lambdas") for path in objects):
        return True
    moved = objects.get("variables", {}).get("attributes", {})
    return bool(moved) and not moved.keys().isdisjoint(Variables(getattr(scheduler, "lr_lambdas", ())).values())


def overridden_schedule(
    scheduler: Any, saved: Mapping[str, Any], *, objects: Mapping[str, Any] | None = None
) -> list[str]:
    """Return the settings of a schedule that a checkpoint overrides: ``"T_max=10 (built as 20)"``.

    Only torch's schedulers and their components are compared; state of others may change with the steps.

    Args:
        scheduler: of this run.
        saved: its state in the checkpoint.
        objects: entries of the checkpoint with the attributes that have changed, also of the objects of a LambdaLR.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        >>> old, new = (torch.optim.lr_scheduler.StepLR(optimizer, size) for size in (1, 2))
        >>> overridden_schedule(new, old.state_dict())
        ['step_size=1 (built as 2)']
    """
    factors = (entry for path, entry in (objects or {}).items() if path.startswith("scheduler.lr_lambdas"))
    moved = {name for entry in factors for name in entry.get("attributes", {})}
    return [
        f"{key}={old!r} (built as {new[key]!r})"
        for new, settings in _pairs(scheduler, saved)
        for key, old in settings.items()
        if key in new and not is_same_setting(_without(moved, old), _without(moved, new[key]))
    ]


def _without(moved: Collection[str], value: Any) -> Any:
    """Return the attributes of the objects of a LambdaLR that are settings; another value as it is."""
    if not moved or not isinstance(value, list):
        return value
    return [{key: inner for key, inner in item.items() if key not in moved} if isinstance(item, dict) else item
            for item in value]  # fmt: skip


def refuse_another_schedule(scheduler: Any, saved: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the type of a saved schedule differs from this run's."""
    for new, old in _pairs(scheduler, saved):
        missing, strange = sorted(new.keys() - old.keys()), sorted(old.keys() - new.keys())
        if missing and strange:
            raise CheckpointError(
                f"scheduler: the checkpoint's is of another kind: it has {', '.join(strange)}, the "
                f"{type(scheduler).__name__} of this run has {', '.join(missing)}. Build it as it was, or give "
                "load_state_dict a state whose 'scheduler' is None, and this one starts fresh"
            )


def _pairs(scheduler: Any, saved: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield current and saved settings of a torch scheduler, then of each of its components."""
    if not type(scheduler).__module__.startswith("torch."):
        return
    own = {key: value for key, value in scheduler.state_dict().items() if _is_setting(key)}
    yield own, {key: value for key, value in saved.items() if _is_setting(key)}
    for part, state in zip(getattr(scheduler, "_schedulers", []), saved.get("_schedulers") or [], strict=False):
        yield from _pairs(part, state)


def _is_setting(key: str) -> bool:
    return key == "_milestones" or not (key.startswith("_") or key in _MOVING)


def as_built(scheduler: Any, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scheduler's saved state, including its components, with the original container types."""
    before = vars(scheduler)
    state = {key: _as_original_type(before.get(key), value) for key, value in saved.items()}
    if state.get("_schedulers"):
        state["_schedulers"] = [
            as_built(part, own) for part, own in zip(scheduler._schedulers, state["_schedulers"], strict=True)
        ]
    return state


def _as_original_type(before: Any, value: Any) -> Any:
    """Convert a plain value to the scheduler's original container type, such as MultiStepLR's Counter."""
    container = type(before) in (tuple, Counter) and isinstance(value, (list, dict))
    return type(before)(value) if container else value
