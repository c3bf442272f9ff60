"""Gradient exchange of a step: replicas with buckets during the last backward pass, sharded models with FSDP2.

Whatever happens in its forward and backward passes, every rank starts the same collectives in the same order, so a
micro-batch without a loss, or an unused parameter, never makes a rank wait forever.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from treadle import distributed
from treadle.distributed.ranks import is_dtensor
from treadle.distributed.state_names import clean_name
from treadle.errors import ConfigError
from treadle.nested import map_nested_tensor
from treadle.task import StepOutput

_log = logging.getLogger("treadle.distributed")
_NOTHING = contextlib.nullcontext()
_FIRST_BUCKET = 1 << 20  # bytes; small, so that communication starts early
_BUCKET = 64 << 20  # fewer messages need less Python time; the last one, not overlapped, takes a fraction of a ms
_MESSAGES = 40  # approximate number for a large model: each takes Python time while backward must be kept busy


class GradientExchange:
    """Base gradient exchange, for models that need none: one process, or the user's own wrapper.

    Args:
        model: the model of the run.

    Attributes:
        equal: whether gradients, and so every number computed from them, are the same on all ranks after a step.
    """

    equal = False
    recordable = False  # whether a CUDA graph can hold the exchange

    def __init__(self, model: nn.Module):
        self.model = model

    def recording(self) -> AbstractContextManager[None]:
        """Exchange nothing between the hosts inside the block, in which a step is recorded or compared with one."""
        return _NOTHING

    def micro_batch(self, *, syncs: bool) -> AbstractContextManager[None]:
        """Wrap forward and backward of one micro-batch.

        Args:
            syncs: whether gradients are exchanged with this micro-batch; otherwise they only accumulate.
        """
        return _NOTHING if syncs else distributed.no_sync(self.model)

    def second_look(self, *, last: bool) -> AbstractContextManager[None]:
        """Wrap forward and backward of a micro-batch that is rerun to find an error.

        Args:
            last: whether it is the last of its step.
        """
        return self.micro_batch(syncs=False)

    def loss_of(self, output: StepOutput, scaled: Callable[[StepOutput], Tensor | None]) -> Tensor | None:
        """Return the loss to backpropagate; None if there is none and no rank waits for this one.

        Args:
            output: output of the micro-batch.
            scaled: returns its loss as weighted in the step, which may be collective.
        """
        return scaled(output)

    def close(self) -> None:
        """Remove every hook from the model; a later step adds them again."""


def gradient_exchange(model: nn.Module) -> GradientExchange:
    """Return the gradient exchange of a model, according to its wrappers and parameters.

    Example:
        >>> type(gradient_exchange(nn.Linear(1, 1))).__name__
        'GradientExchange'
    """
    replicas = distributed.replicated(model)
    if replicas is not None:
        return ReplicaExchange(replicas)
    return ShardExchange(model) if distributed.is_sharded(model) else GradientExchange(model)


@dataclass(eq=False)
class _Bucket:
    """Parameters of one dtype and device, whose gradients form one message.

    Attributes:
        numbers: indices of the parameters, in the order of the message.
        parameters: the parameters.
        arrived: indices of those whose gradient is ready.
        flat: the message, once it is being sent.
    """

    numbers: list[int] = field(default_factory=list)
    parameters: list[nn.Parameter] = field(default_factory=list)
    arrived: set[int] = field(default_factory=set)
    flat: Tensor | None = None
    work: Any = None

    def means(self) -> list[Tensor]:
        """Wait for the message and return its parts, one per parameter."""
        assert self.flat is not None
        self.work.wait()
        flat = self.flat.to(self.parameters[0].device)
        means: tuple[Tensor, ...] = _unflatten_dense_tensors(flat, self.parameters)  # type: ignore[no-untyped-call]
        self.flat = self.work = None
        return list(means)


_NONE, _PRESENT, _LATE = 0, 1, 2


class ReplicaExchange(GradientExchange):
    """Exchange that averages gradients over replicas, overlapped with the last backward pass.

    A bucket is sent as soon as its gradients are ready and all earlier ones are sent; the rest is sent at the end. A
    gradient that this rank lacks counts as zeros; a parameter without a gradient on all ranks remains without. The
    reducer of DistributedDataParallel is disabled: it would wait forever for a rank without a loss.

    Args:
        replicas: the wrapped model, whose process group and ``broadcast_buffers`` are used.
    """

    def __init__(self, replicas: nn.parallel.DistributedDataParallel):
        super().__init__(replicas)
        self.replicas = replicas
        self.equal = True
        self._group = replicas.process_group
        self.recordable = dist.get_backend(self._group) == "nccl"
        self._states = b""  # of the gradients in the latest step, over all ranks
        self._records = False
        self._ranks = dist.get_world_size(self._group)
        ignored = set(getattr(replicas, "parameters_to_ignore", ()))
        named = {name: value for name, value in replicas.module.named_parameters() if name not in ignored}
        self._names, self._all = list(named), list(named.values())
        self._modules = list(replicas.modules())
        self._looks_for_unused = not getattr(replicas, "find_unused_parameters", False)
        self._trained: list[bool] = []
        self._parameters: list[nn.Parameter] = []
        self._buckets: list[_Bucket] = []
        self._bucket_of: list[_Bucket] = []
        self._handles: list[Any] = []
        self._late: set[int] = set()
        self._next = 0
        self._armed = False

    @contextlib.contextmanager
    def micro_batch(self, *, syncs: bool) -> Iterator[None]:
        """Disable torch's reducer; exchange the gradients of the whole step if ``syncs``."""
        self.replicas.require_forward_param_sync = False  # buffers are exchanged with the gradients
        exchanges = syncs and self._ranks > 1
        with self.replicas.no_sync():
            if exchanges:
                self._arm()
            try:
                yield
            finally:
                self._armed = False  # also after an error: no further collectives
        if exchanges:
            self._finish()

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._trained = [], []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Take the gradients of a step to be there on all ranks where they were in the step before."""
        self._records = True
        try:
            yield
        finally:
            self._records = False

    def _arm(self) -> None:
        trained = [parameter.requires_grad for parameter in self._all]
        if trained != self._trained:  # at the first step, and after freezing or unfreezing
            self.close()
            self._trained = trained
            self._parameters = [parameter for parameter in self._all if parameter.requires_grad]
            self._buckets = _buckets(self._parameters)
            by_number = {number: bucket for bucket in self._buckets for number in bucket.numbers}
            self._bucket_of = [by_number[number] for number in range(len(self._parameters))]
            self._handles = [
                parameter.register_post_accumulate_grad_hook(self._noting(number))  # type: ignore[no-untyped-call]
                for number, parameter in enumerate(self._parameters)
            ]
        for bucket in self._buckets:
            bucket.arrived, bucket.flat, bucket.work = set(), None, None
        self._late, self._next, self._armed = set(), 0, True

    def _noting(self, number: int) -> Callable[[Tensor], None]:
        def note(_: Tensor) -> None:
            if not self._armed:
                return
            bucket = self._bucket_of[number]
            if bucket.flat is not None:  # accumulated after sending, as with reentrant checkpointing
                self._late.add(number)
                return
            bucket.arrived.add(number)
            while self._next < len(self._buckets) and self._is_complete(self._buckets[self._next]):
                self._send(self._buckets[self._next])
                self._next += 1

        return note

    def _is_complete(self, bucket: _Bucket) -> bool:
        return len(bucket.arrived) == len(bucket.numbers)

    @torch.no_grad()
    def _send(self, bucket: _Bucket) -> None:
        grads = [torch.zeros_like(p) if (grad := p.grad) is None else grad for p in bucket.parameters]
        if any(grad.is_sparse for grad in grads):
            raise ConfigError(
                "a sparse gradient cannot be exchanged between replicas; build the embedding with sparse=False",
                argument="gradients",
            )
        # Never the gradient itself, even for one tensor: it may be accumulated during the transfer.
        several = len(grads) > 1
        flat: Tensor = _flatten_dense_tensors(grads) if several else grads[0].reshape(-1).clone()  # type: ignore[no-untyped-call]
        bucket.flat = flat.to(distributed.collective_device(flat.device))
        mean = dist.get_backend(self._group) == "nccl"  # NCCL supports AVG; gloo does not
        if not mean:
            bucket.flat.mul_(1.0 / self._ranks)
        operation = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
        bucket.work = dist.all_reduce(bucket.flat, op=operation, group=self._group, async_op=True)

    @torch.no_grad()
    def _finish(self) -> None:
        """Send the rest, wait, and assign the means."""
        for bucket in self._buckets[self._next :]:
            self._send(bucket)
        present = self._own_states()
        largest_states = None if self._records else distributed.start_max_over_ranks(present)
        means = [bucket.means() for bucket in self._buckets]
        states = bytes((present if largest_states is None else largest_states()).numpy())
        if self._records and states != self._states:
            raise RuntimeError("on this rank other parameters have a gradient than on all ranks in the previous step")
        self._states = states
        if self._looks_for_unused and any(states):
            self._looks_for_unused = False
            self._name_unused(states)
        if _LATE in states:
            means = [self._sent_again(*pair, states) for pair in zip(self._buckets, means, strict=True)]
        for bucket, some in zip(self._buckets, means, strict=True):
            _hand_out(bucket, some, states)
        if self.replicas.broadcast_buffers:
            own = [buffer for module in self._modules for buffer in module._buffers.values() if buffer is not None]
            _share_buffers(own, self._group)

    def _own_states(self) -> Tensor:
        """Return the state of each gradient on this rank."""
        own = bytearray(parameter.grad is not None for parameter in self._parameters)
        for number in self._late:
            own[number] = _LATE
        return torch.frombuffer(own, dtype=torch.uint8)

    def _sent_again(self, bucket: _Bucket, means: list[Tensor], states: bytes) -> list[Tensor]:
        """Return the means of a bucket, from a second message if one of its gradients was late."""
        if all(states[number] != _LATE for number in bucket.numbers):
            return means
        self._send(bucket)
        return bucket.means()

    def _name_unused(self, states: bytes) -> None:
        trained = [clean_name(name) for name, value in zip(self._names, self._all, strict=True) if value.requires_grad]
        unused = [name for name, state in zip(trained, states, strict=True) if state == _NONE]
        if unused and distributed.rank() == 0:
            _log.warning(
                "%d parameters got no gradient on any rank in the first step: %s. Freeze unused parameters with "
                "requires_grad_(False); if only some steps use them, pass find_unused_parameters=True to the wrapper",
                len(unused), ", ".join(unused[:10]),
            )  # fmt: skip


def _hand_out(bucket: _Bucket, means: Sequence[Tensor], states: bytes) -> None:
    """Make the gradients views of the message, so that they need not be copied."""
    for number, parameter, mean in zip(bucket.numbers, bucket.parameters, means, strict=True):
        if states[number] != _NONE:
            # Another layout, such as channels_last, is kept: fused optimizers need the same layout in weights and
            # gradients.
            parameter.grad = mean if parameter.is_contiguous() else torch.empty_like(parameter).copy_(mean)


def _buckets(parameters: Sequence[nn.Parameter]) -> list[_Bucket]:
    """Group parameters in the order in which backward reaches them, last first.

    A bucket is closed once it is full, so that a bias is grouped with its weight, however large.
    """
    total = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    usual = max(_BUCKET, total // _MESSAGES)
    buckets: list[_Bucket] = []
    open_ones: dict[tuple[torch.dtype, torch.device], tuple[_Bucket, int]] = {}
    for number, parameter in reversed(list(enumerate(parameters))):
        key = parameter.dtype, parameter.device
        if key not in open_ones:
            open_ones[key] = (_Bucket(), 0)
            buckets.append(open_ones[key][0])
        bucket, filled = open_ones[key]
        bucket.numbers.append(number)
        bucket.parameters.append(parameter)
        filled += parameter.numel() * parameter.element_size()
        open_ones[key] = (bucket, filled)
        if filled >= (_FIRST_BUCKET if bucket is buckets[0] else usual):
            del open_ones[key]
    return buckets


@torch.no_grad()
def _share_buffers(buffers: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Broadcast the buffers of rank 0, in one message per dtype and device."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for buffer in buffers:
        by_kind.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    for some in by_kind.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in some])
        flat = flat.to(distributed.collective_device(flat.device))
        dist.broadcast(flat, group=group, group_src=0)
        for buffer, part in zip(some, torch.split(flat, [buffer.numel() for buffer in some]), strict=True):
            buffer.copy_(part.view_as(buffer))


class ShardExchange(GradientExchange):
    """Exchange for models sharded with ``fully_shard``, whose gradients torch reduces in the backward pass.

    The backward pass is collective, so a rank whose micro-batch has no loss backpropagates zeros through the model's
    outputs. Persistent buffers, such as the running mean of a batch norm, are those of rank 0 after a step, as in
    replicas.

    Args:
        model: model with sharded parameters.

    Raises:
        ConfigError: on several ranks, a trainable parameter is not sharded.
    """

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self.equal = True
        self._parts = distributed.sharded_parts(model)
        self._outputs: list[Tensor] = []
        self._inner = distributed.unwrap(model)
        self._saved_buffers = self._inner.state_dict().keys() & {name for name, _ in self._inner.named_buffers()}
        plain = [name for name, value in model.named_parameters() if value.requires_grad and not is_dtensor(value)]
        if plain and distributed.world_size() > 1:
            raise ConfigError(
                f"parameter {plain[0]!r} is trained and not sharded, so its gradient would not be all-reduced; "
                "call fully_shard on the whole model too, as treadle.parallelize does, or freeze it",
                argument="model",
            )

    @contextlib.contextmanager
    def micro_batch(self, *, syncs: bool) -> Iterator[None]:
        """Reduce gradients if ``syncs``; otherwise accumulate them unsharded on each rank."""
        for part in self._parts:
            part.set_requires_gradient_sync(syncs, recurse=False)
        handle = self.model.register_forward_hook(self._keep)
        try:
            yield
        finally:
            handle.remove()
            self._outputs = []
        if syncs and self._saved_buffers and distributed.world_size() > 1:
            named = self._inner.named_buffers()
            _share_buffers([buffer for name, buffer in named if name in self._saved_buffers])

    def second_look(self, *, last: bool) -> AbstractContextManager[None]:
        """Wrap it as in a step: unreduced gradients would be added to those of the next step."""
        return self.micro_batch(syncs=last)

    def _keep(self, module: nn.Module, inputs: Any, output: Any) -> None:
        def keep(tensor: Tensor) -> Tensor:
            if tensor.requires_grad:
                self._outputs.append(tensor)
            return tensor

        map_nested_tensor(keep, output)

    def loss_of(self, output: StepOutput, scaled: Callable[[StepOutput], Tensor | None]) -> Tensor | None:
        """Return the loss, or zero times the model's outputs.

        Raises:
            ConfigError: there is no loss and the model was not run.
        """
        if output.loss is None and not self._outputs:
            raise ConfigError(
                "None, and the model was not run on this micro-batch. The forward and backward passes of a "
                "sharded model exchange weights, so every rank must run it on every micro-batch; call the model first "
                "and return loss None afterwards",
                argument="loss",
            )
        loss = scaled(output)
        if loss is not None:
            return loss
        kept = self._outputs
        if output.loss is not None and not kept:  # a loss of weight 0, from a task that runs parts of the model
            kept = [output.loss]
        return torch.stack([(each.sum() * 0).float() for each in kept]).sum()
