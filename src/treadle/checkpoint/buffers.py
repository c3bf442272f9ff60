"""Reusable host memory for copies of a training state."""

from __future__ import annotations

import logging
from collections.abc import Hashable

import torch
from torch import Tensor

_log = logging.getLogger("treadle.checkpoint")


class HostBuffers:
    """CPU memory for copies of tensors, reused once the copy before last has released it.

    Fresh memory costs several times the copy itself, since the system has to find and clear each page. Copies from a
    CUDA device go into pinned memory and run at bus speed.

    Example:
        >>> buffers = HostBuffers()
        >>> first = buffers.copy(torch.ones(3)); buffers.ready(); buffers.reclaim()
        >>> buffers.copy(torch.zeros(3)) is first
        True
    """

    def __init__(self) -> None:
        self._free: dict[Hashable, list[Tensor]] = {}
        self._in_use: list[tuple[Hashable, Tensor]] = []
        self._devices: set[torch.device] = set()
        self._pinning = True

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy in host memory; copies of device tensors are complete after :meth:`ready`."""
        if tensor.device.type not in ("cpu", "cuda") or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return tensor.to("cpu", copy=True)  # rare, and not worth a buffer
        key = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device.type)
        free = self._free.get(key)
        buffer = free.pop() if free else self._new(tensor)
        buffer.copy_(tensor, non_blocking=True)
        self._in_use.append((key, buffer))
        if tensor.device.type != "cpu":
            self._devices.add(tensor.device)
        return buffer

    def _new(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cuda" and self._pinning:
            try:
                return torch.empty_like(tensor, device="cpu", pin_memory=True)
            except RuntimeError as error:
                self._pinning = False
                _log.info("no pinned memory, so checkpoints are copied more slowly: %s", error)
        return torch.empty_like(tensor, device="cpu")

    def ready(self) -> None:
        """Wait for the copies from devices, and free memory that this round did not need."""
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()
        self._devices.clear()
        self._free.clear()

    def reclaim(self) -> None:
        """Reclaim all memory: copies that are still referenced will change."""
        for key, buffer in self._in_use:
            self._free.setdefault(key, []).append(buffer)
        self._in_use.clear()

    def drop(self) -> None:
        """Free all memory."""
        self._in_use.clear()
        self._free.clear()


class LiveTensors(HostBuffers):
    """Copies only where needed, for a save that ends before training continues.

    Example:
        >>> weight, part = torch.ones(3), torch.ones(3)[:2]
        >>> LiveTensors().copy(weight) is weight, LiveTensors().copy(part) is part
        (True, False)
    """

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a CPU tensor that spans its whole storage unchanged, and a copy of any other."""
        if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return tensor.to("cpu", copy=True)
        is_whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        return tensor if is_whole else tensor.to("cpu", copy=True)  # torch.save writes the whole storage of a view


class NoBuffers(HostBuffers):
    """Buffers that copy nothing, for a rank that takes part in collecting a state but does not write.

    Example:
        >>> NoBuffers().copy(torch.ones(3)).device.type
        'meta'
    """

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a meta tensor."""
        return torch.empty_like(tensor, device="meta")
