"""Handover of the host between runs that share a process: while one launches work or waits, the others run.

A single run launches and waits as usual. Runs that take turns have one thread each, and in each thread an object that
takes over launches and waits.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


class Host(Protocol):
    """Interface of a host that the run of this thread shares with others."""

    def launch(self, launch: Callable[[], None], count: int, steps: int) -> None:
        """Call a function several times on the run's stream, interleaved with launches of other runs.

        Args:
            launch: launches one or several steps.
            count: number of calls.
            steps: steps that each call launches.
        """
        ...

    def wait(self, ready: Callable[[], bool]) -> None:
        """Yield to other runs until something is ready, or until none of them has anything to do."""
        ...

    def run_off_turn(self, work: Callable[[], T]) -> T:
        """Yield to other runs while a function runs, and return its result."""
        ...


class _ThreadState(threading.local):
    host: Host | None = None


_THREAD = _ThreadState()


@contextlib.contextmanager
def shared_host(host: Host) -> Iterator[None]:
    """Delegate launches and waits of this thread to a host inside the block.

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
    """Call a function that launches work on the current stream several times.

    Args:
        launch: the function.
        count: number of calls.
        steps: steps that each call launches.
    """
    if _THREAD.host is not None and count > 1:
        _THREAD.host.launch(launch, count, steps)
        return
    for _ in range(count):
        launch()


def wait_for(event: Any) -> None:
    """Wait for a CUDA event; runs that share the host continue meanwhile."""
    if _THREAD.host is not None and not event.query():
        _THREAD.host.wait(event.query)
    event.synchronize()


def wait_for_work(device: torch.device) -> None:
    """Yield to other runs until the current stream of a device is done; a no-op for a single run."""
    if _THREAD.host is not None and device.type == "cuda":
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        _THREAD.host.wait(event.query)


def run_off_turn(work: Callable[[], T]) -> T:
    """Run file operations, or copies to the host, while other runs continue.

    The function must not launch other work, change process-wide state, or hold a lock that another run may need.

    Example:
        >>> run_off_turn(lambda: 3)
        3
    """
    return work() if _THREAD.host is None else _THREAD.host.run_off_turn(work)
