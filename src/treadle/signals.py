"""Signals: a handler that only notes a number, and the plan of what happens at the next boundary."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from treadle.errors import ConfigError

ExitCode = Literal["128+signal"] | int


@dataclass(frozen=True)
class ExitPlan:
    """What a hook asks for when one of its signals arrives.

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
        """Returns the exit code for the signal that was received.

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
    """Checks the arguments a user gave and returns a plan, or None when no signal is named.

    Raises:
        ConfigError: ``code`` is another string, or a signal cannot be handled.
    """
    if signals is None:
        return None
    if isinstance(code, str) and code != "128+signal":
        raise ConfigError(f"exit_code={code!r}: must be '128+signal' or an int")
    numbers = tuple(int(number) for number in ([signals] if isinstance(signals, int) else signals))
    for number in numbers:
        if number in (getattr(signal, "SIGKILL", -1), getattr(signal, "SIGSTOP", -1)):
            raise ConfigError(f"exit_signals: signal {number} cannot be handled; use SIGTERM, SIGINT or SIGUSR1")
    seconds = wait.total_seconds() if isinstance(wait, timedelta) else float(wait)
    return ExitPlan(numbers, write, code, seconds)


class SignalListener:
    """Notes the first signal that arrives while it listens.

    A second signal is noted too but changes nothing, so that a running save can finish; a third is handed to the
    handler that was installed before.

    Attributes:
        received: the first signal, or None.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._count = 0
        self._previous: dict[int, Any] = {}

    @contextlib.contextmanager
    def listening(self, signals: Sequence[int]) -> Iterator[None]:
        """Installs the handlers inside the block and restores the earlier ones afterwards."""
        self.received, self._count = None, 0
        if not signals:
            yield
            return
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("exit_signals: python handles signals in the main thread only; train there, or pass None")
        try:
            for number in dict.fromkeys(signals):
                self._previous[number] = signal.signal(number, self._note)
            yield
        finally:
            self._restore()

    def _note(self, number: int, _frame: Any) -> None:
        self._count += 1
        if self.received is None:
            self.received = number
        if self._count >= 3:
            self._restore()
            os.kill(os.getpid(), number)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}
