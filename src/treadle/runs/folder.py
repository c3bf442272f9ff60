"""The run folder of a pack: its settings, and the handling of a rerun with different ones."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treadle.checkpoint.files import copy_file, why_unwritable, write_text
from treadle.config.yaml_files import parse
from treadle.errors import CheckpointError, ConfigError, nearest
from treadle.requirements import own_version
from treadle.runs.settings import changes

SPLITS = ("train", "val", "test")
RUN_FILE = "run.json"
CHECKPOINTS = "checkpoints"
_EARLIER, _MOVING = "earlier", ".earlier-moving"
_LOGS = (".log", ".out", ".err")
CHECKPOINTS = "checkpoints"
_log = logging.getLogger("treadle.cli")


def stored_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON file of a run; None if it is missing, or damaged, with a warning.

    Example:
        >>> stored_json(Path("no_such_run", "config.json")) is None
        True
    """
    values = _loaded(path)
    return values if isinstance(values, dict) else None


def finished_metrics(out: Path, settings: Mapping[str, Any], *, needed: Collection[str] = ()) -> dict[str, Any] | None:
    """Return the content of ``metrics.json`` if the folder's run is finished and has these settings, else None.

    Args:
        out: the run folder.
        settings: nested plain values, as under ``config`` in ``metrics.json``.
        needed: other files that must exist in the folder.

    Example:
        >>> finished_metrics(Path("no_such_run"), {}) is None
        True
    """
    found = stored_json(out / "metrics.json")
    if found is None or not all((out / name).exists() for name in needed):
        return None
    if changes(found.get("config") or {}, settings):  # a setting introduced after the run counts as None
        return None
    _log.info("%s is finished; pass --no-resume to start over", out)
    return found


@dataclass(frozen=True)
class Record:
    """Record of a run in its folder: ``run.json``, or one of its predecessors.

    Attributes:
        face: the pack, or the face of a configuration file's trainer.
        config: nested plain values.
        version: the version of treadle that wrote it; None for older files.
        identity: further values that a resumed run must share, such as the fingerprint of a text.
        entries: for a run of a configuration file, one for each configuration that it was started with; None for a
            pack.
        file: the name of the file.
    """

    face: str
    config: dict[str, Any]
    version: str | None = None
    identity: dict[str, Any] = field(default_factory=dict)
    entries: list[Any] | None = None
    file: str = RUN_FILE


def read_record(run: Path) -> Record | None:
    """Read the record of a run folder; None if it is missing, or damaged, with a warning.

    Formats of older runs are read too: a ``run.json`` that is a list (configuration files), ``config.yaml`` (graphs),
    ``config.json`` with a ``face`` (text, astro) and without one (spectra).

    Example:
        >>> read_record(Path("no_such_run")) is None
        True
    """
    found = _loaded(run / RUN_FILE)
    if isinstance(found, list):
        return Record("mini", {}, entries=found)
    if isinstance(found, dict) and isinstance(found.get("face"), str):
        known = {key: found.pop(key, None) for key in ("face", "config", "version", "entries")}
        return Record(known["face"], known["config"] or {}, known["version"], found, known["entries"])
    if (run / "config.yaml").is_file():
        return Record("graphs", _loaded_yaml(run / "config.yaml"), file="config.yaml")
    stored = stored_json(run / "config.json") or {}
    # Only the spectra pack omitted its name; other programs, such as transformers, have files of this name too.
    face = stored.pop("face", "spectra" if {"epochs", "data", "model"} <= stored.keys() else None)
    if not isinstance(face, str):
        return None
    identity = {key: stored.pop(key) for key in ("corpus",) if key in stored}
    return Record(face, stored, identity=identity, file="config.json")


def write_record(run: Path, record: Mapping[str, Any]) -> None:
    """Write ``run.json``, unless it is unchanged.

    Args:
        run: the run folder.
        record: with at least ``face`` and ``config``; ``version`` is added.

    Raises:
        CheckpointError: the file cannot be written.
    """
    text = json.dumps({"face": record["face"], "version": own_version(), **record}, indent=2) + "\n"
    write_changed(text, run / RUN_FILE)


def write_changed(text: str, path: Path) -> None:
    """Write a text file, unless it already holds the text.

    Raises:
        CheckpointError: the file cannot be written.
    """
    if not path.is_file() or path.read_text(encoding="utf-8", errors="replace") != text:
        write_text(text, path)


