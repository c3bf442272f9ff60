"""Split masks ``train_mask``, ``val_mask`` and ``test_mask``, which select the target rows of each split."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from treadle.errors import ConfigError, nearest

MaskName: TypeAlias = Literal["train_mask", "val_mask", "test_mask"]
MASKS: tuple[str, ...] = get_args(MaskName)


def check_mask_name(mask: str) -> None:
    """Raise ConfigError unless ``mask`` is the name of a split mask."""
    if mask not in MASKS:
        raise ConfigError(nearest(str(mask), MASKS), argument="mask", value=mask)


def masks_in(batch: Any) -> list[str]:
    """Return the names of the split masks of a batch.

    Example:
        >>> from types import SimpleNamespace
        >>> masks_in(SimpleNamespace(train_mask=torch.tensor([True])))
        ['train_mask']
    """
    return [name for name in MASKS if isinstance(getattr(batch, name, None), Tensor)]


def counted_rows(batch: Any, split_mask: str) -> Tensor | None:
    """Return the mask of target rows that count, True = counted; None for all.

    Args:
        batch: batch with ``target_mask`` if it is padded, and split masks if its rows belong to several splits.
        split_mask: mask of the split to train on or evaluate.

    Raises:
        ConfigError: the batch has split masks but not this one, or it is not bool.

    Example:
        >>> from types import SimpleNamespace
        >>> counted_rows(SimpleNamespace(train_mask=torch.tensor([True, False])), "train_mask").tolist()
        [True, False]
    """
    real: Tensor | None = getattr(batch, "target_mask", None)
    found = masks_in(batch)
    if not found:
        return real
    if split_mask not in found:
        raise ConfigError(
            f"{split_mask}: the batch has {' and '.join(found)} and no {split_mask}, so which of its targets belong to "
            f"this split is unknown; add {split_mask}, or remove the masks from the data of this loader"
        )
    mask: Tensor = getattr(batch, split_mask)
    if mask.dtype != torch.bool:
        raise ConfigError(f"{split_mask}: a {mask.dtype} tensor; masks must be bool, True = counted")
    return mask if real is None else mask & real
