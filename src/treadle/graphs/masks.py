"""Masks of the field, ``train_mask``, ``val_mask`` and ``test_mask``: which rows of the targets each split counts."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from treadle.errors import ConfigError, nearest

MaskName: TypeAlias = Literal["train_mask", "val_mask", "test_mask"]
MASKS: tuple[str, ...] = get_args(MaskName)


def check_mask_name(mask: str) -> None:
    """Raise ConfigError unless it is the name of a mask of the field."""
    if mask not in MASKS:
        raise ConfigError(nearest(str(mask), MASKS), argument="mask", value=mask)


def masks_in(batch: Any) -> list[str]:
    """Return which masks of the field a batch has.

    Example:
        >>> from types import SimpleNamespace
        >>> masks_in(SimpleNamespace(train_mask=torch.tensor([True])))
        ['train_mask']
    """
    return [name for name in MASKS if isinstance(getattr(batch, name, None), Tensor)]


def counted_rows(batch: Any, split_mask: str) -> Tensor | None:
    """Return which rows of the targets count, True = counted; None for all.

    Args:
        batch: with ``target_mask`` where it is padded, and masks of the field where its rows are of several splits.
        split_mask: the mask of the split that is trained on or evaluated.

    Raises:
        ConfigError: the batch has masks of the field and not this one, or it is not bool.

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
            f"this split is unknown; add {split_mask}, or take the masks off the data of this loader"
        )
    mask: Tensor = getattr(batch, split_mask)
    if mask.dtype != torch.bool:
        raise ConfigError(f"{split_mask}: a {mask.dtype} tensor; masks must be bool, True = counted")
    return mask if real is None else mask & real
