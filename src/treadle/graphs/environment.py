"""Provenance of results: git commit, package versions, and comparison of two results."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from treadle.checkpoint.schema import versions
from treadle.checkpoint.store import write_text


def get_git_info(folder: str | os.PathLike[str] = ".") -> dict[str, Any]:
    """Return the commit, the branch and whether there are uncommitted changes, of the repository around a folder.

    Args:
        folder: defaults to the current one.

    Returns:
        ``commit``, ``branch``, ``dirty`` and ``timestamp``; ``"unknown"`` and None outside a repository or without git.

    Example:
        >>> sorted(get_git_info())
        ['branch', 'commit', 'dirty', 'timestamp']
    """

    def ask(*arguments: str) -> str | None:
        try:
            found = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
        except OSError:
            return None
        return found.stdout.strip() if found.returncode == 0 else None

    changed = ask("status", "--porcelain")
    return {
        "commit": ask("rev-parse", "HEAD") or "unknown",
        "branch": ask("rev-parse", "--abbrev-ref", "HEAD") or "unknown",
        "dirty": None if changed is None else bool(changed),
        "timestamp": _now(),
    }


def get_environment_info() -> dict[str, Any]:
    """Return the versions of Python, torch, numpy, CUDA and treadle, the machine and its GPU.

    Example:
        >>> get_environment_info()["torch_version"] == torch.__version__
        True
    """
    has_cuda = torch.cuda.is_available()
    return {
        "python_version": platform.python_version(),
        "torch_version": torch.__version__,
        "numpy_version": np.__version__,
        "cuda_available": has_cuda,
        "cuda_version": torch.version.cuda if has_cuda else None,
        "device_name": torch.cuda.get_device_name() if has_cuda else None,
        "platform": platform.platform(),
        "packages": versions(),
    }


def create_reproducibility_info(config: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return ``seed``, ``git``, ``environment``, ``config_hash`` and ``timestamp`` of a run.

    Example:
        >>> first, second = (create_reproducibility_info(config, 1) for config in ({"a": 1, "b": 2}, {"b": 2, "a": 1}))
        >>> first["config_hash"] == second["config_hash"], first["seed"]
        (True, 1)
    """
    text = json.dumps(config, sort_keys=True, default=str)
    return {
        "seed": seed,
        "git": get_git_info(),
        "environment": get_environment_info(),
        "config_hash": hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
        "timestamp": _now(),
    }


def save_reproducibility_info(
    info: Mapping[str, Any], output_dir: str | os.PathLike[str], filename: str = "reproducibility.json"
) -> Path:
    """Write the information next to the results of a run; return the path."""
    path = Path(output_dir) / filename
    write_text(json.dumps(info, indent=2, default=str) + "\n", path)
    return path


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def verify_reproducibility(
    output_dir1: str | os.PathLike[str],
    output_dir2: str | os.PathLike[str],
    metrics_file: str = "results.json",
    tolerance: float = 1e-6,
) -> dict[str, Any]:
    """Compare the results of two runs, value by value.

    Args:
        output_dir1: folder of the first run.
        output_dir2: folder of the second.
        metrics_file: name of a JSON file in both.
        tolerance: maximum difference of numbers; 0 requires equality. NaN equals NaN.

    Returns:
        ``identical``, ``differences`` (one sentence each) and ``warnings``, which name strings with times or paths that
        are not compared.

    Example:
        >>> import tempfile
        >>> first, second = Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp())
        >>> _ = (first / "results.json").write_text('{"loss": 0.5, "time": "noon"}')
        >>> _ = (second / "results.json").write_text('{"loss": 0.75, "time": "night"}')
        >>> verify_reproducibility(first, second)["differences"]
        ['loss: 0.5 and 0.75']
    """
    paths = [Path(folder) / metrics_file for folder in (output_dir1, output_dir2)]
    missing = [f"missing: {path}" for path in paths if not path.exists()]
    if missing:
        return {"identical": False, "differences": missing, "warnings": []}
    first, second = (json.loads(path.read_text(encoding="utf-8")) for path in paths)
    found = list(_differences(first, second, "", tolerance))
    different = [text for text, counts in found if counts]
    return {
        "identical": not different,
        "differences": different,
        "warnings": [text for text, counts in found if not counts],
    }


def _differences(first: Any, second: Any, place: str, tolerance: float) -> Iterator[tuple[str, bool]]:
    """Yield each difference and whether it counts."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for key in {**first, **second}:
            here = f"{place}.{key}" if place else str(key)
            if key in first and key in second:
                yield from _differences(first[key], second[key], here, tolerance)
            else:
                yield f"{here}: only in the {'first' if key in first else 'second'}", True
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        for index, pair in enumerate(zip(first, second, strict=True)):
            yield from _differences(*pair, f"{place}[{index}]", tolerance)
    elif _is_number(first) and _is_number(second):
        both_nan = math.isnan(first) and math.isnan(second)
        if not (first == second or both_nan or abs(first - second) <= tolerance):
            yield f"{place}: {first} and {second}", True
    elif first != second:
        is_aside = isinstance(first, str) and isinstance(second, str) and _is_time_or_path(place)
        yield f"{place}: {first!r} and {second!r}", not is_aside


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_time_or_path(place: str) -> bool:
    return any(word in place.lower() for word in ("time", "path"))
