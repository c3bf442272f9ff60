"""Admission of members by GPU memory, measured on running members."""

from __future__ import annotations

import logging

import torch

from treadle.errors import ConfigError

_log = logging.getLogger("treadle.population")
_SPARE = 0.1  # fraction of a member's memory, since it may not have seen its largest batch yet


class Admission:
    """Decision whether another member starts, based on the GPU memory used by running ones.

    Members start one after another, each after the first turn of the previous one, and are estimated by the memory of
    the first ones. Without a GPU every member is admitted.

    Args:
        asked: concurrent members requested by the user; None takes as many as fit.

    Example:
        >>> Admission()(3)
        True
    """

    def __init__(self, asked: int | None = None):
        self._asked = asked
        self._start = _taken()
        self._full: int | None = None  # number of members found to fit

    def __call__(self, running: int) -> bool:
        """Return whether another member fits next to the running ones.

        Raises:
            ConfigError: the user requested more concurrent members than fit.
        """
        if not torch.cuda.is_available():
            return True
        if self._full is not None and running >= self._full:
            return False  # not measured again before one ends, since measuring waits for the GPU
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
    """Return the GPU memory in use in bytes: tensors, graphs, and memory cached by torch."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free
