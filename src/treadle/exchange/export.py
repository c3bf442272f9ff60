"""Export of the weights of any checkpoint as a file for other programs."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from treadle.checkpoint.schema import non_finite_names, versions
from treadle.checkpoint.shard_manifest import is_whole
from treadle.errors import CheckpointError, ConfigError
from treadle.errors.arguments import checked
from treadle.exchange.pretrained import find_config, ties_embeddings, write_folder
from treadle.exchange.sources import Source, find_source
from treadle.exchange.tensor_files import tied_names, with_memory_of_their_own, write_safetensors, write_torch

Form = Literal["safetensors", "torch", "hf"]
_ENDINGS = {"safetensors": ".safetensors", "torch": ".pt", "hf": "-hf"}
_log = logging.getLogger("treadle.exchange")


@dataclass(frozen=True)
class Exported:
    """Result of an export.

    Attributes:
        path: the file or folder.
        source: the weights and their origin.
        tensors: the number of tensors, tied ones counted once.
        nbytes: their size in memory.
        tied: further names of tied weights, each with the first name.
    """

    path: Path
    source: Source
    tensors: int
    nbytes: int
    tied: Mapping[str, str]


@checked
def export_weights(
    source: str | os.PathLike[str],
    to: Form,
    *,
    out: str | os.PathLike[str] | None = None,
    raw: bool = False,
    config: str | os.PathLike[str] | None = None,
    force: bool = False,
) -> Exported:
    """Export the weights of a checkpoint for other programs, atomically.

    Args:
        source: a run folder, whose best intact checkpoint is taken, or the newest if none is marked best; a checkpoint
            file; or a checkpoint of another framework, see :func:`read_foreign`.
        to: ``"torch"``, a plain state dict; ``"safetensors"``, with step, epoch, face and versions in the header and
            tied weights stored once; ``"hf"``, a folder that ``from_pretrained`` loads.
        out: the file, or the folder for ``"hf"``; None: in a folder ``export`` next to the checkpoint or in the run.
        raw: take the raw weights even if averaged ones were validated.
        config: for ``"hf"``: a folder with the model's ``config.json``, whose tokenizer is copied too; None: the run's
            ``pretrained`` folder, or the checkpoint's own.
        force: replace an existing file.

    Raises:
        ConfigError: there is no such source, ``out`` exists already, or there is no ``config.json``.
        CheckpointError: the source cannot be used, or the file cannot be written.
        ImportError: safetensors is needed and not installed.

    Example:
        >>> import torch
        >>> torch.save({"state_dict": torch.nn.Linear(2, 1).state_dict(), "epoch": 3}, "old.pth")
        >>> list(torch.load(export_weights("old.pth", "torch").path, weights_only=True))
        ['weight', 'bias']
    """
    if config is not None and to != "hf":
        raise ConfigError(f" is for to='hf' only, and to={to!r}", argument="config", value=os.fspath(config))
    asked = Path(source)
    found = find_source(asked, raw=raw)
    target = _default_target(asked, found.path, to) if out is None else Path(out)
    _refuse_to_overwrite(target, is_folder=to == "hf", force=force)
    weights = with_memory_of_their_own(found.weights)
    odd = [name for name, value in weights.items() if not isinstance(value, Tensor)]
    if odd:
        raise CheckpointError(f"{str(found.path)!r}: {odd[0]} is not a tensor, and an export holds only tensors")
    bad = non_finite_names({"model": weights})
    if bad:
        _log.warning("%s: %d tensors are not finite (first: %s)", found.path, len(bad), bad[0].removeprefix("model."))
    tied = tied_names(weights)
    if to == "torch":
        write_torch(weights, target)
    elif to == "safetensors":
        write_safetensors(weights, target, metadata=_header(found), drop=tied)
    else:
        _write_pretrained(weights, target, found, tied, asked=asked, config=None if config is None else Path(config))
    stored = [value for name, value in weights.items() if name not in tied]
    return Exported(target, found, len(stored), sum(value.nbytes for value in stored), tied)


def _default_target(asked: Path, read: Path, to: Form) -> Path:
    folder = asked if asked.is_dir() and not is_whole(asked) else asked.parent
    return folder / "export" / f"{'model' if read.is_dir() and not is_whole(read) else read.stem}{_ENDINGS[to]}"


def _refuse_to_overwrite(target: Path, *, is_folder: bool, force: bool) -> None:
    if not os.path.lexists(target):
        return
    if target.is_dir() != is_folder:
        kinds = ("a file", "a folder") if is_folder else ("a folder", "a file")
        raise ConfigError(f" is {kinds[0]}; give the name of {kinds[1]}", argument="out", value=str(target))
    if not force:
        raise ConfigError(
            " already exists; choose another name, or pass force (--force)", argument="out", value=str(target)
        )


def _header(found: Source) -> dict[str, str]:
    """Return the metadata of a safetensors header; transformers requires ``format``."""
    known = {
        "format": "pt", "treadle": versions()["treadle"], "weights": found.which, "face": found.face,
        "step": found.step, "epoch": found.epoch,
    }  # fmt: skip
    return {key: str(value) for key, value in known.items() if value is not None}


def _write_pretrained(
    weights: Mapping[str, Tensor],
    target: Path,
    found: Source,
    tied: Mapping[str, str],
    *,
    asked: Path,
    config: Path | None,
) -> None:
    if found.adapters_only:
        raise CheckpointError(
            f"{str(found.path)!r} holds adapters without their base model, which 'hf' needs; the run's 'pretrained' "
            "folder loads with peft.PeftModel.from_pretrained"
        )
    folder = find_config(_config_places(asked, found) if config is None else [config])
    drop = tied if ties_embeddings(folder) else {}
    write_folder(target, folder, lambda path: write_safetensors(weights, path, metadata=_header(found), drop=drop))


def _config_places(asked: Path, found: Source) -> list[Path]:
    """Return the possible folders of the model's configuration; a run's own ``config.json`` holds its settings."""
    if found.kind == "transformers":
        return [found.path]
    if asked.is_dir():
        return [asked / "pretrained"]
    return [asked.parent / "pretrained", asked.parent.parent / "pretrained"]
