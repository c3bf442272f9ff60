"""Samples of a batch and micro-batches of a step: saved between two epochs, and compared when a run resumes there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle import distributed
from treadle.data.order import in_global_order
from treadle.data.transfer import TransferLoader


def sizes_between_epochs(loader: Any, accumulation: int) -> dict[str, int]:
    """Return entries of a checkpoint between two epochs; inside one, they follow from its length and counters.

    Example:
        >>> sizes_between_epochs([[1.0], [2.0]], 2)
        {'accumulation_steps': 2}
    """
    size = _batch_size_of(loader)
    return {"accumulation_steps": accumulation, **({} if size is None else {"batch_size": size})}


def other_batch_size(saved: Mapping[str, Any], loader: Any) -> list[str]:
    """Return a warning if a loader has batches of another size than the run that wrote a checkpoint.

    Args:
        saved: the ``data`` entry of the checkpoint.
        loader: of this run.
    """
    before, now = saved.get("batch_size"), _batch_size_of(loader)
    order, ordered = saved.get("order"), in_global_order(loader)
    if order and ordered is not None:
        before, now = order.get("global_batch_size"), ordered.order.global_batch_size
    elif saved.get("num_ranks") != distributed.world_size():
        return []  # batches of one rank, which change with the number of ranks
    if before is None or now is None or before == now:
        return []
    return [
        f"batches had {before} samples in the run that wrote the checkpoint and have {now} now, so the run differs "
        f"from here on; use batch_size={before} to continue it exactly"
    ]


def other_accumulation(tree: Mapping[str, Any], now: int) -> list[str]:
    """Return a warning if a step has other micro-batches than in the run that wrote a checkpoint.

    Args:
        tree: the checkpoint.
        now: micro-batches of a step in this run.
    """
    before = _accumulation_of(tree.get("progress") or {}, tree.get("data") or {}, tree.get("global_step"))
    if before in (None, now):
        return []
    return [
        f"accumulation_steps: a step had {before} micro-batches in the run that wrote the checkpoint and has {now} "
        f"now, so the run differs from here on; use {before} to continue it exactly"
    ]


def _accumulation_of(progress: Mapping[str, Any], data: Mapping[str, Any], step: Any) -> int | None:
    """Return the micro-batches of a step recorded in a checkpoint; None where it restores their number."""
    if "accumulation_steps" in (progress.get("settings") or {}):
        return None  # a hook has changed it
    if "accumulation_steps" in data or data.get("ended"):
        return data.get("accumulation_steps")
    steps, position = progress.get("epoch_applied_steps", 0), data.get("position", 0)
    all_applied = progress.get("applied_steps") == step
    return position // steps if steps and all_applied and position % steps == 0 else None


def _batch_size_of(loader: Any) -> int | None:
    """Return the samples in a batch of a loader, by its batch sampler if it has one; None if unknown."""
    loader = loader.loader if isinstance(loader, TransferLoader) else loader
    owner = loader if getattr(loader, "batch_sampler", None) is None else loader.batch_sampler
    size = getattr(owner, "batch_size", None)
    return size if isinstance(size, int) else None
