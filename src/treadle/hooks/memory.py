"""CudaMaxMemoryHook: peak GPU memory of each step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from treadle.engine.hook import BaseHook, capturable, read_only

if TYPE_CHECKING:
    from treadle.engine import Engine


class CudaMaxMemoryHook(BaseHook):
    """Hook that records the peak allocated memory of each step in GiB, as ``trainer.step_info["max_memory"]``.

    ``LoggingHook`` and ``ProgressHook`` show it, whether listed before or after this hook. Without CUDA it only warns.

    Example:
        >>> hook = CudaMaxMemoryHook()
    """

    writes = True

    def __init__(self) -> None:
        self._device: torch.device | None = None
        self._warned = False

    def on_before_train(self, trainer: Engine) -> None:
        """Check for CUDA."""
        self._device = trainer.device if trainer.device.type == "cuda" and torch.cuda.is_available() else None
        if self._device is None and not self._warned:
            self._warned = True
            trainer.logger.warning("CudaMaxMemoryHook: the device is %s, so no memory is measured", trainer.device)

    def on_before_step(self, trainer: Engine) -> None:
        """Reset the peak."""
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)

    @capturable
    @read_only
    def on_before_optimizer_step(self, trainer: Engine) -> None:
        """Store a lazily read value, for hooks that see the end of the step before this one."""
        if self._device is not None:
            trainer.step_info["max_memory"] = _Peak(self._device)

    def on_after_step(self, trainer: Engine) -> None:
        """Record the peak; the allocator counts on the host, so this does not wait for the device."""
        if self._device is not None:
            trainer.step_info["max_memory"] = float(_Peak(self._device))


class _Peak:
    def __init__(self, device: torch.device):
        self.device = device

    def __float__(self) -> float:
        return float(torch.cuda.max_memory_allocated(self.device)) / 2**30
