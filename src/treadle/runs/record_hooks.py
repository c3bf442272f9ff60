"""Hooks that record how a run was started and its sessions, for the commands below ``treadle train``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treadle import distributed
from treadle.config import format_config
from treadle.engine import Engine
from treadle.engine.hook import BaseHook
from treadle.hooks.files import to_json
from treadle.hooks.sessionlog import SessionLogHook
from treadle.runs.folder import CHECKPOINTS, RUN_FILE, write_record
from treadle.runs.record import SESSIONS, from_literal, read_entries
from treadle.runs.settings import changes

_log = logging.getLogger("treadle.cli")


class RunRecordHook(BaseHook):
    """Hook that writes ``run.json``: the configuration file, the command-line settings and the resulting configuration.

    A run resumed with another configuration logs the changes and keeps an entry for each, with the step from which it
    applies. The last of the hooks, when the folder is known to belong to this process.

    Args:
        file: the configuration file.
        arguments: the settings of the command line.
        config: the resulting configuration.
    """

    state_key = "run record"

    def __init__(self, file: Path, arguments: Sequence[str], config: Mapping[str, Any]):
        self.file = file
        self.config = config
        self._entry = {
            "file": str(file.resolve()), "arguments": list(arguments), "config": _as_literal(config),
        }  # fmt: skip

    def on_before_train(self, trainer: Engine) -> None:
        """Write the record, unless it is unchanged."""
        if distributed.rank() != 0 or trainer.workspace is None:
            return
        path = trainer.workspace / RUN_FILE
        before = read_entries(path)
        entries = [entry for entry in before if entry["from_step"] < trainer.step]
        if not entries or not _same(entries[-1], self._entry):
            if entries:
                _say_changes(entries[-1], self._entry, str(trainer.workspace))
            entries.append({"from_step": trainer.step, **self._entry})
        if entries != before:
            config = None if entries[-1]["config"] is None else to_json(self.config)
            write_record(trainer.workspace, {"face": trainer.face, "config": config, "entries": entries})

    def warn_of_unused(self, trainer: Engine) -> None:
        """Warn of settings that differ from those of a finished run, which is left unchanged."""
        if distributed.rank() != 0 or trainer.workspace is None:
            return
        entries = read_entries(trainer.workspace / RUN_FILE)
        if entries and not _same(entries[-1], self._entry):
            _say_changes(entries[-1], self._entry, f"{trainer.workspace} (it is finished: they have no effect)")


class SessionKeeper:
    """Observer that adds a SessionLogHook to each trainer of a command with a folder, unless it has one."""

    def before_building(self, engine: Engine) -> None:
        """Do nothing."""

    def before_running(self, engine: Engine) -> None:
        """Append the hook; its file is in the run folder, above the folder of checkpoints."""
        folder = engine.workspace
        if folder is not None and not any(isinstance(hook, SessionLogHook) for hook in engine.hooks):
            folder = folder.parent if folder.name == CHECKPOINTS else folder
            engine.hooks = [*engine.hooks, SessionLogHook(folder / SESSIONS)]


def _same(last: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    # If the whole configuration is known, it does not matter which settings came from the command line.
    if entry["config"] is None or last["config"] is None:
        return all(last[key] == entry[key] for key in ("file", "config", "arguments"))
    before = format_config(from_literal(last["config"])).split("\n")  # an earlier version wrote other quotes
    return bool(last["file"] == entry["file"] and before == entry["config"])


def _say_changes(last: Mapping[str, Any], entry: Mapping[str, Any], folder: str) -> None:
    if last["config"] is None or entry["config"] is None:
        return
    before, now = from_literal(last["config"]), from_literal(entry["config"])
    for key, (old, new) in changes(before, now).items():
        _log.warning("the run in %s was started with other settings: %s was %r and is now %r", folder, key, old, new)


def _as_literal(config: Mapping[str, Any]) -> list[str] | None:
    """Format a configuration as literals that can be read without executing code; None if it holds objects."""
    lines = format_config(config).split("\n")
    try:
        return lines if from_literal(lines) == config else None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
