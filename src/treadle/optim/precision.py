"""Mixed precision: autocast, loss scaling, unscaling, and the state of the scaler."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from treadle.errors import ConfigError
from treadle.nested import map_nested_tensor

PrecisionName = Literal["bf16", "fp16"]
_HALF = (torch.bfloat16, torch.float16)
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_OF_A_STEP = ("scale", "unscale_", "update")  # methods of a scaler
_NONE: AbstractContextManager[Any] = contextlib.nullcontext()


@functools.cache
def _keeps_casts_without_a_graph() -> bool:
    """Return whether autocast reuses weights cast under ``no_grad`` in later forwards, as torch 2.7 does.

    Such a weight would silently get no gradient.
    """
    with torch.inference_mode(False), torch.enable_grad():
        weight = torch.ones(1, 1, device="cpu", requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=True):
            with torch.no_grad():
                weight.mm(weight)
            return not weight.mm(weight).requires_grad


def check_precision(name: Any, *, argument: str = "precision") -> None:
    """Raise ConfigError for an unknown precision.

    Args:
        name: None, ``"bf16"`` or ``"fp16"``.
        argument: name of the argument.
    """
    if name is not None and name not in get_args(PrecisionName):
        raise ConfigError(" is not known; use None, 'bf16' or 'fp16'", argument=argument, value=name)


class Precision:
    """Autocast and gradient scaling for one device type.

    fp16 uses a gradient scaler; bf16 and full precision do not.

    Args:
        name: None (full precision), ``"bf16"`` or ``"fp16"``.
        device: device, which determines the autocast device type.
        scaler: a scaler to use in place of the default one.

    Attributes:
        scaled: whether gradients are scaled (fp16).

    Raises:
        ConfigError: the name is unknown, or torch has no autocast for the device type.

    Example:
        >>> Precision(None, torch.device("cpu")).name is None
        True
    """

    def __init__(self, name: PrecisionName | None, device: torch.device, *, scaler: torch.amp.GradScaler | None = None):
        check_precision(name)
        if name is not None and not torch.amp.is_autocast_available(device.type):
            raise ConfigError(
                f"torch has no autocast on {device.type!r}; use precision=None", argument="precision", value=name
            )
        self.name = name
        self.device = device
        self.scaler = scaler or torch.amp.GradScaler(device.type, enabled=name == "fp16")
        self.scaled = bool(self.scaler.is_enabled())
        self._cache = False if name is not None and _keeps_casts_without_a_graph() else None  # None is torch's default
        self._unscaled = False  # between unscale and the verdict on the step

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of the forward pass, in training and evaluation alike."""
        if self.name is None:
            return _NONE
        return torch.autocast(self.device.type, dtype=_DTYPES[self.name], cache_enabled=self._cache)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to call ``backward`` on."""
        return self.scaler.scale(loss) if self.scaled else loss

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, in place."""
        if not self.scaled:
            return
        if self._unscaled:  # an exception or Ctrl-C interrupted the previous step
            self.skipped()
        self.scaler.unscale_(optimizer)
        self._unscaled = True

    def applied(self) -> None:
        """Record that the step was applied; the scale may grow."""
        if self.scaled and self._saw_gradients():
            self.scaler.update()
        self._unscaled = False

    def skipped(self) -> None:
        """Record that the step was dropped with finite gradients; the scale is kept."""
        if self.scaled and self._unscaled:
            self.scaler.update(self.scaler.get_scale())
        self._unscaled = False

    def refused(self) -> bool:
        """Lower the scale after a non-finite gradient.

        Returns:
            Whether lowering was possible, so that the step counts as skipped; False without a scaler, or if the scale
            would fall below 1.0, where it stays.
        """
        if not self.scaled:
            return False
        before = self.scaler.get_scale()
        lowered = before * self.scaler.get_backoff_factor()
        if self._saw_gradients():
            # The elements on this rank may be finite although their norm, or that of another rank, is not.
            self.flag_of_step(self.device).fill_(1.0)
            self.scaler.update()  # also resets the count of steps until the scale may grow
        self.scaler.update(lowered if lowered >= 1.0 else before)
        self._unscaled = False
        return lowered >= 1.0

    @property
    def moves_on_device(self) -> bool:
        """Whether the scaler is torch's, whose scale can follow a step without the host."""
        kind = type(self.scaler)
        own = [name for name in _OF_A_STEP if getattr(kind, name) is not getattr(torch.amp.GradScaler, name)]
        return self.scaled and not own

    def scale_tensors(self) -> list[Tensor]:
        """Return the scale, and the count of steps until it may grow, on the device; nothing before the first step."""
        scale, growth = self.scaler._scale, self.scaler._growth_tracker
        return [] if scale is None or growth is None else [scale, growth]

    def flag_of_step(self, device: torch.device) -> Tensor:
        """Return the flag of infinite gradients in the current step, 0-d, which the next update of the scale reads."""
        found = [flag for state in self._seen_gradients() for flag in state["found_inf_per_device"].values()]
        if not found:
            return torch.zeros((), device=device)
        whole: Tensor = found[0]
        for flag in found[1:]:  # of a model on several devices
            whole = torch.maximum(whole, flag.to(whole.device, non_blocking=True))
        if len(found) > 1:
            for state in self._seen_gradients():
                state["found_inf_per_device"] = {whole.device: whole}
        return whole

    @torch.no_grad()
    def move_on_device(self, flag: Tensor, ended: Tensor) -> None:
        """Lower the scale if a flag is set, else count towards its growth, without reading the device.

        Args:
            flag: result of :meth:`flag_of_step`.
            ended: set if the scale would fall below 1.0, where it stays.
        """
        self._unscaled = False
        if not self._saw_gradients():
            return
        (scale, _) = self.scale_tensors()
        before = scale.clone()
        self.scaler.update()
        low = torch.logical_and(flag, scale < 1.0)
        torch.maximum(ended, low, out=ended)
        torch.where(low, before, scale, out=scale)

    def forget_recorded(self, optimizer: Optimizer) -> Tensor | None:
        """Reset the unscaled state after capture; return the tensor in which replays record infinite gradients.

        None without a scaler, or if the step moves the scale itself.
        """
        if not self.scaled:
            return None
        state = self.scaler._per_optimizer_states.pop(id(optimizer), {"found_inf_per_device": {}})
        self._unscaled = False
        return next(iter(state["found_inf_per_device"].values()), None)

    def note_replayed(self, optimizer: Optimizer, found: Tensor | None) -> None:
        """Record that a replay has unscaled the gradients.

        Args:
            optimizer: optimizer of the captured step.
            found: result of :meth:`forget_recorded`.
        """
        if found is not None:
            self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {found.device: found}
            self._unscaled = True

    def _seen_gradients(self) -> list[dict[str, Any]]:
        return [state for state in self.scaler._per_optimizer_states.values() if state["found_inf_per_device"]]

    def _saw_gradients(self) -> bool:
        return bool(self._seen_gradients())


@contextlib.contextmanager
def tf32(enabled: bool) -> Iterator[None]:
    """Allow TF32 in matmul and cuDNN inside the block, and restore the flags afterwards.

    Args:
        enabled: False leaves the flags unchanged.

    Example:
        >>> with tf32(True):
        ...     torch.backends.cuda.matmul.allow_tf32
        True
    """
    if not enabled:
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def in_full_precision(loss_fn: Callable[..., Any], outputs: Any, targets: Any, device: torch.device) -> Any:
    """Return ``loss_fn(outputs, targets)``, computed in float32 even under autocast.

    Args:
        loss_fn: the loss.
        outputs: model outputs; half-precision tensors are converted to float32.
        targets: passed unchanged.
        device: device whose autocast is disabled.
    """
    widened = widen(outputs) if isinstance(outputs, Tensor) else map_nested_tensor(widen, outputs)
    if not torch.is_autocast_enabled(device.type):
        return loss_fn(widened, targets)
    with torch.autocast(device.type, enabled=False):
        return loss_fn(widened, targets)


def widen(tensor: Tensor) -> Tensor:
    """Return a half-precision tensor as float32, any other unchanged."""
    return tensor.float() if tensor.dtype in _HALF else tensor
