"""Flight recorder of a step: its batch, its sample ids, and the origin of the first non-finite number."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from treadle import distributed
from treadle.capture.compile import uncompiled
from treadle.nested import elements, flatten_nested_dict
from treadle.optim.gradients import total_norm
from treadle.optim.loss_weights import GroupWeights
from treadle.optim.nonfinite import BufferCopies
from treadle.optim.optimizer import parameter_names
from treadle.seed import RngState
from treadle.task import as_step_output

if TYPE_CHECKING:
    from treadle.engine import Engine

_PLAIN = (bool, int, float, str, type(None))


def ids_as_plain(ids: Any) -> Any:
    """Return sample ids as lists, numbers and strings, calling them first if callable.

    Example:
        >>> ids_as_plain([torch.tensor([3, 1]), range(2), np.int64(5)])
        [[3, 1], [0, 1], 5]
    """
    if callable(ids):
        return ids_as_plain(ids())
    if isinstance(ids, (Tensor, np.ndarray, np.generic)):
        return ids.tolist()
    if isinstance(ids, (list, tuple, range)):
        return [ids_as_plain(item) for item in ids]
    return ids if isinstance(ids, _PLAIN) else repr(ids)


def batch_as_plain(batch: Any) -> Any:
    """Return a copy of a batch on the CPU that ``torch.load(weights_only=True)`` reads.

    Args:
        batch: tensors, arrays, numbers and strings in dicts, lists and tuples.

    Raises:
        TypeError: it holds another type.

    Example:
        >>> batch_as_plain((torch.ones(1), {"name": "a"}))
        (tensor([1.]), {'name': 'a'})
    """
    if type(batch) in _PLAIN:
        return batch
    if isinstance(batch, Tensor) and type(batch) in (Tensor, nn.Parameter):
        return batch.detach().to("cpu", copy=True)
    if isinstance(batch, np.ndarray) and batch.dtype.kind in "biufc":
        return torch.from_numpy(np.array(batch))
    if isinstance(batch, Mapping) and all(type(key) in _PLAIN for key in batch):
        return {key: batch_as_plain(value) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(batch_as_plain(item) for item in batch)
    if isinstance(batch, list):
        return [batch_as_plain(item) for item in batch]
    raise TypeError(f"a {type(batch).__module__}.{type(batch).__qualname__} is not a plain tensor or value")


def is_finite(value: Any) -> bool:
    """Return whether every floating-point tensor in a nesting is finite; waits for the device.

    Example:
        >>> is_finite((torch.ones(2), [torch.tensor(float("nan"))]))
        False
    """
    if isinstance(value, Tensor):
        local = elements(value.to_local() if hasattr(value, "to_local") else value)
        return not (local.is_floating_point() or local.is_complex()) or bool(torch.isfinite(local).all())
    if isinstance(value, Mapping):
        return all(is_finite(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return all(is_finite(item) for item in value)
    return not isinstance(value, float) or math.isfinite(value)


def bad_inputs(batches: Sequence[Any]) -> list[str]:
    """Return the paths in a group's batches with non-finite numbers, such as ``"0/x"``."""
    table = {str(number): _as_dicts(batch) for number, batch in enumerate(batches)}
    flat = flatten_nested_dict(table)
    return ["/".join(map(str, path)) for path, value in flat.items() if not is_finite(value)]


def _as_dicts(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_dicts(item) for key, item in value.items()}
    return {i: _as_dicts(v) for i, v in enumerate(value)} if isinstance(value, (list, tuple)) else value


class AttemptStart:
    """Initial state of an attempt at a step: RNG, and buffers that a forward pass may change.

    Args:
        model: model whose current modules are covered.
    """

    def __init__(self, model: nn.Module):
        self.rng: RngState | None = None
        self._buffers = BufferCopies(model)

    def note(self) -> None:
        """Record the current state."""
        self.rng = RngState.capture()
        self._buffers.update()

    def restore_buffers(self) -> None:
        """Restore the buffers."""
        self._buffers.restore()


