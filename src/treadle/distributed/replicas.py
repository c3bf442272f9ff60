"""Gradient exchange of replicas: one message per bucket of gradients, sent during the last backward pass."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from treadle import distributed
from treadle.distributed.exchange import GradientExchange, share_buffers
from treadle.distributed.state_names import clean_name
from treadle.errors import ConfigError

_log = logging.getLogger("treadle.distributed")
_FIRST_BUCKET = 1 << 20  # bytes; small, so that communication starts early
_BUCKET = 64 << 20  # fewer messages need less Python time; the last one, not overlapped, takes a fraction of a ms
_MESSAGES = 40  # approximate number for a large model: each takes Python time while backward must be kept busy
_NONE, _PRESENT, _LATE = 0, 1, 2


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

    @property
    def is_complete(self) -> bool:
        """Whether every gradient is ready."""
        return len(self.arrived) == len(self.numbers)

    def means(self) -> list[Tensor]:
        """Wait for the message and return its parts, one per parameter."""
        assert self.flat is not None
        self.work.wait()
        flat = self.flat.to(self.parameters[0].device)
        means: tuple[Tensor, ...] = _unflatten_dense_tensors(flat, self.parameters)  # type: ignore[no-untyped-call]
        self.flat = self.work = None
        return list(means)


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
            while self._next < len(self._buckets) and self._buckets[self._next].is_complete:
                self._send(self._buckets[self._next])
                self._next += 1

        return note

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
            share_buffers(own, self._group)

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
