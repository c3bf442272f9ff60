"""Reading of the record of how a run was started, from which ``treadle replay`` rebuilds it. Does not import torch."""

from __future__ import annotations

import ast
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treadle.errors import ConfigError
from treadle.runs.folder import RUN_FILE

_log = logging.getLogger("treadle.cli")
SESSIONS = "sessions.jsonl"


def from_literal(lines: Sequence[str]) -> Any:
    """Parse a configuration from lines of literals."""
    return ast.literal_eval("\n".join(lines))


def read_entries(path: Path) -> list[dict[str, Any]]:
    """Read the entries of a record; a damaged one counts as absent, with a warning."""
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
    """Return the configuration that a run was last started with; None if no plain values were recorded."""
    entries = read_entries(run / RUN_FILE)
    try:
        return from_literal(entries[-1]["config"]) if entries and entries[-1]["config"] is not None else None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        _log.warning("%s: the configuration cannot be read (%s: %s)", run / RUN_FILE, type(error).__name__, error)
        return None


def recorded_config(run: Path, step: int) -> tuple[dict[str, Any], Path] | None:
    """Return the configuration in effect at a step of a run, and the folder of its file.

    A configuration of plain values is taken from the record, so that later edits of the file have no effect; one with
    objects is loaded again.

    Raises:
        ConfigError: the folder of the file is gone.
    """
    entries = [entry for entry in read_entries(run / RUN_FILE) if entry["from_step"] < step]
    if not entries:
        return None
    file, lines = Path(entries[-1]["file"]), entries[-1]["config"]
    if not file.parent.is_dir():
        raise ConfigError(
            f"was started from {file}, whose folder no longer exists; pass its new path with --script",
            argument="RUN",
            value=str(run),
        )
    if lines is not None:
        return from_literal(lines), file.parent
    from treadle.runs.target import PackRun, read_target

    config = read_target(file, entries[-1]["arguments"])
    if isinstance(config, PackRun):
        raise ConfigError(f"{file}: described a trainer when the run was started, but names a pack now")
    return config, file.parent
