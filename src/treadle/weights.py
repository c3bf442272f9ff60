"""How micro-batches share one step: gradients of Σ w·loss / Σ w, over micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from treadle import distributed
from treadle.errors import ConfigError
from treadle.task import StepOutput


class GroupWeights:
    """Scales the losses of one group and says what the gradients are still to be divided by.

    Each loss is divided by ``size · reference / weight`` before its backward pass and the gradients once more by
    ``Σ weight / (size · reference)`` at the end. The reference is the first weight, so a scaled loss does not grow
    with the weights (fp16), equal weights give exactly ``loss / size`` and no second division, and a single
    micro-batch on one rank is not scaled at all: a plain loop is matched to the bit.

    Args:
        size: micro-batches in the group.
        device: where collectives run.
        undivided: gradients are summed, not averaged (the task divided by its totals already).

    Example:
        >>> weights = GroupWeights(1, device=torch.device("cpu"))
        >>> loss = torch.tensor(2.0, requires_grad=True)
        >>> weights.scaled(StepOutput(loss, weight=7)) is loss, weights.divisor()
        (True, None)
    """

    def __init__(self, size: int, *, device: torch.device, undivided: bool = False):
        self.size = size
        self.device = device
        self.undivided = undivided
        self.num_losses = 0
        self.total: float | Tensor = 0.0
        self._reference: float | Tensor | None = None
        self._reduction = "mean"
        self._ranks = distributed.world_size()

    def scaled(self, output: StepOutput) -> Tensor | None:
        """Returns the loss to backpropagate, or None when the micro-batch contributes nothing.

        Raises:
            ConfigError: the weight is negative or not finite, or means and sums meet in one group.
        """
        weight = _checked(output.weight)
        missing = output.loss is None or (not isinstance(weight, Tensor) and weight == 0)
        if self._reference is None and not self.undivided and not self._alone:
            self._share_reference(0.0 if missing else weight)
        if output.loss is None or missing:
            return None
        if self.num_losses and output.reduction != self._reduction:
            raise ConfigError(
                f"reduction={output.reduction!r}: an earlier micro-batch of this step had {self._reduction!r}; "
                "a step either averages its losses or adds them up"
            )
        self._reduction = output.reduction
        self.num_losses += 1
        self.total = self.total + weight
        if self.undivided or output.reduction == "sum":
            self.undivided = True
            return output.loss
        if self._alone or self._reference is None:
            return output.loss
        return output.loss / (self.size * self._reference / weight)

    @property
    def _alone(self) -> bool:
        return self.size == 1 and self._ranks == 1

    def _share_reference(self, weight: float | Tensor) -> None:
        """Takes the first weight as reference; on several ranks all take part, with a loss or without."""
        if self._ranks > 1:
            weight = distributed.max_over_ranks(torch.as_tensor(weight, dtype=torch.float32), self.device)
        if isinstance(weight, Tensor):
            self._reference = torch.where(weight > 0, weight, torch.ones_like(weight)).float()
        elif weight > 0:
            self._reference = weight

    def any_loss(self) -> bool:
        """Decides for all ranks whether any had a loss, and makes the total the same kind of number everywhere."""
        if self._ranks == 1:
            return self.num_losses > 0
        told = [self.num_losses > 0, isinstance(self.total, Tensor), self.undivided]
        heard = distributed.max_over_ranks(torch.tensor(told, dtype=torch.uint8), self.device).tolist()
        anybody, on_device, self.undivided = (bool(flag) for flag in heard)
        if on_device:
            self.total = torch.as_tensor(self.total, dtype=torch.float64)
        return anybody

    def divisor(self) -> float | Tensor | None:
        """Returns what the gradients must be divided by, or None for nothing; they are averaged over ranks before.

        Afterwards ``total`` is the sum over the ranks where it is a tensor.
        """
        if self.undivided:
            return None if self._ranks == 1 else 1.0 / self._ranks
        if self._alone or self._reference is None:
            return None
        total = self.total
        if self._ranks > 1:
            total = distributed.sum_over_ranks(torch.as_tensor(total, dtype=torch.float64), self.device)
            self.total = total if isinstance(self.total, Tensor) else self.total
        divisor = total / (self._ranks * self.size * self._reference)
        return None if not isinstance(divisor, Tensor) and divisor == 1.0 else divisor


def _checked(weight: float | Tensor | None) -> float | Tensor:
    if weight is None:
        return 1.0
    if isinstance(weight, Tensor):  # its value is not known here: reading it would wait for the device
        return weight.detach()
    if not 0.0 <= weight < math.inf:
        raise ConfigError(f"weight={weight!r}: how many things the loss is a mean over must be finite and >= 0")
    return float(weight)


@torch.no_grad()
def divide_(grads: Sequence[Tensor], divisor: float | Tensor | None) -> None:
    """Divides gradients in place, all in one call; None leaves them alone."""
    if divisor is None or not grads:
        return
    if isinstance(divisor, Tensor):
        divisor = divisor.to(device=grads[0].device, dtype=torch.float32)
    torch._foreach_div_(list(grads), divisor)


def as_count(count: Tensor) -> float | Tensor:
    """Returns a count on the CPU as a number, since reading it waits for nothing; on a device it stays a tensor."""
    return float(count.numpy()) if count.device.type == "cpu" else count


def without_empty(loss: Tensor, weight: float | Tensor) -> Tensor | None:
    """Returns the loss of a batch, or None if nothing in it counts.

    Where the weight lies on a device, a loss over nothing (0/0) becomes an exact 0 that keeps its graph, so that it
    neither reaches the gradient nor has to be looked at.

    Example:
        >>> without_empty(torch.tensor(float("nan")), 0.0) is None
        True
        >>> without_empty(torch.tensor(float("nan")), torch.tensor(0))
        tensor(0.)
    """
    if isinstance(weight, Tensor):
        return torch.where(weight.to(loss.device) > 0, loss, torch.zeros_like(loss))
    return None if weight == 0 else loss
