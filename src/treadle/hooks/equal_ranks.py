"""EqualRanksHook: detects replicas whose weights have diverged."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from treadle import distributed
from treadle.engine.hook import BaseHook
from treadle.errors import RanksDifferError
from treadle.errors.arguments import check_least, checked

if TYPE_CHECKING:
    from treadle.engine import Engine


class EqualRanksHook(BaseHook):
    """Hook that checks that the weights of replicas are equal on all ranks.

    Gradients are all-reduced before hooks see them and never compared again, so a hook that changes them on one rank
    only trains as many models as there are ranks, of which rank 0's is saved. This hook compares one sum over the
    weights every ``interval`` steps. The sum travels with the messages of a step, without further communication; on a
    GPU, the host waits for it once per interval. Sharded weights are not checked.

    Args:
        interval: steps between two comparisons, >= 1.

    Raises:
        ConfigError: ``interval`` is below 1.

    Example:
        >>> hook = EqualRanksHook(100)
    """

    @checked
    def __init__(self, interval: int = 100):
        check_least(1, interval=interval)
        self.interval = interval
        self._sum = 0.0
        self._summed_at = 0
        self._equal_at = 0

    def on_before_train(self, trainer: Engine) -> None:
        """Start comparing if there are several ranks."""
        self.idle = distributed.world_size() == 1
        self._summed_at, self._equal_at = 0, trainer.step

    def notice(self, trainer: Engine) -> Callable[[], float]:
        """Send the last sum to the other ranks."""
        return self._notice

    def _notice(self) -> float:
        return self._sum

    def on_after_step(self, trainer: Engine) -> None:
        """Compare the sums received in this step, and compute the next ones.

        Raises:
            RanksDifferError: the weights differ; raised on all ranks.
        """
        if self._summed_at:
            self._compare(trainer.heard_of(self._notice))
        if trainer.step % self.interval == 0:
            self._sum, self._summed_at = _sum_of_weights(trainer), trainer.step

    def on_after_train(self, trainer: Engine) -> None:
        """Compare the final weights.

        Raises:
            RanksDifferError: the weights differ; raised on all ranks.
        """
        if not self.idle:
            self._sum, self._summed_at = _sum_of_weights(trainer), trainer.step
            self._compare([row[0] for row in distributed.gather_numbers([self._sum], dtype=torch.float64)])

    def _compare(self, sums: Sequence[float]) -> None:
        step, self._summed_at = self._summed_at, 0
        others = [rank for rank, value in enumerate(sums) if not _same(value, sums[0])]
        if others:
            raise RanksDifferError(
                f"the weights of {'rank' if len(others) == 1 else 'ranks'} {', '.join(map(str, others))} differ from "
                f"those of rank 0 after step {step}, but not after step {self._equal_at}: something changes "
                "gradients, weights or the optimizer on some ranks only, such as a hook that acts on rank 0 alone. "
                "Make the same change on every rank"
            )
        self._equal_at = step


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


@torch.no_grad()
def _sum_of_weights(trainer: Engine) -> float:
    """Return a position-dependent sum over the replicated weights."""
    whole = [weight.detach() for weight in trainer.model.parameters() if not distributed.is_dtensor(weight)]
    if not whole:
        return 0.0
    sums = [(number + 1) * weight.sum(dtype=torch.float64) for number, weight in enumerate(whole)]
    return float(torch.stack([value.to(sums[0].device) for value in sums]).sum())
