"""Protection of the weights from non-finite gradients, without device syncs where possible.

There are three methods, depending on the optimizer and the device:

* on the CPU, the flag is in host memory, which can be read without waiting;
* on CUDA, a fused optimizer takes ``found_inf`` and leaves weights and step counters unchanged if it is set, in that
step and all following ones. The host checks some steps later, when the flag has long arrived, and before anything is
reported, saved or evaluated: a check in each step would take a tenth of a small model's step;
* elsewhere, one device read per step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from treadle import distributed
from treadle.optim.late_flags import LateFlags, LateRefusal, Locate
from treadle.optim.loss_weights import EqualWeights, GivenWeights, GroupWeights

if TYPE_CHECKING:
    from treadle.optim.late_skips import LateSkips

SCALE_LOWERED = "non-finite gradient: the fp16 scale was lowered"
"""Reason of a step that fp16 skips."""

_NUMPY = (torch.float32, torch.float64)


@dataclass(frozen=True)
class RefusalPlan:
    """Plan of a hook for steps with non-finite gradients.

    Attributes:
        described: description of the policy, for the start log.
        watch: called at the start of every attempt, before any random number is drawn.
        refused: called while the refused gradients exist; returns whether the run continues without this step. False
            means fresh data while there are retries, else NonFiniteError. All ranks must return the same.
    """

    described: str
    watch: Callable[[], None]
    refused: Callable[[], bool]


class Verdict(NamedTuple):
    """Verdict on the gradient of a step.

    Attributes:
        finite: the norm is finite on every rank.
        counted: the total weight is above 0 on some rank.
        late: an earlier refused step that the host has just detected; then nothing must be applied.
    """

    finite: bool
    counted: bool
    late: LateRefusal | None = None


class BufferCopies:
    """Copies of a model's persistent buffers, to undo what the forward pass of a refused step did to them.

    A batch norm that saw a NaN keeps it in its running mean forever, although no gradient reaches it. The buffers are
    copied into the same memory every time: batch norm changes them without increasing their version.

    Args:
        model: model whose current modules are covered.

    Example:
        >>> layer = nn.BatchNorm1d(1)
        >>> copies = BufferCopies(layer)
        >>> copies.update(), layer.running_mean.fill_(float("nan")), copies.restore(), layer.running_mean
        (None, tensor([0.]), None, tensor([0.]))
    """

    def __init__(self, model: nn.Module):
        self._places = [
            (module, name)
            for module in distributed.unwrap(model).modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        ]
        self._copies: list[Tensor] = []

    @torch.no_grad()
    def update(self) -> None:
        """Copy the current buffers."""
        buffers = self._buffers()
        if _same_layout(buffers, self._copies):
            _copy(self._copies, buffers)
        else:
            self._copies = [buffer.detach().clone() for buffer in buffers]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffers."""
        buffers = self._buffers()
        if _same_layout(buffers, self._copies):
            _copy(buffers, self._copies)

    def _buffers(self) -> list[Tensor]:
        return [getattr(module, name) for module, name in self._places]


def _same_layout(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    kinds = [[(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors] for tensors in (some, others)]
    return kinds[0] == kinds[1]


def _copy(into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    if into:
        torch._foreach_copy_(list(into), list(source))


class FiniteGuard:
    """Guard that decides whether a step may change the weights.

    Args:
        deferred: whether the result is checked some steps late; only if the optimizer skips on the device, and not with
            retries or a plan.
        can_wait: whether the host may detect a refused captured step late; under the same conditions as ``deferred``.
        plan: plan of a hook for refused steps, or None.
        agreed: whether gradients and weights are already the same on all ranks, so that no communication is needed.
        num_ranks: number of ranks of the run; the size of the process group by default.
        skips: flags of deferred steps in fp16, else None.
        buffers: copies to restore after a refused step that is retried, or None.

    Attributes:
        late: flags of deferred steps not checked yet; None before the first.

    Example:
        >>> guard = FiniteGuard()
        >>> guard.judge(torch.tensor(float("nan")), 1.0)
        Verdict(finite=False, counted=True, late=None)
    """

    recording = False  # whether steps are being captured, so that they have no effect yet
    weights: EqualWeights | GivenWeights | GroupWeights | None = None  # of a captured step's micro-batches

    def __init__(
        self,
        *,
        deferred: bool = False,
        can_wait: bool = False,
        plan: RefusalPlan | None = None,
        agreed: bool = False,
        num_ranks: int | None = None,
        skips: LateSkips | None = None,
        buffers: BufferCopies | None = None,
    ):
        self.buffers = buffers
        self.deferred = deferred
        self.can_wait = can_wait
        self.plan = plan
        self.skips = skips
        self.late: LateFlags | None = skips
        self._alone = agreed or (distributed.world_size() if num_ranks is None else num_ranks) == 1

    def decides_now(self, total_weight: float | Tensor) -> bool:
        """Return whether the verdict on a step with this weight is known before the update."""
        return not self.deferred or isinstance(total_weight, Tensor)

    def judge(self, norm: Tensor, total_weight: float | Tensor) -> Verdict:
        """Return the verdict on a gradient, the same on all ranks; optimistic if deferred."""
        now = self.decides_now(total_weight)
        if self.late is not None and (late := self.late_refusal(wait=now)) is not None:
            return Verdict(finite=False, counted=True, late=late)
        if not now:
            return Verdict(finite=True, counted=True)
        if self._alone and norm.device.type == "cpu" and norm.dtype in _NUMPY and not isinstance(total_weight, Tensor):
            return Verdict(finite=math.isfinite(norm.numpy()), counted=True)  # the usual case, in a tenth of the time
        bad = ~torch.isfinite(norm).reshape(1)
        if isinstance(total_weight, Tensor):
            bad = torch.cat([bad, ~(total_weight.to(norm.device) > 0).reshape(1)])
        shared = bad if self._alone else distributed.max_over_ranks(bad.to(torch.uint8))
        flags = [bool(flag) for flag in (shared.numpy() if shared.device.type == "cpu" else shared.tolist())]
        return Verdict(finite=not flags[0], counted=len(flags) == 1 or not flags[1])

    def apply(self, optimizer: Optimizer, norm: Tensor, total_weight: float | Tensor, *, locate: Locate) -> None:
        """Step the optimizer; if the verdict is deferred, the optimizer itself skips a non-finite gradient.

        Args:
            optimizer: the optimizer of the run.
            norm: the gradient's norm, before clipping.
            total_weight: as given to :meth:`judge`.
            locate: returns the location of the step, for a late error.
        """
        if self.decides_now(total_weight):
            optimizer.step()
            return
        self.late_flags(norm.device).step(optimizer, norm, locate())

    def late_flags(self, device: torch.device) -> LateFlags:
        """Return the flags in which deferred and captured steps record a refusal."""
        if self.late is None:
            self.late = LateFlags(device)
        return self.late

    def late_refusal(self, *, wait: bool) -> LateRefusal | None:
        """Return the first deferred step with a non-finite gradient, else None.

        Args:
            wait: whether to wait for all steps so far; False checks only results that have arrived.
        """
        if self.late is None or not (wait or self.late.raised):
            return None
        return self.late.late_refusal()
