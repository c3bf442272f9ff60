"""Atomic file writes: staged next to the target, flushed, renamed, and the folder synced.

A crash at any point leaves the old file or the new one. The staged file is in the target's folder, so the
rename never crosses a file system. System calls go through ``os``, where the tests count every one of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import shutil
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from treadle.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

FORMAT_NAME = "treadle"
STORED = "treadle.stored"  # {STORED: key} replaces the tensor of that key
TEMPORARY = ".treadle-tmp"
EXPORTED = "pretrained"
"""Folder in that of a run with the weights as their library exports them."""
TRIAL = ".trial"
"""End of the name of a link that tries whether a folder can hold links."""
_CHUNK = 1 << 20  # bytes
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.ENOSYS}  # raised by network and FUSE file systems


def make_folder(folder: Path) -> None:
    """Create a folder and its parents durably, so that a power loss after a save cannot remove them."""
    missing = []
    while not os.path.isdir(folder):
        missing.append(folder)
        if folder == folder.parent:
            break
        folder = folder.parent
    for new in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(new)
        sync_folder(new.parent)


def why_unwritable(folder: Path) -> str | None:
    """Return why a folder can be neither written nor created, with the place that prevents it; None if nothing does.

    Example:
        >>> why_unwritable(Path(__file__) / "run") == f"{__file__} is not a folder"
        True
    """
    place = next((each for each in (folder, *folder.parents) if os.path.lexists(each)), folder)
    if place.is_symlink() and not place.exists():
        return f"{place} is a link to {os.readlink(place)}, which does not exist"
    if not place.is_dir():
        return f"{place} is not a folder"
    return None if os.access(place, os.W_OK | os.X_OK) else f"{place} cannot be written"


def sync_folder(folder: Path) -> None:
    """Make renames and unlinks in a folder durable, where the platform supports it."""
    if os.name == "nt":  # a directory cannot be opened for fsync there
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def reported(target: Path | str) -> Iterator[None]:
    """Turn any error while a file is written into a CheckpointError of one clear line."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        cause = _system_error(error)
        file = next((one for one in Path(target).parents if one.is_file()), None)
        if isinstance(cause, (NotADirectoryError, FileExistsError)) and file is not None:
            raise CheckpointError(
                f"{str(target)!r} was not written: {str(file)!r} is a file; choose a folder"
            ) from error
        is_full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "free some space or choose another folder" if is_full else "choose another folder"
        raise CheckpointError(
            f"{str(target)!r} was not written: {first_line(cause)}. Existing files are intact; {fix}"
        ) from error


def _system_error(error: BaseException) -> BaseException:
    """Return the OSError behind an error: torch's writer hides a full disk behind 'unexpected pos 64 vs 0'."""
    cause: BaseException | None = error
    for _ in range(10):
        if cause is None or isinstance(cause, OSError):
            break
        cause = cause.__cause__ or cause.__context__
    return error if cause is None else cause


def first_line(error: BaseException) -> str:
    """Return the first line of a message, shortened; those of torch span pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary path next to ``target`` and rename it over ``target`` if the block succeeds.

    The block must leave a flushed and fsynced file. Temporary files left by killed processes are removed.
    """
    with _lock_of(target):
        _remove_stale(target)
        temporary = target.with_name(f".{target.name}.{os.getpid()}{TEMPORARY}")
        try:
            yield temporary
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        with contextlib.suppress(OSError):  # a rename between two names of one file is a no-op and leaves both
            os.unlink(temporary)
        _confirm(target)


_locks: weakref.WeakValueDictionary[tuple[int, str], Any] = weakref.WeakValueDictionary()


def _lock_of(target: Path) -> Any:
    """Return the lock of a file that several threads of this process may write."""
    key = (os.getpid(), os.path.abspath(target))  # a forked process gets unlocked locks
    return _locks.setdefault(key, threading.RLock())


def _confirm(target: Path) -> None:
    try:
        sync_folder(target.parent)
    except Exception as error:
        raise CheckpointError(
            f"{str(target)!r} was written, but the disk did not confirm it ({first_line(error)}), so a power loss may "
            "undo it; check the disk"
        ) from error


def _remove_stale(target: Path) -> None:
    for leftover in target.parent.glob(f".{glob.escape(target.name)}.*{TEMPORARY}"):
        remove_leftover(leftover)


def remove_leftover(leftover: Path) -> None:
    """Remove a temporary file or folder unless a live process on this machine may be writing it."""
    owner = leftover.name.removesuffix(TEMPORARY).rsplit(".", 1)[-1]
    if owner.isdecimal() and int(owner) != os.getpid() and process_lives(int(owner)):
        return
    with contextlib.suppress(OSError):
        _remove_tree(leftover) if leftover.is_dir() and not leftover.is_symlink() else os.unlink(leftover)


