"""Execution of a user's script as ``__main__`` inside a command, with its output files redirected."""

from __future__ import annotations

import inspect
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from treadle.builder import build_trainer
from treadle.engine import Engine
from treadle.engine.hook import BaseHook
from treadle.errors import ConfigError
from treadle.hooks import MlflowHook, TrackioHook, WandbHook
from treadle.hooks.own_tracker import OwnTrackerHook

_SENDING = (WandbHook, MlflowHook, TrackioHook, OwnTrackerHook)
"""Trackers that reach beyond the workspace, or may."""


def run_as_main(script: Path, arguments: Sequence[str]) -> None:
    """Run a script like ``python SCRIPT ARGUMENTS`` in this process, then restore arguments and import path."""
    argv, path = sys.argv, list(sys.path)
    try:
        sys.argv = [str(script), *arguments]
        sys.path.insert(0, str(script.parent.resolve()))  # where `python script.py` looks first
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = argv, path


class RedirectedRuns:
    """Observer that redirects the files of a target's trainers; commands extend it.

    Args:
        target: the name of the target for messages.
        workspace: the new folder of the files.
    """

    command: ClassVar[str]
    faces: ClassVar[tuple[str, ...]] = ("mini", "engine")

    def __init__(self, target: str, workspace: Path):
        self.target, self.workspace = target, workspace
        self._homes: dict[int, Path | None] = {}

    def before_building(self, engine: Engine) -> None:
        """Move the workspace before anything uses it."""
        self._homes[id(engine)] = engine.workspace
        engine.workspace = self.workspace

    def move(self, engine: Engine) -> list[str]:
        """Redirect the files of a trainer's hooks; return the state keys of removed hooks.

        Raises:
            ConfigError: its face writes files that cannot be redirected.
        """
        if engine.face not in self.faces:
            raise ConfigError(
                f"={self.target}: makes a trainer of the {engine.face} face, whose files cannot be redirected; "
                f"{self.command} runs scripts and configurations with a BaseTrainer, and the packs by their name, "
                f"such as `treadle {self.command} spectra`",
                argument="TARGET",
            )
        return _move_files(engine, self._homes.get(id(engine), engine.workspace), self.workspace)


def _move_files(engine: Engine, home: Path | None, workspace: Path) -> list[str]:
    """Redirect the files of a run's hooks into another workspace, and remove hooks that upload elsewhere.

    Args:
        engine: built, and not running.
        home: the original workspace of the run.
        workspace: the new folder of the files.

    Returns:
        The state keys of the removed hooks.
    """
    engine.workspace = workspace
    for hook in engine.hooks:
        _move(hook, home, workspace)
    sending = [hook for hook in engine.hooks if isinstance(hook, _SENDING)]
    engine.hooks = [hook for hook in engine.hooks if hook not in sending]
    return [hook.state_key for hook in sending]


def _move(hook: BaseHook, home: Path | None, workspace: Path) -> None:
    path = getattr(hook, "path", None)
    if not hook.writes or not isinstance(path, Path):
        return
    if path.is_absolute():
        inside = home is not None and path.is_relative_to(home)
        path = path.relative_to(home) if inside and home is not None else Path(path.name)
    hook.path = workspace / path  # type: ignore[attr-defined]


def train_from(config: dict[str, Any], folder: Path) -> Any:
    """Build the trainer of a configuration, train it, and return it.

    Args:
        config: a configuration for :func:`treadle.builder.build_trainer`.
        folder: the folder of the file, in which its imports are searched.

    Raises:
        ConfigError: it does not describe a trainer with a ``train()`` without arguments.
    """
    trainer = build_trainer(config, folder=folder)
    train = getattr(trainer, "train", None)
    needed = [] if not callable(train) else inspect.signature(train).parameters.values()
    if not callable(train) or any(item.default is item.empty and item.kind < item.VAR_POSITIONAL for item in needed):
        raise ConfigError(
            f"{config['trainer']['type']!r} makes a {type(trainer).__name__}, which has no train() without required "
            "arguments; use a BaseTrainer, or `face` for a run of a pack",
            argument="trainer.type",
        )
    train()
    return trainer
