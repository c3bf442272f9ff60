"""Python commands in separate processes without startup cost: each is forked from the test process.

``python("-m", "treadle", ...)`` is ``subprocess.run([sys.executable, ...], capture_output=True, text=True)`` without
the seconds that an import of torch takes. Not for tests of imports or of other hash seeds.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import inspect
import logging
import multiprocessing.process
import multiprocessing.util
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

_SEED_OF_A_NEW_PROCESS = 67280421310721  # torch's own
_IGNORED_BY_PYTHON = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)


def python(
    *arguments: str, cwd: str | os.PathLike[str] | None = None, env: dict[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments (``-m``, a module, ...; ``-c``, code, ...; a script, ...) and return how it ended.

    Raises:
        subprocess.TimeoutExpired: after ``timeout`` seconds; the process is killed then.
    """
    pipe = subprocess.PIPE
    command = [sys.executable, *arguments]
    with Forked(command, stdout=pipe, stderr=pipe, text=True, cwd=cwd, env=env) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


class Forked(subprocess.Popen):
    """``Popen`` of ``[sys.executable, ...]`` that forks this process instead of starting another interpreter."""

    def _execute_child(self, *given: Any) -> None:
        call = inspect.signature(subprocess.Popen._execute_child).bind(self, *given).arguments
        command = [os.fspath(part) for part in call["args"]]
        assert command[0] == sys.executable, command
        pipes = [call[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _be_a_new_process(command[1:], pipes, call["cwd"], call["env"], call["start_new_session"])
        self._child_created = True
        self._close_pipe_fds(*pipes)


def _be_a_new_process(
    arguments: Sequence[str], pipes: Sequence[int], cwd: Any, env: Any, start_new_session: bool
) -> None:
    """Exit the process."""
    code: Any = 1
    try:
        if start_new_session:
            os.setsid()
        _take_streams(*pipes)
        _forget_the_parent()
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        if cwd is not None:
            os.chdir(cwd)
        code = _run(list(arguments))
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _take_streams(p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int, errread: int, errwrite: int) -> None:
    for number, theirs in enumerate((p2cread, c2pwrite, errwrite)):
        if theirs != -1:
            os.dup2(theirs, number)
    for unused in (p2cwrite, c2pread, errread):
        if unused != -1:
            os.close(unused)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  (open until the process ends)
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115


def _forget_the_parent() -> None:
    """Undo what pytest and earlier tests have set, and keep their exit handlers from running here."""
    gc.freeze()  # their objects are not collected here: a loader's would end the workers of the parent
    atexit._clear()
    multiprocessing.util._finalizer_registry.clear()
    multiprocessing.process._children.clear()
    faulthandler.disable()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__
    importlib.reload(warnings)  # pytest records warnings
    warnings.resetwarnings()
    for category in _IGNORED_BY_PYTHON:
        warnings.simplefilter("ignore", category)
    logging.disable(logging.NOTSET)
    for logger in [logging.getLogger(), *map(logging.getLogger, [*logging.root.manager.loggerDict])]:
        if logger is logging.root or logger.name.split(".")[0] == "treadle":
            logger.handlers.clear()
            logger.setLevel(logging.WARNING if logger is logging.root else logging.NOTSET)
        for handler in [*logger.handlers]:
            if type(handler).__module__.startswith("_pytest"):
                logger.removeHandler(handler)
            elif type(handler) is logging.StreamHandler:  # torch's handlers write to the stderr at import time
                handler.stream = sys.stderr  # setStream would flush the old one, which may be closed
    random.seed()
    np.random.seed()
    torch.default_generator.manual_seed(_SEED_OF_A_NEW_PROCESS)
    if torch.are_deterministic_algorithms_enabled():  # setting it imports the compiler, which takes a second
        torch.use_deterministic_algorithms(False)


def _run(arguments: list[str]) -> int:
    """Run the arguments like the interpreter, including its exit; return the exit code."""
    if arguments[0] == "-u":
        arguments = arguments[1:]
    kind, *rest = arguments
    # First the folder of the script or, with -m and -c, the current one; then what PYTHONPATH adds for this process.
    sys.path[:0] = ["" if kind in ("-m", "-c") else str(Path(kind).resolve().parent)] + [
        part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part
    ]
    importlib.invalidate_caches()
    try:
        if kind == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.argv = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = arguments
            runpy.run_path(kind, run_name="__main__")
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        if left.code is not None and not isinstance(left.code, int):
            print(left.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    multiprocessing.util._exit_function()
    logging.shutdown()
    return code
