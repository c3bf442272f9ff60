"""Log block with the decisions at the start of a run and their reasons, and the line at its end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from treadle import distributed
from treadle.distributed.state_names import clean_name
from treadle.engine.best import BestRule
from treadle.errors import number_of

if TYPE_CHECKING:
    from treadle.engine.loop import Engine


def start_block(engine: Engine) -> str:
    """Return the decisions of a run and their reasons, one line each, hooks in calling order."""
    lines = {
        "device": f"{engine.device} ({_why_device(engine)})",
        "precision": _precision(engine),
        "ranks": _ranks(engine),
        "start": _start(engine),
        "target": f"{engine.target}",
        "non-finite": _non_finite(engine),
        "hooks": ", ".join(hook.state_key for hook in engine.hooks if not hook.implicit) or "none",
    }
    return "\n".join(["training starts", *(f"  {name:<11}{text}" for name, text in lines.items())])


def start_line(engine: Engine) -> str:
    """Return the block in one line: where a run starts, on which device, and where it will end."""
    where = f"on {engine.device}, to {engine.target}"
    if not engine.progress.step:
        return f"training starts {where}"
    source = "" if engine.state.source is None else f" ({short_path(engine.state.source)})"
    return f"training resumes at step {engine.progress.step}, epoch {engine.epoch}{source}, {where}"


def end_line(engine: Engine, first_step: int, seconds: float) -> str:
    """Return a line with why and where a run ended, its duration, the best value and the last checkpoint.

    Args:
        engine: engine at the end of its run.
        first_step: the step at which this process started.
        seconds: time since then.
    """
    place = f"step {engine.progress.step}, epoch {engine.epoch}"
    speed = f"{_duration(seconds)} for {number_of(engine.progress.step - first_step, 'step')}"
    parts = [f"{_why_ended(engine)} at {place}", speed]
    parts += [
        f"best {rule.metric} {rule.best:.4g} at {place} {rule.best_epoch}"
        for rule, place in best_rules(engine)
        if rule.best_epoch is not None
    ]
    if engine.state.saved is not None:
        parts.append(f"saved {short_path(engine.state.saved)}")
    return "; ".join(parts)


def best_rules(engine: Engine) -> list[tuple[BestRule, str]]:
    """Return the active rules that select a state, each with its unit, ``"epoch"`` or ``"step"``."""
    rules = [(getattr(driver, "best", None), "epoch") for driver in engine.state.drivers]
    rules += [(getattr(hook, "best_rule", None), "step") for hook in engine.hooks]
    return [(rule, place) for rule, place in rules if isinstance(rule, BestRule)]


def _why_ended(engine: Engine) -> str:
    for rule, place in best_rules(engine):
        if rule.should_stop:
            what = "epoch" if place == "epoch" else "evaluation"
            return f"stopped early, {rule.count} {what}{'s' if rule.count > 1 else ''} without a better {rule.metric},"
    if engine.target.reached(engine):
        return "done"
    deadline = engine.target.deadline
    if deadline is not None and deadline.over:
        return f"stopped before {engine.target}, as max_time of {_duration(deadline.seconds)} has passed,"
    return f"stopped before {engine.target}, as should_stop was set,"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def short_path(path: str) -> str:
    """Return a path relative to the working directory if it is below it.

    Example:
        >>> short_path("runs/a/last.pt")
        'runs/a/last.pt'
    """
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return os.fspath(path)


def _why_device(engine: Engine) -> str:
    if engine.settings.device_asked is not None:
        return f"device={engine.settings.device_asked!r}"
    if engine.device.type == "cpu":
        return "not specified, and neither CUDA nor MPS is available"
    return "not specified; CUDA is preferred, then MPS, then the CPU"


def _precision(engine: Engine) -> str:
    name = engine.precision.name
    if name is None:
        return "full (no mixed precision requested)"
    if engine.precision.scaled:
        return f"{name} by autocast, gradients scaled from {engine.precision.scaler.get_scale():g}"
    return f"{name} by autocast, no gradient scaling needed"


def _ranks(engine: Engine) -> str:
    size = distributed.world_size()
    if not distributed.is_distributed():
        return "1 (no process group)"
    here = f"{size} (process group {torch.distributed.get_backend()}), this is rank {distributed.rank()}"
    return f"{here}; {_model(engine)}"


def _model(engine: Engine) -> str:
    if distributed.replicated(engine.model) is not None:
        return "one replica of the model each, gradients all-reduced during the backward pass"
    if not distributed.is_sharded(engine.model):
        return "one model each, gradients not exchanged by treadle"
    names = {module: clean_name(name) for name, module in distributed.unwrap(engine.model).named_modules()}
    blocks = [names[part] for part in distributed.sharded_parts(engine.model) if names.get(part)]
    shown = ", ".join(blocks[:8]) + (f" and {len(blocks) - 8} more" if len(blocks) > 8 else "")
    return f"the model is sharded; gathered one at a time: {shown or 'only the whole model'}"


def _start(engine: Engine) -> str:
    if not engine.progress.step:
        return "fresh: no checkpoint specified or found"
    source = engine.state.source or "a loaded state or this trainer's earlier run"
    return f"step {engine.progress.step}, epoch {engine.epoch}, from {source}"


def _non_finite(engine: Engine) -> str:
    retries = engine.max_non_finite_grad_retries
    last = "an error" if engine.guard.plan is None else engine.guard.plan.described
    at_once = f"{last} immediately" if engine.guard.plan is None else last
    policy = f"up to {retries} retries with fresh data, then {last}" if retries else at_once
    if engine.guard.deferred:
        return f"{policy}; skipped on the device, checked by the host some steps later"
    if engine.device.type == "cpu":
        return f"{policy}; checking is free on the CPU"
    return f"{policy}; one device read per step (a fused optimizer without retries needs none)"