def _loaded(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        _log.warning("%s is damaged (%s) and will be rewritten", path, error)
        return None


def _loaded_yaml(path: Path) -> dict[str, Any]:
    try:
        return parse(path.read_bytes(), path)
    except (ConfigError, ImportError) as error:
        _log.warning("%s is damaged (%s) and will be rewritten", path, error)
        return {}


def refuse_unwritable(out: Path) -> None:
    """Raise ConfigError for a run folder that can be neither written nor created, before data is read."""
    reason = why_unwritable(out)
    if reason is not None:
        raise ConfigError(f"--out {out}: {reason}; choose another folder")


def refuse_other_run(out: Path, face: str) -> None:
    """Raise for a folder with a run of another kind, since neither could then be resumed; warn of one of a script.

    Args:
        out: the run folder; it may be missing.
        face: the pack whose run will be written there.

    Raises:
        ConfigError: the folder's run belongs to another pack or a configuration file.
    """
    record = read_record(out)
    if record is None and (out / "settings.json").is_file():
        _log.warning(
            "--out %s: holds a run of a script, whose files are set aside under names with .1 or .superseded; give "
            "another folder with --out to keep the two apart",
            out,
        )
    if record is None or (record.entries is None and record.face == face):
        return
    found = f"of 'treadle train {record.face}'" if record.entries is None else "of a configuration file"
    raise ConfigError(f"--out {out}: holds a run {found}; give another folder with --out")


@contextmanager
def readable(out: Path, *, verb: str = "read") -> Iterator[None]:
    """Raise a ConfigError that names ``--out`` for errors in reading or writing a run folder."""
    try:
        yield
    except (CheckpointError, OSError) as error:
        if verb == "read" and isinstance(error, CheckpointError):
            raise
        raise ConfigError(f"--out {out}: cannot be {verb} ({_cause(error)}); choose another folder") from error


def writable(out: Path) -> AbstractContextManager[None]:
    """Return :func:`readable` for a folder that is written."""
    return readable(out, verb="written")


def _cause(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    return cause.strerror or str(cause) if isinstance(cause, OSError) else str(error)


def set_aside(folder: Path) -> None:
    """Move a file or folder of an earlier run aside; an empty folder, left by an early kill, stays."""
    if folder.exists() and not (folder.is_dir() and all(path.name.startswith(".") for path in folder.iterdir())):
        from treadle.hooks.files import next_free

        aside = next_free(folder)
        folder.rename(aside)
        _log.info("%s belonged to an earlier run and is now %s", folder.name, aside.name)


def set_run_aside(out: Path, *, parts: Collection[str] = ()) -> None:
    """Move the whole run in a folder into ``earlier.N`` inside it: settings, results, pages, pictures, states, logs.

    The new folder is a run folder too. Log files that other programs may be writing stay, and so do the files of a run
    that was killed before its first state. An interrupted move is completed by the next call.

    Args:
        out: the run folder; it may be missing.
        parts: further names that only a run with a state or results has, besides ``checkpoints`` and ``metrics.json``.
    """
    moving = out / _MOVING
    if not (moving.is_dir() or any(_has_content(out / name) for name in ("checkpoints", "metrics.json", *parts))):
        return
    moving.mkdir(exist_ok=True)
    for path in sorted(out.iterdir(), key=lambda path: path.name == RUN_FILE):  # the record last
        if not (path.name.startswith(".") or path.suffix in _LOGS or re.fullmatch(rf"{_EARLIER}\.\d+", path.name)):
            path.rename(_unused_name(moving / path.name))
    _finish_move(out, "the earlier run")


def set_results_aside(out: Path, names: Collection[str]) -> None:
    """Move the results of a run that continues with other settings into ``earlier.N``, with a copy of its settings.

    Args:
        out: the run folder.
        names: the names of its results.
    """
    found = [out / name for name in names if _has_content(out / name)]
    if not (found or (out / _MOVING).is_dir()):
        return
    (out / _MOVING).mkdir(exist_ok=True)
    for name in (RUN_FILE, "config.json", "config.yaml"):
        if (out / name).is_file():
            copy_file(out / name, out / _MOVING / name)
    for path in found:
        path.rename(_unused_name(out / _MOVING / path.name))
    _finish_move(out, "results with the earlier settings")


def _finish_move(out: Path, what: str) -> None:
    aside = _unused_name(out / f"{_EARLIER}.1")
    (out / _MOVING).rename(aside)
    _log.info("%s: %s", aside, what)


def _unused_name(path: Path) -> Path:
    number, stem = 1, path.name.removesuffix(".1")
    while path.exists():
        number += 1
        path = path.with_name(f"{stem}.{number}")
    return path


def _has_content(path: Path) -> bool:
    return any(not inner.name.startswith(".") for inner in path.iterdir()) if path.is_dir() else path.exists()


def describe_changes(differences: Mapping[str, tuple[Any, Any]], folder: str, *, free: Collection[str]) -> list[str]:
    """Describe the changes of a rerun.

    Args:
        differences: from :func:`treadle.runs.settings.changes`.
        folder: the run folder, for the advice.
        free: the settings that a run may change on resuming.

    Returns:
        One sentence per change that the run can make on resuming.

    Raises:
        ConfigError: a change would need another model, other data, or a state that the checkpoint overrides.

    Example:
        >>> describe_changes({"threads": (1, 2)}, "runs/short", free={"threads"})
        ['threads was 1 and is now 2']
    """
    refused = [key for key in differences if key not in free]
    if refused:
        what = ", ".join(f"{key} was {differences[key][0]!r} and is now {differences[key][1]!r}" for key in refused)
        raise ConfigError(
            f"the run in {folder} was started with other settings: {what}. Settings are fixed for a run; give another "
            "folder with --out, use the old settings, or pass --no-resume to start over in this one"
        )
    sentences = []
    for key, (before, now) in differences.items():
        sentence = f"{key} was {before!r} and is now {now!r}"
        if key.endswith("epochs") or "schedule" in key:
            sentence += ": the learning rate follows the new schedule from here on"
        sentences.append(sentence)
    return sentences


def run_folder_of(path: Path) -> Path:
    """Return the run folder of a checkpoint.

    Example:
        >>> run_folder_of(Path("runs/a/checkpoints/best.pt")).name, run_folder_of(Path("runs/a/best.pt")).name
        ('a', 'a')
    """
    return path.parent.parent if path.parent.name == "checkpoints" else path.parent


def known_split(split: str, known: Collection[str]) -> str:
    """Validate and return the name of a split.

    Raises:
        ConfigError: the split is unknown.

    Example:
        >>> known_split("val", SPLITS)
        'val'
    """
    if split not in known:
        raise ConfigError(f"{nearest(split, known)}", argument="split", value=split)
    return split


def split_of(data: Any, split: str) -> Any:
    """Return one split of a pack's data.

    Raises:
        ConfigError: there is no such split.
    """
    return getattr(data, known_split(split, SPLITS))
