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
            self.scaler.update()  # also resets the count of steps until the scale may grow
        # The elements on this rank may be finite although their norm, or that of another rank, is not.
        self.scaler.update(lowered if lowered >= 1.0 else before)
        self._unscaled = False
        return lowered >= 1.0

    def forget_recorded(self, optimizer: Optimizer) -> Tensor | None:
        """Reset the unscaled state after capture; return the tensor in which replays record infinite gradients.

        None without a scaler.
        """
        if not self.scaled:
            return None
        state = self.scaler._per_optimizer_states.pop(id(optimizer))
        self._unscaled = False
        (found,) = state["found_inf_per_device"].values()
        return found  # type: ignore[no-any-return]

    def note_replayed(self, optimizer: Optimizer, found: Tensor | None) -> None:
        """Record that a replay has unscaled the gradients.

        Args:
            optimizer: optimizer of the captured step.
            found: result of :meth:`forget_recorded`.
        """
        if found is not None:
            self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {found.device: found}
            self._unscaled = True

    def _saw_gradients(self) -> bool:
        states = self.scaler._per_optimizer_states.values()
        return any(state["found_inf_per_device"] for state in states)


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
