"""Non-finite protection: no non-finite update reaches the weights, and the host does not wait to know it.

Three ways, from what the optimizer and the device allow:

* on the CPU the flag is host memory; looking at it waits for nothing;
* on an accelerator, a fused optimizer takes ``found_inf`` and leaves weights and step counters alone where it is set.
  The host looks at the flag of a step only before the update of the next one, when it has long arrived, and before
  anything is saved, logged or evaluated;
* elsewhere one read a step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from treadle import distributed
from treadle.weights import GivenWeights, GroupWeights

_MARK = 8  # steps
_NUMPY = (torch.float32, torch.float64)


class Place(NamedTuple):
    """Where a step stands, for the message of an error about it.

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


class Verdict(NamedTuple):
    """What is known of a step's gradient.

    Attributes:
        finite: the norm is finite on every rank.
        counted: the total weight is above 0 on some rank.
    """

    finite: bool
    counted: bool


@dataclass(frozen=True)
class RefusalPlan:
    """What a hook asks for when the gradient of a step is not finite.

    Attributes:
        described: the policy in words, for the block at the start.
        watch: called at the start of every attempt, before anything draws a random number.
        refused: called with the refused gradients in place; returns whether the run goes on without this step. False
            asks for fresh data while there are retries, else for NonFiniteError. All ranks must answer alike.
    """

    described: str
    watch: Callable[[], None]
    refused: Callable[[], bool]


def skips_on_device(optimizer: Optimizer, device: torch.device) -> bool:
    """Returns whether the optimizer itself can leave a non-finite gradient out: fused, on CUDA.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> skips_on_device(torch.optim.SGD([weight], lr=1.0), torch.device("cpu"))
        False
    """
    return device.type == "cuda" and all(group.get("fused") for group in optimizer.param_groups)


@dataclass(frozen=True)
class LateRefusal:
    """A step that the optimizer left out on the device, found out later.

    Attributes:
        place: of the step.
        norm: of its gradient.
        undone: the steps that were counted as applied and are not: this one, and those after it.
    """

    place: Place
    norm: Tensor
    undone: int


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
        """Sets the flag if a norm is not finite, in one kernel, which multiplies the norm by one; returns the flag."""
        torch._amp_foreach_non_finite_check_and_unscale_([norm.float()], self.flag, self._one)
        return self.flag


def step_unless(found_inf: Tensor, optimizer: Optimizer) -> None:
    """Steps a fused optimizer, which leaves the step out on the device where ``found_inf`` is 1."""
    optimizer.grad_scale, optimizer.found_inf = None, found_inf  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


class FiniteGuard:
    """Decides whether a step may change the weights.

    Args:
        deferred: whether the answer comes one step late; only where the optimizer skips on the device, and not with
            retries, an fp16 scaler or a plan.
        plan: what a hook asks for at a refusal, or None.
        agreed: whether gradients and weights are the same on all ranks already, so that nothing is to be exchanged.

    Example:
        >>> guard = FiniteGuard()
        >>> guard.judge(torch.tensor(float("nan")), 1.0)
        Verdict(finite=False, counted=True)
    """

    recording = False  # whether steps are being recorded, so that nothing they seem to do has happened
    weights: GivenWeights | GroupWeights | None = None  # of a recorded step's micro-batches

    def __init__(self, *, deferred: bool = False, plan: RefusalPlan | None = None, agreed: bool = False):
        self.agreed = agreed
        self.deferred = deferred
        self.plan = plan
        self.replays: ReplayFlags | None = None
        self._waiting: tuple[Place, Tensor] | None = None
        self._found: FoundInf | None = None
        self._host: Tensor | None = None
        self._host_flag: Any = None  # the same memory, for a look that is no operation of torch
        self._arrived: torch.cuda.Event | None = None

    def judge(self, norm: Tensor, total_weight: float | Tensor) -> Verdict:
        """Returns the verdict on a gradient, by one decision for all ranks; optimistic where it is deferred."""
        if self.deferred and not isinstance(total_weight, Tensor):
            return Verdict(finite=True, counted=True)
        alone = self.agreed or distributed.world_size() == 1
        if alone and norm.device.type == "cpu" and norm.dtype in _NUMPY and not isinstance(total_weight, Tensor):
            return Verdict(finite=math.isfinite(norm.numpy()), counted=True)  # the usual case, in a tenth of the time
        bad = ~torch.isfinite(norm).reshape(1)
        if isinstance(total_weight, Tensor):
            bad = torch.cat([bad, ~(total_weight.to(norm.device) > 0).reshape(1)])
        shared = bad if self.agreed else distributed.max_over_ranks(bad.to(torch.uint8))
        flags = [bool(flag) for flag in (shared.numpy() if shared.device.type == "cpu" else shared.tolist())]
        return Verdict(finite=not flags[0], counted=len(flags) == 1 or not flags[1])

    def apply(self, optimizer: Optimizer, norm: Tensor, total_weight: float | Tensor, *, place: Place) -> None:
        """Steps the optimizer; where the verdict is deferred, the optimizer itself skips a non-finite gradient.

        Args:
            optimizer: the optimizer of the run.
            norm: the gradient's norm, before clipping.
            total_weight: as given to :meth:`judge`.
            place: what an error that comes late has to say.
        """
        if not self.deferred or isinstance(total_weight, Tensor):
            optimizer.step()
            return
        if self._found is None or self._host is None or self._arrived is None:
            self._found = FoundInf(norm.device)
            self._host = torch.empty((), dtype=torch.float32, pin_memory=True)
            self._host_flag = self._host.numpy()
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        found_inf = self._found.look_at(norm)
        step_unless(found_inf, optimizer)
        self._host.copy_(found_inf, non_blocking=True)
        self._arrived.record(torch.cuda.current_stream(norm.device))
        self._waiting = (place, norm)

    @property
    def waits(self) -> bool:
        """Whether there is an eager step that the host has not looked at."""
        return self._waiting is not None

    def late_refusal(self) -> LateRefusal | None:
        """Returns what is known of the first deferred step whose gradient was not finite, else None."""
        if self._waiting is not None and self._found is not None and self._arrived is not None:
            place, norm = self._waiting
            self._waiting = None
            self._arrived.synchronize()
            if self._host_flag:
                self._found.flag.zero_()
                return LateRefusal(place, norm, undone=1)
        return None if self.replays is None else self.replays.late_refusal()


