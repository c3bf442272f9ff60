"""Resumable sweeps over settings: grids, random draws and seeds."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from treadle.checkpoint.lock import run_lock
from treadle.checkpoint.store import write_text
from treadle.errors import ConfigError

Settings = dict[str, Any]
_log = logging.getLogger("treadle.graphs")


def grid_sweep(parameters: Mapping[str, Sequence[Any]]) -> list[Settings]:
    """Return every combination of values, the last name varying fastest.

    Args:
        parameters: the values of each dotted setting.

    Raises:
        ConfigError: a setting has no value.

    Example:
        >>> grid_sweep({"model.num_layers": [2, 4], "seed": [0, 1]})[1]
        {'model.num_layers': 2, 'seed': 1}
    """
    for name, values in parameters.items():
        if isinstance(values, str) or not len(values):
            raise ConfigError("must be a list of at least one value", argument=name, value=values)
    return [dict(zip(parameters, chosen, strict=True)) for chosen in itertools.product(*parameters.values())]


def seed_sweep(settings: Mapping[str, Any], seeds: Sequence[int]) -> list[Settings]:
    """Return the same settings with each seed.

    Example:
        >>> seed_sweep({"pe": "mspe"}, [1, 2])
        [{'pe': 'mspe', 'seed': 1}, {'pe': 'mspe', 'seed': 2}]
    """
    return [{**settings, "seed": seed} for seed in seeds]


def random_sweep(parameters: Mapping[str, Any], num_runs: int, *, seed: int = 0) -> list[Settings]:
    """Draw random settings; draw i depends only on the seed and i, so a longer sweep extends a shorter one.

    Args:
        parameters: for each dotted setting a list to choose from, or ``(low, high)``: two integers, both inclusive, or
            two floats; positive floats that span more than a factor of 10 are drawn log-uniformly.
        num_runs: number of runs.
        seed: seed of the draws.

    Raises:
        ConfigError: a range is empty, or a list has no value.

    Example:
        >>> draws = random_sweep({"optimizer.lr": (1e-5, 1e-2), "model.num_layers": (2, 4), "pe": ["lap", "rwse"]}, 3)
        >>> all(1e-5 <= draw["optimizer.lr"] <= 1e-2 and draw["model.num_layers"] in (2, 3, 4) for draw in draws)
        True
    """
    found = []
    for number in range(num_runs):
        rng = random.Random(f"{seed}/{number}")
        found.append({name: _drawn(rng, name, values) for name, values in parameters.items()})
    return found


def _drawn(rng: random.Random, name: str, values: Any) -> Any:
    if isinstance(values, tuple) and len(values) == 2 and all(type(end) in (int, float) for end in values):
        low, high = values
        if not low <= high:
            raise ConfigError("the lowest value comes first", argument=name, value=values)
        if type(low) is type(high) is int:
            return rng.randint(low, high)
        if low > 0 and high > 10 * low:
            return math.exp(rng.uniform(math.log(low), math.log(high)))
        return rng.uniform(low, high)
    if isinstance(values, str) or not len(values):
        raise ConfigError("must be (low, high) or a list of at least one value", argument=name, value=values)
    return rng.choice(list(values))


def settings_id(settings: Mapping[str, Any]) -> str:
    """Return a short id of settings, independent of their order.

    Example:
        >>> settings_id({"a": 1, "b": 2}) == settings_id({"b": 2, "a": 1}), len(settings_id({}))
        (True, 12)
    """
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def run_sweep(
    sweep: Sequence[Mapping[str, Any]],
    run: Callable[[Settings, Path], Mapping[str, Any]],
    folder: str | os.PathLike[str],
    *,
    keep_going: bool = False,
) -> list[dict[str, Any]]:
    """Run every entry of a sweep that has no result yet; after a kill, the same call continues with the next.

    Only one process at a time may use the folder. A run that was interrupted must resume itself: pass it
    ``resume=True``.

    Args:
        sweep: settings of the runs.
        run: called as ``run(settings, folder)`` with a folder for each entry; returns plain values.
        folder: gets ``<id>/result.json`` for each.
        keep_going: log the error of a failed run and continue with the next; a later call retries the entry.

    Returns:
        ``{"id", "settings", "result"}`` of every entry that has a result, in the order of the sweep.

    Raises:
        ConfigError: two entries have equal settings.
        CheckpointError: another process is using the folder.

    Example:
        >>> import tempfile
        >>> calls = []
        >>> def run(settings, folder):
        ...     calls.append(settings["lr"])
        ...     return {"loss": settings["lr"] * 2}
        >>> home = tempfile.mkdtemp()
        >>> first = run_sweep([{"lr": 1}], run, home)
        >>> [entry["result"] for entry in run_sweep([{"lr": 1}, {"lr": 2}], run, home)], calls
        ([{'loss': 2}, {'loss': 4}], [1, 2])
    """
    names = [settings_id(settings) for settings in sweep]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"has {dict(sweep[names.index(twice)])} twice; leave one out", argument="sweep")
    home = Path(folder)
    home.mkdir(parents=True, exist_ok=True)
    with run_lock(home):
        for name, settings in zip(names, sweep, strict=True):
            target = home / name / "result.json"
            if target.exists():
                continue
            target.parent.mkdir(exist_ok=True)
            try:
                result = run(dict(settings), target.parent)
            except Exception:
                if not keep_going:
                    raise
                _log.exception("sweep: the run with %s failed", dict(settings))
                continue
            entry = {"id": name, "settings": dict(settings), "result": dict(result)}
            write_text(json.dumps(entry, indent=2) + "\n", target)
    return list(_results(home, names))


def _results(home: Path, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for name in names:
        path = home / name / "result.json"
        if path.exists():
            yield json.loads(path.read_text(encoding="utf-8"))
