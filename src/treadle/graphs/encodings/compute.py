"""Encodings of one graph, as functions and as ``torch_geometric`` transforms (which work without it)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from treadle.errors import ConfigError
from treadle.errors.arguments import check_least, checked
from treadle.graphs.encodings.config import (
    NodePEConfig,
    PEConfig,
    PEConfigLike,
    RelativePEConfig,
    parse_node_config,
    parse_pe_config,
    parse_relative_config,
)
from treadle.graphs.encodings.graphs import PlainGraphs
from treadle.graphs.encodings.node import node_encoding
from treadle.graphs.encodings.relative import listed, pair_encoding

Section = TypeVar("Section")


class GraphEncoding(NamedTuple):
    """Encodings of one graph; None for disabled ones.

    N = nodes, P = listed pairs of nodes.
    """

    node_pe: Tensor | None
    """(N, node_dim) float32."""
    edge_pe_index: Tensor | None
    """(2, P) int64: the two nodes of each pair."""
    edge_pe: Tensor | None
    """(P, relative_dim) float32."""

    def attach(self, data: Any) -> Any:
        """Return a shallow copy of a graph with the encodings as attributes of the same names."""
        data = copy.copy(data)
        for name, value in self._asdict().items():
            if value is not None:
                setattr(data, name, value)
        return data


@checked
def compute_node_pe(edge_index: Tensor, num_nodes: int, config: PEConfigLike | NodePEConfig) -> Tensor:
    """Return the node encoding of one graph.

    Args:
        edge_index: (2, E) integer; direction, duplicates and self-loops are ignored.
        num_nodes: N.
        config: all settings (:func:`parse_pe_config`), or only the section ``node``.

    Returns:
        (N, dim) float32; (N, 0) if node encodings are disabled.

    Raises:
        ConfigError: a setting is invalid, or an edge refers to a node outside the graph.

    Example:
        >>> compute_node_pe(torch.tensor([[0, 1], [1, 2]]), 3, "default").shape
        torch.Size([3, 20])
    """
    node_pe = encode_graph(
        edge_index, num_nodes, PEConfig(node=_section(config, NodePEConfig, parse_node_config, "node"))
    ).node_pe
    return torch.zeros(num_nodes, 0, device=edge_index.device) if node_pe is None else node_pe


@checked
def compute_relative_pe(
    edge_index: Tensor, num_nodes: int, config: PEConfigLike | RelativePEConfig
) -> tuple[Tensor, Tensor]:
    """Return the pair encoding of one graph.

    Args:
        edge_index: (2, E) integer; direction, duplicates and self-loops are ignored.
        num_nodes: N.
        config: all settings (:func:`parse_pe_config`), or only the section ``relative``.

    Returns:
        ``edge_pe_index`` (2, P) int64 and ``edge_pe`` (P, dim) float32; P and dim are 0 if pair encodings are disabled.

    Raises:
        ConfigError: a setting is invalid, or an edge refers to a node outside the graph.

    Example:
        >>> pairs, code = compute_relative_pe(torch.tensor([[0, 1], [1, 2]]), 3, "default")
        >>> pairs.shape, code.shape
        (torch.Size([2, 9]), torch.Size([9, 32]))
    """
    encoded = encode_graph(
        edge_index, num_nodes, PEConfig(relative=_section(config, RelativePEConfig, parse_relative_config, "relative"))
    )
    if encoded.edge_pe_index is None or encoded.edge_pe is None:
        device = edge_index.device
        return torch.zeros(2, 0, dtype=torch.long, device=device), torch.zeros(0, 0, device=device)
    return encoded.edge_pe_index, encoded.edge_pe


def _section(config: Any, kind: type[Section], parse: Callable[[Any], Section | None], name: str) -> Section | None:
    """Return one section of a configuration, given alone or as part of all settings."""
    if isinstance(config, kind):
        return config
    if isinstance(config, Mapping) and config and not {"node", "relative"} & set(config):
        return parse(config)
    found: Section | None = getattr(parse_pe_config(config), name)
    return found


def encode_graph(edge_index: Tensor, num_nodes: int, config: PEConfig) -> GraphEncoding:
    """Return all encodings of one graph, computing shared quantities once."""
    graphs, device = PlainGraphs([edge_index], num_nodes), edge_index.device
    node_pe = index = values = None
    if config.node is not None:
        node_pe = node_encoding(graphs, config.node)[0].to(device)
    if config.relative is not None:
        index, values = listed(pair_encoding(graphs, config.relative)[0], config.relative)
        index, values = index.to(device), values.to(device)
    return GraphEncoding(node_pe, index, values)


class AddPositionalEncodings:
    """Transform that adds encodings to a graph: ``node_pe``, ``edge_pe_index`` and ``edge_pe``.

    Works as a ``torch_geometric`` transform, and without it: a graph is any object with ``edge_index`` and
    ``num_nodes`` (or ``x``, one row per node). For a whole data set, :func:`encode_graphs` is many times faster.

    Args:
        pe_config: see :func:`parse_pe_config`.

    Raises:
        ConfigError: a setting is invalid; or, when called, the graph has no ``edge_index`` or ``num_nodes``, or it is a
            batch of several graphs, whose encodings would be those of their union.

    Example:
        >>> from types import SimpleNamespace
        >>> graph = SimpleNamespace(edge_index=torch.tensor([[0, 1], [1, 2]]), num_nodes=3)
        >>> AddPositionalEncodings("default")(graph).node_pe.shape
        torch.Size([3, 20])
    """

    @checked
    def __init__(self, pe_config: PEConfigLike):
        self.config = parse_pe_config(pe_config)

    def __call__(self, data: Any) -> Any:
        """Return a shallow copy of the graph with its encodings."""
        if getattr(data, "num_graphs", 1) != 1:
            raise ConfigError(
                f"data is a batch of {data.num_graphs} graphs: encodings belong to single graphs; transform each graph "
                "before they are batched"
            )
        edge_index = getattr(data, "edge_index", None)
        num_nodes = getattr(data, "num_nodes", None)
        if num_nodes is None and isinstance(getattr(data, "x", None), Tensor):
            num_nodes = data.x.shape[0]
        if edge_index is None or num_nodes is None:
            raise ConfigError(
                f"{type(data).__name__} has no edge_index or no num_nodes: set both; an edgeless graph has "
                "edge_index=torch.empty(2, 0, dtype=torch.long)"
            )
        return encode_graph(edge_index, int(num_nodes), self.config).attach(data)

    def __repr__(self) -> str:
        parts = {"node": self.config.node, "relative": self.config.relative}
        described = ", ".join(f"{name}={part.type if part is not None else 'none'}" for name, part in parts.items())
        return f"{type(self).__name__}({described})"


class RandomSignFlip:
    """Transform that multiplies leading columns of ``node_pe`` by random signs, one per graph and column.

    This is the training part of ``sign_invariant: flip``: eigenvectors are stored with a fixed sign, which evaluation
    uses unchanged, while in training signs are arbitrary. The signs come from torch's global CPU generator, which a
    checkpoint restores. Use it as the transform of the training data, or on a ``torch_geometric`` batch in the training
    step.

    Args:
        columns: :attr:`NodePEConfig.flip_columns`; 0 is a no-op and draws nothing.

    Example:
        >>> from types import SimpleNamespace
        >>> graph = SimpleNamespace(node_pe=torch.ones(2, 3))
        >>> flipped = RandomSignFlip(2)(graph).node_pe
        >>> flipped.abs().equal(graph.node_pe), flipped[:, 2].tolist()
        (True, [1.0, 1.0])
    """

    @checked
    def __init__(self, columns: int):
        check_least(0, columns=columns)
        self.columns = columns

    def __call__(self, data: Any) -> Any:
        """Return a shallow copy of the graph or batch with newly drawn signs."""
        if self.columns == 0:
            return data
        node_pe = data.node_pe
        if node_pe.shape[1] < self.columns:
            raise ConfigError(f"node_pe has {node_pe.shape[1]} columns, but columns={self.columns} are to be flipped")
        owner = getattr(data, "batch", None)
        graphs = 1 if owner is None else int(data.num_graphs)
        signs = torch.randint(0, 2, (graphs, self.columns)).mul_(2).sub_(1).to(node_pe)
        row_signs = signs if owner is None else signs[owner]
        data = copy.copy(data)
        data.node_pe = torch.cat([node_pe[:, : self.columns] * row_signs, node_pe[:, self.columns :]], dim=1)
        return data

    def __repr__(self) -> str:
        return f"{type(self).__name__}(columns={self.columns})"
