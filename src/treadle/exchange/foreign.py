"""The parts of other frameworks' checkpoints, sorted into what can and cannot be imported.

Weights, the optimizer's state and the counts of steps and epochs are imported. Everything else is listed in
``not_taken``, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from treadle.checkpoint.files import FORMAT_NAME
from treadle.checkpoint.safe.claims import shortened
from treadle.distributed.state_names import clean_name
from treadle.errors import CheckpointError

Kind = Literal["torch", "safetensors", "lightning", "accelerate", "transformers"]

_MODELS = ("model_state_dict", "state_dict", "model", "model_state", "net", "network", "weights")
_OPTIMIZERS = ("optimizer_state_dict", "optimizer", "optimizer_state", "optim")
_STEPS = ("global_step", "step", "iteration")

RANDOM = "the random state: training continued from here draws different numbers"
SCHEDULE = "the state of the scheduler, which fits only the same scheduler: build yours for the remaining steps"
SCALER = "a new fp16 scaler finds its scale within a few steps"
_LIGHTNING = {
    "loops": "the position inside the epoch: training continues at the beginning of one",
    "callbacks": "the state of callbacks, which are Lightning's own",
    "lr_schedulers": SCHEDULE,
    "hyper_parameters": "build the model with them yourself",
    "datamodule_hyper_parameters": "build the data with them yourself",
    "MixedPrecision": SCALER,
}


@dataclass(frozen=True)
class ForeignCheckpoint:
    """Content of another framework's checkpoint.

    Attributes:
        path: the file or folder.
        kind: what wrote it; ``"torch"`` for a plain ``torch.save``, ``"transformers"`` for the Hugging Face Trainer and
            for ``save_pretrained``.
        model: the weights by name, on the CPU, without ``_orig_mod.`` and without ``prefix``.
        optimizer: the state dict of the only optimizer, or None.
        epoch: epochs trained as the file counts them (Hugging Face counts fractions), or None if it has no count.
        step: optimizer steps, or None if it has no count.
        not_taken: what could not be imported, each as ``"name: why"``.
        prefix: the prefix removed from every weight's name.
    """

    path: Path
    kind: Kind
    model: dict[str, Tensor]
    optimizer: dict[str, Any] | None = None
    epoch: float | None = None
    step: int | None = None
    not_taken: list[str] = field(default_factory=list)
    prefix: str = ""


def is_own(tree: Mapping[str, Any]) -> bool:
    """Return whether a tree was written by treadle.

    Example:
        >>> is_own({"format": {"name": "treadle", "version": 1}, "model": {}})
        True
    """
    described = tree.get("format")
    return isinstance(described, Mapping) and described.get("name") == FORMAT_NAME


def from_tree(path: Path, tree: Mapping[str, Any], metadata: Mapping[str, str] | None) -> ForeignCheckpoint:
    """Return the parts of a loaded file.

    Args:
        path: names it in messages.
        tree: the content of the file.
        metadata: the metadata of a safetensors file; None for a torch file.

    Raises:
        CheckpointError: there are no weights in it, or it is treadle's own.
    """
    if is_own(tree):
        raise CheckpointError(
            f"{str(path)!r} is a checkpoint of treadle: resume from it, or take its weights with load_weights(path)"
        )
    if metadata is not None:
        if not tree:
            raise CheckpointError(f"{str(path)!r} holds no weights: it has no tensors")
        epoch, step = (number(metadata.get(key), int) for key in ("epoch", "step"))
        return ForeignCheckpoint(path, "safetensors", cleaned(tree), epoch=epoch, step=step)
    if "pytorch-lightning_version" in tree:
        return _from_lightning(path, tree)
    return _from_torch(path, tree)


def cleaned(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights with the prefixes of compiled parts removed from their names."""
    return {clean_name(name): value for name, value in weights.items()}


def number(value: Any, kind: type[int] | type[float]) -> Any:
    """Return a value if it is a number, else None.

    Example:
        >>> number("12", int), number(None, int), number("a lot", int), number(0.75, float)
        (12, None, None, 0.75)
    """
    try:
        return kind(value) if type(value) in (int, float, str) else None
    except (ValueError, OverflowError):
        return None


