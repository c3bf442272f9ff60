"""Handling of an out-of-memory error: save the last finished step and advise what to change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from treadle import distributed
from treadle.errors import OutOfMemoryError

if TYPE_CHECKING:
    from treadle.engine.loop import Engine

_OF_THE_HOST = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
_ACCUMULATION = {
    "mini": "gradient_accumulation_steps", "functional": "gradient_accumulation_steps", "astro": "grad_accum_steps",
}  # fmt: skip
"""Face -> its setting, where it is not ``accumulation_steps``."""


@runtime_checkable
class Saves(Protocol):
    """Hook that can save the current state at any step boundary."""

    def save(self, trainer: Engine) -> None:
        """Save the state, once per step."""

    def wait_for_writes(self) -> None:
        """Wait until the state is on disk."""


@contextlib.contextmanager
def explaining_out_of_memory(engine: Engine) -> Iterator[None]:
    """Save what can be saved, and turn an out-of-memory error into one that names batch, setting and fix.

    The failed step is undone: its data is used again. The saved state is that of the last finished step, except for the
    random numbers that the failed step drew and the buffers that its forward pass changed: the run continues from
    there, but not to the bit. Once gradients exist, or on several ranks, nothing is saved: the weights may be half
    updated, or the state cannot be gathered.

    Raises:
        OutOfMemoryError: memory ran out.
    """
    try:
        yield
    except BaseException as error:
        if not is_out_of_memory(error):
            raise
        where, fix = _where(engine), _fix(engine)
        saved = _save(engine)
        raise OutOfMemoryError(f"out of memory {where}. {fix}. {saved}. {_first_line(error)}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, on a device or on the host.

    Example:
        >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory.")), is_out_of_memory(ValueError("no memory"))
        (True, False)
    """
    if isinstance(error, OutOfMemoryError):
        return False  # explained already
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OF_THE_HOST)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return f"PyTorch's message: {text.splitlines()[0]}"


def _where(engine: Engine) -> str:
    parts = [f"at step {engine.progress.step} on {engine.device}{_used(engine.device)}"]
    size = _batch_size(engine)
    if size is not None:
        parts.append(f"with micro-batches of {size}")
    return f"{' '.join(parts)} and {_accumulation(engine)}={engine.settings.accumulation_steps}"


def _accumulation(engine: Engine) -> str:
    return _ACCUMULATION.get(engine.face, "accumulation_steps")


def _used(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    total = torch.cuda.get_device_properties(device).total_memory
    return f" ({torch.cuda.max_memory_reserved(device) / 2**30:.1f} of {total / 2**30:.1f} GiB at the peak)"


def _fix(engine: Engine) -> str:
    size, steps, name = _batch_size(engine), engine.settings.accumulation_steps, _accumulation(engine)
    if size is not None and size < 2:
        return "Use a smaller model, mixed precision, or checkpointed activations"
    smaller = "half the batch size" if size is None else f"a batch size of {(size + 1) // 2}"
    return (
        f"Use {smaller} and {name}={2 * steps}, which computes the same step in smaller parts, or use mixed precision"
    )


def _batch_size(engine: Engine) -> int | None:
    """Return the batch size: what the forward pass counted, else the first dimension of the first tensor."""
    counted = [output.num_samples for output in engine.attempt.outputs if output.num_samples]
    if counted:
        return int(counted[0])
    return next((size for batch in engine.attempt.group.batches if (size := _first_size(batch)) is not None), None)


def _first_size(batch: Any) -> int | None:
    graphs = getattr(batch, "num_graphs", None)
    if isinstance(graphs, int):
        return graphs
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else None
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((size for part in parts if (size := _first_size(part)) is not None), None)


def _save(engine: Engine) -> str:
    """Save the last finished step if possible; return a description of the outcome."""
    writes = _writers(engine)
    if not writes:
        return "Nothing was saved, as no hook saves checkpoints"
    if distributed.world_size() > 1:
        return (
            "A resumed run continues from the last checkpoint: nothing was saved now, as the other ranks are not "
            "at this point"
        )
    if not _undo_step(engine):
        return "A resumed run continues from the last checkpoint: the state in memory is not that of a finished step"
    if engine.progress.step == 0:
        return "Nothing was saved, as no step was finished"
    try:
        for write in writes:
            write()
    except Exception as failure:  # noqa: BLE001  (the error of the memory is the one to raise)
        engine.logger.error("step %d could not be saved: %s", engine.progress.step, failure)
        return "A resumed run continues from the last checkpoint"
    return f"Step {engine.progress.step} was saved; a resumed run continues from there"


def _writers(engine: Engine) -> list[Callable[[], Any]]:
    if engine.signals.plans:
        return [plan.write for plan in engine.signals.plans]
    saving = [hook for hook in engine.hooks if isinstance(hook, Saves)]
    return [lambda hook=hook: _save_by(hook, engine) for hook in saving]  # type: ignore[misc]


def _save_by(hook: Saves, engine: Engine) -> None:
    hook.save(engine)
    hook.wait_for_writes()


def _undo_step(engine: Engine) -> bool:
    """Undo a step that has no gradients yet, and free its memory; return whether there was one."""
    info, batches = engine.attempt.info, engine.attempt.group.batches
    begun = bool(info) and "grad_norm" not in info and "step_time" not in info
    if not begun or engine.progress.tries > 1:  # after a refused group the position in the data is unknown
        return False
    if engine.settings.capture is not False:  # while a step is recorded, the weights are those of a trial
        return False
    engine.cursor.give_back(len(batches))
    engine.progress.undo_step(len(batches))
    engine.attempt.discard_outputs()
    engine.optimizer.zero_grad(set_to_none=True)
    return True
