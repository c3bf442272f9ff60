"""The folder of a pack's run: the settings it was started with, and what a rerun with others means."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from treadle.errors import CheckpointError, ConfigError, nearest
from treadle.runs.settings import changes

SPLITS = ("train", "val", "test")
_log = logging.getLogger("treadle.cli")


def stored_json(path: Path) -> dict[str, Any] | None:
    """Reads one of a run's JSON files; a damaged one is named and counts as absent, as one that is not there.

    Example:
        >>> stored_json(Path("no_such_run", "config.json")) is None
        True
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        _log.warning("%s is damaged (%s) and will be written anew", path, error)
        return None
    return values if isinstance(values, dict) else None


def finished_metrics(out: Path, settings: Mapping[str, Any], *, needed: Collection[str] = ()) -> dict[str, Any] | None:
    """Returns what ``metrics.json`` holds if the run of a folder is finished and is of these settings, else None.

    Args:
        out: the run folder.
        settings: nested plain values, as ``metrics.json`` has them under ``config``.
        needed: files of the folder that must be there too.

    Example:
        >>> finished_metrics(Path("no_such_run"), {}) is None
        True
    """
    found = stored_json(out / "metrics.json")
    if found is None or not all((out / name).exists() for name in needed):
        return None
    if changes(found.get("config") or {}, settings):  # a setting that is newer than the run counts as None
        return None
    _log.info("%s is finished; --no-resume would start it afresh", out)
    return found


@contextmanager
def usable_config(run: Path) -> Iterator[dict[str, Any]]:
    """Gives the settings in the folder of a pack's run, and turns what does not fit into a ConfigError.

    Raises:
        ConfigError: there are none, or the block cannot use them.
    """
    path = run / "config.json"
    if not run.is_dir():
        raise ConfigError(f"RUN={str(run)!r}: no such folder; give the folder of a run")
    try:
        yield dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"RUN={str(run)!r}: {path.name} cannot be used ({type(error).__name__}: {error}); give the folder of a run "
            "of 'treadle train', or your own script with --script"
        ) from error


def refuse_other_run(out: Path, face: str) -> None:
    """Refuses a folder that holds a run of another kind: neither could go on or be replayed after the other.

    Args:
        out: the run folder; it may not be there.
        face: the pack whose run is to be written there.

    Raises:
        ConfigError: the folder's run is of another pack or of a configuration file.

    Example:
        >>> refuse_other_run(Path("no_such_run"), "spectra")
    """
    stored = None if not out.is_dir() else stored_json(out / "config.json")
    found = None
    if (out / "run.json").is_file():
        found = "of a configuration file"
    elif (out / "config.yaml").is_file() and face != "graphs":
        found = "of 'treadle train graphs'"
    elif (other := _pack_of(stored or {})) not in (None, face):
        found = f"of 'treadle train {other}'"
    if found is not None:
        raise ConfigError(f"--out {out}: holds a run {found}; give another folder with --out")


def _pack_of(stored: Mapping[str, Any]) -> Any:
    # Only the spectra pack leaves its name out; other programs have files of this name too, such as transformers.
    return stored.get("face", "spectra" if {"epochs", "data", "model"} <= stored.keys() else None)


@contextmanager
def readable(out: Path) -> Iterator[None]:
    """Turns an error of reading a run folder into a ConfigError that names the option.

    Raises:
        ConfigError: the folder cannot be read.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be read ({error.strerror}); choose another folder") from error


@contextmanager
def writable(out: Path) -> Iterator[None]:
    """Turns an error of writing into a run folder into a ConfigError that names the option.

    Raises:
        ConfigError: the folder cannot be written.
    """
    try:
        yield
    except (CheckpointError, OSError) as error:
        raise ConfigError(f"--out {out}: cannot be written ({_cause(error)}); choose another folder") from error


def _cause(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    return cause.strerror or str(cause) if isinstance(cause, OSError) else str(error)


def set_aside(folder: Path) -> None:
    """Renames a folder of an earlier run, if it is there."""
    if folder.exists():
        from treadle.hooks.files import next_free

        aside = next_free(folder)
        folder.rename(aside)
        _log.info("%s belonged to an earlier run and is now %s", folder.name, aside.name)


def explain_changes(differences: Mapping[str, tuple[Any, Any]], folder: str, *, free: Collection[str]) -> list[str]:
    """Says in words what a rerun changes.

    Args:
        differences: what :func:`treadle.runs.settings.changes` returned.
        folder: the run folder, for the advice.
        free: the settings that a run may change on its way.

    Returns:
        One sentence per change that the run can take up on its way.

    Raises:
        ConfigError: a change would need another model, other data, or a state that the checkpoint overrides.

    Example:
        >>> explain_changes({"threads": (1, 2)}, "runs/short", free={"threads"})
        ['threads was 1 and is now 2']
    """
    refused = [key for key in differences if key not in free]
    if refused:
        what = ", ".join(f"{key} was {differences[key][0]!r} and is now {differences[key][1]!r}" for key in refused)
        raise ConfigError(
            f"the run in {folder} was started with other settings: {what}. A run keeps them to its end; give another "
            "folder with --out, the old settings, or --no-resume to start afresh in this one"
        )
    sentences = []
    for key, (before, now) in differences.items():
        sentence = f"{key} was {before!r} and is now {now!r}"
        if key.endswith("epochs") or "schedule" in key:
            sentence += ": the learning rate follows the new schedule from here on"
        sentences.append(sentence)
    return sentences


def run_folder_of(path: Path) -> Path:
    """Returns the folder of the run that a checkpoint is of.

    Example:
        >>> run_folder_of(Path("runs/a/checkpoints/best.pt")).name, run_folder_of(Path("runs/a/best.pt")).name
        ('a', 'a')
    """
    return path.parent.parent if path.parent.name == "checkpoints" else path.parent


def known_split(split: str, known: Collection[str]) -> str:
    """Returns the name of a split.

    Raises:
        ConfigError: it is not among the known ones.

    Example:
        >>> known_split("val", SPLITS)
        'val'
    """
    if split not in known:
        raise ConfigError(f"split={split!r}: {nearest(split, known)}")
    return split


def part_of(data: Any, split: str) -> Any:
    """Returns one part of a pack's data.

    Raises:
        ConfigError: there is no such split.
    """
    return getattr(data, known_split(split, SPLITS))
