"""Weighting of micro-batches in a step: gradients of Σ w·loss / Σ w, over micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from treadle import distributed
from treadle.errors import ConfigError
from treadle.optim.gradients import Inverse
from treadle.task import StepOutput

NUM_AGREED = 3
"""Numbers of a captured step on which ranks must agree."""


class GroupWeights:
    """Loss weights of one group, with the remaining divisor of its gradients.

    Each loss is divided by ``size · reference / weight`` before its backward pass, and the gradients afterwards by ``Σ
    weight / (size · reference)`` at the end. The reference is the first weight, so a scaled loss does not grow with the
    weights (fp16), equal weights give exactly ``loss / size`` and no second division, and a single micro-batch on one
    rank is not scaled at all: results match a plain loop to the bit.

    Ranks exchange their numbers after the first and after the last forward pass of a step, which coincide with a single
    micro-batch. The exchange is between hosts; only weights on a device are reduced there.

    Args:
        size: micro-batches in the group.
        device: device on which device weights are reduced over ranks.
        undivided: gradients are summed, not averaged (the task has already divided by its totals).
        largest: micro-batches of a whole group, equal on all ranks; by default ``size``.
        num_ranks: number of ranks of the run; the size of the process group by default.
        notices: returns the numbers that ranks also exchange after the last forward pass.

    Attributes:
        total: weight of the group; after the last micro-batch, over all ranks.
        rank_notices: the notices of each rank, after the last micro-batch on several ranks.

    Example:
        >>> weights = GroupWeights(1, device=torch.device("cpu"))
        >>> loss = torch.tensor(2.0, requires_grad=True)
        >>> weights.scaled(StepOutput(loss, weight=7)) is loss, weights.divisor()
        (True, None)
    """

    def __init__(
        self,
        size: int,
        *,
        device: torch.device,
        undivided: bool = False,
        largest: int | None = None,
        num_ranks: int | None = None,
        notices: Callable[[], Sequence[float]] = tuple,
    ):
        self.size = size
        self.device = device
        self.undivided = undivided
        self.num_losses = 0
        self.total: float | Tensor = 0.0
        self.rank_notices: list[list[float]] = []
        self._last = size
        self._gathers_twice = max(largest or 1, size) > 1
        self._notices = notices
        self._seen = 0
        self._first: float | Tensor = 0.0
        self._reference: float | Tensor | None = None
        self._reduction: str | None = None
        self._ranks = distributed.world_size() if num_ranks is None else num_ranks
        self._alone = size == 1 and self._ranks == 1
        self._anybody = False

    def scaled(self, output: StepOutput) -> Tensor | None:
        """Return the loss to backpropagate, or None when the micro-batch contributes nothing.

        Raises:
            ConfigError: the weight is negative or not finite, or means and sums are mixed in one step.
        """
        weight = _checked(output.weight)
        missing = output.loss is None or (not isinstance(weight, Tensor) and weight == 0)
        if not missing:
            self._count(output, weight)
        self._seen += 1
        if not self._alone:
            self._agree(0.0 if missing else weight)
        if output.loss is None or missing:
            return None
        if self.undivided or self._alone or self._reference is None:
            return output.loss
        divisor = self.size * self._reference / weight
        return output.loss / divisor if isinstance(divisor, Tensor) or divisor != 1.0 else output.loss

    def _count(self, output: StepOutput, weight: float | Tensor) -> None:
        if self._reduction not in (None, output.reduction):
            raise _mixed(output.reduction, f"an earlier micro-batch had {self._reduction!r}")
        self._reduction = output.reduction
        self.undivided |= output.reduction == "sum"
        self.num_losses += 1
        self.total = self.total + weight

    def _agree(self, weight: float | Tensor) -> None:
        """Determine the reference and, on several ranks, everything that must be the same on all of them."""
        if self._ranks == 1:
            if self._reference is None and not self.undivided:
                self._take_reference(weight)
            return
        if self._seen == 1:
            self._first = weight
            if self._gathers_twice:
                self._share_reference(self._gather())
        if self._seen == self._last:
            gathered = self._gather()
            if not self._gathers_twice:
                self._share_reference(gathered)
            self._share_total(gathered)

    def _take_reference(self, weight: float | Tensor) -> None:
        if isinstance(weight, Tensor):
            self._reference = torch.where(weight > 0, weight, torch.ones_like(weight)).float()
        elif weight > 0:
            self._reference = weight

    def _gather(self) -> dict[str, list[float]]:
        """Gather the numbers of all ranks, by name."""
        own = self._numbers()
        numbers = distributed.gather_numbers([*own.values(), *self._notices()])
        self.rank_notices = [gathered[len(own) :] for gathered in numbers]
        return {name: [gathered[index] for gathered in numbers] for index, name in enumerate(own)}

    def _numbers(self) -> dict[str, float]:
        """Return the numbers of this rank, by name."""
        return {
            "size": self.size, "undivided": self.undivided, "losses": self.num_losses,
            "summed": self._reduction == "sum", "averaged": self._reduction == "mean",
            "first": _number(self._first), "first on device": isinstance(self._first, Tensor),
            "total": _number(self.total), "total on device": isinstance(self.total, Tensor),
        }  # fmt: skip

    def _share_reference(self, gathered: Mapping[str, list[float]]) -> None:
        self.size = int(max(gathered["size"]))  # groups may differ if one rank's data ends first
        self.undivided = any(gathered["undivided"])
        if self.undivided:
            return
        if any(gathered["first on device"]):
            first = torch.as_tensor(self._first, dtype=torch.float32, device=self.device)
            self._take_reference(distributed.max_over_ranks(first))
        else:
            self._reference = max(gathered["first"]) or 1.0

    def _share_total(self, gathered: Mapping[str, list[float]]) -> None:
        if any(gathered["summed"]) and any(gathered["averaged"]):
            raise _mixed(self._reduction or "none here", "another rank used the other one")
        self.undivided = any(gathered["undivided"])
        self._anybody = any(gathered["losses"])
        if any(gathered["total on device"]):
            total = torch.as_tensor(self.total, dtype=torch.float64, device=self.device)
            self.total = distributed.sum_over_ranks(total)
        else:
            self.total = sum(gathered["total"])

    def any_loss(self) -> bool:
        """Return whether any micro-batch had a loss, on any rank."""
        return self._anybody if self._ranks > 1 else self.num_losses > 0

    def divisor(self) -> float | Tensor | None:
        """Return the divisor of the gradients after averaging over ranks, or None."""
        if self.undivided:
            return None if self._ranks == 1 else 1.0 / self._ranks
        if self._alone or self._reference is None:
            return None
        divisor = self.total / (self._ranks * self.size * self._reference)
        return None if not isinstance(divisor, Tensor) and divisor == 1.0 else divisor


class GivenWeights:
    """Loss weights of a captured step, like :class:`GroupWeights`, with numbers set later by the host.

    Args:
        size: micro-batches in the group.
        device: device of the losses.
        equal: whether the weights of a step are always equal, so that gradients need no division.

    Attributes:
        total: total weight, above 0.
        rank_notices: empty: there is one rank.

    Example:
        >>> weights = GivenWeights(2, device=torch.device("cpu"), equal=False)
        >>> weights.give([3.0, 6.0]); weights.begin()
        >>> [weights.scaled(StepOutput(torch.tensor(3.0))).item() for _ in range(2)], weights.divisor()
        ([1.5, 3.0], tensor(1.5000))
    """

    def __init__(self, size: int, *, device: torch.device, equal: bool):
        self.total = 1.0
        self._equal = equal
        self.rank_notices: list[list[float]] = []
        self._size = size
        self._factors = torch.ones(size + 1, device=device)
        self._on_cuda = device.type == "cuda"
        self._seen = 0
        self._undivided = False

    def give(self, weights: Sequence[float]) -> None:
        """Set the weights of the next step's micro-batches, each above 0."""
        reference, total = weights[0], sum(weights)
        divisors = [self._size * reference / weight for weight in weights] + [total / (self._size * reference)]
        if self._on_cuda:  # there torch divides by a host number through its float64 inverse
            divisors = [1.0 / divisor for divisor in divisors]
        self._factors.copy_(torch.tensor(divisors), non_blocking=True)

    def begin(self) -> None:
        """Begin a step."""
        self._seen = 0

    def scaled(self, output: StepOutput) -> Tensor | None:
        """Return the loss to backpropagate.

        Raises:
            RuntimeError: the loss is not float32, so that its scale would be rounded differently.
        """
        if output.loss is None:
            return None
        self._undivided |= output.reduction == "sum"
        factor = self._factors[self._seen]
        self._seen += 1
        if self._undivided:
            return output.loss
        if output.loss.dtype != torch.float32:
            raise RuntimeError(f"the loss of accumulated micro-batches is {output.loss.dtype}, but must be float32")
        return output.loss * factor if self._on_cuda else output.loss / factor

    def any_loss(self) -> bool:
        """Return whether every micro-batch had a loss."""
        return self._seen == self._size

    def divisor(self) -> Tensor | Inverse | None:
        """Return the divisor of the gradients."""
        if self._undivided or self._equal:
            return None
        return Inverse(self._factors[-1]) if self._on_cuda else self._factors[-1]


