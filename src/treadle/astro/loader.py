"""The data loader of the settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from treadle.astro.config import TrainingConfig
from treadle.astro.sequences import collate_sequences
from treadle.astro.settings import training_settings
from treadle.errors.arguments import checked


@checked
def build_loader(
    dataset: Dataset[Any],
    training: TrainingConfig | Mapping[str, Any],
    *,
    shuffle: bool = True,
    batch_sampler: Iterable[list[int]] | None = None,
) -> DataLoader[Any]:
    """Make a loader of padded batches.

    Memory is pinned where CUDA is there to copy from it; without workers nothing persists or is prefetched.

    Args:
        dataset: gives sequences, as `encode_sequence` makes them.
        training: batch size, workers and their options; a mapping is read as `AstroTrainer` reads it.
        shuffle: a new order each epoch, drawn from the global generator.
        batch_sampler: gives the indices of each batch, instead of the batch size and ``shuffle``.

    Returns:
        A loader of what `collate_sequences` makes.

    Example:
        >>> sequences = [{"tokens": [1, 2], "types": [1, 2]}, {"tokens": [1, 5, 2], "types": [1, 5, 2]}]
        >>> loader = build_loader(sequences, TrainingConfig(batch_size=2, num_workers=0), shuffle=False)
        >>> next(iter(loader))["tokens"].tolist()
        [[1, 2, 0], [1, 5, 2]]
    """
    if isinstance(training, Mapping):
        training = training_settings(training)
    options: dict[str, Any] = {"batch_size": training.batch_size, "shuffle": shuffle}
    if batch_sampler is not None:
        options = {"batch_sampler": batch_sampler}
    if training.num_workers:
        options |= {"persistent_workers": training.persistent_workers, "prefetch_factor": training.prefetch_factor}
    return DataLoader(
        dataset,
        num_workers=training.num_workers,
        pin_memory=training.pin_memory and torch.cuda.is_available(),
        collate_fn=collate_sequences,
        **options,
    )
