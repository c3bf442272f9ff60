"""How many members of a population fit into the memory of a GPU, as those that run show."""

from __future__ import annotations

import logging

import torch

from treadle.errors import ConfigError

_log = logging.getLogger("treadle.population")
_SPARE = 0.1  # share of a member's memory, since it may not have seen its largest batch


class Admission:
    """Decision whether a further member starts beside those that run, by what these have taken of the GPU's memory.

    Members start one after the other, each after the first turn of the one before. What the first ones took is the
    measure. Without a GPU every member is admitted.

    Args:
        asked: members that the user wants at a time; None takes as many as fit.

    Example:
        >>> Admission()(3)
        True
    """

    def __init__(self, asked: int | None = None):
        self._asked = asked
        self._start = _taken()
        self._full: int | None = None  # members that were found to be all that fit

    def __call__(self, running: int) -> bool:
        """Return whether another member fits beside so many.

        Raises:
            ConfigError: the user asked for more at a time than fit.
        """
        if not torch.cuda.is_available():
            return True
        if self._full is not None and running >= self._full:
            return False  # nothing is measured again before one ends: that waits for the GPU
        self._full = None
        torch.cuda.synchronize()
        each, free = (_taken() - self._start) / running, torch.cuda.mem_get_info()[0]
        if each * (1 + _SPARE) <= free:
            return True
        text = f"{running} members take {each / 2**20:,.0f} MiB each, and {free / 2**20:,.0f} MiB are free"
        if self._asked is not None:
            raise ConfigError(f"{text}; use fewer, or None for as many as fit", argument="together", value=self._asked)
        self._full = running
        _log.warning("%s: the others wait until one ends", text)
        return False


def _taken() -> int:
    """Return the bytes of the GPU that are taken: by tensors, by graphs, and by what torch keeps for more of them."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free
