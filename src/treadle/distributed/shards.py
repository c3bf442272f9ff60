"""Sharded tensors: local shard, whole tensor, and placement of saved values.

Saved values are whole tensors, or references to tensors on disk of which each rank reads only its part. Neither needs a
collective: every rank takes its own slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from treadle.distributed.ranks import is_dtensor, rank


@dataclass(frozen=True)
class LocalShard:
    """Local shard of a tensor.

    Attributes:
        local: values of the shard.
        offsets: start of the shard in the whole tensor, by dimension.
        shape: shape of the whole tensor.
    """

    local: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@runtime_checkable
class Stored(Protocol):
    """Tensor on disk, read lazily."""

    shape: torch.Size
    dtype: torch.dtype

    def read(self, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a block of the tensor, on the CPU."""
        ...


def whole(saved: Tensor | Stored) -> Tensor:
    """Return a saved tensor in memory.

    Example:
        >>> whole(torch.ones(1))
        tensor([1.])
    """
    return saved if isinstance(saved, Tensor) else saved.read([0] * len(saved.shape), saved.shape)


def local_block(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and sizes of this rank's shard of a DTensor."""
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(chunk.offsets), tuple(chunk.sizes)


def without_pending_sums(tensor: Any) -> Any:
    """Return a sharded DTensor, reducing ``Partial`` placements."""
    from torch.distributed.tensor import Replicate

    waits = [placement.is_partial() for placement in tensor.placements]
    if not any(waits):
        return tensor
    placements = [Replicate() if wait else kept for wait, kept in zip(waits, tensor.placements, strict=True)]
    return tensor.redistribute(placements=placements)


def gathered(tensor: Any) -> Tensor:
    """Return the whole of a DTensor on rank 0, and a meta tensor on other ranks; collective."""
    full: Tensor = tensor.full_tensor()
    return full if rank() == 0 else torch.empty_like(full, device="meta")


def placed_like(saved: Any, live: Any) -> Any:
    """Return a saved value for copying into a live one: whole, or this rank's shard.

    Args:
        saved: a whole tensor, a stored one, or any other value, which is returned unchanged.
        live: a DTensor provides its mesh and placements; for anything else the whole is returned.

    Example:
        >>> placed_like(torch.ones(2), torch.zeros(2))
        tensor([1., 1.])
    """
    if not isinstance(saved, Tensor | Stored) or is_dtensor(saved):
        return saved
    if not is_dtensor(live) or saved.shape != live.shape:
        return whole(saved)
    from torch.distributed.tensor import DTensor

    offsets, sizes = local_block(live)
    if isinstance(saved, Tensor):
        local = saved[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))].clone()
    else:
        local = saved.read(offsets, sizes)
    local = local.to(live.to_local().device)
    return DTensor.from_local(
        local, live.device_mesh, live.placements, run_check=False, shape=live.shape, stride=live.stride()
    )


def placed_state(saved: Any, parameter: Tensor) -> Any:
    """Return an entry of an optimizer's state placed like its parameter: sharded alike, or replicated.

    Args:
        saved: a whole or a stored tensor of any shape, or another value.
        parameter: the live parameter that it belongs to.
    """
    if not isinstance(saved, Tensor | Stored) or not is_dtensor(parameter) or is_dtensor(saved):
        return placed_like(saved, None)
    if saved.shape == parameter.shape and len(saved.shape):
        return placed_like(saved, parameter)
    if not len(saved.shape):  # a step counter, which torch keeps as a plain tensor
        return whole(saved)
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    value = whole(saved).to(parameter.to_local().device)  # type: ignore[attr-defined]
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
