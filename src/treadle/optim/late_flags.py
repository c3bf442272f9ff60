"""Steps that the optimizer skips on the device, and flags by which the host learns of them later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from treadle.device.handover import wait_for

_STEPS_PER_COPY = 8  # steps
_COPIES_IN_FLIGHT = 2


class StepLocation(NamedTuple):
    """Location of a step (step, epoch, batch), used in error messages.

    Attributes:
        step: 1-based.
        epoch: epochs completed.
        position: micro-batches of the epoch consumed, including this step's.
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
class LateRefusal:
    """Step that the optimizer skipped on the device, detected later.

    Attributes:
        place: location of the step.
        norm: norm of its gradient.
        undone: the steps wrongly counted as applied: this one and those after it.
    """

    place: StepLocation
    norm: Tensor
    undone: int


def skips_on_device(optimizer: Optimizer, device: torch.device) -> bool:
    """Return whether the optimizer itself can skip a non-finite gradient: fused, on CUDA.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> skips_on_device(torch.optim.SGD([weight], lr=1.0), torch.device("cpu"))
        False
    """
    return device.type == "cuda" and all(group.get("fused") for group in optimizer.param_groups)


def can_be_recorded(optimizer: Optimizer, device: torch.device) -> bool:
    """Return whether a captured step can skip a gradient: fused or capturable optimizer, on CUDA.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> can_be_recorded(torch.optim.RAdam([weight], capturable=True), torch.device("cuda"))
        True
    """
    groups = optimizer.param_groups
    return device.type == "cuda" and all(group.get("fused") or group.get("capturable") for group in groups)


def step_unless(found_inf: Tensor, optimizer: Optimizer) -> None:
    """Step an optimizer, skipping the step on the device if ``found_inf`` is 1.

    A fused optimizer does so itself. For any other, all changes are undone; it must already have all of its state.
    """
    if not all(group.get("fused") for group in optimizer.param_groups):
        _step_or_restore(found_inf, optimizer)
        return
    optimizer.grad_scale, optimizer.found_inf = None, found_inf  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


@torch.no_grad()
def _step_or_restore(found_inf: Tensor, optimizer: Optimizer) -> None:
    moved = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moved += [value for entries in optimizer.state.values() for value in entries.values() if isinstance(value, Tensor)]
    before = [tensor.clone() for tensor in moved]
    optimizer.step()
    left_out = found_inf.bool()
    for tensor, old in zip(moved, before, strict=True):
        torch.where(left_out, old, tensor, out=tensor)


