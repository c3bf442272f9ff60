"""Console output of a run: shows the library's log on stderr if no handler of the user does.

The library configures no logging when it is imported. While a run is prepared or trained, and only then, rank 0 writes
log lines at INFO and above to stderr, unless a handler of the user already shows them, ``progress=False`` was given, or
the environment variable ``TREADLE_PROGRESS`` is 0. Records reach the user's handlers as usual.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from treadle import distributed
from treadle.seed import forked_rng

if TYPE_CHECKING:
    from treadle.engine.loop import Engine
    from treadle.engine.screens import Screen

VARIABLE = "TREADLE_PROGRESS"
_OFF = ("0", "off", "false", "no")
_LIBRARY = "treadle"
_COUNT_AFTER, _COUNT_EVERY, _COUNT_LINE_EVERY = 1.0, 0.25, 60.0  # seconds of an evaluation; the last in a log
_BURST = 10.0  # burst of epoch lines; then one per second, after an hour one per minute


def turned_off() -> bool:
    """Return whether the environment variable disables console output.

    Example:
        >>> import os
        >>> before = os.environ.get(VARIABLE); os.environ[VARIABLE] = "off"
        >>> turned_off()
        True
        >>> _ = os.environ.pop(VARIABLE) if before is None else os.environ.update({VARIABLE: before})
    """
    return os.environ.get(VARIABLE, "").strip().lower() in _OFF


class RunLogHandler(logging.Handler):
    """Handler that shows log records on stderr during a run; one per process.

    Attributes:
        screen: the live display, or None.
        replaces_lines: whether the display replaces the lines of a ProgressHook.
        member: name of the current run where several take turns; only their warnings are shown.
    """

    def __init__(self) -> None:
        super().__init__()
        self.screen: Screen | None = None
        self.replaces_lines = False
        self.member: str | None = None
        self._depth = 0
        self._muted = 0
        self._logger: logging.Logger | None = None
        self._before = (logging.NOTSET, True)
        self._started = False
        self._end: str | None = None
        self._set_aside: list[str] = []
        self._tokens = _BURST
        self._opened = self._refilled = 0.0

    def show_above(self, screen: Screen) -> None:
        """Print log lines above a live display, unless there is one already."""
        self.screen = self.screen or screen

    def leave(self, screen: Screen | None) -> None:
        """Print log lines on stderr again if this display showed them."""
        if self.screen is screen:
            self.screen = None

    def replace_lines(self, replace: bool) -> None:
        """Set whether the live display replaces the lines of a ProgressHook."""
        self.replaces_lines = replace

    def name_member(self, name: str | None) -> None:
        """Set the run whose turn it is, or None."""
        self.member = name

    def is_active(self) -> bool:
        """Return whether a run is currently shown."""
        return self._logger is not None and not self._muted

    @contextlib.contextmanager
    def scope(self, logger: logging.Logger, *, wanted: bool) -> Iterator[None]:
        """Show the records of a logger and of the library inside the block, unless another handler does.

        Nested blocks belong to the outermost one, which shows one start and one end.
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
        owner.propagate = False  # forwarded manually, by the same rules as without this handler
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
        """Show a record, and forward it to the handlers that would receive it without this one."""
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

    def show_count(self, done: int, total: int | None) -> float:
        """Show the number of batches that an evaluation has scored; return the seconds until the next time."""
        text = f"evaluating {done}{'' if total is None else f'/{total}'}"
        if self.screen is not None:
            with forked_rng():  # rich draws from Python's random for its styles, which must not affect the evaluation
                self.screen.annotate(text)
            return _COUNT_EVERY
        if self.is_active():
            self._write(text)
        return _COUNT_LINE_EVERY

    def _show(self, record: logging.LogRecord) -> None:
        text, topic = record.getMessage(), getattr(record, "topic", None)
        if record.levelno >= logging.WARNING:
            if self._logger is not None and _shows(self._logger, record.levelno, skip=self):
                return
            text = f"{record.levelname.lower()}: {'' if self.member is None else f'{self.member}: '}{text}"
        elif self.member is not None:
            return
        elif topic == "start block":
            if self._started:
                return
            text, self._started = getattr(record, "short", text), True
        elif topic == "end":
            self._end = text  # shown at the end of the outermost block, which may contain several runs
            return
        elif topic == "set aside":
            self._set_aside.append(getattr(record, "short", text))  # all of them in one line, before the next one
            return
        elif topic == "resumed" or (topic == "progress" and self.replaces_lines):
            return  # the start line and the live display show the same
        elif topic == "epoch" and not self._has_token():
            return
        self._write(text)

    def _has_token(self) -> bool:
        """Return whether the rate limit allows one more line."""
        now = time.monotonic()
        rate = max(min(1.0, 60 / max(now - self._opened, 1.0)), 1 / 60)
        self._tokens = min(_BURST, self._tokens + rate * (now - self._refilled))
        self._refilled = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def _write(self, text: str) -> None:
        if self._set_aside:
            text = f"files of an earlier run are now {', '.join(self._set_aside)}\n{text}"
            self._set_aside = []
        if self.screen is not None:
            self.screen.print_above(text)
        elif sys.stderr is not None:
            with contextlib.suppress(OSError, ValueError):  # a closed pipe or stream must not end the run
                sys.stderr.write(f"{text}\n")
                sys.stderr.flush()


RUN_LOG = RunLogHandler()


class EvaluationCount:
    """Count of the batches of an evaluation, which appears once the evaluation takes long.

    Args:
        total: number of batches, if known.

    Example:
        >>> count = EvaluationCount(2)
        >>> count.add_batch()
    """

    def __init__(self, total: int | None):
        self._total = total
        self._done = 0
        self._due = time.monotonic() + (_COUNT_LINE_EVERY if RUN_LOG.screen is None else _COUNT_AFTER)

    def add_batch(self) -> None:
        """Count a batch, and show the count if due."""
        self._done += 1
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + RUN_LOG.show_count(self._done, self._total)


def run_log_shown(engine: Engine) -> contextlib.AbstractContextManager[None]:
    """Show the log of an engine inside the block if no handler of the user does; on rank 0 only."""
    return RUN_LOG.scope(engine.logger, wanted=engine.settings.progress and distributed.rank() == 0)


def is_shown(logger: logging.Logger, level: int = logging.INFO) -> bool:
    """Return whether a handler of the user shows a logger's records.

    Example:
        >>> is_shown(logging.Logger("alone"))
        False
    """
    return logger.isEnabledFor(level) and _shows(logger, level)


def _shows(logger: logging.Logger, level: int, *, skip: logging.Handler | None = None) -> bool:
    owner: logging.Logger | None = logger
    while owner is not None:
        for handler in owner.handlers:
            if (
                handler.level <= level
                and handler is not skip
                and not isinstance(handler, (logging.NullHandler, RunLogHandler))
            ):
                return True
        owner = owner.parent if owner.propagate or skip in owner.handlers else None
    return False


def _is_quiet(logger: logging.Logger) -> bool:
    """Return whether the user set the level of a logger or a non-root ancestor above INFO."""
    if logger.manager.disable >= logging.INFO:
        return True
    owner: logging.Logger | None = logger
    while owner is not None and owner.parent is not None:
        if owner.level:
            return owner.level > logging.INFO
        owner = owner.parent
    return False