class EqualWeights(GroupWeights):
    """Loss weights of a captured step on several ranks, which agreed that those of each rank are the same.

    Args:
        size: micro-batches in the group.
        device: device of the losses.
        num_ranks: number of ranks of the run.

    Attributes:
        agreed: numbers of the latest step that must be the same on all ranks.

    Example:
        >>> weights = EqualWeights(1, device=torch.device("cpu"), num_ranks=2)
        >>> weights.scaled(StepOutput(torch.tensor(3.0), weight=7)), weights.any_loss(), weights.divisor()
        (tensor(3.), True, None)
    """

    def __init__(self, size: int, *, device: torch.device, num_ranks: int):
        super().__init__(size, device=device, num_ranks=num_ranks)
        self._begun = dict(vars(self))
        self.agreed = [0.0] * NUM_AGREED

    def begin(self) -> None:
        """Begin a step."""
        vars(self).update(self._begun)

    def scaled(self, output: StepOutput) -> Tensor | None:
        """Return the loss to backpropagate.

        Raises:
            RuntimeError: the device knows the weight, or losses are added up.
        """
        if isinstance(output.weight, Tensor) or output.reduction == "sum":
            raise RuntimeError("on several ranks the host must know the weight, and losses must be means")
        return super().scaled(output)

    def _gather(self) -> dict[str, list[float]]:
        own = self._numbers()
        self.agreed = [own[name] for name in ("size", "first", "total")]
        return {name: [number] * self._ranks for name, number in own.items()}


