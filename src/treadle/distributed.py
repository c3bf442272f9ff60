"""Ranks: who am I, one decision for all, sums over ranks. Without a process group: one rank."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from treadle.errors import ConfigError

_BUCKET_ELEMENTS = 1 << 23
_control: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None  # the default group and the one made for it


def is_distributed() -> bool:
    """Returns whether the user has started a process group."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Returns the rank of this process, 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Returns the number of ranks, 1 without a process group."""
    return dist.get_world_size() if is_distributed() else 1


def control_group() -> dist.ProcessGroup:
    """Returns a gloo group of all ranks for values that the host decides by, so that no decision waits for a GPU.

    It is the default group where that one is gloo. Otherwise the first call makes it, which all ranks must do at the
    same point; an engine does it when it is prepared. For the main thread only: two threads would mix their messages.
    """
    global _control
    default = dist.group.WORLD
    if default is None:
        raise ConfigError("control_group: no process group was started; call torch.distributed.init_process_group()")
    if dist.get_backend() == "gloo":
        return default
    if _control is None or _control[0] is not default:
        _control = (default, dist.new_group(backend="gloo"))
    return _control[1]


def is_dtensor(tensor: Any) -> bool:
    """Returns whether a tensor is spread over ranks; does not import what makes such tensors."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_sharded(model: nn.Module) -> bool:
    """Returns whether a model has parameters that are spread over ranks, as ``fully_shard`` makes them.

    Example:
        >>> is_sharded(nn.Linear(1, 1))
        False
    """
    return any(is_dtensor(parameter) for parameter in model.parameters())


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor, in the same memory; a plain tensor is its own part.

    Example:
        >>> local(torch.ones(1))
        tensor([1.])
    """
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


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


def replicated(model: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """Returns the DistributedDataParallel around a model, compiled or not, or None."""
    inner: Any = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.parallel.DistributedDataParallel) else None


def local_backward(model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
    """Keeps ranks from exchanging gradients inside the block.

    Replicas never exchange in a backward pass: one without a loss on some rank would make the others wait for ever.
    :func:`exchange` does it afterwards. Other models exchange with the last micro-batch of a step.
    """
    replicas = replicated(model)
    if replicas is not None:
        replicas.require_forward_param_sync = False  # buffers are exchanged with the gradients
        return replicas.no_sync()
    return contextlib.nullcontext() if last else no_sync(model)


@torch.no_grad()
def exchange(model: nn.Module, device: torch.device) -> None:
    """Gives every replica the mean gradients over the ranks, and the buffers of rank 0.

    A rank without a gradient counts as zeros; a parameter without one on every rank stays without.
    """
    replicas = replicated(model)
    if replicas is None or world_size() == 1:
        return
    parameters = [parameter for parameter in replicas.parameters() if parameter.requires_grad]
    present = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
    used = max_over_ranks(present, device).tolist()
    grads = []
    for parameter, anywhere in zip(parameters, used, strict=True):
        if anywhere and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad is not None:
            grads.append(parameter.grad)
    for bucket in _buckets(grads):
        flat = torch.cat([grad.reshape(-1) for grad in bucket]) / world_size()
        flat = sum_over_ranks(flat, device)
        parts = torch.split(flat, [grad.numel() for grad in bucket])
        torch._foreach_copy_(bucket, [part.view_as(grad) for part, grad in zip(parts, bucket, strict=True)])
    if replicas.broadcast_buffers:
        for buffer in replicas.buffers():
            shared = buffer.to(collective_device(device))
            dist.broadcast(shared, src=0)
            buffer.copy_(shared)


def _buckets(grads: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Groups gradients of one type and place, up to a size that is worth a message."""
    buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for grad in grads:
        bucket = buckets.setdefault((grad.dtype, grad.device), [])
        if bucket and sum(other.numel() for other in bucket) + grad.numel() > _BUCKET_ELEMENTS:
            yield list(bucket)
            bucket.clear()
        bucket.append(grad)
    yield from (bucket for bucket in buckets.values() if bucket)


def gather_objects(value: Any) -> list[Any]:
    """Returns one value per rank, in rank order, on every rank."""
    if world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, value)
    return gathered
