"""The few shapes that batches of graphs are padded into, chosen from the sizes of a data set."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from treadle.errors import ConfigError


@dataclass(frozen=True)
class PadBucket:
    """The room of a padded batch: what it holds at most.

    Example:
        >>> bucket = PadBucket(graphs=2, nodes_per_graph=8, edges=20)
        >>> bucket.fits(PadBucket(graphs=2, nodes_per_graph=5, edges=20))
        True
    """

    graphs: int
    """Real graphs; the batch has one slot more."""
    nodes_per_graph: int
    """Nodes of the largest graph. Multiples of 8 suit the attention kernels."""
    edges: int
    """Directed edges of all graphs."""
    pairs: int = 0
    """Pairs with an encoding (``edge_pe_index``) of all graphs."""
    target_pairs: int = 0
    """Pairs with a target (``pair_index``) of all graphs."""

    def fits(self, need: PadBucket) -> bool:
        """Returns whether a batch that needs this much fits."""
        return all(
            own >= other for own, other in zip(dataclasses.astuple(self), dataclasses.astuple(need), strict=True)
        )


def columns(batch: Any, name: str) -> int:
    """Returns the columns of an index (2, n) of a batch or graph; 0 when it is not there."""
    index = getattr(batch, name, None)
    return 0 if index is None else int(index.shape[1])


def plan_buckets(graphs: Iterable[Any], batch_size: int, *, count: int = 3, multiple: int = 8) -> list[PadBucket]:
    """Chooses buckets for random batches of a data set.

    The sizes S are quantiles of the largest graph of a random batch, so that each bucket is used about equally often;
    its edges and pairs are what the ``batch_size`` richest graphs of up to S nodes have together. So every batch fits
    into the first bucket that holds its largest graph.

    Args:
        graphs: with ``x`` and ``edge_index``; ``edge_pe_index`` and ``pair_index`` where they are there.
        batch_size: graphs of a batch at most.
        count: buckets at most; fewer when sizes coincide.
        multiple: S is rounded up to a multiple of this.

    Raises:
        ConfigError: when there is no graph, or a number is below 1.

    Example:
        >>> from types import SimpleNamespace
        >>> graphs = [SimpleNamespace(x=torch.ones(n), edge_index=torch.zeros(2, 2 * n)) for n in (5, 9, 20)]
        >>> [(bucket.nodes_per_graph, bucket.edges) for bucket in plan_buckets(graphs, 2)]
        [(16, 28), (24, 58)]
    """
    for name, value in (("batch_size", batch_size), ("count", count), ("multiple", multiple)):
        if value < 1:
            raise ConfigError(f"{name}={value} must be 1 or more")
    needs = torch.tensor(
        [
            [len(g.x), g.edge_index.shape[1], columns(g, "edge_pe_index"), columns(g, "pair_index")]
            for g in graphs
        ]
    )  # fmt: skip
    if len(needs) == 0:
        raise ConfigError("there are no graphs to plan buckets for; pass the training data")
    sizes = needs[:, 0].sort().values
    buckets = []
    for part in range(1, count + 1):
        # P(largest of the batch ≤ s) = P(one ≤ s)^batch_size
        rank = round((part / count) ** (1 / batch_size) * (len(sizes) - 1))
        nodes_per_graph = -(-int(sizes[rank]) // multiple) * multiple
        inside = needs[needs[:, 0] <= nodes_per_graph, 1:]
        edges, pairs, target_pairs = inside.sort(dim=0, descending=True).values[:batch_size].sum(0).tolist()
        bucket = PadBucket(batch_size, nodes_per_graph, edges, pairs, target_pairs)
        if bucket not in buckets:
            buckets.append(bucket)
    return buckets
