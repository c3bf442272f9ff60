"""Lock that allows one process per run folder, names its holder and ends with it.

The lock is an ``flock`` on a small file in the folder, held open during the run. The system drops it when the process
ends, for whatever reason, so a leftover file blocks nobody. Three cases could keep or drop it wrongly:

- Forked data workers share the open file, and would keep the lock for seconds after their parent is killed. Each child
closes its copy at once. (Closing a copy does not unlock; unlocking in the child would.)
- The file is removed at the end, so a waiting process may lock a file that no longer has the name: it checks again
after locking.
- A process that was just killed may still be exiting: a refused lock is retried for a second.

Within one process the lock is shared: a second trainer may resume where a first one failed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from treadle.checkpoint.files import (
    EXPORTED,
    TEMPORARY,
    TRIAL,
    finish_replacement,
    make_folder,
    remove_leftover,
    reported,
)
from treadle.errors import CheckpointError

try:
    import fcntl
except ImportError:  # not available on this platform
    fcntl = None  # type: ignore[assignment]

_log = logging.getLogger("treadle.checkpoint")
LOCK_NAME = ".treadle-lock"
_RETRY_SECONDS = 1.0  # seconds
_UNSUPPORTED = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL}
_guard = threading.RLock()
_held: dict[str, _SharedLock] = {}
_uses: Counter[str] = Counter()
_warned: set[str] = set()


class _SharedLock:
    """Lock of this process, with the number of runs sharing it."""

    def __init__(self, descriptor: int | None):
        self.descriptor = descriptor
        self.users = 1


class _LockedByOther(Exception):
    """Error that another process holds the lock, with its description."""


class RunLock:
    """Lock of a run folder for this process; take it when a run starts and release it when the run ends."""

    def __init__(self) -> None:
        self._key: str | None = None

    def take(self, folder: str | os.PathLike[str]) -> None:
        """Lock the folder, creating it if needed; a no-op if already locked.

        Raises:
            CheckpointError: another process, named with PID and host, holds the lock, or the folder is not writable.
        """
        key = os.path.realpath(folder)
        with _guard:
            if self._key == key and key in _held:
                return
            self.release()
            if key in _held:
                _held[key].users += 1
            else:
                _held[key] = _SharedLock(_lock_with_retries(Path(folder)))
                remove_leftovers(Path(folder))
            self._key = key
            _uses[key] += 1

    def release(self) -> None:
        """Release the folder; a no-op without a lock."""
        with _guard:
            held = None if self._key is None else _held.get(self._key)
            if held is not None and self._key is not None:
                held.users -= 1
                if held.users == 0:
                    del _held[self._key]
                    _unlock(held.descriptor, Path(self._key) / LOCK_NAME)
            self._key = None


def is_used_again(folder: Path) -> bool:
    """Return whether several runs of this process have locked a folder, one after another or together."""
    return _uses[os.path.realpath(folder)] > 1


def remove_leftovers(folder: Path) -> None:
    """Remove leftovers of killed saves in a folder that this process has locked, and in its direct subfolders.

    Subfolders locked by another run, and files that a live process may still be writing, are left alone.
    """
    try:
        inside = [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    free = [path for path in inside if not path.name.endswith(TEMPORARY) and holder(path) is None]
    for leftover in (path for place in (folder, *free) for path in leftovers(place)):
        remove_leftover(leftover)
    with contextlib.suppress(OSError):  # the next start tries again
        finish_replacement(folder / EXPORTED)


def leftovers(folder: Path) -> list[Path]:
    """Return temporary files, folders and links of saves directly in a folder."""
    return [*folder.glob(f".*{TEMPORARY}"), *folder.glob(f".*{TRIAL}")]


@contextlib.contextmanager
def run_lock(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Lock a run folder inside the block.

    Raises:
        CheckpointError: another process holds the lock, or the folder is not writable.

    Example:
        >>> with run_lock("run"):
        ...     os.listdir("run")
        ['.treadle-lock']
    """
    lock = RunLock()
    lock.take(folder)
    try:
        yield
    finally:
        lock.release()


