"""Ranks: who am I, one decision for all, sums over ranks. Without a process group: one rank."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel


def is_distributed() -> bool:
    """Returns whether the user has started a process group."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Returns the rank of this process, 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Returns the number of ranks, 1 without a process group."""
    return dist.get_world_size() if is_distributed() else 1


def collective_device(device: torch.device) -> torch.device:
    """Returns where a tensor must lie for a collective: the accelerator under NCCL, else the CPU."""
    return device if dist.get_backend() == "nccl" else torch.device("cpu")


def sum_over_ranks(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns the sum of a tensor over all ranks on the tensor's own device; ``tensor`` on one rank."""
    if world_size() == 1:
        return tensor
    moved = tensor.detach().to(collective_device(device), copy=True)
    dist.all_reduce(moved)
    return moved.to(tensor.device)


def max_over_ranks(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns the maximum of a tensor over all ranks on the tensor's own device; ``tensor`` on one rank."""
    if world_size() == 1:
        return tensor
    moved = tensor.detach().to(collective_device(device), copy=True)
    dist.all_reduce(moved, op=dist.ReduceOp.MAX)
    return moved.to(tensor.device)


def agree(value: int, device: torch.device) -> int:
    """Returns the largest value any rank gives: one all-reduce, one decision for all.

    Example:
        >>> agree(3, torch.device("cpu"))
        3
    """
    if world_size() == 1:
        return value
    return int(max_over_ranks(torch.tensor(value, dtype=torch.int64), device).item())


def unwrap(module: nn.Module) -> nn.Module:
    """Peels ``torch.compile``, DistributedDataParallel, DataParallel and AveragedModel, in any nesting.

    Example:
        >>> unwrap(nn.DataParallel(nn.Linear(1, 1)))
        Linear(in_features=1, out_features=1, bias=True)
    """
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel, AveragedModel)
    while True:
        inner: Any = getattr(module, "_orig_mod", None)
        if isinstance(inner, nn.Module):
            module = inner
        elif isinstance(module, wrappers):
            module = module.module
        else:
            return module


def no_sync(model: nn.Module) -> AbstractContextManager[Any]:
    """Returns the model's own ``no_sync`` context where it has one, else a context that does nothing."""
    context = getattr(model, "no_sync", None)
    return context() if callable(context) else contextlib.nullcontext()


def gather_objects(value: Any) -> list[Any]:
    """Returns one value per rank, in rank order, on every rank."""
    if world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, value)
    return gathered
