"""Reading of checkpoint folders of Accelerate, the Hugging Face Trainer and ``save_pretrained``."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from treadle.checkpoint.safe.claims import shortened
from treadle.errors import CheckpointError
from treadle.exchange.foreign import (
    RANDOM,
    SCALER,
    SCHEDULE,
    ForeignCheckpoint,
    Kind,
    cleaned,
    from_tree,
    is_optimizer_state,
    number,
)
from treadle.exchange.tensor_files import read_tree

_INDEX = ".index.json"
_WEIGHTS = ("model.safetensors", f"model.safetensors{_INDEX}", "pytorch_model.bin", f"pytorch_model.bin{_INDEX}")
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
_OF_TRANSFORMERS = {"config.json", "trainer_state.json", "training_args.bin"}
_REASONS = (
    (r"random_states_\d+\.pkl|rng_state(_\d+)?\.pth", f"a pickle, which is not opened, of {RANDOM}"),
    (r"scheduler(_\d+)?\.(bin|pt)", SCHEDULE),
    (r"scaler(_\d+)?\.pt", SCALER),
    (r"training_args\.bin", "a pickled object, which is not opened: give the settings yourself"),
    (r"sampler(_\d+)?\.bin|dl_state_dict(_\d+)?\.bin", "the position in the data: training starts a new epoch"),
    (r"(model|pytorch_model)_\d+\.(safetensors|bin)", "a second model; the first one is read"),
    (r"optimizer_\d+\.bin", "a second optimizer; the first one is read"),
    (r"custom_checkpoint_\d+\.pkl", "a pickle of an object of your own, which is not opened"),
)


def read_folder(folder: Path, *, optimizer: bool = True) -> ForeignCheckpoint:
    """Read a folder of Accelerate, of the Hugging Face Trainer, or of ``save_pretrained``.

    Args:
        folder: the checkpoint.
        optimizer: also read the optimizer's file, which is the larger one.

    Raises:
        CheckpointError: it is not such a folder, or a file in it is damaged or holds pickled code.
    """
    names = sorted(os.listdir(folder))
    weights = weights_file(folder)
    if weights is None:
        raise CheckpointError(f"{str(folder)!r} cannot be read: {_what_it_is(folder, names)}")
    kind: Kind = "transformers" if _OF_TRANSFORMERS & set(names) else "accelerate"
    state = _trainer_state(folder) if "trainer_state.json" in names else {}
    moments = next((name for name in _OPTIMIZERS if name in names), None)
    left_out = [f"{name}: {why}" for name in names for pattern, why in _REASONS if re.fullmatch(pattern, name)]
    if moments and not optimizer:
        left_out.insert(0, f"{moments}: not requested")
    return ForeignCheckpoint(
        folder,
        kind,
        _read_weights(folder, weights),
        optimizer=_read_optimizer(folder / moments) if moments and optimizer else None,
        epoch=number(state.get("epoch"), float),
        step=number(state.get("global_step"), int),
        not_taken=left_out,
    )


def weights_file(folder: Path) -> str | None:
    """Return the name of the file, or the index, that holds the weights in a folder of these kinds."""
    return next((name for name in _WEIGHTS if (folder / name).is_file()), None)


def _read_weights(folder: Path, name: str) -> dict[str, Tensor]:
    files = _parts(folder / name) if name.endswith(_INDEX) else [name]
    weights: dict[str, Tensor] = {}
    for part in files:
        tree, metadata = read_tree(folder / part)
        weights.update(from_tree(folder / part, tree, metadata).model)
    return cleaned(weights)


def _parts(index: Path) -> list[str]:
    try:
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{str(index)!r} is damaged: {shortened(str(error))}") from None
    outside = [name for name in files if not isinstance(name, str) or name != os.path.basename(name)]
    if outside:
        raise CheckpointError(f"{str(index)!r} is refused: it names {shortened(str(outside[0]))}, outside its folder")
    return files


def _read_optimizer(path: Path) -> dict[str, Any]:
    tree, _ = read_tree(path)
    if not is_optimizer_state(tree):
        raise CheckpointError(f"{str(path)!r} holds no optimizer state: its keys are {list(tree)[:8]}")
    return tree


def _trainer_state(folder: Path) -> dict[str, Any]:
    path = folder / "trainer_state.json"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{str(path)!r} is damaged: {shortened(str(error))}") from None


def _what_it_is(folder: Path, names: list[str]) -> str:
    if any(name.startswith("adapter_model.") for name in names):
        return "it holds adapters without their base model; load it with peft.PeftModel.from_pretrained"
    if any(name.startswith("pytorch_model_fsdp") or name.endswith(".distcp") for name in names):
        return "its weights are sharded by FSDP; gather them first with 'accelerate merge-weights'"
    if "zero_to_fp32.py" in names:
        return "its weights are sharded by DeepSpeed; gather them first with its own zero_to_fp32.py"
    inside = [name for name in names if re.fullmatch(r"checkpoint-\d+", name) and weights_file(folder / name)]
    if inside:
        newest = max(inside, key=lambda name: int(name.rpartition("-")[2]))
        return f"it holds checkpoints of the Hugging Face Trainer; give one of them, such as {newest}"
    return f"it holds none of {', '.join(_WEIGHTS)}; give a checkpoint's own file or folder"
