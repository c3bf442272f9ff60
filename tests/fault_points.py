"""Fault injection: counts the system calls of a save and breaks one by an error, a foreign error, or SIGKILL."""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import random
import signal
import traceback
import warnings
from pathlib import Path

CALLS = ("mkdir", "replace", "rename", "unlink", "remove", "link", "symlink", "fsync", "open", "close", "truncate")


class Foreign(Exception):
    """Error that no code expects."""


class Points:
    """Numbered calls on files below a folder; the fault comes at number ``at``, halfway through a write.

    Attributes:
        seen: the calls so far, in order: (call, file name).
    """

    def __init__(self, folder, at=0, act=None):
        self.folder = str(folder)
        self.at = at
        self.act = act
        self.seen = []
        self.names = {}

    def reach(self, call, path):
        self.seen.append((call, Path(path).name))
        if len(self.seen) == self.at:
            self.act()

    def mine(self, path):
        return isinstance(path, (str, os.PathLike)) and str(path).startswith(self.folder)

    @contextlib.contextmanager
    def watching(self):
        real = {name: getattr(os, name) for name in CALLS}
        real_open = builtins.open

        def watched(name):
            def call(*args, **kwargs):
                path = self.names.get(args[0]) if name in ("fsync", "close") else args[0]
                others = [path, *args[1:2]] if name in ("link", "replace", "rename", "symlink") else [path]
                if path is not None and any(self.mine(other) for other in others):
                    self.reach(name, path)
                result = real[name](*args, **kwargs)
                if name == "open" and self.mine(path):
                    self.names[result] = path
                if name == "close":
                    self.names.pop(args[0], None)
                return result

            return call

        def opened(path, mode="r", *args, **kwargs):
            if not self.mine(path) or not set(mode) & set("wax+"):
                return real_open(path, mode, *args, **kwargs)
            self.reach("open", path)
            file = real_open(path, mode, *args, **kwargs)
            self.names[file.fileno()] = path
            return Watched(file, self, path)

        try:
            for name in CALLS:
                setattr(os, name, watched(name))
            builtins.open = opened
            yield self
        finally:
            builtins.open = real_open
            for name, function in real.items():
                setattr(os, name, function)


class Watched:
    """File open for writing, each of whose calls is a point."""

    def __init__(self, file, points, path):
        self.file, self.points, self.path = file, points, path

    def write(self, data):
        half = len(data) // 2
        self.file.write(data[:half])
        if len(self.points.seen) + 1 == self.points.at:
            self.file.flush()
        self.points.reach("write", self.path)
        self.file.write(data[half:])
        return len(data)

    def flush(self):
        self.points.reach("flush", self.path)
        self.file.flush()

    def close(self):
        if not self.file.closed:
            self.points.names.pop(self.file.fileno(), None)
            self.file.close()
            self.points.reach("close", self.path)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __getattr__(self, name):
        return getattr(self.file, name)


def no_space():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def foreign():
    raise Foreign("nobody expected this")


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def record(folder, action):
    """Run an action without faults and return its points."""
    with Points(folder).watching() as points:
        action()
    return points.seen


def in_child(action):
    """Run an action in a forked child and return its wait status; an error there is shown."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of other tests are irrelevant to the child
        state, pid = random.getstate(), os.fork()
    if pid == 0:
        try:
            random.setstate(state)  # python reseeds it in every child
            action()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(7)
    return os.waitpid(pid, 0)[1]


def hurt(folder, action, at, act):
    """Run an action with a fault at one point; return the exception, or None. SIGKILL happens in a child."""
    if act is killed:
        with Points(folder, at, act).watching():
            status = in_child(action)
        assert os.WIFSIGNALED(status), f"the child ended with {status} and was not killed"
        return None
    with Points(folder, at, act).watching():
        try:
            action()
        except Exception as error:
            return error
    return None
