"""Background checkpoint writing: one copy to host memory, the rest in a thread.

The thread gets a finished copy and a function that writes it. It touches no live tensor, hook or engine, and takes no
lock that a data worker forked meanwhile could need: it logs nothing itself (its messages are logged at the next
boundary by the training thread), and everything that ``torch.save`` imports is imported beforehand. Each save has a
separate thread, which the interpreter waits for at exit, unless the thread waits for other ranks.
"""

from __future__ import annotations

import io
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from treadle.checkpoint.buffers import HostBuffers, LiveTensors
from treadle.checkpoint.files import first_line
from treadle.errors import CheckpointError

_log = logging.getLogger("treadle.checkpoint")
_HEARTBEAT = 0.2  # seconds; Python handles signals between two waits, on every platform
_PATIENCE = 20.0  # seconds
Tree = dict[str, Any]


class CheckpointWriter:
    """Background writer of one state at a time; a new request waits for the previous one.

    There is at most one copy of the state besides the live one, and the next save reuses its memory.

    Example:
        >>> from treadle.checkpoint.schema import to_plain
        >>> from treadle.checkpoint.store import save_checkpoint
        >>> live = {"model": {"w": torch.zeros(2)}}
        >>> writer = CheckpointWriter()
        >>> writer.save(lambda buffers: to_plain(live, buffers=buffers), lambda tree: save_checkpoint(tree, "a.pt"))
        >>> _ = live["model"]["w"].fill_(1.0)
        >>> writer.wait()
        >>> torch.load("a.pt", weights_only=True)["model"]["w"]
        tensor([0., 0.])
    """

    def __init__(self) -> None:
        self._buffers = HostBuffers()
        self._running: list[_BackgroundWrite] = []  # at most one
        self._warm = False
        weakref.finalize(self, _log_lost_errors, self._running)

    @property
    def writing(self) -> bool:
        """Whether a write is in progress."""
        return bool(self._running) and self._running[0].is_alive()

    def save(
        self,
        collect: Callable[[HostBuffers], Tree],
        write: Callable[[Tree], object],
        *,
        background: bool = True,
        collective: bool = False,
    ) -> None:
        """Wait for the previous write, copy the state, and start writing it.

        Args:
            collect: collects the state with the given buffers; called immediately.
            write: writes the copy; called in a thread. It must not keep references to it.
            background: False writes synchronously, from the live tensors where possible.
            collective: whether the write waits for other ranks, so that it may never end after a failure: then
                :meth:`close` abandons it, and it keeps no process alive.

        Raises:
            CheckpointError: the previous write failed; then nothing is copied.
        """
        self.wait()
        if not background:
            write(collect(LiveTensors()))
            return
        self._buffers.reclaim()
        tree = collect(self._buffers)
        self._buffers.ready()
        self._start(_BackgroundWrite(tree, write, collective=collective))

    def _start(self, running: _BackgroundWrite) -> None:
        if not self._warm:
            torch.save({}, io.BytesIO())  # an import lock held in a thread would stay locked in a forked child
            self._warm = True
        try:
            running.begin()
        except RuntimeError as error:  # too many threads, or the interpreter is shutting down
            _log.warning("cannot start a thread for a background save (%s): saving in the foreground", error)
            running.run()  # its error is reported like a thread's, so that other ranks learn of it too
        self._running.append(running)

    def wait(self) -> None:
        """Wait for the current write.

        Raises:
            CheckpointError: the write failed; raised once.
        """
        if not self._running:
            return
        running = self._running[0]
        while running.is_alive():
            running.thread.join(_HEARTBEAT)
        self._running.clear()
        running.finish()

    def wait_for_error(self, *, patience: float = math.inf) -> CheckpointError | None:
        """Wait and return the error instead of raising it.

        Args:
            patience: seconds after which a write that waits for other ranks is abandoned.
        """
        try:
            if self._running and self._running[0].collective and self._running[0].runs_longer_than(patience):
                self._running.pop().abandon()
                return CheckpointError(
                    f"a background save was abandoned after {patience:g} s, because another rank stopped taking part "
                    "in it. Existing files are intact"
                )
            self.wait()
        except CheckpointError as error:
            return error
        return None

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(error)

    def close(self, failure: BaseException | None = None) -> None:
        """Wait and free the memory; if training has already failed, an error here is only logged.

        After a failure, a write that waits for other ranks gets 20 s: some of them may never arrive.

        Raises:
            CheckpointError: the last write failed, and ``failure`` is None.
        """
        error = self.wait_for_error(patience=math.inf if failure is None else _PATIENCE)
        self._buffers.drop()
        if error is not None and failure is None:
            raise error
        if error is not None:
            _log.error("%s", error)


class _BackgroundWrite:
    """Single write: its thread, messages and error."""

    def __init__(self, tree: Tree, write: Callable[[Tree], object], *, collective: bool):
        self.collective = collective
        self._work: tuple[Callable[[Tree], object], Tree] | None = (write, tree)
        self._messages: list[logging.LogRecord] = []
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self.run, name="treadle-checkpoint", daemon=collective)

    def begin(self) -> None:
        _log.addFilter(self._keep)
        try:
            self.thread.start()
        except BaseException:
            _log.removeFilter(self._keep)
            raise

    def run(self) -> None:
        assert self._work is not None
        write, tree = self._work
        self._work = None
        try:
            write(tree)
        except BaseException as error:  # noqa: BLE001  (raised in the thread that trains)
            self.error = error

    def _keep(self, record: logging.LogRecord) -> bool:
        """Buffer the thread's messages: a handler's lock must not be held while a data worker is forked."""
        if threading.current_thread() is not self.thread:
            return True
        self._messages.append(record)
        return False

    def is_alive(self) -> bool:
        return self.thread.is_alive()

    def runs_longer_than(self, patience: float) -> bool:
        """Wait up to a timeout, and return whether the write is still running."""
        deadline = time.monotonic() + patience
        while self.is_alive() and time.monotonic() < deadline:
            self.thread.join(_HEARTBEAT)
        return self.is_alive()

    def abandon(self) -> None:
        """Abandon the write: it may finish, but its result is not reported."""
        _log.removeFilter(self._keep)

    def finish(self) -> None:
        """Log the messages and raise the error of the write, in the waiting thread."""
        _log.removeFilter(self._keep)
        for record in self._messages:
            _log.handle(record)
        error, self.error = self.error, None
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise CheckpointError(
                f"a background save failed with {type(error).__name__}: {first_line(error)}. Existing files are "
                "intact; use background=False for a full traceback"
            ) from error


def _log_lost_errors(all_running: list[_BackgroundWrite]) -> None:
    """Log the error of a final write that nobody waited for, when the writer or the interpreter ends."""
    for running in all_running:
        if not running.is_alive():
            try:
                running.finish()
            except CheckpointError as error:
                _log.error("%s", error)
