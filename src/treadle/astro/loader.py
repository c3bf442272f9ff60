"""The data loader of the settings."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from treadle.astro.config import TrainingConfig
from treadle.astro.sequences import collate_sequences


def build_loader(dataset: Dataset[Any], training: TrainingConfig, *, shuffle: bool = True) -> DataLoader[Any]:
    """Makes a loader of padded batches.

    Memory is pinned where CUDA is there to copy from it; without workers nothing persists or is prefetched.

    Args:
        dataset: gives sequences, as `encode_sequence` makes them.
        training: batch size, workers and their options.
        shuffle: a new order each epoch, drawn from the global generator.

    Returns:
        A loader of what `collate_sequences` makes.

    Example:
        >>> sequences = [{"tokens": [1, 2], "types": [1, 2]}, {"tokens": [1, 5, 2], "types": [1, 5, 2]}]
        >>> loader = build_loader(sequences, TrainingConfig(batch_size=2, num_workers=0), shuffle=False)
        >>> next(iter(loader))["tokens"].tolist()
        [[1, 2, 0], [1, 5, 2]]
    """
    workers: dict[str, Any] = {}
    if training.num_workers:
        workers = {"persistent_workers": training.persistent_workers, "prefetch_factor": training.prefetch_factor}
    return DataLoader(
        dataset,
        batch_size=training.batch_size,
        shuffle=shuffle,
        num_workers=training.num_workers,
        pin_memory=training.pin_memory and torch.cuda.is_available(),
        collate_fn=collate_sequences,
        **workers,
    )
