"""How a run was started, kept in its folder: ``treadle replay`` builds the run again from it; and its sessions."""

from __future__ import annotations

import ast
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treadle import distributed
from treadle.config import format_config
from treadle.engine import Engine
from treadle.engine.hook import BaseHook
from treadle.errors import ConfigError
from treadle.hooks.files import to_json
from treadle.hooks.sessionlog import SessionLogHook
from treadle.runs.folder import RUN_FILE, write_record
from treadle.runs.settings import changes
from treadle.runs.target import PackRun, read_target

_log = logging.getLogger("treadle.cli")
CHECKPOINTS = "checkpoints"
SESSIONS = "sessions.jsonl"


class RunRecordHook(BaseHook):
    """Writes ``run.json`` into the workspace: file, settings of the command line, and the configuration they gave.

    A run that goes on with another configuration says what is new, and keeps an entry for either, with the step from
    which it holds. The last of the hooks: by then the folder is known to belong to this process.

    Args:
        file: the configuration file.
        arguments: the settings of the command line.
        config: what they gave.
    """

    state_key = "run record"

    def __init__(self, file: Path, arguments: Sequence[str], config: Mapping[str, Any]):
        self.file = file
        self.config = config
        self._entry = {
            "file": str(file.resolve()), "arguments": list(arguments), "config": _as_literal(config),
        }  # fmt: skip

    def on_before_train(self, trainer: Engine) -> None:
        """Writes the record, unless it says the same already."""
        if distributed.rank() != 0 or trainer.workspace is None:
            return
        path = trainer.workspace / RUN_FILE
        before = _entries(path)
        entries = [entry for entry in before if entry["from_step"] < trainer.step]
        if not entries or not _same(entries[-1], self._entry):
            if entries:
                _say_changes(entries[-1], self._entry, str(trainer.workspace))
            entries.append({"from_step": trainer.step, **self._entry})
        if entries != before:
            config = None if entries[-1]["config"] is None else to_json(self.config)
            write_record(trainer.workspace, {"face": trainer.face, "config": config, "entries": entries})


class SessionKeeper:
    """Observes the trainers of a command: each that writes into a folder gets a SessionLogHook, unless it has one."""

    def before_building(self, engine: Engine) -> None:
        """Leaves everything as it is."""

    def before_running(self, engine: Engine) -> None:
        """Adds the hook behind the others; its file lies in the run folder, above the folder of checkpoints."""
        folder = engine.workspace
        if folder is not None and not any(isinstance(hook, SessionLogHook) for hook in engine.hooks):
            folder = folder.parent if folder.name == CHECKPOINTS else folder
            engine.hooks = [*engine.hooks, SessionLogHook(folder / SESSIONS)]


def _same(last: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    # Which settings came from the command line does not matter where the whole is known.
    keys = ("file", "config", "arguments") if entry["config"] is None else ("file", "config")
    return all(last[key] == entry[key] for key in keys)


def _say_changes(last: Mapping[str, Any], entry: Mapping[str, Any], folder: str) -> None:
    if last["config"] is None or entry["config"] is None:
        return
    before, now = _from_literal(last["config"]), _from_literal(entry["config"])
    for key, (old, new) in changes(before, now).items():
        _log.warning("the run in %s was started with other settings: %s was %r and is now %r", folder, key, old, new)


def _as_literal(config: Mapping[str, Any]) -> list[str] | None:
    """Returns a configuration as lines that can be read without running anything; None if it holds objects."""
    lines = format_config(config).split("\n")
    try:
        return lines if _from_literal(lines) == config else None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _from_literal(lines: Sequence[str]) -> Any:
    return ast.literal_eval("\n".join(lines))


def _entries(path: Path) -> list[dict[str, Any]]:
    """Reads a record; one that is damaged is named and counts as absent."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        entries = found.get("entries", []) if isinstance(found, dict) else found  # a list in earlier versions
        return [{key: entry[key] for key in ("from_step", "file", "arguments", "config")} for entry in entries]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("%s cannot be used (%s: %s)", path, type(error).__name__, error)
        return []


def last_config(run: Path) -> Any:
    """Returns the configuration that a run was last started with; None if none of plain values was recorded."""
    entries = _entries(run / RUN_FILE)
    try:
        return _from_literal(entries[-1]["config"]) if entries and entries[-1]["config"] is not None else None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        _log.warning("%s: the configuration cannot be read (%s: %s)", run / RUN_FILE, type(error).__name__, error)
        return None


def recorded_config(run: Path, step: int) -> tuple[dict[str, Any], Path] | None:
    """Returns the configuration that a step of a run was made with, and the folder of its file.

    A configuration of plain values is taken from the record, so that a file edited since then changes nothing; one
    that holds objects is loaded again.

    Raises:
        ConfigError: the folder of the file is gone.
    """
    entries = [entry for entry in _entries(run / RUN_FILE) if entry["from_step"] < step]
    if not entries:
        return None
    file, lines = Path(entries[-1]["file"]), entries[-1]["config"]
    if not file.parent.is_dir():
        raise ConfigError(
            f"was started from {file}, whose folder is gone; name the file where it lies now with --script",
            argument="RUN",
            value=str(run),
        )
    if lines is not None:
        return _from_literal(lines), file.parent
    config = read_target(file, entries[-1]["arguments"])
    if isinstance(config, PackRun):
        raise ConfigError(f"{file}: described a trainer when the run was started and names a pack now")
    return config, file.parent