def check_free(folder: str | os.PathLike[str]) -> None:
    """Raise if another process holds the lock of a folder; takes no lock and creates no file.

    Raises:
        CheckpointError: another process, named with PID and host, holds the lock.
    """
    path = Path(folder) / LOCK_NAME
    with _guard:
        if fcntl is None or os.path.realpath(folder) in _held or not path.exists():
            return
        _close_copies_in_forks()
        deadline = time.monotonic() + _RETRY_SECONDS
        while (occupied := _is_locked(path)) and time.monotonic() < deadline:
            time.sleep(0.05)
    if occupied:
        raise _refusal(Path(folder), _holder(path))


def holder(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return ``pid``, ``host`` and ``since`` of the process that holds the lock; {} if unknown, None if free.

    Takes no lock, creates no file and does not wait.

    Example:
        >>> holder("run") is None
        True
    """
    path = Path(folder) / LOCK_NAME
    if fcntl is None or not path.exists() or not _is_locked(path):
        return None
    return _description(path)


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:  # removed meanwhile, or not readable; taking the lock will raise
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    else:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # immediate, even if a child was forked meanwhile
        return False
    finally:
        os.close(descriptor)


# -- the file -----------------------------------------------------------------------------------------------------


def _lock_with_retries(folder: Path) -> int | None:
    deadline = time.monotonic() + _RETRY_SECONDS
    _close_copies_in_forks()
    while True:
        try:
            with reported(folder):
                make_folder(folder)
                return _lock(folder / LOCK_NAME)
        except CheckpointError as error:
            if not isinstance(error.__cause__, _LockedByOther):
                raise
            if time.monotonic() >= deadline:
                raise _refusal(folder, str(error.__cause__)) from None
        time.sleep(0.05)


def _lock(path: Path) -> int | None:
    """Return the descriptor that holds the lock, or None if the file system does not support locks."""
    if fcntl is None:
        _warn_unlockable(path, "this platform has no file locks")
        return None
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_linked_at(descriptor, path):
                _describe(descriptor)
                return descriptor
            os.close(descriptor)
        except BlockingIOError:
            os.close(descriptor)
            raise _LockedByOther(_holder(path)) from None
        except OSError as error:
            os.close(descriptor)
            if error.errno not in _UNSUPPORTED:
                raise
            with contextlib.suppress(OSError):
                os.unlink(path)
            _warn_unlockable(path, str(error.strerror))
            return None
        except BaseException:
            os.close(descriptor)
            raise


def _is_linked_at(descriptor: int, path: Path) -> bool:
    try:
        named = os.stat(path)
    except FileNotFoundError:
        return False
    opened = os.fstat(descriptor)
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def _describe(descriptor: int) -> None:
    text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")})
    with contextlib.suppress(OSError):  # a full disk: the lock holds, only its message has less detail
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)


def _description(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {"pid": int(found["pid"]), "host": str(found["host"])[:80], "since": str(found["since"])[:40]}
    except (OSError, ValueError, KeyError, TypeError):  # just created, still empty
        return {}


def _holder(path: Path) -> str:
    found = _description(path)
    return "process {pid} on {host!r}, since {since}".format(**found) if found else "another process"


def _refusal(folder: Path, holder: str) -> CheckpointError:
    return CheckpointError(
        f"{str(folder)!r} is in use by {holder}: two runs in one folder would overwrite each other's checkpoints. Wait "
        "for it to end, stop it, or choose another folder"
    )


def _warn_unlockable(path: Path, reason: str) -> None:
    if str(path.parent) not in _warned:
        _warned.add(str(path.parent))
        _log.warning("%s cannot be locked (%s): make sure that only one run uses it", path.parent, reason)


def _unlock(descriptor: int | None, path: Path) -> None:
    if descriptor is None:
        return
    with contextlib.suppress(OSError):
        if _is_linked_at(descriptor, path):
            os.unlink(path)
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    with contextlib.suppress(OSError):
        os.close(descriptor)


# -- forked children ----------------------------------------------------------------------------------------------

_fork_hook_registered = False


def _close_copies_in_forks() -> None:
    global _fork_hook_registered
    if not _fork_hook_registered and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_close_copies)
        _fork_hook_registered = True


def _close_copies() -> None:
    global _guard
    _guard = threading.RLock()  # a thread of the parent may have held it
    for held in _held.values():
        if held.descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(held.descriptor)
    _held.clear()
