"""Shared parts of the tests of pack commands: running one, checking its files, stopping it at a given point."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from treadle.cli.main import main
from treadle.engine import Engine
from treadle.engine.hook import BaseHook
from treadle.runs.pack import Results
from treadle.runs.report import Report


def treadle(*arguments: object) -> int:
    """Run a command in this process and return its exit code."""
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    return left.value.code if isinstance(left.value.code, int) else 0


def read(*parts: object) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(Path(*map(str, parts)).read_text(encoding="utf-8"))
    return values


def files(folder: Path) -> dict[str, int]:
    """Return the modification time of each file in a folder."""
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def leave_the_report_out(patch: Any, pack: Any) -> None:
    """Make a pack skip testing, plotting and reporting after its training."""
    patch.setattr(pack, "finish", lambda *args: Results({}))
    patch.setattr(pack, "report", lambda *args: Report())


def draw_nothing(*args: Any, path: Path, **kwargs: Any) -> Path:
    """Replace a function that writes a plot."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"")
    return path


class Killed(BaseException):
    """Exception that simulates the end of the process: nothing in the library may catch it."""


def kill() -> None:
    raise Killed


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class Stop(BaseHook):
    """Observer that acts at one event of one step."""

    def __init__(self, event: str, step: int, act: Callable[[], None]):
        self.step, self.act = step, act
        setattr(self, event, self._happens)

    def _happens(self, trainer: Engine, *rest: object) -> None:
        if trainer.step == self.step:
            self.act()

    def before_building(self, engine: Engine) -> None:
        """Act before building; step face only."""

    def before_running(self, engine: Engine) -> None:
        engine.hooks = [*engine.hooks, self]