class KnownWeights(GroupWeights):
    """Loss weights of a group that the host knows in advance, in place of the step's device tensors.

    Args:
        weights: weights of the micro-batches.
        device: device of the losses.
    """

    def __init__(self, weights: Sequence[float], *, device: torch.device):
        super().__init__(len(weights), device=device, num_ranks=1)
        self._known = weights

    def scaled(self, output: StepOutput) -> Tensor | None:
        """Return the loss to backpropagate."""
        return super().scaled(replace(output, weight=self._known[self._seen]))


def _mixed(reduction: str, other: str) -> ConfigError:
    return ConfigError(
        f"{other} in this step; a step either averages its losses or adds them up",
        argument="reduction",
        value=reduction,
    )


def _number(value: float | Tensor) -> float:
    return 0.0 if isinstance(value, Tensor) else value  # a device value is unknown to the host


def _checked(weight: float | Tensor | None) -> float | Tensor:
    if weight is None:
        return 1.0
    if isinstance(weight, Tensor):  # unknown here: reading it would wait for the device
        return weight.detach()
    if not 0.0 <= weight < math.inf:
        raise ConfigError(
            "the number of elements that the loss is a mean over must be finite and >= 0",
            argument="weight",
            value=weight,
        )
    return float(weight)


def as_count(count: Tensor) -> float | Tensor:
    """Return a CPU count as a number, since reading it needs no sync; keep a device count as a tensor."""
    return float(count.numpy()) if count.device.type == "cpu" else count


def without_empty(loss: Tensor, weight: float | Tensor) -> Tensor | None:
    """Return the loss of a batch, or None if its weight is 0.

    If the weight is on a device, a loss over nothing (0/0) becomes an exact 0 that keeps its graph, so that it does not
    affect the gradient and need not be read.

    Example:
        >>> without_empty(torch.tensor(float("nan")), 0.0) is None
        True
        >>> without_empty(torch.tensor(float("nan")), torch.tensor(0))
        tensor(0.)
    """
    if isinstance(weight, Tensor):
        return torch.where(weight.to(loss.device) > 0, loss, torch.zeros_like(loss))
    return None if weight == 0 else loss