@contextlib.contextmanager
def replacing_folder(target: Path) -> Iterator[Path]:
    """Yield an empty temporary folder and, if the block succeeds, sync it and replace ``target`` with it.

    No system call replaces a folder. The old one is briefly renamed to ``.NAME.old``; if a crash happens at that
    moment, the next call restores it first.
    """
    aside = _old_name(target)
    make_folder(target.parent)
    _remove_stale(target)
    finish_replacement(target)
    temporary = target.with_name(f".{target.name}.{os.getpid()}{TEMPORARY}")
    try:
        os.mkdir(temporary)
        yield temporary
        _sync_tree(temporary)
        if target.exists():
            os.rename(target, aside)
        os.rename(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            _remove_tree(temporary)
        with contextlib.suppress(OSError):
            finish_replacement(target)
        raise
    _confirm(target)
    with contextlib.suppress(OSError):  # the next call tries again
        _remove_tree(aside)


def _old_name(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def finish_replacement(target: Path) -> None:
    """Finish an interrupted replacement of a folder: restore the old one, or remove it if the new one exists."""
    aside = _old_name(target)
    if aside.exists() and not target.exists():
        os.rename(aside, target)
    _remove_tree(aside)


def _remove_tree(folder: Path) -> None:
    """Remove a folder and its contents, or a link to one; a no-op if there is none."""
    if folder.is_symlink():
        os.unlink(folder)
    elif folder.exists():
        shutil.rmtree(folder)


def _sync_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(parent, name), "rb+") as file:
                os.fsync(file.fileno())
        sync_folder(Path(parent))


_QUERY_LIMITED_INFORMATION = 0x1000  # of Windows


def process_lives(pid: int) -> bool:
    """Return whether a process on this machine has the PID.

    Example:
        >>> process_lives(os.getpid())
        True
    """
    if sys.platform == "win32":  # there the signal 0 is Ctrl-C
        kernel = ctypes.windll.kernel32
        handle = kernel.OpenProcess(_QUERY_LIMITED_INFORMATION, False, pid)
        return bool(handle) and bool(kernel.CloseHandle(handle))
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def write_bytes(write: Callable[[BinaryIO], Any], path: str | os.PathLike[str]) -> Path:
    """Write a file atomically with the content that ``write`` produces."""
    target = Path(path)
    with reported(target):
        make_folder(target.parent)
        with replacing(target) as temporary, open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    return target


def write_text(text: str, path: str | os.PathLike[str]) -> Path:
    """Write a small text file atomically."""
    return write_bytes(lambda file: file.write(text.encode("utf-8")), path)


def save_tensor(tensor: Tensor, path: str | os.PathLike[str]) -> Path:
    """Write one tensor atomically, for ``torch.load``."""
    import torch

    return write_bytes(lambda file: torch.save(tensor, file), path)


def link_sibling(target: Path, name: str) -> Path:
    """Make ``name``, next to ``target``, a symbolic link to it, atomically; a hard link without symbolic links.

    A folder cannot be hard-linked: without symbolic links it gets no second name.
    """
    link = target.with_name(name)
    with reported(link):
        if target.is_dir() and not _can_link(link):
            return link
        with replacing(link) as temporary:
            try:
                os.symlink(target.name, temporary)
            except OSError:  # no symbolic links on this file system
                _link_or_copy(target, temporary)
    return link


def link_in_folder(target: Path, link: Path) -> None:
    """Point a symbolic link in another folder to a file; a no-op where links are not supported.

    Args:
        target: the file.
        link: the link, created with its folder, or moved.
    """
    relative = os.path.relpath(target, link.parent)
    lock = _lock_of(link)
    if not lock.acquire(blocking=False):  # another writer holds it and is writing
        return
    try:
        with contextlib.suppress(OSError):
            if os.path.islink(link) and os.readlink(link) == relative:
                return
            if os.path.lexists(link) and not os.path.islink(link):  # a file that another writer owns
                return
            link.parent.mkdir(exist_ok=True)
            with replacing(link) as temporary:
                os.symlink(relative, temporary)
    finally:
        lock.release()


def remove_link(link: Path) -> None:
    """Remove a link if it exists.

    Raises:
        CheckpointError: the link cannot be removed.
    """
    if os.path.lexists(link):
        with reported(link):
            link.unlink(missing_ok=True)


def _can_link(link: Path) -> bool:
    trial = link.with_name(f".{link.name}{TRIAL}")
    try:
        trial.unlink(missing_ok=True)
        os.symlink("nothing", trial)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO):
            raise
        return False
    trial.unlink()
    return True


def copy_file(source: Path, name: Path) -> None:
    """Copy a file to disk with its modification time, synced."""
    shutil.copyfile(source, name)
    written = os.stat(source)
    os.utime(name, ns=(written.st_atime_ns, written.st_mtime_ns))
    with open(name, "rb+") as file:
        os.fsync(file.fileno())


def same_contents(one: Path, other: Path) -> bool:
    """Return whether two files hold the same bytes, by reading both.

    Example:
        >>> same_contents(Path(__file__), Path(__file__))
        True
    """
    with open(one, "rb") as first, open(other, "rb") as second:
        while content := first.read(_CHUNK):
            if content != second.read(_CHUNK):
                return False
        return not second.read(1)


def _link_or_copy(source: Path, name: Path) -> None:
    try:
        os.link(source, name)
    except OSError:  # no hard links either
        copy_file(source, name)
