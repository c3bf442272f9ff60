"""Input encoders for node and edge features.

Shapes: M = nodes or edges, N = nodes, F = feature columns or types, K = columns of the node encoding, D = hidden width.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from treadle.data.graph_sizes import recorded_sizes
from treadle.errors import ConfigError, TreadleError
from treadle.graphs.row_index import RowIndex
from treadle.graphs.statistics import GraphStatistics


def needed(batch: Any, name: str) -> Tensor:
    """Return an attribute of the batch that the model requires.

    Raises:
        ConfigError: it is missing.
    """
    value = getattr(batch, name, None)
    if not isinstance(value, Tensor):
        raise ConfigError(
            f"the {type(batch).__name__} has no tensor {name!r}, which this model needs; add it to the data"
        )
    return value


@contextlib.contextmanager
def explaining_edges(batch: Any) -> Iterator[None]:
    """Turn an error of the block into one about ``edge_index``, if that is wrong.

    Raises:
        ConfigError: the edges are no integers of shape (2, E), or name nodes that do not exist.
    """
    try:
        yield
    except (IndexError, RuntimeError, ValueError, TypeError) as error:
        wrong = None if isinstance(error, TreadleError) else _wrong_edges(batch)
        if wrong is None:
            raise
        raise ConfigError(f"the edge_index of a {type(batch).__name__} {wrong}", argument="batch") from error


def _wrong_edges(batch: Any) -> str | None:
    edges, nodes = getattr(batch, "edge_index", None), getattr(batch, "num_nodes", None)
    if not isinstance(edges, Tensor) or edges.is_cuda:  # after a failed assertion nothing can be read from CUDA
        return None
    if edges.dim() != 2 or len(edges) != 2:
        return f"has shape {tuple(edges.shape)}; it must be (2, E), sources and targets, such as edges.t().contiguous()"
    if edges.is_floating_point() or edges.is_complex() or edges.dtype == torch.bool:
        return f"has dtype {edges.dtype}; it must be torch.long"
    if edges.numel() and isinstance(nodes, int) and not (int(edges.min()) >= 0 and int(edges.max()) < nodes):
        return (
            f"names nodes {int(edges.min())} to {int(edges.max())}, and the batch has nodes 0 to {nodes - 1}; each "
            "graph counts its nodes from 0"
        )
    return None


def graphs_of(batch: Any) -> tuple[Tensor, int]:
    """Return the graph of each node (N,) and the number of graphs; a batch without this information is one graph."""
    graph_N = getattr(batch, "batch", None)
    if graph_N is None:
        x = needed(batch, "x")
        return torch.zeros(len(x), dtype=torch.long, device=x.device), 1
    sizes = recorded_sizes(graph_N)
    if sizes is not None:  # the batch may have to read its number of graphs from the device
        return graph_N, len(sizes)
    num_graphs = getattr(batch, "num_graphs", None)
    return graph_N, int(graph_N.max()) + 1 if num_graphs is None else int(num_graphs)


class FeatureEncoder(nn.Module):
    """Encoder for integer types (table lookup) or float columns (linear map), with a shared weight.

    A table lookup is a linear map of one-hot columns, so the model works with either, without unused parameters.
    Initialised like ``nn.Linear(num_features, hidden_dim)``.

    Args:
        num_features: F, the number of types or columns.
        hidden_dim: D.
        what: name of the features for messages, such as ``"x"``.
        argument: name of the argument that set ``num_features``, for messages.
        takes_fewer: whether float features may have fewer columns, because their number was not given.

    Example:
        >>> encode = FeatureEncoder(3, 8, what="x", argument="num_features")
        >>> types = torch.tensor([2, 0])
        >>> torch.allclose(encode(types), encode(nn.functional.one_hot(types, 3).float()))
        True
    """

    def __init__(
        self, num_features: int, hidden_dim: int, *, what: str, argument: str, takes_fewer: bool = False
    ) -> None:
        super().__init__()
        self.takes_fewer = takes_fewer
        self.what = what
        self.argument = argument
        bound = 1 / math.sqrt(num_features)
        self.weight = nn.Parameter(torch.empty(num_features, hidden_dim).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(hidden_dim).uniform_(-bound, bound))

    def forward(self, features: Tensor) -> Tensor:
        """Encode (M,) or (M, 1) integers, or (M, F) floats, into (M, D).

        Raises:
            ValueError: the shape is wrong, or an integer is outside 0 … F − 1. On CUDA the latter is a device-side
                assertion, since reading the values would synchronise every step.
        """
        num_features = len(self.weight)
        if features.is_floating_point():
            weight = self.weight[: features.shape[-1]] if self.takes_fewer else self.weight
            if features.dim() != 2 or features.shape[1] != len(weight):
                raise ValueError(
                    f"{self.what} has shape {tuple(features.shape)}, but the model was built for float features of "
                    f"{self.argument}={num_features} columns; pass {self.argument}={features.shape[-1]} to get_model"
                )
            return torch.addmm(self.bias, features.to(weight.dtype), weight)
        types_M = features.squeeze(-1) if features.dim() == 2 and features.shape[1] == 1 else features
        if types_M.dim() != 1:
            raise ValueError(
                f"{self.what} has shape {tuple(features.shape)} and type {features.dtype}; integers are types, one for "
                "each row. Combine the columns into one type, or convert them to float"
            )
        try:
            return self._rows_of(types_M.long()) + self.bias
        except IndexError:
            low, high = int(types_M.min()), int(types_M.max())
            fix = "types count from 0" if low < 0 else f"pass {self.argument}={high + 1} or more to get_model"
            raise ValueError(
                f"{self.what} has types from {low} to {high}, but the model was built with "
                f"{self.argument}={num_features}, for 0 to {num_features - 1}; {fix}"
            ) from None

    def _rows_of(self, types_M: Tensor) -> Tensor:
        """Return the table row of each type; its gradient is deterministic on CUDA."""
        if self.weight.is_cuda:
            return RowIndex(types_M, len(self.weight)).select(self.weight)
        return F.embedding(types_M, self.weight)


class NodeEncodingInput(nn.Module):
    """Module that adds a node encoding through a learned per-channel gate, initially half open.

    Args:
        node_pe_dim: K.
        hidden_dim: D.
        statistics: statistics of the training graphs, used to standardise each column. Unscaled columns are small and
            differ tenfold in scale, so the features dominate them. None: no scaling.

    Example:
        >>> NodeEncodingInput(4, 8)(torch.zeros(3, 8), torch.randn(3, 4)).shape
        torch.Size([3, 8])
    """

    mean: Tensor | None
    scale: Tensor | None

    def __init__(self, node_pe_dim: int, hidden_dim: int, statistics: GraphStatistics | None = None) -> None:
        super().__init__()
        self.node_pe_dim = node_pe_dim
        known = statistics is not None and statistics.node_pe_mean is not None
        self.register_buffer("mean", _copied(statistics.node_pe_mean) if statistics and known else None)
        self.register_buffer("scale", _copied(statistics.node_pe_scale) if statistics and known else None)
        self.encode = nn.Sequential(nn.Linear(node_pe_dim, hidden_dim), nn.GELU(), nn.Linear(hidden_dim, hidden_dim))
        self.gate = nn.Parameter(torch.zeros(hidden_dim))

    def forward(self, nodes_ND: Tensor, node_pe_NK: Tensor) -> Tensor:
        """Return (N, D)."""
        values_NK = node_pe_NK.to(self.gate.dtype)
        if self.mean is not None and self.scale is not None:
            values_NK = (values_NK - self.mean) * self.scale
        encoded_ND: Tensor = self.encode(values_NK)
        return nodes_ND + self.gate.sigmoid() * encoded_ND


def _copied(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.detach().clone()