class LateFlags:
    """Pending results of steps that the device may have refused: one flag for all of them.

    On several ranks, all detect a refusal at the same step: every eighth step copies its flag to a separate host
    location, which is read two copies later.

    Args:
        device: device of the steps.

    Attributes:
        refused: 0-d on the device: 0.0, or 1.0 from the first step with a non-finite gradient, so that no later step
            changes anything.
        raised: whether the host has detected a refused step.

    Example:
        >>> flags = LateFlags(torch.device("cpu"))
        >>> norm = torch.tensor(float("inf"))
        >>> _ = flags.raise_for(norm); flags.note(StepLocation(3, 0, 3, 1, 1), norm)
        >>> flags.late_refusal().place.step, flags.late_refusal()
        (3, None)
    """

    def __init__(self, device: torch.device):
        self.refused = torch.zeros((), device=device)
        self._one = torch.ones((), device=device)
        self.raised = False
        self._on_cuda = device.type == "cuda"
        self._early: _FlagCopy | None = None  # that of the latest step, if sent before its update
        self._steps: deque[Steps] = deque()
        self._copies: deque[tuple[_FlagCopy, int]] = deque()  # with the number of entries of _steps that each covers
        self._uncovered = 0  # entries since the last copy
        self._spare: list[_FlagCopy] = []

    def raise_for(self, norm: Tensor) -> Tensor:
        """Set the flag on the device if a gradient norm is not finite; return it."""
        self._mark(self.refused, norm)
        return self.refused

    def _mark(self, flag: Tensor, norm: Tensor) -> None:
        """Set a flag if a norm is not finite, in one kernel that multiplies the norm by one."""
        torch._amp_foreach_non_finite_check_and_unscale_([norm.float()], flag, self._one)

    def step(self, optimizer: Optimizer, norm: Tensor, place: StepLocation) -> None:
        """Step an optimizer, unless this gradient or one before was not finite, and record the step."""
        step_unless(self.raise_for(norm), optimizer)
        self.note(place, norm)

    @property
    def moved(self) -> list[Tensor]:
        """Tensors that a step changes, besides :attr:`refused`."""
        return []

    def note(self, place: StepLocation, norm: Tensor) -> None:
        """Record a step; every eighth step copies the flag to the host, and waits for an earlier copy.

        A copy in each step would take a tenth of a small model's step, and a sixth of a replayed one.
        """
        self._steps.append(Steps(place, norm))
        self._early = None
        self._uncovered += 1
        if self._uncovered == _STEPS_PER_COPY:
            self._copy_flag()

    def note_block(self, first: StepLocation, norms: Tensor) -> None:
        """Record consecutive steps of one batch each, with one copy for all.

        Args:
            first: location of the first step.
            norms: (N,) norms of the steps.
        """
        self._steps.append(Steps(first, norms))
        self._early = None
        self._uncovered += 1
        self._copy_flag()

    def _sent(self) -> _FlagCopy:
        copy = self._spare.pop() if self._spare else _FlagCopy(on_cuda=self._on_cuda)
        copy.send(self.refused)
        return copy

    def _copy_flag(self) -> None:
        copy = self._sent()
        self._copies.append((copy, self._uncovered))
        self._uncovered = 0
        if len(self._copies) > _COPIES_IN_FLIGHT:
            copy, count = self._copies.popleft()
            self._spare.append(copy)
            if copy.result():
                self.raised = True
                return
            for _ in range(count):
                self._steps.popleft()

    def late_refusal(self) -> LateRefusal | None:
        """Wait for all flags; return the first refused step, or None."""
        if not self._steps:
            return None
        copy, self._early = self._early or self._sent(), None
        refused, steps = copy.result(), list(self._steps)
        self._spare += [copy, *(each for each, _ in self._copies)]
        self._steps.clear()
        self._copies.clear()
        self._uncovered = 0
        self.raised = False
        if not refused:
            return None
        self.refused.zero_()
        return self._refusal_in(steps)

    def forget(self) -> None:
        """Drop pending results, before another state is loaded."""
        self.late_refusal()

    def _refusal_in(self, steps: list[Steps]) -> LateRefusal | None:
        """Return the first refused one of some steps."""
        finite = finite_of(steps)
        bad = finite.index(False)
        return LateRefusal(*place_of(steps, bad), undone=len(finite) - bad)


class Steps(NamedTuple):
    """One step, or several consecutive ones of one batch each."""

    first: StepLocation
    norms: Tensor  # 0-d, or (N,)


def finite_of(steps: list[Steps]) -> list[bool]:
    """Return whether the norm of each step is finite; reads the device."""
    finite: list[bool] = torch.cat([noted.norms.reshape(-1) for noted in steps]).isfinite().tolist()
    return finite


def place_of(steps: list[Steps], number: int) -> tuple[StepLocation, Tensor]:
    """Return location and norm of a step by its index over all."""
    for first, norms in steps:
        if number < norms.numel():
            place = first._replace(step=first.step + number, position=first.position + number)
            return place, norms.reshape(-1)[number]
        number -= norms.numel()
    raise IndexError(number)


class _FlagCopy:
    """Host memory for the flag of one step."""

    def __init__(self, *, on_cuda: bool):
        self._place = torch.zeros((), pin_memory=on_cuda)
        self._seen = self._place.numpy()  # the same memory, to read without a torch operation
        self._event = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]

    def send(self, flag: Tensor) -> None:
        """Copy a flag into the host memory."""
        self._place.copy_(flag, non_blocking=True)
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(flag.device))

    def result(self) -> bool:
        """Wait for the flag; return whether it is set."""
        if self._event is not None:
            wait_for(self._event)
        return bool(self._seen)
