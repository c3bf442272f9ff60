"""Ranks and collectives between hosts: rank, common decisions, sums, messages. Without a process group: one rank."""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from treadle.errors import ConfigError

_FEW = 4  # number of ranks up to which gloo's own collectives are no slower than recursive doubling
_TAG = 0x74726561  # tag of messages, distinct from the user's

_control: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None  # the default group and the one created for it


def is_distributed() -> bool:
    """Return whether the user has initialized a process group."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Return the rank of this process, 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Return the number of ranks, 1 without a process group."""
    return dist.get_world_size() if is_distributed() else 1


def control_group(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Return a gloo group of all ranks for host decisions, so that no decision waits for a GPU.

    It is the default group if that uses gloo. Otherwise the first call creates it, which all ranks must do at the same
    point; an engine does it in ``prepare``. For the main thread only: two threads would mix their messages.

    Args:
        timeout: timeout of the group, if this call creates one; None: torch's default for gloo, 30 minutes.
    """
    global _control
    default = dist.group.WORLD
    if default is None:
        raise ConfigError(
            "no process group was started; call torch.distributed.init_process_group()", argument="control_group"
        )
    if dist.get_backend() == "gloo":
        return default
    if _control is None or _control[0] is not default:
        _control = (default, dist.new_group(backend="gloo", timeout=timeout))
    return _control[1]


def is_dtensor(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor, without importing DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model has sharded parameters, as from ``fully_shard``.

    Example:
        >>> is_sharded(nn.Linear(1, 1))
        False
    """
    return bool(sharded_parts(model)) or any(is_dtensor(parameter) for parameter in model.parameters())


def sharded_parts(model: nn.Module) -> list[Any]:
    """Return the modules of a model on which ``fully_shard`` was called."""
    module = sys.modules.get("torch.distributed.fsdp")
    return [] if module is None else [part for part in model.modules() if isinstance(part, module.FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Free unsharded weights left in a sharded model by a forward pass without a backward pass.

    Its parameters are shards again, and the next forward pass gathers their current values.
    """
    for part in sharded_parts(model):
        part.reshard()


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, in the same memory; a plain tensor is returned unchanged.

    Example:
        >>> local(torch.ones(1))
        tensor([1.])
    """
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def collective_device(device: torch.device) -> torch.device:
    """Return the device of a tensor in a collective: its own, or the CPU if the ranks use gloo."""
    return torch.device("cpu") if dist.get_backend() == "gloo" else device


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks on the tensor's own device; ``tensor`` on one rank.

    CPU tensors use the control group, so that no host waits for a GPU.
    """
    return _reduced(tensor, dist.ReduceOp.SUM)


def max_over_ranks(tensor: Tensor) -> Tensor:
    """Return the maximum of a tensor over all ranks on the tensor's own device; ``tensor`` on one rank."""
    return _reduced(tensor, dist.ReduceOp.MAX)


def start_max_over_ranks(tensor: Tensor) -> Callable[[], Tensor]:
    """Start a maximum over ranks of a CPU tensor; return a function that waits for it.

    No other host communication may happen in between.

    Example:
        >>> start_max_over_ranks(torch.tensor(2))()
        tensor(2)
    """
    if not 1 < world_size() <= _FEW:
        return lambda: max_over_ranks(tensor)
    largest = tensor.clone()
    work = dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=control_group(), async_op=True)

    def wait() -> Tensor:
        work.wait()
        return largest

    return wait


def _reduced(tensor: Tensor, op: Any) -> Tensor:
    if world_size() == 1:
        return tensor
    moved = tensor.detach().to(collective_device(tensor.device), copy=True)
    if moved.device.type == "cpu" and op == dist.ReduceOp.MAX and world_size() > _FEW:
        _take_largest(moved)
    else:
        dist.all_reduce(moved, op=op, group=control_group() if moved.device.type == "cpu" else None)
    return moved.to(tensor.device)


def _take_largest(tensor: Tensor) -> None:
    """Compute the maximum over ranks in place by recursive doubling, for a CPU tensor."""
    others, distance = torch.empty_like(tensor), 1
    while distance < world_size():
        _pass_on(tensor, others, distance)
        torch.maximum(tensor, others, out=tensor)
        distance *= 2


def _rows_of_ranks(own: Tensor) -> Tensor:
    """Return the tensors of all ranks on the CPU, as rows in rank order.

    Gloo's all-gather uses a ring, with N - 1 sequential messages. With many ranks it is done in rounds instead, in each
    of which a rank receives everything that another one has so far: log2 N sequential messages.
    """
    size, known = world_size(), 1
    rows = own.new_empty((size, *own.shape))
    if size <= _FEW:
        dist.all_gather(list(rows.unbind()), own, group=control_group())
        return rows
    rows[0] = own  # this rank's own first, then those of the following ranks
    while known < size:
        more = min(known, size - known)
        _pass_on(rows[:more], rows[known : known + more], known)
        known += more
    return rows.roll(rank(), 0)


def _pass_on(own: Tensor, others: Tensor, distance: int) -> None:
    """Send a tensor to the rank at a distance before this one, and receive from the one after it."""
    group, size = control_group(), world_size()
    sent = dist.isend(own, dst=(rank() - distance) % size, group=group, tag=_TAG)
    dist.recv(others, src=(rank() + distance) % size, group=group, tag=_TAG)
    assert sent is not None
    sent.wait()


def agree(value: int) -> int:
    """Return the maximum of a value over all ranks, for a common decision: one all-reduce between hosts.

    Example:
        >>> agree(3)
        3
    """
    if world_size() == 1:
        return value
    return int(max_over_ranks(torch.tensor(value, dtype=torch.int64)).numpy())


def gather_numbers(values: Sequence[float], *, dtype: torch.dtype = torch.float64) -> list[list[Any]]:
    """Return the numbers of every rank, in rank order: one collective between hosts.

    Args:
        values: numbers, equally many on all ranks.
        dtype: dtype in which they are sent; ``torch.int64`` keeps large integers exact.

    Example:
        >>> gather_numbers([1.0, 2.0]), gather_numbers([2**60 + 1], dtype=torch.int64)
        ([[1.0, 2.0]], [[1152921504606846977]])
    """
    own = torch.tensor(values, dtype=dtype)
    numbers: list[list[Any]] = [own.tolist()] if world_size() == 1 else _rows_of_ranks(own).tolist()
    return numbers


def unwrap(module: nn.Module) -> nn.Module:
    """Unwrap ``torch.compile``, DistributedDataParallel, DataParallel and AveragedModel, in any nesting.

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
    """Return the model's own ``no_sync`` context if it has one, else a null context."""
    context = getattr(model, "no_sync", None)
    return context() if callable(context) else contextlib.nullcontext()


def replicated(model: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """Return the DistributedDataParallel around a model, compiled or not, or None."""
    inner: Any = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.parallel.DistributedDataParallel) else None


def gather_objects(value: Any) -> list[Any]:
    """Return one value per rank, in rank order, on every rank."""
    if world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, packed(value), group=control_group())
    return [unpacked(data) for data in gathered]


_AS_NUMPY = {torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
             torch.uint8, torch.bool}  # fmt: skip


class _Packer(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor and _is_plain(value):
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented


def _is_plain(tensor: Tensor) -> bool:
    strided = tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.dtype in _AS_NUMPY
    return strided and not tensor.requires_grad and not tensor.is_conj() and not tensor.is_neg()


def packed(value: Any) -> bytes:
    """Serialize a value for :func:`unpacked`, with plain CPU tensors as raw memory.

    Args:
        value: any picklable value. Tensors that share memory no longer do afterwards.

    Example:
        >>> unpacked(packed({"step": 3, "loss": torch.tensor(2.5)}))
        {'step': 3, 'loss': tensor(2.5000)}
    """
    into = io.BytesIO()
    _Packer(into, protocol=5).dump(value)
    return into.getvalue()


def unpacked(data: bytes) -> Any:
    """Invert :func:`packed`; only for bytes from this run's ranks, since it unpickles them."""
    return pickle.loads(data)
