"""Helpers of hooks that write files: path resolution, free names for older files, JSON values."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.checkpoint.store import write_text
from treadle.errors import ConfigError

if TYPE_CHECKING:
    from treadle.engine import Engine


def in_workspace(trainer: Engine, path: str | Path) -> Path:
    """Resolve a path relative to the trainer's workspace.

    Raises:
        ConfigError: the path is relative and the trainer has no workspace.
    """
    path = Path(path)
    if path.is_absolute():
        return path
    if trainer.workspace is None:
        raise ConfigError(
            " is relative and the trainer has no workspace; pass workspace= to the trainer or an absolute path",
            argument="path",
            value=str(path),
        )
    return trainer.workspace / path


def file_in_workspace(trainer: Engine, path: str | Path) -> Path:
    """Resolve the path of a file like :func:`in_workspace`.

    Raises:
        ConfigError: the path is relative and the trainer has no workspace, or a folder has the name.
    """
    path = in_workspace(trainer, path)
    if path.is_dir():
        raise ConfigError("is a folder; give the path of a file", argument="path", value=str(path))
    return path


def next_free(path: Path) -> Path:
    """Return ``<stem>.N<suffix>`` with the smallest free N."""
    number = 1
    while (candidate := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return candidate


def set_aside(trainer: Engine, path: Path) -> None:
    """Rename the file of an earlier run to the next free name."""
    if path.exists():
        aside = next_free(path)
        path.rename(aside)
        trainer.logger.info(
            "%s belonged to an earlier run and is now %s", path.name, aside.name,
            extra={"topic": "set aside", "short": aside.name},
        )  # fmt: skip


def continue_lines(trainer: Engine, path: Path) -> set[str]:
    """Prepare a file of JSON lines with ``step``: rename that of another run, or truncate that of a resumed run.

    Returns:
        The keys of the lines at the step resumed from.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if trainer.step == 0:
        set_aside(trainer, path)
    return cut_lines(path, trainer.step) if path.exists() else set()


def cut_lines(path: Path, step: int) -> set[str]:
    """Drop lines after a step, and a partially written line; return the keys at that step."""
    kept, keys = [], set()
    text = path.read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines():
        try:
            record = json.loads(line)
            at = record["step"]
        except (ValueError, KeyError, TypeError):
            continue
        if at <= step:
            kept.append(line + "\n")
        if at == step:
            keys |= set(record)
    if "".join(kept) != text:
        write_text("".join(kept), path)
    return keys


def append_lines(path: Path, lines: Sequence[str]) -> None:
    """Append lines to a file, all or none: a partial write on a full disk is undone.

    Example:
        >>> append_lines(Path("lines.txt"), ["a", "b"])
        >>> Path("lines.txt").read_text()
        'a\\nb\\n'
    """
    rest = "".join(f"{line}\n" for line in lines).encode()
    with open(path, "ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(size)
            raise


def to_json(value: Any) -> Any:
    """Convert a value to valid JSON: NaN and infinities become null.

    Example:
        >>> to_json({"a": float("nan"), "b": [1, float("inf")]})
        {'a': None, 'b': [1, None]}
    """
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class RunNotes:
    """State of a tracker in the workspace, to continue its run: the run's id and the last step sent.

    Args:
        workspace: folder of the files; None stores nothing.
        name: name of the tracker; the files are ``<name>_run_id`` and ``<name>_last_step``.

    Example:
        >>> RunNotes(None, "wandb").run_id is None
        True
    """

    def __init__(self, workspace: Path | None, name: str):
        self.workspace = workspace
        self.id_file = f"{name}_run_id"
        self.step_file = f"{name}_last_step"

    @property
    def run_id(self) -> str | None:
        """Stored run id, or None."""
        return self._text(self.id_file) or None

    def keep(self, run_id: str) -> None:
        """Store the id of the run."""
        if self.workspace is not None:
            self.workspace.mkdir(parents=True, exist_ok=True)
            (self.workspace / self.id_file).write_text(f"{run_id}\n", encoding="utf-8")

    def last_step(self, run_id: str) -> int:
        """Return the recorded last step that was sent to a run; -1 if none was."""
        noted, _, step = self._text(self.step_file).rpartition(" ")
        return int(step) if noted == run_id and step.isdigit() else -1

    def note(self, run_id: str, step: int) -> None:
        """Record the last step that was sent."""
        if self.workspace is not None:
            # Replaced atomically against kills, but not synced, at each log point.
            temporary = self.workspace / f".{self.step_file}.tmp"
            temporary.write_text(f"{run_id} {step}\n", encoding="utf-8")
            os.replace(temporary, self.workspace / self.step_file)

    def _text(self, name: str) -> str:
        path = None if self.workspace is None else self.workspace / name
        return path.read_text(encoding="utf-8").strip() if path is not None and path.is_file() else ""
