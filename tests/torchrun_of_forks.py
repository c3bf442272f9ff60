"""``torchrun`` with forked ranks: otherwise unchanged, but starting a rank does not import torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.run import main

from processes import Forked

_gate: list[int] = []  # the ends of a pipe, while ranks are forked


@contextlib.contextmanager
def all_forked_first() -> Iterator[None]:
    """Hold processes forked in the block until the block ends.

    A rank that runs connects to the store of ``torchrun``, a thread of which then looks its name up. One that is forked
    at that moment inherits the lock of glibc's resolver, but not the thread that would release it, and hangs.
    """
    _gate[:] = os.pipe()
    try:
        yield
    finally:
        for end in _gate:
            os.close(end)
        _gate.clear()


def _wait_at_the_gate() -> None:
    if _gate:
        reads, writes = _gate
        os.close(writes)
        os.read(reads, 1)  # nothing is written; it returns when every other process has closed the other end
        os.close(reads)
        _gate.clear()


os.register_at_fork(after_in_child=_wait_at_the_gate)


def _start(context: Any, start: Any = SubprocessContext._start) -> None:
    with all_forked_first():
        start(context)


if __name__ == "__main__":
    subprocess_handler.Popen = Forked
    SubprocessContext._start = _start
    main()
