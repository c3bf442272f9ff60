"""Handover of the host between runs that share a process: where one launches much or waits, the others run.

A run by itself launches and waits as if this module were not there. Runs that take turns have a thread each, and in
each of these threads one object that receives what it would keep the host with.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


class Host(Protocol):
    """Host that the run of this thread shares with others."""

    def launch(self, launch: Callable[[], None], count: int, steps: int) -> None:
        """Call a function several times on the run's stream, a few times at once, between launches of other runs.

        Args:
            launch: launches one or several steps.
            count: calls.
            steps: that each launches.
        """
        ...

    def wait(self, ready: Callable[[], bool]) -> None:
        """Let other runs work until something is ready, or until none of them has anything to do."""
        ...

    def beside(self, work: Callable[[], T]) -> T:
        """Let other runs work while a function does, and return what it returned."""
        ...


class _OfThread(threading.local):
    host: Host | None = None


_THREAD = _OfThread()


@contextlib.contextmanager
def shared_host(host: Host) -> Iterator[None]:
    """Hand launches and waits of this thread to others inside the block.

    Example:
        >>> class Alone:
        ...     def launch(self, launch, count, steps):
        ...         print(count, "launches")
        >>> with shared_host(Alone()):
        ...     launch_times(lambda: None, 3)
        3 launches
    """
    before, _THREAD.host = _THREAD.host, host
    try:
        yield
    finally:
        _THREAD.host = before


def host_is_shared() -> bool:
    """Return whether the run of this thread shares its process with others.

    Example:
        >>> host_is_shared()
        False
    """
    return _THREAD.host is not None


def launch_times(launch: Callable[[], None], count: int, *, steps: int = 1) -> None:
    """Call a function that launches work on the present stream several times.

    Args:
        launch: the function.
        count: calls.
        steps: that each launches.
    """
    if _THREAD.host is not None and count > 1:
        _THREAD.host.launch(launch, count, steps)
        return
    for _ in range(count):
        launch()


def wait_for(event: Any) -> None:
    """Wait for a CUDA event; runs that share the host work meanwhile."""
    if _THREAD.host is not None and not event.query():
        _THREAD.host.wait(event.query)
    event.synchronize()


def wait_for_work(device: torch.device) -> None:
    """Let other runs work until the present stream of a device is done; a run by itself does not wait here."""
    if _THREAD.host is not None and device.type == "cuda":
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        _THREAD.host.wait(event.query)


def beside_others(work: Callable[[], T]) -> T:
    """Do work on files while other runs go on.

    It launches nothing, leaves alone what a process has once, and holds no lock that another run may want.

    Example:
        >>> beside_others(lambda: 3)
        3
    """
    return work() if _THREAD.host is None else _THREAD.host.beside(work)
