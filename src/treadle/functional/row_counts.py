"""Number of counted labels in a batch of a TensorLoader, known to the host on any device."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from treadle.data.rows import LastRows
from treadle.data.tensors import TensorLoader, packed
from treadle.functional.batches import split_batch, tensors_in
from treadle.functional.losses import model_loss


class RowCounts:
    """Counts of labels in every row of a loader, computed once and summed on the host for each batch.

    Otherwise labels on a device would have to be counted, with a sync, in every step.

    Args:
        mask_of: returns the mask of counted labels for inputs, outputs and targets, samples first, or None.

    Example:
        >>> import torch
        >>> from treadle.functional.losses import counted_labels
        >>> counts = RowCounts(lambda inputs, outputs, targets: targets != -100)
        >>> loader = TensorLoader(torch.zeros(4, 1), torch.tensor([1, -100, 2, 3]), batch_size=2)
        >>> [counts.of(batch, loader, loader.last_ids()) for batch in loader]
        [1.0, 2.0]
    """

    def __init__(self, mask_of: Callable[[Any, Any, Any], Tensor | None]):
        self._mask_of = mask_of
        self._key: Any = None
        self._loader: weakref.ref[TensorLoader] | None = None  # weak, since its tensors may be large
        self._counts: np.ndarray[Any, Any] | None = None

    def of(self, batch: Any, loader: Any, ids: Any, *, outputs: Any = None, rule: Any = None) -> float | None:
        """Return the number of counted labels of a batch; None unless it is unchanged since the loader yielded it.

        Args:
            batch: batch from the loader.
            loader: the loader.
            ids: sample ids of the batch, from the loader.
            outputs: outputs of the model, or a stand-in.
            rule: key of anything else that affects the counts; a new one recounts.
        """
        if type(loader) is not TensorLoader or not isinstance(ids, LastRows):
            return None
        if not all(map(ids.gave, tensors_in(batch))) or any(tensor.is_inference() for tensor in loader.tensors):
            return None
        key = model_loss(outputs) is None, rule, *(tensor._version for tensor in loader.tensors)
        if self._loader is None or self._loader() is not loader or key != self._key:
            self._loader, self._key, self._counts = weakref.ref(loader), key, self._counted(loader, outputs)
        if self._counts is None:
            return None
        rows = ids()
        chosen = self._counts[rows.numpy() if isinstance(rows, Tensor) else slice(rows.start, rows.stop)]
        return float(chosen.sum())

    def _counted(self, loader: TensorLoader, outputs: Any) -> np.ndarray[Any, Any] | None:
        """Return the counts of all rows, read once from the device."""
        inputs, targets = split_batch(packed(loader.names, loader.tensors))
        mask = self._mask_of(inputs, outputs, targets)
        if mask is None:
            return None
        counts: np.ndarray[Any, Any] = mask.reshape(len(mask), -1).sum(1).cpu().numpy()
        return counts
