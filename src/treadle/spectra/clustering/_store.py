"""Small files of plain tensors and numbers: written atomically, read without unpickling objects."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from treadle.errors import ConfigError


def save_atomic(payload: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write `payload` to `path` atomically: a reader sees the old file or the new one, never a partial one."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as stream:
            torch.save(dict(payload), stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def load_plain(
    path: str | os.PathLike[str], *, kind: str, keys: tuple[str, ...], chemomae: Mapping[str, str]
) -> dict[str, Any]:
    """Load a file written by `save_atomic` or by chemomae.

    Args:
        path: the file.
        kind: the kind of object that it must hold.
        keys: entries that it must have.
        chemomae: entry -> its name in the files of chemomae, for those that differ.

    Raises:
        ConfigError: the file is of another kind, or lacks one of `keys`.
    """
    payload = torch.load(Path(path), map_location="cpu", weights_only=True)
    if isinstance(payload, dict) and "kind" not in payload and set(chemomae.values()) <= set(payload):
        payload = {**payload, **{own: payload[theirs] for own, theirs in chemomae.items()}, "kind": kind}
    found = payload.get("kind") if isinstance(payload, dict) else type(payload).__name__
    if not isinstance(payload, dict) or found != kind:
        raise ConfigError(
            f" holds {found!r}, but must hold {kind!r}; pass such a file.", argument="path", value=os.fspath(path)
        )
    missing = [key for key in keys if key not in payload]
    if missing:
        raise ConfigError(f" lacks {missing}; write the file again with save.", argument="path", value=os.fspath(path))
    return payload