@dataclass
class Finding:
    """Origin of the first non-finite number of a step.

    Attributes:
        module: name of the first module whose output was not finite, in the order of the forward pass, or None.
        module_type: class of the module.
        micro_batch: index of the micro-batch in the group, from 0.
        parameter: name of the first parameter whose gradient was not finite, in the order of the backward pass.
        loss_finite: whether every loss was finite.
        losses: losses of the second run, one per micro-batch.
        error: why the second run was aborted, or None.
    """

    module: str | None = None
    module_type: str | None = None
    micro_batch: int | None = None
    parameter: str | None = None
    loss_finite: bool = True
    losses: list[float | None] = field(default_factory=list)
    error: str | None = None

    @property
    def where(self) -> str:
        """Description of the finding."""
        if self.module is not None:
            return f"output of module {self.module!r} ({self.module_type})"
        if not self.loss_finite:
            return "the loss, while every module's output was finite"
        if self.parameter is not None:
            return f"gradient of {self.parameter!r}, while the loss was finite"
        return self.error or "not found: the second run was finite throughout"


def find_non_finite(engine: Engine, attempt: AttemptStart) -> Finding:
    """Rerun the engine's current group from its initial state, checking every module and gradient.

    RNG and buffers are restored afterwards; the gradients are those of the second run.

    Args:
        engine: engine whose ``group`` was refused.
        attempt: state recorded at the start of the refused attempt.
    """
    finding = Finding()
    rng = RngState.capture()
    try:
        if attempt.rng is not None:
            attempt.rng.restore()
        attempt.restore_buffers()
        with _checks_installed(engine.model, finding), uncompiled(engine.model):
            _run_again(engine, finding)
    except Exception as error:  # noqa: BLE001  (such as out of memory: partial results are still useful)
        finding.error = f"the second run failed: {type(error).__name__}: {error}"
    finally:
        attempt.restore_buffers()
        rng.restore()
    return finding


def _run_again(engine: Engine, finding: Finding) -> None:
    """Run forward and backward on the group like the step, but without all-reducing gradients."""
    engine.optimizer.zero_grad(set_to_none=True)
    group = engine.attempt.group
    one_rank = distributed.world_size() == 1
    weights = GroupWeights(len(group.batches), device=engine.device, undivided=engine.attempt.term_totals is not None)
    for number, batch in enumerate(group.batches):
        finding.micro_batch = number if finding.module is None else finding.micro_batch
        with engine.exchange.second_look(last=number + 1 == len(group.batches)):
            with engine.precision.autocast():
                output = as_step_output(engine.forward(batch), training=True)
            loss = engine.exchange.loss_of(output, weights.scaled if one_rank else lambda output: output.loss)
            finding.losses.append(None if output.loss is None else float(output.loss.detach()))
            finding.loss_finite &= output.loss is None or is_finite(output.loss.detach())
            if loss is not None:
                engine.precision.scale(loss).backward()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _checks_installed(model: nn.Module, finding: Finding) -> Iterator[None]:
    """Check every module's output and every parameter's gradient inside the block."""
    inner = distributed.unwrap(model)
    names = parameter_names(model)
    handles = []

    def look_at(name: str) -> Any:
        def after_forward(module: nn.Module, inputs: Any, output: Any) -> None:
            if finding.module is None and not is_finite(output):
                finding.module, finding.module_type = name or "<the model itself>", type(module).__name__

        return after_forward

    def after_accumulation(parameter: Tensor) -> None:
        if finding.parameter is None and parameter.grad is not None and not is_finite(parameter.grad):
            finding.parameter = names.get(id(parameter), "<unnamed>")

    try:
        for name, module in inner.named_modules():
            handles.append(module.register_forward_hook(look_at(name)))
        for parameter in inner.parameters():
            if parameter.requires_grad:
                handles.append(parameter.register_post_accumulate_grad_hook(after_accumulation))  # type: ignore[no-untyped-call]
        yield
    finally:
        for handle in handles:
            handle.remove()


def layer_norms(engine: Engine) -> dict[str, Tensor]:
    """Return the 2-norm of the current gradient for each layer, the module that owns the parameters.

    Example:
        >>> # {"0": tensor(1.5), "2": tensor(0.2)}
    """
    parts: dict[str, list[Tensor]] = {}
    names = parameter_names(engine.model)
    for group in engine.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                layer = names.get(id(parameter), "<unnamed>").rpartition(".")[0] or "<the model itself>"
                parts.setdefault(layer, []).append(parameter.grad)
    return {layer: total_norm(grads) for layer, grads in parts.items()}
