"""Statistics of training graphs stored in a model: sizes, and the scales of node encodings and of targets.

Shapes: N = nodes of all graphs, K = columns of the node encoding, G = graphs, T = targets.
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
    target_mean: Tensor | None = None
    """(T,) float32, mean of the known values of each target; None if targets were not measured."""
    target_scale: Tensor | None = None
    """(T,) float32, their standard deviation; 1 for a constant target."""

    @property
    def node_pe_dim(self) -> int | None:
        """K; None if graphs have no ``node_pe``."""
        return None if self.node_pe_mean is None else len(self.node_pe_mean)

    @property
    def targets(self) -> tuple[Tensor, Tensor] | None:
        """``target_mean`` and ``target_scale``; None if targets were not measured."""
        if self.target_mean is None or self.target_scale is None:
            return None
        return self.target_mean, self.target_scale

    @classmethod
    def unknown(cls, node_pe_dim: int | None, num_targets: int | None = None) -> GraphStatistics:
        """Return NaN placeholders for statistics that a checkpoint provides; None: without those of targets.

        Example:
            >>> GraphStatistics.unknown(2).node_pe_mean
            tensor([nan, nan])
        """
        pairs = [(torch.full((2, dim), torch.nan) if dim else (None, None)) for dim in (node_pe_dim, num_targets)]
        (mean, scale), (target_mean, target_scale) = pairs
        return cls(torch.nan, mean, scale, target_mean, target_scale)


@checked
def graph_statistics(graphs: Iterable[Any], *, targets: bool = False) -> GraphStatistics:
    """Compute the statistics of a training set, bit-identical in every process.

    Args:
        graphs: graphs with ``num_nodes`` or ``x``, and ``node_pe`` (n, K) if encodings are used. A random transform of
            the data draws from a fork of torch's generators, so training is not affected.
        targets: whether to measure ``y``, one row of T targets per graph, for a regression whose outputs the model
            scales to the units of the targets; pass ``target_scale`` to `get_loss_fn`, too. NaN is unknown.

    Raises:
        ConfigError: there are no graphs, their ``node_pe`` differ in width or are not finite, or a target has no known
            value.

    Example:
        >>> from types import SimpleNamespace
        >>> graphs = [SimpleNamespace(num_nodes=2, node_pe=torch.tensor([[0.0, 1.0], [4.0, 1.0]]))] * 3
        >>> found = graph_statistics(graphs)
        >>> found.mean_nodes, found.node_pe_mean.tolist(), found.node_pe_scale.tolist()
        (2.0, [2.0, 1.0], [0.5, 1.0])
    """
    sizes: list[int] = []
    encodings: list[Tensor] = []
    rows: list[Tensor] = []
    with forked_rng():
        for graph in graphs:
            num_nodes = getattr(graph, "num_nodes", None)
            sizes.append(len(graph.x) if num_nodes is None else int(num_nodes))
            if getattr(graph, "node_pe", None) is not None:
                encodings.append(graph.node_pe.cpu())
            if targets:
                rows.append(graph.y.cpu().double().flatten())
    if not sizes:
        raise ConfigError("there are none to measure; pass the graphs of the training set", argument="graphs")
    mean_nodes = sum(sizes) / len(sizes)
    of_targets = _target_mean_and_scale(torch.stack(rows)) if targets else (None, None)
    if not encodings:
        return GraphStatistics(mean_nodes, None, None, *of_targets)
    widths = {tuple(encoding.shape[1:]) for encoding in encodings}
    if len(encodings) != len(sizes) or len(widths) != 1:
        raise ConfigError(
            f"{len(encodings)} of {len(sizes)} have a node_pe, of {len(widths)} widths; encode all alike",
            argument="graphs",
        )
    return GraphStatistics(mean_nodes, *_mean_and_scale(torch.cat(encodings)), *of_targets)


def _target_mean_and_scale(targets_GT: Tensor) -> tuple[Tensor, Tensor]:
    known_GT = ~targets_GT.isnan()
    if not bool(known_GT.any(dim=0).all()):
        raise ConfigError(
            f"{(~known_GT.any(dim=0)).nonzero().flatten().tolist()} of the targets have no known value; leave them out",
            argument="graphs",
        )
    with one_thread():
        mean_T = targets_GT.nanmean(dim=0)
        deviation_T = (targets_GT - mean_T).square().nanmean(dim=0).sqrt()
    varies_T = deviation_T > _CONSTANT * mean_T.abs()
    return mean_T.float(), torch.where(varies_T, deviation_T, 1.0).float()


def _mean_and_scale(values_NK: Tensor) -> tuple[Tensor, Tensor]:
    if not bool(values_NK.isfinite().all()):
        raise ConfigError("a node_pe is not finite; correct the encodings", argument="graphs")
    with one_thread():
        wide_NK = values_NK.double()
        mean_K = wide_NK.mean(dim=0)
        deviation_K = (wide_NK - mean_K).square().mean(dim=0).sqrt()
    scale_K = torch.where(deviation_K > _CONSTANT, 1 / deviation_K, 1.0)
    return mean_K.float(), scale_K.float()
