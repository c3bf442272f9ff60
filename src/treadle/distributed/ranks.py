"""Ranks: who am I, one decision for all, sums and messages over ranks. Without a process group: one rank."""

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

_FEW = 4  # ranks, up to which gloo's own collectives take no longer than doubling does
_TAG = 0x74726561  # of messages in rounds, so that they meet none of the user's

_control: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None  # the default group and the one made for it


def is_distributed() -> bool:
    """Return whether the user has started a process group."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Return the rank of this process, 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Return the number of ranks, 1 without a process group."""
    return dist.get_world_size() if is_distributed() else 1


def control_group(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Return a gloo group of all ranks for values that the host decides by, so that no decision waits for a GPU.

    It is the default group where that one is gloo. Otherwise the first call makes it, which all ranks must do at the
    same point; an engine does it when it is prepared. For the main thread only: two threads would mix their messages.

    Args:
        timeout: of the group that this call makes, if it makes one; None: torch's default for gloo, 30 minutes.
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
    """Return whether a tensor is spread over ranks; do not import what makes such tensors."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model has parameters that are spread over ranks, as ``fully_shard`` makes them.

    Example:
        >>> is_sharded(nn.Linear(1, 1))
        False
    """
    return bool(sharded_parts(model)) or any(is_dtensor(parameter) for parameter in model.parameters())


def sharded_parts(model: nn.Module) -> list[Any]:
    """Return the modules of a model that ``fully_shard`` was called on."""
    module = sys.modules.get("torch.distributed.fsdp")
    return [] if module is None else [part for part in model.modules() if isinstance(part, module.FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Free the whole weights that a forward pass without a backward pass left behind in a sharded model.

    Its parameters are their parts again, and the next forward pass gathers what they have become until then.
    """
    for part in sharded_parts(model):
        part.reshard()


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in the same memory; a plain tensor is its own part.

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

    A tensor on the CPU goes through the control group, so that no rank's host waits for a GPU.
    """
    return _reduced(tensor, dist.ReduceOp.SUM)


def max_over_ranks(tensor: Tensor) -> Tensor:
    """Return the maximum of a tensor over all ranks on the tensor's own device; ``tensor`` on one rank."""
    return _reduced(tensor, dist.ReduceOp.MAX)


def start_max_over_ranks(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin to find the maximum of a tensor on the CPU over all ranks; return what waits for it.

    No other exchange between the hosts may come between the two.

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
    """Put the maximum over ranks into a tensor on the CPU, of twice as many ranks in each round."""
    others, distance = torch.empty_like(tensor), 1
    while distance < world_size():
        _pass_on(tensor, others, distance)
        torch.maximum(tensor, others, out=tensor)
        distance *= 2


def _rows_of_ranks(own: Tensor) -> Tensor:
    """Return the tensors of all ranks, on the CPU and in rank order, as rows.

    Gloo's gather goes round a ring, N - 1 messages one after the other. Many ranks do it in rounds instead, in each of
    which a rank takes over all that another one knows already: log2 N messages one after the other.
    """
    size, known = world_size(), 1
    rows = own.new_empty((size, *own.shape))
    if size <= _FEW:
        dist.all_gather(list(rows.unbind()), own, group=control_group())
        return rows
    rows[0] = own  # this rank's own first, then those of the ranks after it
    while known < size:
        more = min(known, size - known)
        _pass_on(rows[:more], rows[known : known + more], known)
        known += more
    return rows.roll(rank(), 0)


def _pass_on(own: Tensor, others: Tensor, distance: int) -> None:
    """Send a tensor to the rank so far before this one, and receive that of the rank so far after it."""
    group, size = control_group(), world_size()
    sent = dist.isend(own, dst=(rank() - distance) % size, group=group, tag=_TAG)
    dist.recv(others, src=(rank() + distance) % size, group=group, tag=_TAG)
    assert sent is not None
    sent.wait()


def agree(value: int) -> int:
    """Return the largest value any rank gives: one all-reduce between the hosts, one decision for all.

    Example:
        >>> agree(3)
        3
    """
    if world_size() == 1:
        return value
    return int(max_over_ranks(torch.tensor(value, dtype=torch.int64)).numpy())


def gather_numbers(values: Sequence[float], *, dtype: torch.dtype = torch.float64) -> list[list[Any]]:
    """Return the numbers of every rank, in rank order: one exchange between the hosts, at the same point on all.

    Args:
        values: equally many on all ranks.
        dtype: as which they travel; ``torch.int64`` keeps large integers to the last bit.

    Example:
        >>> gather_numbers([1.0, 2.0]), gather_numbers([2**60 + 1], dtype=torch.int64)
        ([[1.0, 2.0]], [[1152921504606846977]])
    """
    own = torch.tensor(values, dtype=dtype)
    numbers: list[list[Any]] = [own.tolist()] if world_size() == 1 else _rows_of_ranks(own).tolist()
    return numbers


def unwrap(module: nn.Module) -> nn.Module:
    """Peel ``torch.compile``, DistributedDataParallel, DataParallel and AveragedModel, in any nesting.

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
    """Return the model's own ``no_sync`` context where it has one, else a context that does nothing."""
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
    """Return a value as bytes, which :func:`unpacked` reads; plain tensors on the CPU as their memory.

    Args:
        value: anything that can be pickled. Tensors that share memory are apart afterwards.

    Example:
        >>> unpacked(packed({"step": 3, "loss": torch.tensor(2.5)}))
        {'step': 3, 'loss': tensor(2.5000)}
    """
    into = io.BytesIO()
    _Packer(into, protocol=5).dump(value)
    return into.getvalue()


def unpacked(data: bytes) -> Any:
    """Return what :func:`packed` was given; only for bytes of this run's own ranks, since it unpickles them."""
    return pickle.loads(data)
