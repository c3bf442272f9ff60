"""Safe reading of checkpoints of plain PyTorch, Lightning, Accelerate and the Hugging Face Trainer."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from treadle.errors.arguments import checked
from treadle.exchange.folders import read_folder
from treadle.exchange.foreign import ForeignCheckpoint, from_tree
from treadle.exchange.tensor_files import read_tree


@checked
def read_foreign(path: str | os.PathLike[str]) -> ForeignCheckpoint:
    """Read another framework's checkpoint without executing anything in it or loading pickled objects.

    Args:
        path: a ``.pt``, ``.pth`` or ``.bin`` file of ``torch.save`` (a state dict, or a dict with one under ``model``,
            ``model_state_dict``, ``state_dict``, …), a ``.safetensors`` file, a ``.ckpt`` file of Lightning 2.x, a
            folder of Accelerate's ``save_state``, a ``checkpoint-N`` folder of the Hugging Face Trainer, or a folder
            of ``save_pretrained``.

    Returns:
        Its parts. If every weight's name begins with ``module.``, as DataParallel writes it, that prefix is removed.

    Raises:
        CheckpointError: it is missing, damaged, holds pickled objects, holds no weights, or is treadle's own.
        ImportError: it holds safetensors, and safetensors is not installed.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> torch.save({"state_dict": nn.Linear(2, 1).state_dict(), "epoch": 3, "best_acc": 0.9}, "old.pth")
        >>> found = read_foreign("old.pth")
        >>> found.kind, list(found.model), found.epoch, found.not_taken
        ('torch', ['weight', 'bias'], 3, ['best_acc: treadle has no equivalent'])
    """
    return without_wrapper(read_as_named(path))


def read_as_named(path: str | os.PathLike[str], *, optimizer: bool = True) -> ForeignCheckpoint:
    """Read like :func:`read_foreign`, but keep ``module.`` in the names.

    Args:
        path: a file or a folder.
        optimizer: also read a folder's optimizer file.
    """
    if os.path.isdir(path):
        return read_folder(Path(path), optimizer=optimizer)
    tree, metadata = read_tree(path)
    return from_tree(Path(path), tree, metadata)


def without_prefix(found: ForeignCheckpoint, prefix: str) -> ForeignCheckpoint:
    """Return a checkpoint with a common prefix removed from its weights' names."""
    return replace(found, model={name.removeprefix(prefix): w for name, w in found.model.items()}, prefix=prefix)


def without_wrapper(found: ForeignCheckpoint) -> ForeignCheckpoint:
    """Return a checkpoint without DataParallel's ``module.`` before every name."""
    if all(name.startswith("module.") for name in found.model):
        return without_prefix(found, "module.")
    return found
