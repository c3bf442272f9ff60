"""Torch and safetensors files: verified before reading, written atomically."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treadle.checkpoint.safe.archive import ArchiveError, open_plain_file
from treadle.checkpoint.safe.inspect import inspect_path
from treadle.checkpoint.schema import to_plain
from treadle.checkpoint.store import load_checkpoint, write_bytes
from treadle.errors import CheckpointError, MissingExtraError, PickledCodeError

# Metadata of an export in the header of a safetensors file, in addition to the names of tied weights.
HEADER = ("format", "treadle", "face", "step", "epoch", "weights")
_ADVICE = "save only the weights where the file was made: torch.save(model.state_dict(), 'weights.pt')"


def read_tree(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, str] | None]:
    """Read a torch or safetensors file to the CPU without executing anything in it.

    Tied weights stored once in a safetensors file, as ``safetensors.torch.save_model`` does, are returned under each of
    their names.

    Returns:
        (the content, the metadata of a safetensors file or None for a torch file).

    Raises:
        CheckpointError: the file is missing, damaged, or holds pickled code.
        ImportError: a safetensors file, and safetensors is not installed.
    """
    if _is_archive(path):
        try:
            return load_checkpoint(path), None
        except PickledCodeError as error:
            raise PickledCodeError(f"{error}; {_ADVICE}") from None
    report = inspect_path(path)
    if report["kind"] != "safetensors file":
        raise CheckpointError(f"{os.fspath(path)!r} cannot be used: {'; '.join(report['problems'])}; {_ADVICE}")
    if report["problems"]:
        raise CheckpointError(f"{os.fspath(path)!r} cannot be used: {'; '.join(report['problems'])}")
    with _safetensors("").safe_open(path, framework="pt") as file:
        metadata: dict[str, str] = dict(file.metadata() or {})
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dict)
    for name, kept in metadata.items():
        if name not in tensors and kept in tensors and name not in HEADER:
            tensors[name] = tensors[kept]
    return tensors, metadata


def _is_archive(path: str | os.PathLike[str]) -> bool:
    try:
        with open_plain_file(path) as file:
            return file.read(2) == b"PK"
    except (ArchiveError, OSError) as error:
        raise CheckpointError(f"{os.fspath(path)!r} cannot be read: {error}") from None


def _safetensors(part: str) -> Any:
    try:
        return importlib.import_module(f"safetensors{part}")
    except ImportError as error:
        raise MissingExtraError(f"safetensors files need safetensors ({error}): pip install 'treadle[cli]'") from error


def with_memory_of_their_own(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies without larger underlying storages; tied weights become one object under several names."""
    copies: dict[str, Tensor] = to_plain(weights)
    return copies


def tied_names(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Map every further name of a tied weight to its first name.

    Args:
        weights: what :func:`with_memory_of_their_own` returned.

    Example:
        >>> w = torch.ones(1)
        >>> tied_names({"wte.weight": w, "b": torch.ones(1), "lm_head.weight": w})
        {'lm_head.weight': 'wte.weight'}
    """
    first: dict[int, str] = {}
    for name, value in weights.items():
        first.setdefault(id(value), name)
    return {name: first[id(value)] for name, value in weights.items() if first[id(value)] != name}


def write_torch(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write a plain state dict for ``torch.load(path, weights_only=True)``; tied weights are stored once.

    Raises:
        CheckpointError: the file cannot be written.
    """
    write_bytes(lambda file: torch.save(dict(weights), file), path)


def write_safetensors(
    weights: Mapping[str, Tensor], path: Path, *, metadata: Mapping[str, str], drop: Mapping[str, str]
) -> None:
    """Write a safetensors file.

    Args:
        weights: what :func:`with_memory_of_their_own` returned.
        path: the target.
        metadata: written into the header.
        drop: names to omit, each with the name under which the same weight is kept; recorded in the header.

    Raises:
        CheckpointError: the file cannot be written, or safetensors does not support a tensor's type.
        ImportError: safetensors is not installed.
    """
    save = _safetensors(".torch").save
    # A weight that is kept may still share memory with another, which safetensors refuses.
    tensors, seen = {}, set()
    for name, value in weights.items():
        if name not in drop:
            tensors[name] = value.clone() if id(value) in seen else value.contiguous()
            seen.add(id(value))
    write_bytes(lambda file: file.write(save(tensors, metadata={**drop, **metadata})), path)
