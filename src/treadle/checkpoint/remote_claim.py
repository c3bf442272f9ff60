"""Numbered claim with a heartbeat that allows one writer of a remote workspace."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from typing import Any

from treadle.checkpoint.files import process_lives
from treadle.checkpoint.objects import ObjectStore
from treadle.errors import CheckpointError

_FOLDER = "claims/"


class RemoteClaim:
    """Claim of a remote workspace for this process.

    Claims are numbered. A new claim can be made once the previous one was released, its process is known to be gone, or
    its heartbeat did not change for a whole lease. A process wrongly considered dead sees the higher number before it
    publishes; anything it has already published ranks below anything of a higher number.

    Args:
        store: the workspace.
        lease: seconds without a heartbeat after which the holder is considered dead, > 0.

    Attributes:
        number: number of the claim that is held; 0 without one.

    Example:
        >>> claim = RemoteClaim(ObjectStore("memory://claimed"))
        >>> claim.take()
        >>> claim.number, claim.is_lost()
        (1, False)
        >>> claim.release()
    """

    def __init__(self, store: ObjectStore, *, lease: float = 60.0):
        self.store = store
        self.lease = lease
        self.number = 0
        self._token = ""
        self._beats = 0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, *, above: int = 0) -> None:
        """Claim the workspace; a no-op if already claimed.

        Args:
            above: lower bound of the number: that of a claim which has written, and whose object may be gone.

        Raises:
            CheckpointError: another process, named with PID and host, holds the claim.
        """
        if self.number:
            return
        last = self._last()
        if last and not self._is_free(last):
            raise self._refusal(self._read(last))
        last = max(last, above)
        self._token, self._beats = uuid.uuid4().hex, 0
        if not self.store.create(_key(last + 1), self._described()):
            raise self._refusal(self._read(last + 1))
        self.number = last + 1
        self.store.delete([key for key in self.store.sizes(_FOLDER) if key < _key(self.number)])
        self._stopped.clear()
        self._thread = threading.Thread(target=self._beat, name="treadle-claim", daemon=True)
        self._thread.start()

    def is_lost(self) -> bool:
        """Return whether another process has claimed the workspace since."""
        return self._last() > self.number

    def release(self) -> None:
        """Release the workspace; a no-op without a claim."""
        if not self.number:
            return
        self._stopped.set()
        assert self._thread is not None
        self._thread.join()
        if not self.is_lost():
            self.store.put(_key(self.number), self._described(released=True))
        self.number = 0

    def _beat(self) -> None:
        while not self._stopped.wait(self.lease / 3):
            self._beats += 1
            # The next heartbeat makes up for a failed one; an upload that fails too causes a warning.
            with contextlib.suppress(CheckpointError, OSError):
                self.store.put(_key(self.number), self._described())

    def _described(self, *, released: bool = False) -> bytes:
        held = {
            "token": self._token, "host": socket.gethostname(), "pid": os.getpid(), "beats": self._beats,
            "released": released,
        }  # fmt: skip
        return json.dumps(held).encode()

    def _last(self) -> int:
        return max((_number(key) for key in self.store.sizes(_FOLDER)), default=0)

    def _read(self, number: int) -> dict[str, Any]:
        try:
            held: dict[str, Any] = json.loads(self.store.get(_key(number)))
        except (FileNotFoundError, ValueError):
            return {}
        return held

    def _is_free(self, number: int) -> bool:
        held = self._read(number)
        if held.get("released") or (held.get("host") == socket.gethostname() and not process_lives(held["pid"])):
            return True
        if held.get("host") == socket.gethostname() and held.get("pid") == os.getpid():
            return False
        deadline = time.monotonic() + self.lease
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self.lease / 10))
            now = self._read(number)
            if now != held:
                return bool(now.get("released"))
        return True

    def _refusal(self, held: dict[str, Any]) -> CheckpointError:
        return CheckpointError(
            f"{self.store.url} is used by process {held.get('pid', '?')} on {held.get('host', '?')}: only one process "
            "at a time may train in a workspace; wait for it to end, stop it, or choose another URL"
        )


def _key(number: int) -> str:
    return f"{_FOLDER}{number:08d}.json"


def _number(key: str) -> int:
    digits = key.removeprefix(_FOLDER).partition(".")[0]
    return int(digits) if digits.isdecimal() else 0
