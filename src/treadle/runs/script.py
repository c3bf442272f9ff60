"""The user's own run inside a command: a script started as ``__main__``, and what it writes moved out of the way."""

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
    """Run a script as ``python SCRIPT ARGUMENTS`` would, in this process; arguments and import path come back."""
    argv, path = sys.argv, list(sys.path)
    try:
        sys.argv = [str(script), *arguments]
        sys.path.insert(0, str(script.parent.resolve()))  # where `python script.py` looks first
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = argv, path


class MovedRuns:
    """Observer of the trainers of a target that moves what they write; a command adds what else it does.

    Args:
        target: names it in messages.
        workspace: where the files go.
    """

    command: ClassVar[str]
    faces: ClassVar[tuple[str, ...]] = ("mini", "engine")

    def __init__(self, target: str, workspace: Path):
        self.target, self.workspace = target, workspace
        self._homes: dict[int, Path | None] = {}

    def before_building(self, engine: Engine) -> None:
        """Move the workspace before anything asks for it."""
        self._homes[id(engine)] = engine.workspace
        engine.workspace = self.workspace

    def move(self, engine: Engine) -> list[str]:
        """Move what the hooks of a trainer write; return the state keys of those that were taken out.

        Raises:
            ConfigError: it is of a face that writes files which cannot be moved.
        """
        if engine.face not in self.faces:
            raise ConfigError(
                f"={self.target}: makes a trainer of the {engine.face} face, whose files cannot be moved out of "
                f"the way; {self.command} runs scripts and configurations with a BaseTrainer, and the packs by their "
                f"name, such as `treadle {self.command} spectra`",
                argument="TARGET",
            )
        return _move_files(engine, self._homes.get(id(engine), engine.workspace), self.workspace)


def _move_files(engine: Engine, home: Path | None, workspace: Path) -> list[str]:
    """Move what the hooks of a run write into another workspace, and take out those that send elsewhere.

    Args:
        engine: built, and not running.
        home: the workspace that the run was given.
        workspace: where the files go instead.

    Returns:
        The state keys of the hooks that were taken out.
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
        config: as :func:`treadle.builder.build_trainer` reads it.
        folder: that of the file, where its imports are looked for.

    Raises:
        ConfigError: it does not describe a trainer that trains by ``train()``.
    """
    trainer = build_trainer(config, folder=folder)
    train = getattr(trainer, "train", None)
    needed = [] if not callable(train) else inspect.signature(train).parameters.values()
    if not callable(train) or any(item.default is item.empty and item.kind < item.VAR_POSITIONAL for item in needed):
        raise ConfigError(
            f"{config['trainer']['type']!r} makes a {type(trainer).__name__}, which has no train() that "
            "needs no arguments; use a BaseTrainer, or `face` for a run of a pack",
            argument="trainer.type",
        )
    train()
    return trainer
