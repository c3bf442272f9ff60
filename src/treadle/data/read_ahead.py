"""Checks of loaders that read ahead in threads or processes: of their state, and of what their threads draw."""

from __future__ import annotations

import logging
import multiprocessing
import threading
import time
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from treadle.checkpoint.comparison import same, same_bits
from treadle.errors import ConfigError
from treadle.seed import RngState

_log = logging.getLogger("treadle.data")
_WATCHED_SECONDS = 0.05  # time in which a prefetching thread would draw


def checked_to_resume(loader: Any, iterator: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches of a loader; a prefetching loader must pass a test of its state first.

    Its state may describe what it has read rather than what it has yielded. After the first batch the state is
    reloaded, and the next batch is compared with the expected one.

    Raises:
        ConfigError: the batches differ.
    """
    running = _helpers()
    for first in iterator:
        if _helpers() <= running:
            yield first
            break
        state = loader.state_dict()
        after = next(iterator, None)
        loader.load_state_dict(state)
        if not _same_batch(after, next(iter(loader), None)):
            raise ConfigError(
                f"the state_dict of this {type(loader).__name__}, taken after its first batch, does not resume at the "
                "second one: it counts batches that were read ahead. Count batches in __iter__, where they are "
                "yielded",
                argument="loader",
            )
        loader.load_state_dict(state)
        iterator = iter(loader)
        yield first
        break
    yield from iterator


def warning_of_drawing_threads(loader: Any, iterator: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches of a loader, and warn before the first one if a thread draws random numbers concurrently."""
    running = set(threading.enumerate())
    for first in iterator:
        if set(threading.enumerate()) - running:
            before = RngState.capture().to_plain()
            time.sleep(_WATCHED_SECONDS)
            if not same(before, RngState.capture().to_plain()):
                _log.warning(
                    "a thread of this %s draws from the global random generators at the same time as other threads, "
                    "so no run is reproducible, resumed or not. Give the thread its own generator",
                    type(loader).__name__,
                )
        yield first
        break
    yield from iterator


def _helpers() -> set[Any]:
    return {*threading.enumerate(), *multiprocessing.active_children()}


def _same_batch(one: Any, other: Any) -> bool:
    left, right = tree_leaves(one), tree_leaves(other)
    return len(left) == len(right) and all(
        a.shape == b.shape and a.dtype == b.dtype and same_bits(a, b)
        for a, b in zip(left, right, strict=True)
        if isinstance(a, Tensor) and isinstance(b, Tensor)
    )
