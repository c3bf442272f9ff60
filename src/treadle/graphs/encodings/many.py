"""Encodings of a whole data set, batched by graph size and optionally computed in several processes.

Shapes: G = graphs, B = graphs of one chunk, N = nodes of each, D = width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from treadle.errors.arguments import check_least, checked
from treadle.graphs.encodings.compute import GraphEncoding
from treadle.graphs.encodings.config import PEConfig, PEConfigLike, parse_pe_config
from treadle.graphs.encodings.graphs import PlainGraphs, check_graph, one_thread
from treadle.graphs.encodings.node import node_encoding
from treadle.graphs.encodings.relative import listed, pair_encoding

# Node pairs per chunk: a float64 matrix of 2 MiB stays in the cache.
_PAIRS = 2**18
_MOST_GRAPHS = 256


class EncodedGraphs:
    """Compact encodings of many graphs; ``encoded[i]`` is a copy of those of graph i.

    Pair encodings are stored densely, with codes as integers, and are listed and one-hot encoded on access.

    Attributes:
        config: settings of the encodings.
        num_nodes: (G,) int64.
        node: (ΣN, node_dim) float32, or None.
        pairs: (ΣN²,) integer codes or (ΣN², D) float32, or None.
    """

    def __init__(self, config: PEConfig, num_nodes: Tensor, node: Tensor | None, pairs: Tensor | None):
        self.config = config
        self.num_nodes = num_nodes
        self.node = node
        self.pairs = pairs
        self._first_node = (num_nodes.cumsum(0) - num_nodes).tolist()
        self._first_pair = (num_nodes.square().cumsum(0) - num_nodes.square()).tolist()
        self._sizes = num_nodes.tolist()

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, index: int) -> GraphEncoding:
        size = self._sizes[index]
        node_pe = edge_pe_index = edge_pe = None
        if self.node is not None:
            start = self._first_node[index]
            node_pe = self.node[start : start + size].clone()
        if self.pairs is not None and self.config.relative is not None:
            start = self._first_pair[index]
            block = self.pairs[start : start + size * size]
            edge_pe_index, edge_pe = listed(block.view(size, size, *block.shape[1:]), self.config.relative)
        return GraphEncoding(node_pe, edge_pe_index, edge_pe)


@checked
def encode_graphs(
    graphs: Sequence[tuple[Tensor, int]],
    config: PEConfigLike,
    *,
    num_workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> EncodedGraphs:
    """Compute the encodings of many graphs.

    The encodings of a graph are bit-identical alone, together with any others, and for any number of workers. The
    global generators are not used.

    Args:
        graphs: ``(edge_index, num_nodes)`` of each.
        config: see :func:`parse_pe_config`.
        num_workers: worker processes, as in ``DataLoader``; 0 computes in this process.
        progress: called after each chunk with the number of finished graphs and the total.

    Raises:
        ConfigError: a setting is invalid, or an edge refers to a node outside its graph.

    Example:
        >>> path, ring = torch.tensor([[0, 1], [1, 2]]), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
        >>> encoded = encode_graphs([(path, 3), (ring, 4)], "default")
        >>> encoded[1].node_pe.shape, encoded[1].edge_pe.shape
        (torch.Size([4, 20]), torch.Size([16, 32]))
    """
    settings = parse_pe_config(config)
    check_least(0, num_workers=num_workers)
    for number, (edge_index, num_nodes) in enumerate(graphs):
        check_graph(edge_index, num_nodes, where=f"graph {number}: ")
    sizes = torch.tensor([num_nodes for _, num_nodes in graphs], dtype=torch.long)
    chunks = _Chunks([edge_index for edge_index, _ in graphs], _split(sizes), settings)
    gathered = _Gathered(settings, sizes)
    done = 0
    with one_thread():  # DataLoader workers also have one
        for chunk in _computed(chunks, num_workers):
            gathered.put(chunk)
            done += len(chunk.members)
            if progress is not None:
                progress(done, len(graphs))
    return gathered.result()


class _Chunk(NamedTuple):
    members: list[int]
    node_BND: Tensor | None
    pairs_BNN: Tensor | None  # with a last axis D unless they are codes


class _Chunks(Dataset[_Chunk]):
    """Data set of chunks, so that DataLoader workers compute them."""

    def __init__(self, edge_indices: list[Tensor], members: list[tuple[int, list[int]]], config: PEConfig):
        # Two tensors, not thousands: each tensor sent to a worker holds an open file.
        self.edges = torch.cat(
            [torch.zeros(2, 0, dtype=torch.long), *(index.cpu().long() for index in edge_indices)], 1
        )
        self.first_edge = [0, *itertools.accumulate(edge_index.shape[1] for edge_index in edge_indices)]
        self.members = members
        self.config = config

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, index: int) -> _Chunk:
        size, members = self.members[index]
        bounds = [(self.first_edge[member], self.first_edge[member + 1]) for member in members]
        graphs = PlainGraphs([self.edges[:, start:end] for start, end in bounds], size)
        node_BND = None if self.config.node is None else node_encoding(graphs, self.config.node)
        pairs_BNN = None if self.config.relative is None else pair_encoding(graphs, self.config.relative)
        return _Chunk(members, node_BND, pairs_BNN)


def _split(sizes: Tensor) -> list[tuple[int, list[int]]]:
    """Return chunks of equally sized graphs as (size, indices), the largest first to balance the workers."""
    chunks = []
    for size in sorted(set(sizes.tolist()), reverse=True):
        members = (sizes == size).nonzero().flatten().tolist()
        most = max(1, min(_MOST_GRAPHS, _PAIRS // size**2))
        chunks += [(size, members[start : start + most]) for start in range(0, len(members), most)]
    return chunks


def _computed(chunks: _Chunks, num_workers: int) -> Iterable[_Chunk]:
    if num_workers == 0:
        return (chunks[number] for number in range(len(chunks)))
    # The loader would draw worker seeds from the global generator, which belongs to training.
    return DataLoader(chunks, batch_size=None, num_workers=num_workers, generator=torch.Generator())


class _Gathered:
    """Chunk results in the order of the data set."""

    def __init__(self, config: PEConfig, sizes_G: Tensor):
        self.config = config
        self.sizes_G = sizes_G
        self.first_node_G = sizes_G.cumsum(0) - sizes_G
        self.first_pair_G = sizes_G.square().cumsum(0) - sizes_G.square()
        self.node: Tensor | None = None
        self.pairs: Tensor | None = None

    def put(self, chunk: _Chunk) -> None:
        if chunk.node_BND is not None:
            if self.node is None:
                self.node = chunk.node_BND.new_empty(int(self.sizes_G.sum()), chunk.node_BND.shape[-1])
            self._place(self.node, self.first_node_G[chunk.members], chunk.node_BND.flatten(0, 1))
        if chunk.pairs_BNN is not None:
            if self.pairs is None:
                self.pairs = chunk.pairs_BNN.new_empty(int(self.sizes_G.square().sum()), *chunk.pairs_BNN.shape[3:])
            self._place(self.pairs, self.first_pair_G[chunk.members], chunk.pairs_BNN.flatten(0, 2))

    @staticmethod
    def _place(target: Tensor, first_B: Tensor, rows: Tensor) -> None:
        each = torch.arange(len(rows) // len(first_B))
        target[(first_B.unsqueeze(-1) + each).flatten()] = rows

    def result(self) -> EncodedGraphs:
        return EncodedGraphs(self.config, self.sizes_G, self.node, self.pairs)
