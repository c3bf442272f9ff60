"""Reasons why the steps of an engine cannot be captured, as far as known before the first step."""

from __future__ import annotations

import torch

from treadle.capture.checkpointing import is_checkpointed
from treadle.engine import Engine
from treadle.engine.hook import listeners
from treadle.optim.late_flags import can_be_recorded


def reason_against(engine: Engine) -> str | None:
    """Return the reason why capturing is impossible, as far as known before the first step."""
    hooks = listeners(engine.hooks, "on_before_optimizer_step")
    listening = [hook.state_key for hook in hooks if not getattr(hook.on_before_optimizer_step, "capturable", False)]
    observed = [name for name in ("pre", "post") if getattr(engine.optimizer, f"_optimizer_step_{name}_hooks", None)]
    if engine.device.type != "cuda":
        return f"the device is {engine.device}; CUDA graphs need a CUDA device"
    if engine.num_ranks > 1 and (reason := reason_against_ranks(engine)) is not None:
        return f"there are {engine.num_ranks} ranks: {reason}"
    if not can_be_recorded(engine.optimizer, engine.device):
        return (
            f"the step of {type(engine.optimizer).__name__} cannot be captured; build it with fused=True, or "
            "capturable=True if it has no fused, in every parameter group"
        )
    if listening:
        return (
            f"{', '.join(listening)} acts before the optimizer step, which is inside the graph; remove it, or mark "
            "that method with treadle.hooks.base.capturable if it only launches work on the device"
        )
    if observed:
        return "the optimizer has step hooks, which would run only during capture; remove them"
    if is_checkpointed(engine.model):
        return "gradient checkpointing keeps the random state of each block on the host; turn one of the two off"
    if type(engine).train_step is not Engine.train_step:
        return f"{type(engine).__name__} overrides train_step"
    return None


def reason_against_ranks(engine: Engine) -> str | None:
    """Return the reason why capturing is impossible on several ranks."""
    if engine.capture == "auto":
        return "a step with an all-reduce is captured only with capture=True"
    if not engine.exchange.recordable:
        return "a graph can include only the NCCL all-reduce of replicas; use parallel='ddp'"
    if hasattr(engine.task, "prepare_batch"):
        return "the trainer counts each batch on the host, and counts may differ between ranks"
    if not (engine.guard.deferred or engine.guard.can_wait):
        return "with retries, a policy, or fp16 and an optimizer that is not fused, the host decides on each step"
    if torch.cuda.current_stream(engine.device) == torch.cuda.default_stream(engine.device):
        return (
            "DistributedDataParallel keeps autograd nodes of the stream it was built on, and the default stream "
            "cannot be captured; build the model and train inside `with torch.cuda.stream(torch.cuda.Stream()):`"
        )
    return None
