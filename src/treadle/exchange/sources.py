"""Sources of an export: a run's best intact checkpoint, or the validated weights of a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from treadle.checkpoint.find_step import states_in
from treadle.checkpoint.shard_manifest import has_shards
from treadle.checkpoint.store import find_latest, load_checkpoint, scored_weights
from treadle.errors import CheckpointError, ConfigError
from treadle.exchange.foreign import ForeignCheckpoint, from_tree, is_own
from treadle.exchange.reading import read_as_named, without_wrapper
from treadle.exchange.tensor_files import read_tree

_BEST = ("best.pt", "best_model.pt")
_OF_OTHERS = ("optimizer.pt", "scheduler.pt", "scaler.pt")  # in folders of the Hugging Face Trainer and of Accelerate


@dataclass(frozen=True)
class Source:
    """Weights and their origin.

    Attributes:
        path: the file or folder that was read.
        kind: what wrote it.
        weights: by name, on the CPU.
        which: ``"ema"``, the averages that were validated; ``"model"``, the raw weights; ``"stored"``, the only ones in
            a file that does not distinguish them.
        face: the face that trained them, or None.
        step: optimizer steps, or None.
        epoch: epochs, or None.
        adapters_only: whether the file lacks the frozen base.
        not_validated: names of averages in the file that were not validated.
        left_out: content of another framework's checkpoint other than weights.
    """

    path: Path
    kind: str
    weights: Mapping[str, Tensor]
    which: Literal["ema", "model", "stored"]
    face: str | None = None
    step: int | None = None
    epoch: float | None = None
    adapters_only: bool = False
    not_validated: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def find_source(path: Path, *, raw: bool = False) -> Source:
    """Read the weights of a run folder, a checkpoint, or a checkpoint of another framework.

    Args:
        path: for a run folder, the best checkpoint is taken, or the newest if none is marked best; damaged ones are
            reported and skipped.
        raw: take the raw weights even if averaged ones were validated.

    Raises:
        ConfigError: there is no such file or folder.
        CheckpointError: it holds no usable checkpoint.
    """
    if not os.path.lexists(path):
        raise ConfigError(f"{str(path)!r}: no such file or folder; give a run folder or a checkpoint")
    if has_shards(path):
        return _of_tree(path, load_checkpoint(path), None, raw=raw)
    if not path.is_dir():
        tree, metadata = read_tree(path)
        return _of_tree(path, tree, metadata, raw=raw)
    for folder in (path / "checkpoints", path):
        files = [file for file in states_in(folder) if file.name not in _OF_OTHERS]
        if files:
            file, found = _best_in(folder, files)
            return _of_tree(file, found, None, raw=raw)
    return _of_foreign(without_wrapper(read_as_named(path, optimizer=False)))


def _best_in(folder: Path, files: list[Path]) -> tuple[Path, dict[str, Any]]:
    best = next((folder / name for name in _BEST if (folder / name).exists()), None)
    try:
        found = find_latest(files, prefer=best)
    except CheckpointError:
        found = None
    if found is None:
        raise CheckpointError(
            f"{str(folder)!r} has no intact checkpoint; 'treadle inspect {folder}' lists the problems of each"
        )
    return found


def _of_tree(path: Path, tree: Mapping[str, Any], metadata: Mapping[str, str] | None, *, raw: bool) -> Source:
    if not is_own(tree):
        return _of_foreign(without_wrapper(from_tree(path, tree, metadata)))
    averages = list(tree.get("ema") or {})
    averaged = tree["format"].get("scored") == "ema" and bool(averages) and not raw
    return Source(
        path,
        "treadle",
        scored_weights(tree) if averaged else tree["model"],
        "ema" if averaged else "model",
        face=tree["format"].get("face"),
        step=tree.get("global_step"),
        epoch=tree.get("epoch"),
        adapters_only=bool(tree.get("base")),
        not_validated=[] if averaged or raw else averages,
    )


def _of_foreign(found: ForeignCheckpoint) -> Source:
    left_out = ["optimizer"] if found.optimizer is not None else []
    left_out += [line.partition(":")[0] for line in found.not_taken]
    return Source(found.path, found.kind, found.model, "stored", step=found.step, epoch=found.epoch, left_out=left_out)
