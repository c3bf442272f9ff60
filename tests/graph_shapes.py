"""Graphs whose encodings are known in closed form, as (edge_index, num_nodes)."""

from __future__ import annotations

import torch


def path(n):
    return torch.stack([torch.arange(n - 1), torch.arange(1, n)]), n


def cycle(n):
    return torch.stack([torch.arange(n), (torch.arange(n) + 1) % n]), n


def complete(n):
    return torch.triu_indices(n, n, 1), n


def star(leaves):
    """Return a star graph with node 0 in the centre."""
    return torch.stack([torch.zeros(leaves, dtype=torch.long), torch.arange(1, leaves + 1)]), leaves + 1


def edgeless(n):
    return torch.empty(2, 0, dtype=torch.long), n


def union(first, second):
    """Return the disjoint union, with the nodes of the second graph after those of the first."""
    return torch.cat([first[0], second[0] + first[1]], dim=1), first[1] + second[1]


def random_graph(n, share, seed):
    pairs = torch.triu_indices(n, n, 1)
    kept = torch.rand(pairs.shape[1], generator=torch.Generator().manual_seed(seed)) < share
    return pairs[:, kept], n


def adjacency(edge_index, n):
    dense = torch.zeros(n, n, dtype=torch.float64)
    dense[edge_index[0], edge_index[1]] = 1.0
    return dense.maximum(dense.T)


def normalised_laplacian(edge_index, n):
    """Compute the normalised Laplacian entry by entry, unlike the library."""
    dense = adjacency(edge_index, n)
    degrees = dense.sum(1)
    laplacian = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        for j in range(n):
            if dense[i, j]:
                laplacian[i, j] = -1 / (degrees[i] * degrees[j]) ** 0.5
        laplacian[i, i] = 1.0 if degrees[i] else 0.0
    return laplacian
