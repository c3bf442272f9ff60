"""Statistics of training graphs stored in a model: sizes, and the scale of each node-encoding column.

Shapes: N = nodes of all graphs, K = columns of the node encoding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treadle.errors import ConfigError
from treadle.errors.arguments import checked
from treadle.graphs.encodings.graphs import one_thread
from treadle.seed import forked_rng

_CONSTANT = 1e-6
"""Standard deviation below which a column counts as constant; float32 encodings near 1 round at 1e-7."""


@dataclass(frozen=True)
class GraphStatistics:
    """Statistics of a training set, which `get_model` stores in the model; see `graph_statistics`."""

    mean_nodes: float
    """Average number of nodes per graph."""
    node_pe_mean: Tensor | None = None
    """(K,) float32, mean of each column of ``node_pe``; None if graphs have none."""
    node_pe_scale: Tensor | None = None
    """(K,) float32, reciprocal standard deviation of each column; 1 for a constant column."""

    @property
    def node_pe_dim(self) -> int | None:
        """K; None if graphs have no ``node_pe``."""
        return None if self.node_pe_mean is None else len(self.node_pe_mean)

    @classmethod
    def unknown(cls, node_pe_dim: int | None) -> GraphStatistics:
        """Return NaN placeholders for statistics that a checkpoint provides.

        Example:
            >>> GraphStatistics.unknown(2).node_pe_mean
            tensor([nan, nan])
        """
        if not node_pe_dim:
            return cls(torch.nan)
        return cls(torch.nan, *torch.full((2, node_pe_dim), torch.nan))


@checked
def graph_statistics(graphs: Iterable[Any]) -> GraphStatistics:
    """Compute the statistics of a training set, bit-identical in every process.

    Args:
        graphs: graphs with ``num_nodes`` or ``x``, and ``node_pe`` (n, K) if encodings are used. A random transform of
            the data draws from a fork of torch's generators, so training is not affected.

    Raises:
        ConfigError: there are no graphs, or their ``node_pe`` differ in width or are not finite.

    Example:
        >>> from types import SimpleNamespace
        >>> graphs = [SimpleNamespace(num_nodes=2, node_pe=torch.tensor([[0.0, 1.0], [4.0, 1.0]]))] * 3
        >>> found = graph_statistics(graphs)
        >>> found.mean_nodes, found.node_pe_mean.tolist(), found.node_pe_scale.tolist()
        (2.0, [2.0, 1.0], [0.5, 1.0])
    """
    sizes: list[int] = []
    encodings: list[Tensor] = []
    with forked_rng():
        for graph in graphs:
            num_nodes = getattr(graph, "num_nodes", None)
            sizes.append(len(graph.x) if num_nodes is None else int(num_nodes))
            if getattr(graph, "node_pe", None) is not None:
                encodings.append(graph.node_pe.cpu())
    if not sizes:
        raise ConfigError("there are none to measure; pass the graphs of the training set", argument="graphs")
    mean_nodes = sum(sizes) / len(sizes)
    if not encodings:
        return GraphStatistics(mean_nodes)
    widths = {tuple(encoding.shape[1:]) for encoding in encodings}
    if len(encodings) != len(sizes) or len(widths) != 1:
        raise ConfigError(
            f"{len(encodings)} of {len(sizes)} have a node_pe, of {len(widths)} widths; encode all alike",
            argument="graphs",
        )
    return GraphStatistics(mean_nodes, *_mean_and_scale(torch.cat(encodings)))


def _mean_and_scale(values_NK: Tensor) -> tuple[Tensor, Tensor]:
    if not bool(values_NK.isfinite().all()):
        raise ConfigError("a node_pe is not finite; correct the encodings", argument="graphs")
    with one_thread():
        wide_NK = values_NK.double()
        mean_K = wide_NK.mean(dim=0)
        deviation_K = (wide_NK - mean_K).square().mean(dim=0).sqrt()
    scale_K = torch.where(deviation_K > _CONSTANT, 1 / deviation_K, 1.0)
    return mean_K.float(), scale_K.float()
