"""Batches of equally sized plain graphs, with the quantities that the encodings share.

A plain graph is symmetric, without duplicate edges or self-loops. Everything is computed on the CPU in float64. Memory
is that of dense B x N x N matrices: thousands of molecules, or single graphs of a few thousand nodes.

Integers are exact in any order, so they are computed for all graphs at once. Floating-point results are computed for
each graph separately (:func:`apart`), so the encodings of a graph do not depend on the other graphs of its batch.

Shapes: B = graphs, N = nodes of each, E = directed edges of all graphs, M = eigenvectors (= N).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from treadle.errors import ConfigError
from treadle.errors.arguments import is_whole_number


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run a block on one thread, so that the order of summation is fixed; small matrices gain nothing from threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def apart(compute: Callable[..., Tensor], *stacks: Tensor) -> Tensor:
    """Apply a function to each graph's part of stacked tensors, and stack the results.

    BLAS and LAPACK choose their code path by the number of matrices, by their memory alignment (within a stack,
    matrices of odd size are not all aligned alike) and by the number of threads. The last bits depend on the path, and
    for repeated eigenvalues, whole eigenvectors do.

    Args:
        compute: called with one part of each stack, as an aligned copy.
        stacks: (B, ...) each, B at least 1.

    Example:
        >>> apart(torch.trace, torch.eye(3).expand(2, 3, 3)).tolist()
        [3.0, 3.0]
    """
    with one_thread():
        return torch.stack([compute(*(part.clone() for part in parts)) for parts in zip(*stacks, strict=True)])


class Spectrum(NamedTuple):
    """Ascending eigenvalues, and eigenvectors as columns."""

    values_BM: Tensor
    vectors_BNM: Tensor


class PlainGraphs:
    """Batch of B plain graphs with N nodes each; derived values are computed once, on first access.

    Args:
        edge_indices: one (2, e) integer tensor per graph, with nodes numbered from 0 and edges in one or both
            directions.
        num_nodes: N, at least 1.

    Raises:
        ConfigError: an ``edge_index`` does not have this form, or refers to a node outside the graph.

    Example:
        >>> graphs = PlainGraphs([torch.tensor([[0, 1, 1, 2], [1, 0, 2, 2]])], 3)
        >>> graphs.adjacency_BNN[0].tolist()
        [[0.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    """

    def __init__(self, edge_indices: Sequence[Tensor], num_nodes: int):
        self.num_graphs = len(edge_indices)
        self.num_nodes = num_nodes
        # Nodes of graph b are b*N ... b*N + N - 1, as in a disjoint union. Sorted by source.
        self.sources_E, self.targets_E = _plain_edges(edge_indices, num_nodes)

    @cached_property
    def degrees_BN(self) -> Tensor:
        """Number of neighbours, int64."""
        counted = torch.bincount(self.sources_E, minlength=self.num_graphs * self.num_nodes)
        return counted.view(self.num_graphs, self.num_nodes)

    @cached_property
    def adjacency_BNN(self) -> Tensor:
        """1 for an edge, else 0; float64."""
        dense = torch.zeros(self.num_graphs * self.num_nodes, self.num_nodes, dtype=torch.float64)
        dense[self.sources_E, self.targets_E % self.num_nodes] = 1.0
        return dense.view(self.num_graphs, self.num_nodes, self.num_nodes)

    @cached_property
    def transition_BNN(self) -> Tensor:
        """Probabilities of one step of a random walk, D^-1 A; the row of an isolated node is 0."""
        return self.adjacency_BNN / self.degrees_BN.clamp(min=1).unsqueeze(-1)

    @cached_property
    def spectrum(self) -> Spectrum:
        """Spectrum of the normalised Laplacian I - D^-1/2 A D^-1/2; the row of an isolated node is 0."""
        scale_BN = self.degrees_BN.double().clamp(min=1).rsqrt()
        laplacian_BNN = -scale_BN.unsqueeze(-1) * self.adjacency_BNN * scale_BN.unsqueeze(-2)
        laplacian_BNN.diagonal(dim1=-2, dim2=-1).copy_((self.degrees_BN > 0).double())
        # The eigenvalues are an additional row, so that one decomposition returns both.
        joined_B1NM = apart(_values_and_vectors, laplacian_BNN)
        return Spectrum(joined_B1NM[:, 0].clamp(0.0, 2.0), joined_B1NM[:, 1:].contiguous())

    @cached_property
    def hops_BNN(self) -> Tensor:
        """Edges on a shortest path, int32; -1 between components.

        Breadth-first search from every node at once, on edge lists: each step visits the neighbours of the nodes
        reached last, for a total cost of N·E per graph.
        """
        size = self.num_nodes
        hops = torch.full((self.num_graphs * size * size,), -1, dtype=torch.int32)
        last_reached_by = torch.empty_like(hops)
        degrees = self.degrees_BN.flatten()
        first_edge = degrees.cumsum(0) - degrees
        # A pair (start, node) is encoded as start * N + node; start indexes the union, node its graph.
        start = torch.arange(self.num_graphs * size)
        pairs = start * size + start % size
        level = 0
        while pairs.numel() > 0:
            hops[pairs] = level
            level += 1
            start = pairs // size
            node = start // size * size + pairs % size
            fan = degrees[node]
            owner = torch.repeat_interleave(fan)
            edge = torch.arange(owner.numel()) + (first_edge[node] - (fan.cumsum(0) - fan))[owner]
            pairs = start[owner] * size + self.targets_E[edge] % size
            pairs = pairs[hops[pairs] < 0]
            # A node reached from two sides at once is kept once, by the last write.
            order = torch.arange(pairs.numel(), dtype=torch.int32)
            last_reached_by[pairs] = order
            pairs = pairs[last_reached_by[pairs] == order]
        return hops.view(self.num_graphs, size, size)

    @cached_property
    def connected_BNN(self) -> Tensor:
        """Whether two nodes are in the same component."""
        return self.hops_BNN >= 0

    @cached_property
    def components_B(self) -> Tensor:
        """Number of components, counted as nodes not connected to any earlier node."""
        first_BN = self.connected_BNN.to(torch.uint8).argmax(dim=-1)
        return (first_BN == torch.arange(self.num_nodes)).sum(dim=-1)

    @cached_property
    def cores_BN(self) -> Tensor:
        """Core numbers, int64: the largest k such that the node is in a subgraph of minimum degree k.

        Nodes with the fewest remaining neighbours are removed first (Batagelj and Zaversnik 2003), in all graphs at
        once.
        """
        degrees = self.degrees_BN.flatten().clone()
        cores, present = torch.zeros_like(degrees), torch.ones_like(degrees, dtype=torch.bool)
        core = 0
        while present.any():
            leaving = present & (degrees <= core)
            if not leaving.any():
                core = int(degrees[present].min())
                continue
            cores[leaving] = core
            present &= ~leaving
            lost = self.sources_E[leaving[self.targets_E]]
            degrees -= torch.bincount(lost, minlength=degrees.numel())
        return cores.view(self.num_graphs, self.num_nodes)


def _values_and_vectors(matrix_NN: Tensor) -> Tensor:
    values_M, vectors_NM = torch.linalg.eigh(matrix_NN)
    return torch.cat([values_M.unsqueeze(0), vectors_NM])


def _plain_edges(edge_indices: Sequence[Tensor], num_nodes: int) -> tuple[Tensor, Tensor]:
    """Return sources and targets of all edges in the union: symmetric, sorted, without duplicates and self-loops."""
    for edge_index in edge_indices:
        check_graph(edge_index, num_nodes)
    local_2E = torch.cat([edge_index.cpu().long() for edge_index in edge_indices], dim=1)
    owner_E = torch.repeat_interleave(torch.tensor([edge_index.shape[1] for edge_index in edge_indices]))
    no_loop_E = local_2E[0] != local_2E[1]
    local_2E, owner_E = local_2E[:, no_loop_E], owner_E[no_loop_E]
    both_2E = torch.cat([local_2E, local_2E.flip(0)], dim=1)
    keys = torch.unique((owner_E.repeat(2) * num_nodes + both_2E[0]) * num_nodes + both_2E[1])
    sources_E = keys // num_nodes
    return sources_E, sources_E // num_nodes * num_nodes + keys % num_nodes


def check_graph(edge_index: Tensor, num_nodes: int, *, where: str = "") -> None:
    """Raise ConfigError unless the edges are integers of shape (2, E) that refer to nodes of the graph.

    Example:
        >>> check_graph(torch.tensor([[0], [3]]), 3, where="graph 7: ")
        Traceback (most recent call last):
        treadle.errors.ConfigError: graph 7: edge_index has the edge (0, 3), but num_nodes=3: nodes are numbered 0 to
        2; correct the edge or num_nodes
    """
    if not is_whole_number(num_nodes, 1):
        raise ConfigError(f"{where}num_nodes={num_nodes!r}: must be a whole number of at least 1").about("num_nodes")
    whole = not (edge_index.is_floating_point() or edge_index.is_complex() or edge_index.dtype is torch.bool)
    if edge_index.dim() != 2 or edge_index.shape[0] != 2 or not whole:
        raise ConfigError(
            f"{where}edge_index is {edge_index.dtype} of shape {tuple(edge_index.shape)}: must be whole numbers of "
            "shape (2, number of edges); an edgeless graph has torch.empty(2, 0, dtype=torch.long)"
        )
    if edge_index.numel() > 0 and (edge_index.min() < 0 or edge_index.max() >= num_nodes):
        wrong = ((edge_index < 0) | (edge_index >= num_nodes)).any(dim=0)
        edge = tuple(edge_index[:, wrong][:, 0].tolist())
        raise ConfigError(
            f"{where}edge_index has the edge {edge}, but num_nodes={num_nodes}: nodes are numbered 0 to "
            f"{num_nodes - 1}; correct the edge or num_nodes"
        )


def hop_distances(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Return the number of edges on a shortest path between all nodes of one graph.

    Args:
        edge_index: (2, E) integer; direction, duplicates and self-loops are ignored.
        num_nodes: N.

    Returns:
        (N, N) int64; -1 between components.

    Example:
        >>> hop_distances(torch.tensor([[0, 1], [1, 2]]), 4)[0].tolist()
        [0, 1, 2, -1]
    """
    return PlainGraphs([edge_index], num_nodes).hops_BNN[0].long().to(edge_index.device)


def core_numbers(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Return the core number of every node of one graph.

    Args:
        edge_index: (2, E) integer; direction, duplicates and self-loops are ignored.
        num_nodes: N.

    Returns:
        (N,) int64.

    Example:
        >>> core_numbers(torch.tensor([[0, 1, 2, 2], [1, 2, 0, 3]]), 4).tolist()
        [2, 2, 2, 1]
    """
    return PlainGraphs([edge_index], num_nodes).cores_BN[0].to(edge_index.device)
