"""Detection of the samples that a DistributedSampler repeats so that all ranks have equally many."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler


def real_samples(loader: Any) -> int | None:
    """Return the number of this rank's samples before the duplicates at the end; None if there are no duplicates.

    Args:
        loader: any iterable; a ``DataLoader`` with a ``DistributedSampler`` without ``drop_last`` has duplicates.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> sampler = DistributedSampler(range(5), num_replicas=2, rank=1, shuffle=False)
        >>> real_samples(DataLoader(range(5), sampler=sampler)), real_samples([1, 2])
        (2, None)
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return None
    length: int = len(sampler.dataset)  # type: ignore[arg-type]  # a map-style data set has a length
    return len(range(sampler.rank, length, sampler.num_replicas))


def graphs_in(batch: Any) -> int | None:
    """Return the number of graphs in a batch, without padding; None if it is unknown or only on a device.

    Example:
        >>> from types import SimpleNamespace
        >>> graphs_in(SimpleNamespace(num_graphs=3, graph_mask=torch.tensor([True, True, False])))
        2
    """
    mask = getattr(batch, "graph_mask", None)
    if isinstance(mask, Tensor):
        # NumPy keeps python, where torch would let the writer of another member's file in.
        return int(np.count_nonzero(mask.numpy())) if mask.device.type == "cpu" else None
    graphs = getattr(batch, "num_graphs", None)
    return graphs if isinstance(graphs, int) else None


def rows_of_first(batch: Any, target: Tensor, num_graphs: int) -> Tensor:
    """Return the mask of target rows that belong to the first graphs of a batch, (rows,) bool.

    Args:
        batch: batch with ``num_graphs``, and ``batch`` and ``pair_index`` if rows are nodes or pairs.
        target: one row per graph, node or pair.
        num_graphs: number of graphs.

    Example:
        >>> from types import SimpleNamespace
        >>> batch = SimpleNamespace(num_graphs=2, batch=torch.tensor([0, 0, 1]))
        >>> rows_of_first(batch, torch.zeros(3), 1)
        tensor([ True,  True, False])
    """
    if len(target) == batch.num_graphs:
        return torch.arange(len(target)) < num_graphs
    graph_of_row: Tensor = batch.batch if len(target) == len(batch.batch) else batch.batch[batch.pair_index[0]]
    return graph_of_row.cpu() < num_graphs