class ReplayFlags:
    """What the host knows of steps that were replayed and not looked at: each leaves one flag for all so far.

    Args:
        device: of the steps.

    Attributes:
        refused: 0-d on the device: 0.0, and 1.0 from a step on whose gradient was not finite, so that no later step
            changes anything.

    Example:
        >>> flags = ReplayFlags(torch.device("cpu"))
        >>> norm = torch.tensor(float("inf"))
        >>> _ = flags.raise_for(norm); flags.note(Place(3, 0, 3, 1, 1), norm)
        >>> flags.late_refusal().place.step, flags.late_refusal()
        (3, None)
    """

    def __init__(self, device: torch.device):
        self._found = FoundInf(device)
        self.refused = self._found.flag
        self._on_cuda = device.type == "cuda"
        self._told = torch.zeros((), pin_memory=self._on_cuda)
        self._told_here = self._told.numpy()
        self._steps: deque[tuple[Place, Tensor]] = deque()
        self._marks: deque[torch.cuda.Event] = deque()

    def raise_for(self, norm: Tensor) -> Tensor:
        """Raises the flag for a gradient's norm that is not finite, on the device; returns it."""
        return self._found.look_at(norm)

    def note(self, place: Place, norm: Tensor) -> None:
        """Notes a step; sends the flag of every eighth to the host, and waits for one of some steps before.

        In the graph of each step the copy alone would take a sixth of a small model's step.
        """
        self._steps.append((place, norm))
        if len(self._steps) % _MARK:
            return
        self._told.copy_(self.refused, non_blocking=True)
        if not self._on_cuda:
            return
        mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record(torch.cuda.current_stream(norm.device))
        self._marks.append(mark)
        if len(self._marks) > 2:
            self._marks.popleft().synchronize()
            if not self._told_here:
                for _ in range(_MARK):
                    self._steps.popleft()

    @property
    def raised(self) -> bool:
        """Whether the host has heard of a refused step; asks nobody."""
        return bool(self._told_here)

    def late_refusal(self) -> LateRefusal | None:
        """Waits for all flags; returns the first step that was refused, or None."""
        if not self._steps:
            return None
        self._told.copy_(self.refused, non_blocking=True)
        if self._on_cuda:
            torch.cuda.current_stream(self.refused.device).synchronize()
        steps, refused = list(self._steps), self.raised
        self._steps.clear()
        self._marks.clear()
        if not refused:
            return None
        self.refused.zero_()
        self._told.zero_()
        first = next(number for number, (_, norm) in enumerate(steps) if not bool(norm.isfinite()))
        return LateRefusal(*steps[first], undone=len(steps) - first)
