"""Bucketing of graph batches: a few padded shapes, chosen from the sizes of a data set.

Nodes are arranged in rows of equal length, with several small graphs in one row and no graph across two (like sequence
packing for language models). With one row per graph, each row would be as long as the largest graph, and mostly
padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from treadle.errors import ConfigError
from treadle.errors.arguments import check_least, checked


@checked
@dataclass(frozen=True)
class PadBucket:
    """Capacity of a padded batch.

    Example:
        >>> bucket = PadBucket(graphs=4, rows=2, row_length=8, edges=20)
        >>> bucket.place([3, 6, 5]), bucket.place([7, 6, 5])
        ([13, 0, 8], None)
    """

    graphs: int
    """Number of real graphs; the batch has one more, which is empty."""
    rows: int
    row_length: int
    """Slots per row: at least the nodes of the largest graph. Multiples of 8 suit the attention kernels."""
    edges: int
    """Directed edges of all graphs."""
    pairs: int = 0
    """Pairs with an encoding (``edge_pe_index``) of all graphs."""
    target_pairs: int = 0
    """Pairs with a target (``pair_index``) of all graphs."""

    def __post_init__(self) -> None:
        check_least(1, graphs=self.graphs, rows=self.rows, row_length=self.row_length)
        check_least(0, edges=self.edges, pairs=self.pairs, target_pairs=self.target_pairs)

    @property
    def reserve(self) -> int:
        """Slots of one row that stay free, so that padding edges are spread over enough padding nodes."""
        return max(1, self.row_length // 8)

    def place(self, sizes: Sequence[int]) -> list[int] | None:
        """Return the first slot of each graph, placing the largest first; None if they do not fit."""
        if len(sizes) > self.graphs:
            return None
        # The reserve is treated as one more graph.
        wanted = [*sizes, self.reserve]
        filled: list[int] = []
        starts = [0] * len(wanted)
        for index in sorted(range(len(wanted)), key=lambda index: -wanted[index]):
            size = wanted[index]
            row = next((row for row, used in enumerate(filled) if used + size <= self.row_length), len(filled))
            if row == len(filled):
                filled.append(0)
            if row == self.rows or size > self.row_length:
                return None
            starts[index] = row * self.row_length + filled[row]
            filled[row] += size
        return starts[:-1]


def columns(batch: Any, name: str) -> int:
    """Return the number of columns of an index (2, n) of a batch or graph; 0 if it is absent."""
    index = getattr(batch, name, None)
    return 0 if index is None else int(index.shape[1])


@checked
def plan_buckets(
    graphs: Iterable[Any],
    batch_size: int,
    *,
    num_buckets: int = 2,
    share: float = 0.99,
    multiple: int = 8,
    seed: int = 0,
) -> list[PadBucket]:
    """Choose a few buckets for a data set: one that holds any batch, and smaller ones for typical batches.

    Typical batches are 200 random ones. The second largest bucket has rows as long as the largest graph in a fraction
    ``share`` of them, and holds all of those batches. With more than two buckets, the smaller ones hold equal parts of
    those batches, ordered by row length and number of nodes. A bucket that would be no smaller than the next is
    omitted.

    Args:
        graphs: graphs with ``x`` and ``edge_index``, and optionally ``edge_pe_index`` and ``pair_index``.
        batch_size: maximum number of graphs per batch.
        num_buckets: maximum number of buckets, >= 1; one is the bucket that holds any batch.
        share: fraction of the batches, above 0 and at most 1. A smaller one means less padding, but more batches in the
            largest bucket.
        multiple: row lengths are rounded up to a multiple of this.
        seed: seed of the random batches.

    Raises:
        ConfigError: there are no graphs, or a number is out of range.

    Example:
        >>> from types import SimpleNamespace
        >>> graphs = [SimpleNamespace(x=torch.ones(n), edge_index=torch.ones(2, 2 * n)) for n in [5, 9, 6] * 20 + [90]]
        >>> [(bucket.rows, bucket.row_length, bucket.edges) for bucket in plan_buckets(graphs, 4, share=0.9)]
        [(4, 16, 72), (5, 96, 234)]
    """
    if batch_size < 1 or multiple < 1 or num_buckets < 1 or not 0 < share <= 1:
        raise ConfigError(
            f"={batch_size}, num_buckets={num_buckets} and multiple={multiple} must be 1 or more, "
            f"share={share} above 0 and at most 1",
            argument="batch_size",
        )
    needs = [
        (len(g.x), columns(g, "edge_index"), columns(g, "edge_pe_index"), columns(g, "pair_index")) for g in graphs
    ]
    if not needs:
        raise ConfigError("there are no graphs to plan buckets for; pass the training data")
    table = torch.tensor(needs)
    found = [_bucket_of_any(table, batch_size, multiple)]
    if num_buckets > 1:
        batches = _usual_batches(table, batch_size, share, multiple, torch.Generator().manual_seed(seed))
        for part in range(num_buckets - 1, 0, -1):
            bucket = _bucket_of(batches[: -(-len(batches) * part // (num_buckets - 1))], batch_size, multiple)
            if _size(bucket) < _size(found[0]):
                found.insert(0, bucket)
    return found


def _size(bucket: PadBucket) -> tuple[int, int]:
    return bucket.rows * bucket.row_length, bucket.edges + bucket.pairs


def _bucket_of_any(table: torch.Tensor, batch_size: int, multiple: int) -> PadBucket:
    nodes, *others = table.sort(dim=0, descending=True).values[:batch_size].sum(0).tolist()
    row_length = _rounded(int(table[:, 0].max()), multiple)
    # First-fit packing leaves at most one row half full or less; one more row for the reserve.
    rows = min(batch_size, 2 * -(-nodes // row_length)) + 1
    return PadBucket(batch_size, rows, row_length, *others)


def _usual_batches(
    table: torch.Tensor, batch_size: int, share: float, multiple: int, generator: torch.Generator
) -> list[torch.Tensor]:
    """Return random batches, without those with the largest graphs, sorted by row length, then by nodes."""
    size = min(batch_size, len(table))
    batches = [table[torch.randperm(len(table), generator=generator)[:size]] for _ in range(200)]
    largest = torch.stack([batch[:, 0].max() for batch in batches])
    row_length = _rounded(int(largest.float().quantile(share, interpolation="higher")), multiple)
    usual = [batch for batch, top in zip(batches, largest.tolist(), strict=True) if top <= row_length]
    return sorted(usual, key=lambda batch: (_rounded(int(batch[:, 0].max()), multiple), int(batch[:, 0].sum())))


def _bucket_of(batches: Sequence[torch.Tensor], batch_size: int, multiple: int) -> PadBucket:
    """Return the smallest bucket that holds every one of these batches."""
    row_length = _rounded(max(int(batch[:, 0].max()) for batch in batches), multiple)
    others = torch.stack([batch[:, 1:].sum(0) for batch in batches]).amax(0).tolist()
    rows = 1
    for batch in batches:
        while PadBucket(batch_size, rows, row_length, 0).place(batch[:, 0].tolist()) is None:
            rows += 1
    return PadBucket(batch_size, rows, row_length, *others)


def _rounded(size: int, multiple: int) -> int:
    return -(-max(size, 1) // multiple) * multiple
