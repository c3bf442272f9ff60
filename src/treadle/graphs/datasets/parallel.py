"""Ordered parallel map over processes."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

import torch

from treadle.errors.arguments import check_least
from treadle.graphs.encodings.graphs import one_thread

__all__ = ["count_workers", "parallel_map"]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_CHUNK = 64
_WORTH_IT = 4 * _CHUNK  # below this, starting processes costs more than it saves
_MOST = 8  # unless the caller requests more


def count_workers(num_workers: int | None) -> int:
    """Return the number of processes: the given number, or for None one per core, at most 8.

    None means 0, the current process only, if processes cannot be forked, since a script without ``if __name__ ==
    "__main__"`` would run again in each. The same holds in a process that may not have children, such as a DataLoader
    worker.

    Raises:
        ConfigError: the number is negative.

    Example:
        >>> count_workers(0)
        0
    """
    check_least(0, num_workers=num_workers)
    if multiprocessing.current_process().daemon:
        return 0
    if num_workers is not None:
        return num_workers
    return min(_MOST, len(os.sched_getaffinity(0))) if sys.platform == "linux" else 0


def parallel_map(
    function: Callable[[_Item], _Result], items: Sequence[_Item], *, num_workers: int | None = None
) -> list[_Result]:
    """Apply a function to every item and return the results in the order of the items.

    Args:
        function: a module-level function whose result depends only on its argument. It should return NumPy arrays
            rather than tensors, since each tensor would be returned through a separate open file.
        items: its arguments.
        num_workers: number of processes (:func:`count_workers`).

    Raises:
        ConfigError: ``num_workers`` is negative.

    Example:
        >>> parallel_map(abs, range(-3, 0), num_workers=0)
        [3, 2, 1]
    """
    count = count_workers(num_workers)
    if count == 0 or len(items) < _WORTH_IT:
        with one_thread():
            return [function(item) for item in items]
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    # One thread each: a forked child of a process that has used OpenMP hangs in its first parallel region.
    count = min(count, math.ceil(len(items) / _CHUNK))
    with ProcessPoolExecutor(count, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return list(pool.map(function, items, chunksize=_CHUNK))
