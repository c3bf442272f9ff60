"""The records of a run folder, read once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treadle.checkpoint.lock import holder
from treadle.cli.runpage.checkpoints import Checkpoint, epochs_of, read_checkpoints
from treadle.cli.runpage.files import (
    HISTORIES,
    POINTS,
    SETTINGS,
    STEPS,
    VALIDATIONS,
    Row,
    as_epochs,
    find,
    is_run,
    places,
    read_json,
    read_lines,
    read_tail,
    read_yaml,
)
from treadle.errors import ConfigError
from treadle.runs.record import SESSIONS, last_config
from treadle.runs.settings import flat

_SETTING = "config."
_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".svg")


@dataclass(frozen=True)
class RunRecords:
    """Records of a run; every part may be empty.

    Attributes:
        folder: the run folder.
        name: the name of the run on a page.
        steps: rows of ``steps.jsonl``, each step once, in order.
        points: lines of ``metrics.jsonl``.
        epochs: one flat record per epoch.
        sessions: lines of ``sessions.jsonl``.
        config: the settings, by dotted key.
        config_file: whether these are the settings that the run was started with; else they are its trainer's, from a
            checkpoint.
        results: final metrics, by dotted key.
        checkpoints: newest first.
        pictures: files, only the newest of each kind.
        samples: text samples, by file name.
        holder: the process that is training in the folder; None if there is none.
    """

    folder: Path
    name: str
    steps: Sequence[Row] = ()
    points: Sequence[Row] = ()
    epochs: Sequence[Row] = ()
    sessions: Sequence[Row] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    config_file: bool = False
    results: Mapping[str, float] = field(default_factory=dict)
    checkpoints: Sequence[Checkpoint] = ()
    pictures: Sequence[Path] = ()
    samples: Mapping[str, str] = field(default_factory=dict)
    holder: Mapping[str, Any] | None = None

    @property
    def state(self) -> Checkpoint | None:
        """The newest checkpoint that has a step."""
        return next((one for one in self.checkpoints if one.step is not None), None)


def read_run(folder: Path, name: str | None = None, *, brief: bool = False) -> RunRecords:
    """Read a run folder, even while it is being written.

    Args:
        folder: the run folder, of any face.
        name: the name of the run; by default that of the folder.
        brief: read only the end of the step log and the newest checkpoint, and no pictures.

    Raises:
        ConfigError: there is no such folder, or it holds no record of a run.
    """
    if not folder.is_dir():
        raise ConfigError("no such folder", argument="RUN", value=str(folder))
    if not is_run(folder):
        raise ConfigError(
            "holds no record of a run: no steps.jsonl, sessions.jsonl, metrics.jsonl, history or "
            "checkpoint. Give a run's own folder ('treadle runs' lists those below one); a trainer with a workspace or "
            "a save_dir writes them",
            argument="RUN",
            value=str(folder),
        )
    steps = find(folder, STEPS)
    checkpoints = read_checkpoints(folder, newest_only=brief)
    values = next((one.values for one in checkpoints if one.step is not None), {})
    config = _with_settings_of_member(_config(folder), folder)
    return RunRecords(
        folder,
        name or folder.resolve().name,
        steps=_each_once(read_tail(steps) if brief else read_lines(steps)),
        points=[] if brief else [*read_lines(find(folder, POINTS)), *read_lines(find(folder, VALIDATIONS))],
        epochs=as_epochs(read_json(find(folder, *HISTORIES))) or epochs_of(values),
        sessions=read_lines(find(folder, SESSIONS)),
        config=config or {key.removeprefix(_SETTING): v for key, v in values.items() if key.startswith(_SETTING)},
        config_file=bool(config),
        results=_results(folder),
        checkpoints=checkpoints,
        pictures=[] if brief else _pictures(folder),
        samples={} if brief else _samples(folder),
        holder=_holder(folder),
    )


def _each_once(rows: Sequence[Row]) -> list[Row]:
    by_step = {row["step"]: row for row in rows}
    return [by_step[step] for step in sorted(by_step)]


def _holder(folder: Path) -> Mapping[str, Any] | None:
    found = [holder(place) for place in places(folder)]
    return next((one for one in found if one is not None), None)


def _config(folder: Path) -> dict[str, Any]:
    found = (
        read_json(find(folder, "config.json"))
        or read_yaml(find(folder, "config.yaml"))
        or last_config(folder)
        or read_json(find(folder, SETTINGS))
    )
    return flat(found) if isinstance(found, Mapping) else {}


def _with_settings_of_member(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Add the settings that a run has as a member of a population, above all its seed."""
    population = read_json(folder.resolve().parent / "population.json")
    members = population.get("members", []) if isinstance(population, Mapping) else []
    found: Mapping[str, Any] = next(
        (member["settings"] for member in members if member["name"] == folder.resolve().name), {}
    )
    known = {(key.rpartition(".")[2], str(value)) for key, value in config.items()}
    new = {key: value for key, value in found.items() if (key.rpartition(".")[2], str(value)) not in known}
    return {**config, **new}


def _results(folder: Path) -> dict[str, float]:
    """Return the numbers in ``metrics.json``, without single folds and counts of a series."""
    found = read_json(find(folder, "metrics.json"))
    if not isinstance(found, Mapping):
        return {}
    numbers = flat({key: value for key, value in found.items() if key not in ("config", "epochs")})
    return {key: value for key, value in numbers.items() if type(value) in (int, float)}


def _pictures(folder: Path) -> list[Path]:
    """Return the files in ``pictures/`` and those of the last step in ``images/``."""
    found = _images_in(folder / "pictures")
    images = folder / "images"
    steps = [path for path in images.iterdir() if re.fullmatch(r"\d+", path.name)] if images.is_dir() else []
    return found + (_images_in(max(steps, key=lambda path: int(path.name))) if steps else [])


def _images_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in _PICTURES and path.is_file())


def _samples(folder: Path) -> dict[str, str]:
    paths = sorted(folder.glob("samples*.txt"))
    return {path.name: path.read_text(encoding="utf-8", errors="replace") for path in paths}
