"""Reopening of a run as a trainer: rebuilt from its folder's record, or loaded into a given trainer or model."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from treadle.builder import build_trainer
from treadle.checkpoint.find_step import nearest_state
from treadle.checkpoint.shard_manifest import is_whole
from treadle.checkpoint.store import load_checkpoint, load_weights
from treadle.distributed.state_names import load_model_state
from treadle.engine import Engine
from treadle.errors import CheckpointError, ConfigError
from treadle.errors.arguments import checked
from treadle.faces.epoch_face import EpochFace
from treadle.faces.epochs import EpochTrainer
from treadle.faces.step import BaseTrainer
from treadle.runs.folder import CHECKPOINTS, run_folder_of
from treadle.runs.packs import pack_of_folder
from treadle.runs.record import recorded_config

BEST = ("checkpoints/best.pt", "best.pt", "best_model.pt")
"""States of the best epoch in a run folder, in the order in which they are looked for."""


@checked
def open_run(
    run: str | os.PathLike[str],
    trainer: Any = None,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    device: str | None = None,
    read_only: bool = True,
) -> Any:
    """Reopen a run as a trainer that validates, tests, predicts and saves.

    A run of a pack or of a configuration file is rebuilt from its folder; a run of a script needs the trainer as the
    script makes it, or the model. The run folder is only read unless ``read_only`` is False.

    Args:
        run: the run folder, or one of its checkpoints.
        trainer: for a script: a new ``BaseTrainer``, trainer of epochs or ``EpochTrainer``, into which the state is
            loaded; or a model, into which the scored weights are loaded.
        checkpoint: ``"best"``, ``"last"``, or a file, which may be relative to the folder. None takes the best, or the
            last if the run keeps no best or is to continue training.
        device: for a pack or a configuration; None takes CUDA, then MPS, then the CPU.
        read_only: True opens a trainer that refuses to train and writes nothing on its own. False lets it continue
            training in the run's folder; a run of a pack is continued by its command.

    Returns:
        The trainer, or the model that was given.

    Raises:
        ConfigError: there is no such run or checkpoint, or a script's run was opened without a trainer.
        CheckpointError: the checkpoint is damaged, or does not fit.

    Example:
        >>> # trainer = treadle.open_run("runs/graphs")
        >>> # outputs = treadle.open_run("runs/fat", trainer).predict(loader)
    """
    path = find_checkpoint(Path(run), "best" if checkpoint is None and read_only else checkpoint)
    folder = run_folder_of(path)
    if isinstance(trainer, nn.Module):
        load_model_state(trainer, load_weights(path))
        return trainer
    tree = load_checkpoint(path)
    if trainer is not None:
        return _loaded(trainer, tree, path, folder=folder, read_only=read_only)
    if pack_of_folder(folder) is not None:
        return _of_pack(tree, path, folder=folder, device=device, read_only=read_only)
    found = recorded_config(folder, int(tree["global_step"])) if isinstance(tree.get("global_step"), int) else None
    if found is None:
        raise ConfigError(
            "is the run of a script, which defines its model and data: pass the trainer as the script builds it, "
            f"treadle.open_run({os.fspath(run)!r}, trainer), or the model; treadle.load_weights({str(path)!r}) gives "
            "the weights alone",
            argument="trainer",
            value=trainer,
        )
    config, home = found
    if device is not None:
        config["trainer"]["device"] = device
    return _loaded(build_trainer(config, folder=home), tree, path, folder=folder, read_only=read_only)


def find_checkpoint(run: Path, wanted: str | os.PathLike[str] | None = "best") -> Path:
    """Return a checkpoint of a run.

    Args:
        run: the run folder, or one of its checkpoints, which is returned.
        wanted: ``"best"``, or the last if there is none, ``"last"`` or None, or a file, which may be relative to the
            folder.

    Raises:
        ConfigError: there is none.

    Example:
        >>> find_checkpoint(Path("no_such_run"))
        Traceback (most recent call last):
        treadle.errors.ConfigError: run='no_such_run': there is no such run folder or checkpoint
    """
    if run.is_file() or is_whole(run):
        return run
    if not run.is_dir():
        raise ConfigError("there is no such run folder or checkpoint", argument="run", value=str(run))
    places = (run, run / CHECKPOINTS)
    if wanted not in (None, "best", "last"):
        asked = Path(wanted)
        found = [place for place in (asked, *(place / asked for place in places)) if place.is_file() or is_whole(place)]
        if not found:
            raise ConfigError(f"there is no such checkpoint in {run}", argument="checkpoint", value=os.fspath(asked))
        return found[0]
    best = [run / name for name in BEST if (run / name).exists()] if wanted == "best" else []
    if best:
        return best[0]
    last = _furthest(places)
    if last is None:
        raise ConfigError("the folder holds no checkpoint that can be read", argument="run", value=str(run))
    return last


def _furthest(places: Iterable[Path]) -> Path | None:
    states = [found for place in places if place.is_dir() and (found := nearest_state(place, sys.maxsize)) is not None]
    return max(states, key=lambda state: (state[1]["global_step"], state[1].get("epoch", 0)))[0] if states else None


def _loaded(trainer: Any, tree: Mapping[str, Any], path: Path, *, folder: Path, read_only: bool) -> Any:
    """Load a state into a trainer, and point the trainer to the run's folder or to none."""
    engine = _engine_of(trainer)
    if engine is None:
        raise ConfigError(
            "must be a BaseTrainer, a trainer of epochs, an EpochTrainer, or a model",
            argument="trainer", value=type(trainer).__name__,
        )  # fmt: skip
    engine.workspace = None if read_only else folder.absolute()
    try:
        _load(trainer, engine, tree, path, folder=None if read_only else folder)
    except CheckpointError:
        if not read_only:
            raise
        # The state is checked before anything is loaded; for inference, the optimizer need not fit.
        _load(trainer, engine, {**tree, "optimizer": None, "scheduler": None}, path, folder=None)
    if read_only:
        engine.refuse_training(
            f"the run in {folder} was opened read-only; open it with read_only=False to continue training"
        )
    return trainer


def _load(trainer: Any, engine: Engine, tree: Mapping[str, Any], path: Path, *, folder: Path | None) -> None:
    if isinstance(trainer, EpochFace):
        trainer.load_from(tree, path, folder=folder)
        return
    try:
        engine.load_state_dict(tree)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    engine.state.record_source(path)


def _engine_of(trainer: Any) -> Engine | None:
    if isinstance(trainer, EpochFace):
        return trainer._engine
    if isinstance(trainer, EpochTrainer):
        return trainer.engine
    return trainer if isinstance(trainer, (BaseTrainer, Engine)) else None


def _of_pack(tree: Mapping[str, Any], path: Path, *, folder: Path, device: str | None, read_only: bool) -> Any:
    from rich.console import Console

    pack = pack_of_folder(folder)
    assert pack is not None
    if not read_only:
        raise ConfigError(
            f"the run of a pack is continued by its command: treadle train {pack.name} --out {folder}",
            argument="read_only",
            value=read_only,
        )
    with pack.open(path, tree, device=device, messages=Console(quiet=True)) as opened:
        trainer = opened.trainer
    engine = _engine_of(trainer)
    if engine is not None:
        if isinstance(trainer, EpochFace):
            trainer.load_from(tree, path, folder=None)
        engine.workspace = None
        engine.refuse_training(f"the run in {folder} was opened read-only; continue it with treadle train {pack.name}")
    return trainer
