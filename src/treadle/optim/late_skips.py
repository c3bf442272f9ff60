"""Steps in fp16 that the device skips: the scale moves there, and the host learns of skipped steps later."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.optim.ema import Ema
from treadle.optim.late_flags import (
    LateFlags,
    LateRefusal,
    StepLocation,
    Steps,
    finite_of,
    place_of,
    skips_on_device,
    step_unless,
)
from treadle.optim.precision import Precision

Tell = Callable[[int, int | None], None]


def scales_on_device(precision: Precision, optimizer: Optimizer, device: torch.device) -> bool:
    """Return whether scale and optimizer can follow a non-finite gradient without the host.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> precision = Precision("fp16", torch.device("cpu"))
        >>> scales_on_device(precision, torch.optim.SGD([weight], lr=1.0, fused=True), torch.device("cpu"))
        False
    """
    skips = skips_on_device(optimizer, device) and getattr(optimizer, "_step_supports_amp_scaling", False)
    return bool(skips and precision.moves_on_device)


class LateSkips(LateFlags):
    """Pending results of steps in fp16: the device lowers the scale and skips a step, and counts such steps.

    A step whose scale would fall below 1 ends the run: it and all following steps are skipped until the host knows.

    Args:
        device: device of the steps.
        precision: holds the scaler.
        tell: called when the host has learned of skipped steps, with the number of those it had counted as applied, and
            the number of the latest step if that is skipped.

    Attributes:
        skips: flag of the latest step, 0-d on the device: 1.0 if the step changes nothing.
        open: whether the latest step was launched, but is not counted on the host yet.
        host_waits: whether the host waits for the result of the next step.
        latest_skipped: whether the latest step is known to be skipped.
    """

    def __init__(self, device: torch.device, precision: Precision, tell: Tell):
        super().__init__(device)
        self.refused = torch.zeros((), device=device)  # skipped steps that the host does not know of
        self.skips = self.refused
        self.open = False
        self.host_waits = True
        self.latest_skipped = False
        self._moves_averages: bool | None = None  # not looked up yet
        self._precision = precision
        self._tell = tell
        self._ended = torch.zeros((), device=device)
        self._ended_steps = torch.zeros((), device=device)
        self._num_states = -1  # of the optimizer before the latest step, if the step created some

    def wait_for_next(self, needed: bool) -> None:
        """Set whether the host waits for the result of the next step, because something on it needs it at once."""
        self.host_waits = needed

    def moves_averages(self, averages: Iterable[Ema], model: nn.Module) -> bool:
        """Return whether the device can leave all averages of the run unchanged in a skipped step."""
        if self._moves_averages is None:
            self._moves_averages = all(each.recordable and each.shares_devices_with(model) for each in averages)
        return self._moves_averages

    @property
    def moved(self) -> list[Tensor]:
        """Tensors that a step changes."""
        return [*self._precision.scale_tensors(), self._ended, self._ended_steps]

    @torch.no_grad()
    def raise_for(self, norm: Tensor) -> Tensor:
        """Return the flag of a step, set if an unscaled gradient or the norm is not finite."""
        flag = self._precision.flag_of_step(norm.device)
        self._mark(flag, norm)
        torch.maximum(flag, self._ended, out=flag)
        self.refused.add_(flag)
        self.skips = flag
        return flag

    @torch.no_grad()
    def move_scale(self) -> None:
        """Let the scale follow the latest step."""
        self._precision.move_on_device(self.skips, self._ended)
        self._ended_steps.add_(self._ended)

    def step(self, optimizer: Optimizer, norm: Tensor, place: StepLocation) -> None:
        """Step an optimizer, unless the gradient is not finite, and move the scale."""
        flag = self.raise_for(norm)
        early = self._sent() if self.host_waits else None  # so that the host waits for the gradient, not for the update
        num_states = len(optimizer.state)
        step_unless(flag, optimizer)
        self.move_scale()
        self.note(place, norm)
        self._early = early
        created = len(optimizer.state) != num_states
        self._num_states = num_states if created else -1
        self.host_waits |= created

    def note(self, place: StepLocation, norm: Tensor) -> None:
        """Record a step that the host has not counted yet."""
        super().note(place, norm)
        self.open, self.latest_skipped = True, False

    def close(self, optimizer: Optimizer) -> bool:
        """End the latest step on the host; return whether it is known to be skipped.

        State that a skipped step created is removed: torch's fused SGD leaves its momentum uninitialized.
        """
        if self.latest_skipped and self._num_states >= 0:
            for parameter in list(optimizer.state)[self._num_states :]:
                del optimizer.state[parameter]
        self.open, self._num_states = False, -1
        return self.latest_skipped

    def forget(self) -> None:
        """Drop pending results, before another state is loaded."""
        super().forget()
        self.open = self.latest_skipped = False

    def _refusal_in(self, steps: list[Steps]) -> LateRefusal | None:
        """Tell which steps were skipped; return the one that ended the run, if any."""
        finite = finite_of(steps)
        total = len(finite)
        ended = total - int(self._ended_steps)
        skipped = [number for number in range(ended) if not finite[number]]
        counted = total - self.open
        self.latest_skipped = total - 1 in skipped
        latest = place_of(steps, total - 1)[0].step if self.latest_skipped else None
        self._tell(sum(number < counted for number in skipped), latest)
        if ended == total:
            return None
        self._ended.zero_()
        self._ended_steps.zero_()
        self.open = False
        return LateRefusal(*place_of(steps, ended), undone=counted - ended)
