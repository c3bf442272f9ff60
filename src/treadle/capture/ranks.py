"""Agreement of ranks on captured steps: since a graph contains collectives, all capture, replay or run eagerly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from treadle import distributed
from treadle.engine.session import own_notices
from treadle.optim.loss_weights import NUM_AGREED

if TYPE_CHECKING:
    from treadle.engine import Engine

OFF, EAGER, RECORD, REPLAY = -1.0, 0.0, 1.0, 2.0
"""Capture state of a rank: it has given up capturing, has no graph, could capture one, or has one."""


class RankAgreement:
    """Exchange between hosts before a step and during capture; none on a single rank.

    Args:
        engine: the engine of this rank.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self.messages: list[list[float]] = []  # messages of each rank with the latest step

    @property
    def alone(self) -> bool:
        """Whether there is only one rank."""
        return self._engine.num_ranks == 1

    def action(self, own: float, agreed: Sequence[float] = ()) -> float:
        """Return the common action of all ranks for the next step.

        Args:
            own: action that this rank can do.
            agreed: numbers of its micro-batches that a graph takes to be the same on all ranks.
        """
        numbers = [*agreed, *[0.0] * (NUM_AGREED - len(agreed))]
        sent = distributed.gather_numbers([own, *numbers, *own_notices(self._engine)])
        actions, alike = [each[0] for each in sent], {tuple(each[1 : 1 + NUM_AGREED]) for each in sent}
        self.messages = [each[1 + NUM_AGREED :] for each in sent]
        if OFF in actions:
            return OFF
        same = len(set(actions)) == 1 and (own != REPLAY or len(alike) == 1)
        return own if same else EAGER

    def problem(self, own: str | None) -> str | None:
        """Return the problem of this rank or, if only others have one, a message about that."""
        if self.alone:
            return own
        found = any(sent[0] for sent in distributed.gather_numbers([float(own is not None)]))
        return own or ("another rank cannot capture its step" if found else None)

    def largest(self, own: float) -> float:
        """Return the maximum of a number over ranks."""
        return own if self.alone else max(sent[0] for sent in distributed.gather_numbers([own]))
