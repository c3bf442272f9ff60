"""The block of decisions that a run logs when it starts: each with its reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from treadle import distributed
from treadle.distributed.state_names import clean_name

if TYPE_CHECKING:
    from treadle.engine.loop import Engine


def start_block(engine: Engine) -> str:
    """Returns what was decided for a run and why, one line each, hooks in the order in which they are called."""
    lines = {
        "device": f"{engine.device} ({_why_device(engine)})",
        "precision": _precision(engine),
        "ranks": _ranks(engine),
        "start": _start(engine),
        "target": f"{engine.target}",
        "non-finite": _non_finite(engine),
        "hooks": ", ".join(hook.state_key for hook in engine.hooks) or "none",
    }
    return "\n".join(["training starts", *(f"  {name:<11}{text}" for name, text in lines.items())])


def _why_device(engine: Engine) -> str:
    if engine.settings.device_asked is not None:
        return f"asked for as {engine.settings.device_asked!r}"
    if engine.device.type == "cpu":
        return "none was asked for and neither CUDA nor MPS is here"
    return "none was asked for; CUDA comes first, then MPS, then the CPU"


def _precision(engine: Engine) -> str:
    name = engine.precision.name
    if name is None:
        return "full (no mixed precision was asked for)"
    if engine.precision.scaled:
        return f"{name} by autocast, gradients scaled from {engine.precision.scaler.get_scale():g}"
    return f"{name} by autocast, no gradient scaling needed"


def _ranks(engine: Engine) -> str:
    size = distributed.world_size()
    if not distributed.is_distributed():
        return "1 (no process group was started)"
    here = f"{size} (process group {torch.distributed.get_backend()}), this is rank {distributed.rank()}"
    return f"{here}; {_model(engine)}"


def _model(engine: Engine) -> str:
    if distributed.replicated(engine.model) is not None:
        return "a replica of the model on each, gradients exchanged during the backward pass"
    if not distributed.is_sharded(engine.model):
        return "a model on each, whose gradients are not exchanged here"
    names = {module: clean_name(name) for name, module in distributed.unwrap(engine.model).named_modules()}
    blocks = [names[part] for part in distributed.sharded_parts(engine.model) if names.get(part)]
    shown = ", ".join(blocks[:8]) + (f" and {len(blocks) - 8} more" if len(blocks) > 8 else "")
    return f"the model is sharded; gathered one at a time: {shown or 'nothing but the whole'}"


def _start(engine: Engine) -> str:
    if not engine.progress.step:
        return "fresh: no checkpoint was named or found"
    source = engine.state.source or "a state that was loaded, or this trainer's own"
    return f"step {engine.progress.step}, epoch {engine.epoch}, from {source}"


def _non_finite(engine: Engine) -> str:
    retries = engine.max_non_finite_grad_retries
    last = "an error" if engine.guard.plan is None else engine.guard.plan.described
    at_once = f"{last} at once" if engine.guard.plan is None else last
    policy = f"up to {retries} retries with fresh data, then {last}" if retries else at_once
    if engine.guard.deferred:
        return f"{policy}; the optimizer skips on the device and the host looks some steps later"
    if engine.device.type == "cpu":
        return f"{policy}; looking costs nothing on the CPU"
    return f"{policy}; one read a step (a fused optimizer without retries needs none)"
