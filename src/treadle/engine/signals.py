"""Signals: a handler that only records the number, and the plan for the next step boundary."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Literal

from treadle.errors import ConfigError
from treadle.errors.arguments import check_least
from treadle.errors.interrupts import repeating_ignored_interrupts

ExitCode = Literal["128+signal"] | int


@dataclass(frozen=True)
class ExitPlan:
    """Action of a hook for its signals.

    Attributes:
        signals: the signals to listen to.
        write: saves the state; called once, at a step boundary.
        code: ``"128+signal"`` or a number.
        wait: seconds to sleep between saving and exiting.
    """

    signals: tuple[int, ...]
    write: Callable[[], Any]
    code: ExitCode = "128+signal"
    wait: float = 0.0

    def exit_code(self, received: int) -> int:
        """Return the exit code for the signal that was received.

        Example:
            >>> ExitPlan((15,), write=lambda: None).exit_code(15)
            143
        """
        return 128 + received if self.code == "128+signal" else int(self.code)


def exit_plan(
    signals: int | Sequence[int] | None,
    write: Callable[[], Any],
    *,
    code: ExitCode = "128+signal",
    wait: float | timedelta = 0.0,
) -> ExitPlan | None:
    """Check a user's arguments and return a plan, or None if no signal is named.

    Raises:
        ConfigError: ``code`` is another string, ``wait`` is negative, or a signal cannot be handled.
    """
    if code != "128+signal" and not isinstance(code, int):
        raise ConfigError("must be '128+signal' or an int", argument="exit_code", value=code)
    seconds = wait.total_seconds() if isinstance(wait, timedelta) else float(wait)
    check_least(0, exit_wait=seconds)
    if signals is None:
        return None
    numbers = tuple(int(number) for number in ([signals] if isinstance(signals, int) else signals))
    refused = [int(getattr(signal, name)) for name in ("SIGKILL", "SIGSTOP") if hasattr(signal, name)]
    for number in numbers:
        if number in refused or number not in signal.valid_signals():
            raise ConfigError(
                f"signal {number} cannot be handled; use SIGTERM, SIGINT or SIGUSR1", argument="exit_signals"
            )
    return ExitPlan(numbers, write, code, seconds) if numbers else None


_LISTENING, _LEAVING, _OVER = 0, 1, 2
_SECONDS_FOR_MAIN = 5.0  # a signal to the group reaches the main process late while it waits for a long kernel


class SignalListener:
    """Listener that records the first signal.

    A second signal is recorded too but has no effect, so that a running save can finish; a third is passed to the
    handler that was installed before.

    Forked data workers inherit the handler. A signal to the whole process group must not end them while the main
    process needs a last batch and saves; a signal to a single worker must end it, or nothing could.

    Attributes:
        received: the first signal, or None.
        plans: exit plans of the hooks; empty outside a run.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.plans: list[ExitPlan] = []
        self._inside = False
        self._count = 0
        self._previous: dict[int, Any] = {}
        self._owner = 0
        self._phase: bytearray | mmap.mmap = bytearray(1)

    def expect(self, plans: Sequence[ExitPlan]) -> list[int]:
        """Keep the plans of a run's hooks; return the signals to listen to."""
        self.plans = list(plans)
        return [number for plan in self.plans for number in plan.signals]

    @contextlib.contextmanager
    def listening(self, signals: Sequence[int]) -> Iterator[bool]:
        """Install the handlers inside the block and restore the earlier ones afterwards.

        Inside another such block it is a no-op: what was recorded there stays recorded. A KeyboardInterrupt that
        Python ignored is raised again.

        Yields:
            Whether this is the outermost block.
        """
        if self._inside:
            yield False
            return
        self.received, self._count = None, 0
        if not signals:
            with repeating_ignored_interrupts():
                yield True
            return
        self._inside = True
        try:
            with repeating_ignored_interrupts(), self._handlers(signals):
                yield True
        finally:
            self._inside = False

    def _handlers(self, signals: Sequence[int]) -> AbstractContextManager[None]:
        if threading.current_thread() is threading.main_thread():
            return self._handled(signals)
        if SignalRelay.active is None:
            raise ConfigError(
                "Python handles signals only in the main thread; train there, or pass None", argument="exit_signals"
            )
        return SignalRelay.active.serving(self, signals)

    @contextlib.contextmanager
    def _handled(self, signals: Sequence[int]) -> Iterator[None]:
        self._owner = os.getpid()
        self._phase = mmap.mmap(-1, 1)  # shared with forked processes; workers of an earlier run keep theirs
        try:
            for number in dict.fromkeys(signals):
                self._previous[number] = signal.signal(number, self._handle)
            yield
        finally:
            self._phase[0] = _OVER
            _restore(self._previous)

    def record(self, number: int) -> None:
        """Record a signal that a relay received for this run."""
        if self.received is None:
            self.received = number

    def _handle(self, number: int, _frame: Any) -> None:
        if os.getpid() != self._owner:
            self._handle_in_worker(number)
            return
        self._count += 1
        self._phase[0] = _LEAVING
        if self.received is None:
            self.received = number
        if self._count >= 3:
            self._phase[0] = _OVER
            _restore(self._previous)
            os.kill(os.getpid(), number)

    def _handle_in_worker(self, number: int) -> None:
        patience = time.monotonic() + _SECONDS_FOR_MAIN
        while self._phase[0] == _LISTENING and time.monotonic() < patience:
            time.sleep(0.02)
        if self._phase[0] != _LEAVING:
            _restore(self._previous)
            os.kill(os.getpid(), number)


