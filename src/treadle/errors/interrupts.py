"""Ctrl-C at a moment at which Python prints and ignores exceptions."""

from __future__ import annotations

import _thread
import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

_SECONDS = 0.05  # until the callback that ignored the exception has returned


@contextlib.contextmanager
def repeating_ignored_interrupts() -> Iterator[None]:
    """Inside the block, raise a KeyboardInterrupt again that Python ignored.

    Python ignores exceptions in ``__del__``, in callbacks of weak references and of the garbage collector, and around a
    fork. Loaders with workers start and end processes in each epoch, so there Ctrl-C would often do nothing.

    Example:
        >>> with repeating_ignored_interrupts():
        ...     pass
    """
    before = sys.unraisablehook

    def repeat(ignored: Any) -> None:
        if ignored.exc_type is None or not issubclass(ignored.exc_type, KeyboardInterrupt):
            before(ignored)
            return
        timer = threading.Timer(_SECONDS, _thread.interrupt_main)
        timer.daemon = True
        timer.start()

    sys.unraisablehook = repeat
    try:
        yield
    finally:
        if sys.unraisablehook is repeat:
            sys.unraisablehook = before
