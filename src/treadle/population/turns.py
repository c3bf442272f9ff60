"""Runs of one process that take turns: one thread each, of which exactly one runs at a time, with its own RNG.

A member is a function that is independent of the others, so that every front end, pack and script can be one. After
some steps it yields to the next. Process-wide state that changes during a run belongs to the member and is swapped with
it: the generators of Python, NumPy and torch, the number of threads, torch's flags and the observers. On a GPU each
member has a stream, on which its graphs are captured too; the GPU works on all of them concurrently while the host
launches one after another. So that no member blocks the host, it also yields when it would wait for the GPU, and when
it would launch many graphs: the main thread launches these, some of each member at a time.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from treadle.device.garbage import ShortCollections
from treadle.engine.signals import SignalRelay
from treadle.population.member import Make, Member, Outcome, Workspaces
from treadle.population.member_thread import MemberThread
from treadle.population.process_state import ProcessState

MAX_STREAMS = 32  # streams in torch's pool before it reuses one
YOUNG_OBJECTS = 10_000  # new objects before a garbage collection; the state of a run has as many, for a moment
SWITCH_INTERVAL = 1e-5  # switch interval in seconds while another thread writes a file; 5e-3 by default


class Source(Protocol):
    """Source of members that decides which runs next."""

    def next(self) -> Member | None:
        """Return a member to run, or None if there is none, or none before another ends."""
        ...

    def tell(self, member: Member, outcome: Outcome) -> None:
        """Receive the outcome of a member."""
        ...


def run_in_turns(
    make: Make, source: Source, *, together: int, steps: int, admit: Callable[[int], bool] = lambda running: True
) -> int | None:
    """Train the members of a source in this process, several at a time in turns of some steps.

    Args:
        make: the factory.
        source: gives members and receives their outcomes.
        together: number of concurrent members, >= 1.
        steps: steps per turn, >= 1.
        admit: called with the number of running members before another one starts.

    Returns:
        The signal that ended the run of the members, or None.

    Raises:
        KeyboardInterrupt: SIGINT arrived and no member handles it.
    """
    streams, workspaces = _Streams(), Workspaces()
    running: list[MemberThread] = []
    relay = SignalRelay(functools.partial(_call_in_main_thread, running))
    with _interpreter_for_members() as initial:
        try:
            with relay.installed():
                waiting: Member | None = None
                while True:
                    # One in each round: members that begin together also end their epochs together, and then all
                    # of them want the host while the GPU has nothing to do.
                    begins = False
                    if len(running) < together and relay.received is None:
                        waiting = waiting or source.next()
                        begins = waiting is not None and (not running or admit(len(running)))
                    if begins:
                        assert waiting is not None
                        stream = streams.take()
                        running.append(
                            MemberThread(make, waiting, initial, workspaces=workspaces, steps=steps, stream=stream)
                        )
                        waiting = None
                        running[-1].take_turn()
                        _collect(running, source, streams)
                    elif not running:
                        return relay.received
                    able = [each for each in running if not each.waits] or ([] if begins else running[:1])
                    for each in list(running) if relay.received is not None else able:
                        if relay.received is not None and not relay.serves(each.thread):
                            each.end_with(SystemExit(128 + relay.received))
                        else:
                            each.take_turn()
                    _collect(running, source, streams)
        except BaseException as error:
            for each in running:
                each.end_with(type(error)() if isinstance(error, KeyboardInterrupt) else SystemExit(1))
            raise


@contextlib.contextmanager
def _interpreter_for_members() -> Iterator[ProcessState]:
    """Yield the initial state of the members, restored after the block, in which their threads take turns."""
    initial, interval, threshold = ProcessState.capture(), sys.getswitchinterval(), gc.get_threshold()
    initial.restore()
    collections = ShortCollections()
    try:
        if torch.cuda.is_available():
            collections.begin()  # during a full one no member launches work
            gc.set_threshold(max(threshold[0], YOUNG_OBJECTS) if threshold[0] else 0, *threshold[1:])
        sys.setswitchinterval(SWITCH_INTERVAL)
        yield initial
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*threshold)
        collections.end()
        initial.restore()


def _call_in_main_thread(running: list[MemberThread], function: Callable[[], None]) -> None:
    """Call a function in the main thread, and wait for it."""
    caller = next((each for each in running if each.thread is threading.current_thread()), None)
    function() if caller is None else caller.call_in_main_thread(function)


def _collect(running: list[MemberThread], source: Source, streams: _Streams) -> None:
    """Report the members that have ended to the source."""
    for each in [each for each in running if each.ended]:
        running.remove(each)
        streams.give_back(each.stream)
        if each.error is not None:
            raise each.error
        assert each.outcome is not None
        source.tell(each.member, each.outcome)


class _Streams:
    """Streams of the members, each used by one at a time; none on the CPU."""

    def __init__(self) -> None:
        self._free: list[Any] = []
        if torch.cuda.is_available():
            self._free = [torch.cuda.Stream() for _ in range(MAX_STREAMS)]  # type: ignore[no-untyped-call]

    def take(self) -> Any:
        """Return a stream that waits for earlier launches."""
        if not self._free:
            return None
        stream = self._free.pop(0)
        stream.wait_stream(torch.cuda.current_stream())
        return stream

    def give_back(self, stream: Any) -> None:
        """Return a stream to the pool once it is idle."""
        if stream is not None:
            stream.synchronize()
            self._free.append(stream)


@contextlib.contextmanager
def restored_log_levels() -> Iterator[None]:
    """Restore the levels of the library's loggers, since overlapping runs restore each other's.

    Example:
        >>> with restored_log_levels():
        ...     logging.getLogger("treadle.population").setLevel(logging.ERROR)
    """
    names = [name for name in logging.root.manager.loggerDict if name.startswith("treadle")]
    before = {name: logging.getLogger(name).level for name in names}
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
