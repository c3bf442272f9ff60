"""Data loader built from the settings."""

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
    """Build a loader of padded batches.

    Memory is pinned only if CUDA is available; ``persistent_workers`` and ``prefetch_factor`` need workers.

    Args:
        dataset: yields sequences in the format of `encode_sequence`.
        training: batch size, workers and their options; a mapping is read as by `AstroTrainer`.
        shuffle: reshuffle each epoch with the global generator.
        batch_sampler: yields the indices of each batch; replaces the batch size and ``shuffle``.

    Returns:
        A loader whose batches come from `collate_sequences`.

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