def _is_state_dict(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and len(value) > 0
        and all(isinstance(name, str) for name in value)
        and all(isinstance(weight, Tensor) for weight in value.values())
    )


def is_optimizer_state(value: Any) -> bool:
    """Return whether a value has the form of an optimizer's state dict."""
    if not isinstance(value, Mapping) or not isinstance(value.get("state"), Mapping):
        return False
    groups = value.get("param_groups")
    return isinstance(groups, list) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups
    )


def _from_torch(path: Path, tree: Mapping[str, Any]) -> ForeignCheckpoint:
    if _is_state_dict(tree):
        return ForeignCheckpoint(path, "torch", cleaned(tree))
    model = next((key for key in _MODELS if _is_state_dict(tree.get(key))), None)
    if model is None:
        keys = ", ".join(shortened(str(key)) for key in list(tree)[:8])
        raise CheckpointError(
            f"{str(path)!r} holds no weights at the top or under {', '.join(_MODELS)}; its keys are {keys}; save a "
            "state dict, whose values are all tensors, under one of these"
        )
    optimizer = next((key for key in _OPTIMIZERS if is_optimizer_state(tree.get(key))), None)
    step = next((key for key in _STEPS if number(tree.get(key), int) is not None), None)
    epoch = number(tree.get("epoch"), int)
    taken = {model, optimizer, step, None if epoch is None else "epoch"}
    return ForeignCheckpoint(
        path,
        "torch",
        cleaned(tree[model]),
        optimizer=None if optimizer is None else dict(tree[optimizer]),
        epoch=epoch,
        step=None if step is None else int(tree[step]),
        not_taken=[f"{shortened(str(key))}: {_why(str(key), tree[key])}" for key in tree if key not in taken],
    )


def _why(key: str, value: Any) -> str:
    if _is_state_dict(value):
        return "weights besides those that were taken"
    if is_optimizer_state(value):
        return "the state of an optimizer besides the one that was taken"
    for word, reason in (("sched", SCHEDULE), ("scaler", SCALER), ("rng", RANDOM), ("random", RANDOM)):
        if word in key.lower():
            return reason
    return "treadle has no equivalent"


def _from_lightning(path: Path, tree: Mapping[str, Any]) -> ForeignCheckpoint:
    if not _is_state_dict(tree.get("state_dict")):
        raise CheckpointError(f"{str(path)!r} holds no weights: its state_dict does not hold only tensors")
    optimizers = tree.get("optimizer_states") or []
    only = optimizers[0] if len(optimizers) == 1 and is_optimizer_state(optimizers[0]) else None
    known = {"pytorch-lightning_version", "state_dict", "optimizer_states", "epoch", "global_step", "hparams_name"}
    left_out = []
    if optimizers and only is None:
        left_out.append(
            f"optimizer_states: of {len(optimizers)} optimizers; a run here takes the state of a single one"
        )
    for key, value in tree.items():
        if key not in known and value:
            why = _LIGHTNING.get(key, "what the module or a plug-in added")
            given = ", ".join(shortened(str(name)) for name in value) if key.endswith("hyper_parameters") else ""
            left_out.append(f"{shortened(str(key))}: {why}{given and f' ({given})'}")
    left_out.append(f"random numbers: Lightning does not store {RANDOM}")
    return ForeignCheckpoint(
        path, "lightning", cleaned(tree["state_dict"]), optimizer=only, epoch=_lightning_epochs(tree),
        step=number(tree.get("global_step"), int), not_taken=left_out,
    )  # fmt: skip


def _lightning_epochs(tree: Mapping[str, Any]) -> int | None:
    """Return the epochs trained; ``epoch`` is one less in a file written at an epoch's end than after it."""
    progress: Any = tree
    for key in ("loops", "fit_loop", "epoch_progress", "total", "processed"):
        progress = progress.get(key) if isinstance(progress, Mapping) else None
    found: int | None = number(tree.get("epoch") if progress is None else progress, int)
    return found
