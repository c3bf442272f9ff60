"""Cache files of processed graphs, written atomically and used only for the exact settings they were made with."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from treadle.checkpoint.store import load_checkpoint, write_bytes
from treadle.errors import CheckpointError

__all__ = ["cached", "digest"]

_log = logging.getLogger("treadle.graphs")


def digest(*paths: Path) -> str:
    """Return a hash of the contents of files."""
    found = hashlib.sha256()
    for path in paths:
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def cached(folder: Path, key: Mapping[str, Any], build: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], bool]:
    """Return the result of ``build``, from a file if an equal key was built before.

    The file holds tensors and plain values and is read without unpickling code. A damaged file is rebuilt with a
    warning; if the folder is not writable, a warning is logged and the result is rebuilt next time.

    Args:
        folder: cache folder; created if missing.
        key: everything the content depends on, as plain values.
        build: returns the content: tensors, numbers, strings, lists and dicts.

    Returns:
        The content, and whether it came from a file.
    """
    described = json.dumps(key, sort_keys=True)
    path = folder / f"graphs-{hashlib.sha256(described.encode()).hexdigest()[:16]}.pt"
    if path.exists():
        try:
            tree = load_checkpoint(path)
            if tree.get("key") == described:
                return tree["content"], True
            _log.warning("%s was made with other settings than its name states; it is built again", path)
        except CheckpointError as error:
            _log.warning("%s; it is built again", error)
    content = build()
    try:
        write_bytes(lambda file: torch.save({"key": described, "content": content}, file), path)
    except CheckpointError as error:
        _log.warning("processed graphs are not kept, so they are made again next time: %s", error)
    return content, False
