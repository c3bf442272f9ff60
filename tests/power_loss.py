"""Simulated loss of power: records a run's file system calls, and lays out the possible contents after each.

The model is harsher than any file system: data written but not synced is lost or half there, and of the names created,
moved or removed in a folder since its last sync, any subset may have reached the disk, in any order.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import itertools
import os
import random
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_CALLS = ("mkdir", "replace", "rename", "unlink", "remove", "rmdir", "link", "symlink", "fsync")
_OPENING = ((os, "open"), (io, "open"), (builtins, "open"))
_MOST = 5  # up to this many unsynced names, every combination is tried; beyond, a sample

Name = tuple[int, str]  # a folder's number, and a name in it


@dataclass(frozen=True)
class Call:
    """Relevant file system call.

    Attributes:
        kind: ``"name"`` (a name now leads to ``what``), ``"gone"``, ``"move"`` (``name`` takes the place ``to``),
            ``"sync"`` of a folder, ``"content"`` of a file that was synced, or ``"report"``.
        name: the name.
        to: the destination of a move.
        what: the number of a file or folder, or the target of a link.
        content: the content of a file.
        step: the step whose state was reported as saved.
        text: for messages.
    """

    kind: str
    name: Name = (0, "")
    to: Name = (0, "")
    what: Any = None
    content: bytes = b""
    step: int = 0
    text: str = ""

    @property
    def folders(self) -> set[int]:
        return {self.name[0], self.to[0] or self.name[0]}


@dataclass
class Disk:
    """Disk after some calls: what is certain, and what is not."""

    names: dict[Name, Any] = field(default_factory=dict)
    waiting: list[Call] = field(default_factory=list)  # in order
    contents: dict[int, bytes] = field(default_factory=dict)

    def apply(self, call: Call) -> None:
        """Count one more call."""
        if call.kind == "content":
            self.contents[call.what] = call.content
        elif call.kind == "sync":
            for waiting in [one for one in self.waiting if call.what in one.folders]:
                self.waiting.remove(waiting)
                _take(self.names, waiting)
        elif call.kind != "report":
            self.waiting.append(call)

    def layouts(self, chance: random.Random) -> Iterator[dict[Name, Any]]:
        """Yield the possible layouts of names on the disk."""
        numbers = range(len(self.waiting))
        if len(numbers) <= _MOST:
            sizes = range(len(numbers) + 1)
            choices = [set(chosen) for size in sizes for chosen in itertools.combinations(numbers, size)]
        else:
            choices = [set(), set(numbers), *({one} for one in numbers), *(set(numbers) - {one} for one in numbers)]
            choices += [{one for one in numbers if chance.random() < 0.5} for _ in range(8)]
        for chosen in choices:
            names = dict(self.names)
            for number in sorted(chosen):
                _take(names, self.waiting[number])
            yield names


def _take(names: dict[Name, Any], call: Call) -> None:
    if call.kind == "gone":
        names.pop(call.name, None)
    elif call.kind == "move":
        names.pop(call.name, None)
        names[call.to] = call.what
    else:
        names[call.name] = call.what


class Recorder:
    """Recorder of the calls on files below a folder.

    Attributes:
        calls: in order.
        folders: numbers of the folders created.
    """

    def __init__(self, folder: Path):
        self.folder = os.path.realpath(folder)
        self.calls: list[Call] = []
        self.folders: set[int] = {1}
        self._numbers: dict[int, int] = {}  # inode -> number; inodes may be reused, numbers are not
        self._count = itertools.count(2)

    def report(self, step: int) -> None:
        """Record that the state of a step was reported as saved."""
        self.calls.append(Call("report", step=step, text=f"report {step}"))

    def _path_of(self, given: Any, folder: Any) -> str | None:
        if isinstance(given, int):
            found = os.readlink(f"/proc/self/fd/{given}")
        else:
            base = os.readlink(f"/proc/self/fd/{folder}") if folder is not None else os.getcwd()
            found = os.path.join(base, os.fspath(given))
        place = os.path.join(os.path.realpath(os.path.dirname(found)), os.path.basename(found))
        return place if place == self.folder or place.startswith(self.folder + os.sep) else None

    def _name(self, path: str) -> Name:
        if path == self.folder:
            return 1, ""
        return self._number(os.path.dirname(path)), os.path.basename(path)

    def _number(self, path: str) -> int:
        """Return the number of an existing file or folder."""
        return 1 if path == self.folder else self._numbers.setdefault(os.lstat(path).st_ino, next(self._count))

    def _add(self, kind: str, path: str, what: Any, to: str = "") -> None:
        target = self._name(to) if to else (0, "")
        self.calls.append(Call(kind, self._name(path), target, what, text=f"{kind} {path} {to}"))

    def _what(self, path: str) -> Any:
        return ("link", os.readlink(path)) if os.path.islink(path) else self._number(path)

    def made(self, path: str) -> None:
        """Record an open file that may be new."""
        if os.path.isfile(path) and not os.path.islink(path) and os.lstat(path).st_ino not in self._numbers:
            self._add("name", path, self._number(path))

    def before(self, name: str, paths: list[str]) -> None:
        """Record a call before it is made."""
        first = paths[0]
        if name == "fsync" and stat.S_ISDIR(os.lstat(first).st_mode):
            self.calls.append(Call("sync", what=self._number(first), text=f"sync {first}"))
        elif name == "fsync":
            content = Path(first).read_bytes()
            self.calls.append(Call("content", what=self._number(first), content=content, text=f"content {first}"))
        elif name in ("replace", "rename") and os.path.lexists(first):
            self._forget(paths[1])
            self._add("move", first, self._what(first), paths[1])
        elif name == "link":
            self._add("name", paths[1], self._what(first))
        elif name in ("unlink", "remove", "rmdir") and os.path.lexists(first):
            self._add("gone", first, None)
            self._forget(first)

    def after(self, name: str, path: str) -> None:
        """Record the result of a call."""
        if name == "mkdir":
            self._numbers.pop(os.lstat(path).st_ino, None)
            if path != self.folder:
                self.folders.add(self._number(path))
                self._add("name", path, self._number(path))
        elif name == "symlink":
            self._add("name", path, self._what(path))

    def _forget(self, path: str) -> None:
        """Drop the number of a file whose last name is removed, so that a later file with its inode gets a new one."""
        if os.path.lexists(path):
            found = os.lstat(path)
            if stat.S_ISDIR(found.st_mode) or found.st_nlink == 1:
                self._numbers.pop(found.st_ino, None)

    @contextlib.contextmanager
    def watching(self) -> Iterator[Recorder]:
        """Record calls inside the block."""
        real = {name: getattr(os, name) for name in _CALLS}
        opening = {(place, name): getattr(place, name) for place, name in _OPENING}

        def watched(name: str) -> Any:
            def call(*given: Any, **named: Any) -> Any:
                folder = named.get("dir_fd", named.get("src_dir_fd"))
                about = given[1:2] if name == "symlink" else given[: 2 if name in ("replace", "rename", "link") else 1]
                paths = [self._path_of(one, folder) for one in about]
                mine = [path for path in paths if path is not None]
                if len(mine) == len(paths):
                    self.before(name, mine)
                result = real[name](*given, **named)
                if len(mine) == len(paths):
                    self.after(name, mine[0])
                return result

            return call

        def opened(function: Any) -> Any:
            def call(given: Any, *others: Any, **named: Any) -> Any:
                result = function(given, *others, **named)
                path = self._path_of(given, named.get("dir_fd")) if isinstance(given, (str, os.PathLike)) else None
                if path is not None:
                    self.made(path)
                return result

            return call

        try:
            for name in _CALLS:
                setattr(os, name, watched(name))
            for (place, name), function in opening.items():
                setattr(place, name, opened(function))
            yield self
        finally:
            for name, function in real.items():
                setattr(os, name, function)
            for (place, name), function in opening.items():
                setattr(place, name, function)


@dataclass
class Crash:
    """Possible state of the disk after some calls.

    Attributes:
        after: the last call.
        reported: the last step reported as saved.
        names: the targets of the names.
        contents: the contents of synced files.
        later: the intended contents of the others.
        folders: numbers of folders.
    """

    after: Call
    reported: int
    names: dict[Name, Any]
    contents: dict[int, bytes]
    later: dict[int, bytes]
    folders: set[int]

    def lay_out(self, place: Path, *, number: int = 1) -> None:
        """Write the state into a folder; of unsynced files, only the first half is written."""
        place.mkdir(parents=True)
        for (folder, name), what in self.names.items():
            if folder != number:
                continue
            if isinstance(what, tuple):
                (place / name).symlink_to(what[1])
            elif what in self.folders:
                self.lay_out(place / name, number=what)
            else:
                half = self.later.get(what, b"")
                (place / name).write_bytes(self.contents.get(what, half[: len(half) // 2]))

    @property
    def key(self) -> Any:
        """Return a key that identifies this layout."""
        held = {key: self.contents.get(what, what) if type(what) is int else what for key, what in self.names.items()}
        return self.reported, frozenset((key, hash(what)) for key, what in held.items())


def crashes(recorder: Recorder, *, each: int = 1, seed: int = 0) -> Iterator[Crash]:
    """Yield the possible states after every ``each``-th call."""
    chance, disk, reported = random.Random(seed), Disk(), 0
    for number, call in enumerate(recorder.calls, start=1):
        disk.apply(call)
        reported = max(reported, call.step)
        if number % each:
            continue
        later = {one.what: one.content for one in reversed(recorder.calls[number:]) if one.kind == "content"}
        for names in disk.layouts(chance):
            yield Crash(call, reported, names, dict(disk.contents), later, recorder.folders)
