"""Discovery of run folders and reading of their files, for any face; a line cut off by a kill is left out."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from treadle.checkpoint.lock import LOCK_NAME
from treadle.checkpoint.shard_manifest import has_shards
from treadle.config.yaml_files import parse
from treadle.errors import ConfigError
from treadle.runs.folder import CHECKPOINTS
from treadle.runs.record import SESSIONS

Row = dict[str, Any]
EXPORTS = "export"
SETTINGS = "settings.json"  # of every face, see treadle.faces.run_files
STEPS, POINTS, VALIDATIONS = "steps.jsonl", "metrics.jsonl", "validation.jsonl"
HISTORIES = ("training_history.json", "history.json")
_RECORDS = (STEPS, SESSIONS, POINTS, *HISTORIES, "run.json", LOCK_NAME)
_WEIGHTS = (".pt", ".pth", ".ckpt", ".safetensors")
# Folders inside a run that hold no other run and may hold very many files.
_INNER = {CHECKPOINTS, "pictures", "images", "pretrained", "profile", "tensorboard", "wandb", "mlruns", "nonfinite"}


def places(run: Path) -> list[Path]:
    """Return the folders that may hold files of a run: its own, and that of its checkpoints."""
    return [run, run / CHECKPOINTS]


def find(run: Path, *names: str) -> Path | None:
    """Return the first of these files that exists in a run.

    Example:
        >>> find(Path("no_such_run"), "steps.jsonl") is None
        True
    """
    return next((place / name for name in names for place in places(run) if (place / name).is_file()), None)


def is_run(folder: Path) -> bool:
    """Return whether a folder holds files of a run."""
    if folder.name == CHECKPOINTS:
        return False
    return find(folder, *_RECORDS) is not None or any(is_state(path) for path in weight_files(folder))


def is_state(path: Path) -> bool:
    """Return whether a file or folder of weights is named like a checkpoint that a run resumes from."""
    return path.name.startswith(("checkpoint_", "ckpt_epoch_")) or path.name in ("best.pt", "last.pt")


def weight_files(run: Path) -> list[Path]:
    """Return everything that looks like a checkpoint or weights: files by suffix, folders by their shards."""
    found = []
    for place in places(run):
        names = sorted(os.listdir(place)) if place.is_dir() else []
        paths = [place / name for name in names if not name.startswith(".")]
        found += [path for path in paths if path.suffix in _WEIGHTS or (path.is_dir() and has_shards(path))]
    return found


def runs_below(folder: Path) -> Iterator[Path]:
    """Yield the run folders at and below a folder in path order, without following links.

    Example:
        >>> list(runs_below(Path("no_such_folder")))
        []
    """
    for path, folders, _ in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _INNER and not name.startswith("."))
        if is_run(Path(path)):
            folders[:] = [name for name in folders if name != EXPORTS]  # exported weights, named like checkpoints
            yield Path(path)


def read_lines(path: Path | None) -> list[Row]:
    """Return the lines of a file that are JSON objects with an integer ``step``; skip others.

    Example:
        >>> read_lines(None)
        []
    """
    return [] if path is None else _rows_of(_bytes_of(path, None))


def _rows_of(content: bytes) -> list[Row]:
    rows = []
    for line in content.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and type(row.get("step")) is int:
            rows.append(row)
    return rows


def read_tail(path: Path | None) -> list[Row]:
    """Return the lines as :func:`read_lines` does, of the last bytes of a file only."""
    return [] if path is None else _rows_of(_bytes_of(path, 1 << 16))


def _bytes_of(path: Path, last: int | None) -> bytes:
    """Return a file's bytes, or the complete lines in its last bytes; b"" if a fresh start has just renamed it."""
    try:
        with open(path, "rb") as file:
            length = os.fstat(file.fileno()).st_size
            if last is None or length <= last:
                return file.read()
            file.seek(length - last)
            return file.read().split(b"\n", 1)[-1]
    except FileNotFoundError:
        return b""


def read_json(path: Path | None) -> Any:
    """Return the content of a JSON file; None if it is missing, damaged, or just being replaced."""
    if path is None:
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def read_yaml(path: Path | None) -> Any:
    """Return the content of a YAML file; None if it is missing, damaged, or no YAML parser is installed."""
    if path is None:
        return None
    try:
        return parse(path.read_bytes(), path)
    except (OSError, ConfigError, ImportError):
        return None


def as_epochs(history: Any) -> list[Row]:
    """Convert a history in any of its forms to one flat record per epoch, with a key ``epoch``.

    Args:
        history: a list of records, a dict of columns, or a dict of lists of records by split.

    Example:
        >>> as_epochs({"epoch": [1, 2], "eval_loss": [0.5, 0.4]})
        [{'epoch': 1, 'eval_loss': 0.5}, {'epoch': 2, 'eval_loss': 0.4}]
        >>> as_epochs({"train": [{"epoch": 1, "loss": 0.5}], "val": [{"epoch": 1, "loss": 0.6}]})
        [{'epoch': 1, 'train_loss': 0.5, 'val_loss': 0.6}]
    """
    if isinstance(history, list):
        return [row for row in history if isinstance(row, dict) and type(row.get("epoch")) is int]
    if not isinstance(history, dict):
        return []
    epochs = history.get("epoch")
    if isinstance(epochs, list):
        columns = {key: values for key, values in history.items() if isinstance(values, list)}
        return as_epochs([
            {key: values[index] for key, values in columns.items() if index < len(values)}
            for index in range(len(epochs))
        ])  # fmt: skip
    merged: dict[int, Row] = {}
    for part, rows in history.items():
        for row in as_epochs(rows if isinstance(rows, list) else []):
            record = merged.setdefault(row["epoch"], {"epoch": row["epoch"]})
            record.update({f"{part}_{key}": value for key, value in row.items() if key != "epoch"})
    return [merged[epoch] for epoch in sorted(merged)]
