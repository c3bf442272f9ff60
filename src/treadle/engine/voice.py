"""Voice of a run: shows the library's log on stderr where no handler of the user's shows it.

The library configures no logging when it is imported. While a run is prepared or trained, and only then, its log lines
from INFO on are written to stderr by rank 0, unless a handler of the user's shows them already, ``progress=False`` was
given, or the environment variable ``TREADLE_PROGRESS`` is 0. Records reach the user's handlers as they always do.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from treadle import distributed

if TYPE_CHECKING:
    from treadle.engine.loop import Engine

VARIABLE = "TREADLE_PROGRESS"
_OFF = ("0", "off", "false", "no")
_LIBRARY = "treadle"
_BURST = 10.0  # lines of epochs that may come at once; from then on one a second, after an hour one a minute


class Screen(Protocol):
    """Place on a terminal or in a notebook that is redrawn, above which lines are printed."""

    def print_above(self, text: str) -> None:
        """Print a line above it."""
        ...


def turned_off() -> bool:
    """Return whether the environment variable turns the voice off.

    Example:
        >>> import os
        >>> before = os.environ.get(VARIABLE); os.environ[VARIABLE] = "off"
        >>> turned_off()
        True
        >>> _ = os.environ.pop(VARIABLE) if before is None else os.environ.update({VARIABLE: before})
    """
    return os.environ.get(VARIABLE, "").strip().lower() in _OFF


class Voice(logging.Handler):
    """Handler that shows log records on stderr while a run speaks; there is one in a process.

    Attributes:
        screen: the live display, or None.
        replaces_lines: whether that shows what the lines of a ProgressHook show.
        speaker: name of the run that logs at present, where several take turns; of these, only warnings are shown.
    """

    def __init__(self) -> None:
        super().__init__()
        self.screen: Screen | None = None
        self.replaces_lines = False
        self.speaker: str | None = None
        self._depth = 0
        self._muted = 0
        self._logger: logging.Logger | None = None
        self._before = (logging.NOTSET, True)
        self._started = False
        self._end: str | None = None
        self._tokens = _BURST
        self._opened = self._refilled = 0.0

    def speaks(self) -> bool:
        """Return whether a run speaks at present."""
        return self._logger is not None and not self._muted

    @contextlib.contextmanager
    def scope(self, logger: logging.Logger, *, wanted: bool) -> Iterator[None]:
        """Show the records of a logger and of the library inside the block, unless another handler does.

        A block inside another one belongs to it: the outermost shows one start and one end.
        """
        self._depth += 1
        self._muted += not wanted
        opened = wanted and self._depth == 1 and not turned_off() and not _is_quiet(logger) and not is_shown(logger)
        if opened:
            self._attach(logger)
        try:
            yield
        finally:
            self._depth -= 1
            self._muted -= not wanted
            if opened:
                self._detach()

    def _attach(self, logger: logging.Logger) -> None:
        owner = logging.getLogger(_LIBRARY) if logger.name.split(".")[0] == _LIBRARY else logger
        self._logger, self._before = owner, (owner.level, owner.propagate)
        self._started, self._end, self._tokens = False, None, _BURST
        self._opened = self._refilled = time.monotonic()
        owner.setLevel(min(owner.getEffectiveLevel(), logging.INFO))
        owner.propagate = False  # forwarded by hand, by the rules that hold without this handler
        owner.addHandler(self)

    def _detach(self) -> None:
        assert self._logger is not None
        self._logger.removeHandler(self)
        self._logger.setLevel(self._before[0])
        self._logger.propagate = self._before[1]
        self._logger = None
        if self._end is not None:
            self._write(self._end)

    def emit(self, record: logging.LogRecord) -> None:
        """Show a record, and hand it to the handlers that get it without this one."""
        if self._logger is None:
            return
        try:
            if record.levelno >= logging.INFO and not self._muted:
                self._show(record)
        except Exception:  # noqa: BLE001  (logging's own rule: a log line that fails must not end the run)
            self.handleError(record)
        level, propagates = self._before
        parent = self._logger.parent
        least = level or (parent.getEffectiveLevel() if parent is not None else logging.WARNING)
        if propagates and parent is not None and parent.hasHandlers() and record.levelno >= least:
            parent.callHandlers(record)

    def _show(self, record: logging.LogRecord) -> None:
        text, topic = record.getMessage(), getattr(record, "topic", None)
        if record.levelno >= logging.WARNING:
            if self._logger is not None and _shows(self._logger, record.levelno, skip=self):
                return
            text = f"{record.levelname.lower()}: {'' if self.speaker is None else f'{self.speaker}: '}{text}"
        elif self.speaker is not None:
            return
        elif topic == "start block":
            if self._started:
                return
            text, self._started = getattr(record, "short", text), True
        elif topic == "end":
            self._end = text  # shown when the outermost block is left: several runs may make one
            return
        elif topic == "resumed" or (topic == "progress" and self.replaces_lines):
            return  # the start line and the live display have the same
        elif topic == "epoch" and not self._has_token():
            return
        self._write(text)

    def _has_token(self) -> bool:
        """Return whether one more of the lines may be shown of which there can be thousands."""
        now = time.monotonic()
        rate = max(min(1.0, 60 / max(now - self._opened, 1.0)), 1 / 60)
        self._tokens = min(_BURST, self._tokens + rate * (now - self._refilled))
        self._refilled = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def _write(self, text: str) -> None:
        if self.screen is not None:
            self.screen.print_above(text)
        elif sys.stderr is not None:
            with contextlib.suppress(OSError, ValueError):  # a closed pipe or stream must not end the run
                sys.stderr.write(f"{text}\n")
                sys.stderr.flush()


VOICE = Voice()


def speaking(engine: Engine) -> contextlib.AbstractContextManager[None]:
    """Show the log of an engine inside the block where no handler of the user's does; on rank 0 only."""
    return VOICE.scope(engine.logger, wanted=engine.settings.progress and distributed.rank() == 0)


def is_shown(logger: logging.Logger, level: int = logging.INFO) -> bool:
    """Return whether a handler of the user's shows records of a logger.

    Example:
        >>> is_shown(logging.Logger("alone"))
        False
    """
    return logger.isEnabledFor(level) and _shows(logger, level)


def _shows(logger: logging.Logger, level: int, *, skip: logging.Handler | None = None) -> bool:
    owner: logging.Logger | None = logger
    while owner is not None:
        for handler in owner.handlers:
            if handler.level <= level and handler is not skip and not isinstance(handler, (logging.NullHandler, Voice)):
                return True
        owner = owner.parent if owner.propagate or skip in owner.handlers else None
    return False


def _is_quiet(logger: logging.Logger) -> bool:
    """Return whether the user raised the level of a logger, or of one above it but the root, over INFO."""
    if logger.manager.disable >= logging.INFO:
        return True
    owner: logging.Logger | None = logger
    while owner is not None and owner.parent is not None:
        if owner.level:
            return owner.level > logging.INFO
        owner = owner.parent
    return False
