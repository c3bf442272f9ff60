"""Non-finite protection: no non-finite update reaches the weights, and the host does not wait to know it.

Three ways, from what the optimizer and the device allow:

* on the CPU the flag is host memory; looking at it waits for nothing;
* on CUDA, a fused optimizer takes ``found_inf`` and leaves weights and step counters alone where it is set, in that
  step and in all that follow. The host looks some steps later, when the flag has long arrived, and before anything is
  reported, saved or evaluated: a look at each step would take a tenth of a small model's;
* elsewhere one read a step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from treadle import distributed
from treadle.device.handover import wait_for
from treadle.optim.loss_weights import GivenWeights, GroupWeights

_MARK = 8  # steps
_MARKS_ON_THEIR_WAY = 2
_NUMPY = (torch.float32, torch.float64)


class StepLocation(NamedTuple):
    """Location of a step (step, epoch, batch), used in error messages.

    Attributes:
        step: 1-based.
        epoch: epochs completed.
        position: micro-batches of the epoch consumed, this step's included.
        num_batches: micro-batches of the step.
        tries: groups tried.
    """

    step: int
    epoch: int
    position: int
    num_batches: int
    tries: int


Locate = Callable[[], StepLocation]


@dataclass(frozen=True)
class RefusalPlan:
    """What a hook asks for when the gradient of a step is not finite.

    Attributes:
        described: the policy in words, for the block at the start.
        watch: called at the start of every attempt, before anything draws a random number.
        refused: called with the refused gradients in place; returns whether the run continues without this step. False
            asks for fresh data while there are retries, else for NonFiniteError. All ranks must answer alike.
    """

    described: str
    watch: Callable[[], None]
    refused: Callable[[], bool]


def skips_on_device(optimizer: Optimizer, device: torch.device) -> bool:
    """Return whether the optimizer itself can leave a non-finite gradient out: fused, on CUDA.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> skips_on_device(torch.optim.SGD([weight], lr=1.0), torch.device("cpu"))
        False
    """
    return device.type == "cuda" and all(group.get("fused") for group in optimizer.param_groups)


def can_be_recorded(optimizer: Optimizer, device: torch.device) -> bool:
    """Return whether a step can be recorded as a CUDA graph that leaves out a gradient: fused or capturable, on CUDA.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> can_be_recorded(torch.optim.RAdam([weight], capturable=True), torch.device("cuda"))
        True
    """
    groups = optimizer.param_groups
    return device.type == "cuda" and all(group.get("fused") or group.get("capturable") for group in groups)


@dataclass(frozen=True)
class LateRefusal:
    """A step that the optimizer left out on the device, found out later.

    Attributes:
        place: of the step.
        norm: of its gradient.
        undone: the steps that were counted as applied and are not: this one, and those after it.
    """

    place: StepLocation
    norm: Tensor
    undone: int


class Verdict(NamedTuple):
    """Verdict on the gradient of a step.

    Attributes:
        finite: the norm is finite on every rank.
        counted: the total weight is above 0 on some rank.
        late: an earlier step that the device refused and the host learns of now; then nothing is to be applied.
    """

    finite: bool
    counted: bool
    late: LateRefusal | None = None


class FoundInf:
    """Whether a gradient was not finite, on a device, in the form that fused optimizers and loss scaling know.

    Args:
        device: of the gradients.

    Attributes:
        flag: 0-d float32: 0.0, and 1.0 from a norm on that was not finite.

    Example:
        >>> found = FoundInf(torch.device("cpu"))
        >>> [found.look_at(torch.tensor(norm)).item() for norm in (2.0, float("nan"), 2.0)]
        [0.0, 1.0, 1.0]
    """

    def __init__(self, device: torch.device):
        self.flag = torch.zeros((), device=device)
        self._one = torch.ones((), device=device)

    def look_at(self, norm: Tensor) -> Tensor:
        """Set the flag if a norm is not finite, in one kernel, which multiplies the norm by one; return the flag."""
        torch._amp_foreach_non_finite_check_and_unscale_([norm.float()], self.flag, self._one)
        return self.flag


def step_unless(found_inf: Tensor, optimizer: Optimizer) -> None:
    """Step an optimizer; on the device the step is left out where ``found_inf`` is 1.

    A fused one does so itself. Of any other, all that it moved is put back; it must have all of its state.
    """
    if not all(group.get("fused") for group in optimizer.param_groups):
        _step_or_put_back(found_inf, optimizer)
        return
    optimizer.grad_scale, optimizer.found_inf = None, found_inf  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


@torch.no_grad()
def _step_or_put_back(found_inf: Tensor, optimizer: Optimizer) -> None:
    moved = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moved += [value for entries in optimizer.state.values() for value in entries.values() if isinstance(value, Tensor)]
    before = [tensor.clone() for tensor in moved]
    optimizer.step()
    left_out = found_inf.bool()
    for tensor, old in zip(moved, before, strict=True):
        torch.where(left_out, old, tensor, out=tensor)


class FiniteGuard:
    """Decision whether a step may change the weights.

    Args:
        deferred: whether the answer comes some steps late; only where the optimizer skips on the device, and not with
            retries, an fp16 scaler or a plan.
        can_wait: whether the host may learn late of a captured step that was refused; as for ``deferred``.
        plan: what a hook asks for at a refusal, or None.
        agreed: whether gradients and weights are the same on all ranks already, so that nothing is to be exchanged.
        num_ranks: of the run; by default as many as the process group has.

    Attributes:
        late: what the host does not know yet of deferred steps; None before the first.

    Example:
        >>> guard = FiniteGuard()
        >>> guard.judge(torch.tensor(float("nan")), 1.0)
        Verdict(finite=False, counted=True, late=None)
    """

    recording = False  # whether steps are being recorded, so that nothing they seem to do has happened
    weights: GivenWeights | GroupWeights | None = None  # of a recorded step's micro-batches

    def __init__(
        self,
        *,
        deferred: bool = False,
        can_wait: bool = False,
        plan: RefusalPlan | None = None,
        agreed: bool = False,
        num_ranks: int | None = None,
    ):
        self.deferred = deferred
        self.can_wait = can_wait
        self.plan = plan
        self.late: LateFlags | None = None
        self._alone = agreed or (distributed.world_size() if num_ranks is None else num_ranks) == 1

    def decides_now(self, total_weight: float | Tensor) -> bool:
        """Return whether the verdict on a step of this weight is known before its update."""
        return not self.deferred or isinstance(total_weight, Tensor)

    def judge(self, norm: Tensor, total_weight: float | Tensor) -> Verdict:
        """Return the verdict on a gradient, by one decision for all ranks; optimistic where it is deferred."""
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
        """Step the optimizer; where the verdict is deferred, the optimizer itself skips a non-finite gradient.

        Args:
            optimizer: the optimizer of the run.
            norm: the gradient's norm, before clipping.
            total_weight: as given to :meth:`judge`.
            locate: returns the location of the step, for an error that comes late.
        """
        if self.decides_now(total_weight):
            optimizer.step()
            return
        late = self.late_flags(norm.device)
        step_unless(late.raise_for(norm), optimizer)
        late.note(locate(), norm)

    def late_flags(self, device: torch.device) -> LateFlags:
        """Return where deferred steps, and captured ones, leave word of a refusal."""
        if self.late is None:
            self.late = LateFlags(device)
        return self.late

    def late_refusal(self, *, wait: bool) -> LateRefusal | None:
        """Return the first deferred step with a non-finite gradient, else None.

        Args:
            wait: for all steps so far; False looks only at results that the host has.
        """
        if self.late is None or not (wait or self.late.raised):
            return None
        return self.late.late_refusal()


class LateFlags:
    """What the host does not know yet of steps that the device may have refused: one flag for all of them so far.

    On several ranks, all learn of a refusal at the same step: each eighth step sends its flag to its own place,
    which is read two such steps later.

    Args:
        device: of the steps.

    Attributes:
        refused: 0-d on the device: 0.0, and 1.0 from a step on whose gradient was not finite, so that no later step
            changes anything.
        raised: whether the host knows of a refused step.

    Example:
        >>> flags = LateFlags(torch.device("cpu"))
        >>> norm = torch.tensor(float("inf"))
        >>> _ = flags.raise_for(norm); flags.note(StepLocation(3, 0, 3, 1, 1), norm)
        >>> flags.late_refusal().place.step, flags.late_refusal()
        (3, None)
    """

    def __init__(self, device: torch.device):
        self._found = FoundInf(device)
        self.refused = self._found.flag
        self.raised = False
        self._on_cuda = device.type == "cuda"
        self._steps: deque[_Steps] = deque()
        self._marks: deque[tuple[_Mark, int]] = deque()  # with the number of entries of _steps that each is about
        self._unmarked = 0  # entries since the last mark
        self._spare: list[_Mark] = []

    def raise_for(self, norm: Tensor) -> Tensor:
        """Raise the flag for a gradient's norm that is not finite, on the device; return it."""
        return self._found.look_at(norm)

    def note(self, place: StepLocation, norm: Tensor) -> None:
        """Note a step; every eighth sends the flag to the host, and wait for what an earlier one has sent.

        A copy at each step would take a tenth of a small model's, and a sixth of one that is replayed.
        """
        self._steps.append(_Steps(place, norm))
        self._unmarked += 1
        if self._unmarked == _MARK:
            self._send_mark()

    def note_block(self, first: StepLocation, norms: Tensor) -> None:
        """Note steps of one batch each that follow each other, with one mark for all.

        Args:
            first: location of the first of them.
            norms: (N,), of each.
        """
        self._steps.append(_Steps(first, norms))
        self._unmarked += 1
        self._send_mark()

    def _send_mark(self) -> None:
        mark = self._spare.pop() if self._spare else _Mark(on_cuda=self._on_cuda)
        mark.send(self.refused)
        self._marks.append((mark, self._unmarked))
        self._unmarked = 0
        if len(self._marks) > _MARKS_ON_THEIR_WAY:
            mark, count = self._marks.popleft()
            self._spare.append(mark)
            if mark.arrived():
                self.raised = True
                return
            for _ in range(count):
                self._steps.popleft()

    def late_refusal(self) -> LateRefusal | None:
        """Wait for all flags; return the first step that was refused, or None."""
        if not self._steps:
            return None
        mark = self._spare.pop() if self._spare else _Mark(on_cuda=self._on_cuda)
        mark.send(self.refused)
        refused, steps = mark.arrived(), list(self._steps)
        self._spare += [mark, *(each for each, _ in self._marks)]
        self._steps.clear()
        self._marks.clear()
        self._unmarked = 0
        self.raised = False
        if not refused:
            return None
        self.refused.zero_()
        found = next(number for number, noted in enumerate(steps) if noted.first_bad() is not None)
        bad = steps[found].first_bad()
        assert bad is not None
        later = sum(noted.norms.numel() for noted in steps[found:])
        place, norm = steps[found].at(bad)
        return LateRefusal(place, norm, undone=later - bad)


class _Steps(NamedTuple):
    """One step, or several of one batch each that follow each other."""

    first: StepLocation
    norms: Tensor  # 0-d, or (N,)

    def first_bad(self) -> int | None:
        """Return which of the steps is the first whose norm is not finite; read the device."""
        flags = self.norms.isfinite().reshape(-1).tolist()
        return flags.index(False) if False in flags else None

    def at(self, number: int) -> tuple[StepLocation, Tensor]:
        """Return location and norm of one of the steps."""
        first = self.first
        place = first._replace(step=first.step + number, position=first.position + number)
        return place, self.norms.reshape(-1)[number]


class _Mark:
    """A place on the host for the flag of one step."""

    def __init__(self, *, on_cuda: bool):
        self._place = torch.zeros((), pin_memory=on_cuda)
        self._seen = self._place.numpy()  # the same memory, for a look that is no operation of torch
        self._event = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]

    def send(self, flag: Tensor) -> None:
        """Send a flag here."""
        self._place.copy_(flag, non_blocking=True)
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(flag.device))

    def arrived(self) -> bool:
        """Wait for the flag; return whether it is raised."""
        if self._event is not None:
            wait_for(self._event)
        return bool(self._seen)