class SignalRelay:
    """Signal handlers in the main thread on behalf of runs in other threads that take turns with it.

    Attributes:
        active: the relay of this process, or None.
        received: the first signal, or None.

    Args:
        in_main_thread: calls a function in the main thread and returns when it is done.

    Example:
        >>> relay = SignalRelay(lambda function: function())
        >>> with relay.installed():
        ...     SignalRelay.active is relay
        True
    """

    active: ClassVar[SignalRelay | None] = None

    def __init__(self, in_main_thread: Callable[[Callable[[], None]], None]):
        self.received: int | None = None
        self._in_main_thread = in_main_thread
        self._listeners: list[tuple[SignalListener, frozenset[int], threading.Thread]] = []
        self._previous: dict[int, Any] = {}
        self._count = 0

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Serve the runs of other threads inside the block, then restore the previous handlers."""
        before, SignalRelay.active = SignalRelay.active, self
        try:
            yield
        finally:
            SignalRelay.active = before
            _restore(self._previous)

    @contextlib.contextmanager
    def serving(self, listener: SignalListener, signals: Sequence[int]) -> Iterator[None]:
        """Pass signals to a listener inside the block."""
        entry = (listener, frozenset(signals), threading.current_thread())
        self._listeners.append(entry)
        new = [number for number in entry[1] if number not in self._previous]
        if new:
            self._in_main_thread(lambda: self._install(new))
        if self.received is not None:
            listener.record(self.received)
        try:
            yield
        finally:
            self._listeners.remove(entry)

    def serves(self, thread: threading.Thread) -> bool:
        """Return whether a run in a thread exits by its own plan on the received signal."""
        return any(owner is thread and self.received in signals for _, signals, owner in self._listeners)

    def _install(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._previous[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: Any) -> None:
        self._count += 1
        if self.received is None:
            self.received = number
            for listener, signals, _ in list(self._listeners):
                if number in signals:
                    listener.record(number)
        if self._count >= 3:
            _restore(self._previous)
            os.kill(os.getpid(), number)


def _restore(previous: dict[int, Any]) -> None:
    """Restore and forget the previous handlers."""
    for number, handler in previous.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
    previous.clear()
