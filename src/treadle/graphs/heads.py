"""Output heads for graphs, nodes and pairs of nodes.

Shapes: N = nodes of the batch, G = graphs, P = pairs, D = hidden width, C = outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from treadle.graphs.inputs import needed
from treadle.graphs.layers import Structure
from treadle.graphs.row_index import RowIndex


def read_out(nodes_ND: Tensor, graph_N: RowIndex, readout: str) -> Tensor:
    """Pool the nodes of each graph by ``"mean"``, ``"add"`` or ``"max"``; a graph without nodes gives 0.

    Example:
        >>> graphs = RowIndex(torch.tensor([0, 0, 2]), 3)
        >>> read_out(torch.tensor([[1.0], [3.0], [5.0]]), graphs, "mean").flatten().tolist()
        [2.0, 0.0, 5.0]
    """
    if readout == "max":
        rows = graph_N.index_M[:, None].expand_as(nodes_ND)
        empty = nodes_ND.new_zeros(graph_N.num_rows, nodes_ND.shape[1])
        return empty.scatter_reduce(0, rows, nodes_ND, "amax", include_self=False)
    sums_GD = graph_N.sum(nodes_ND)
    if readout == "add":
        return sums_GD
    ones_N1 = torch.ones(len(nodes_ND), 1, device=nodes_ND.device)
    return sums_GD / graph_N.sum(ones_N1).clamp(min=1)


def _mlp(input_dim: int, hidden_dim: int, num_classes: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(input_dim, hidden_dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden_dim, num_classes)
    )


class GraphHead(nn.Module):
    """Output head for whole graphs.

    Args:
        hidden_dim: D.
        num_classes: C.
        dropout: dropout after the hidden layer.
        readout: ``"mean"``, ``"add"``, ``"max"``, or ``"mean_add"``: the mean concatenated with the sum over
            ``mean_nodes``. The mean alone carries no information about the size of a graph; sums of normalised nodes
            alone grow with it, and train poorly.
        mean_nodes: average number of nodes of a training graph, for ``"mean_add"``.
        targets: mean and standard deviation of the training targets, each (C,), which scale the outputs to their units;
            None: no scaling.
    """

    mean_nodes: Tensor | None
    target_mean: Tensor | None
    target_scale: Tensor | None

    def __init__(
        self,
        hidden_dim: int,
        num_classes: int,
        *,
        dropout: float,
        readout: str,
        mean_nodes: float | None = None,
        targets: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.readout = readout
        both = readout == "mean_add"
        self.register_buffer("mean_nodes", torch.tensor(mean_nodes) if both and mean_nodes is not None else None)
        self.register_buffer("target_mean", None if targets is None else targets[0].clone())
        self.register_buffer("target_scale", None if targets is None else targets[1].clone())
        self.mlp = _mlp(2 * hidden_dim if both else hidden_dim, hidden_dim, num_classes, dropout)

    def forward(self, nodes_ND: Tensor, batch: Any, structure: Structure) -> Tensor:
        """Return (G, C)."""
        graph_N = structure.graph_N
        if self.mean_nodes is None:
            joined = read_out(nodes_ND, graph_N, self.readout)
        else:
            mean_GD, sums_GD = (read_out(nodes_ND, graph_N, readout) for readout in ("mean", "add"))
            joined = torch.cat([mean_GD, sums_GD / self.mean_nodes], dim=1)
        outputs_GC: Tensor = self.mlp(joined)
        if self.target_mean is None or self.target_scale is None:
            return outputs_GC
        return outputs_GC * self.target_scale + self.target_mean


class NodeHead(nn.Module):
    """Output head for nodes."""

    def __init__(self, hidden_dim: int, num_classes: int, *, dropout: float) -> None:
        super().__init__()
        self.mlp = _mlp(hidden_dim, hidden_dim, num_classes, dropout)

    def forward(self, nodes_ND: Tensor, batch: Any, structure: Structure) -> Tensor:
        """Return (N, C)."""
        outputs_NC: Tensor = self.mlp(nodes_ND)
        return outputs_NC


class EdgeHead(nn.Module):
    """Output head for the pairs ``batch.pair_index`` (2, P), symmetric in (i, j) and (j, i)."""

    def __init__(self, hidden_dim: int, num_classes: int, *, dropout: float) -> None:
        super().__init__()
        self.mlp = _mlp(2 * hidden_dim, hidden_dim, num_classes, dropout)

    def forward(self, nodes_ND: Tensor, batch: Any, structure: Structure) -> Tensor:
        """Return (P, C).

        Raises:
            ConfigError: the batch has no ``pair_index``.
        """
        first_P, second_P = needed(batch, "pair_index")
        first_PD, second_PD = (RowIndex(ends_P, len(nodes_ND)).select(nodes_ND) for ends_P in (first_P, second_P))
        outputs_PC: Tensor = self.mlp(torch.cat([first_PD + second_PD, (first_PD - second_PD).abs()], dim=1))
        return outputs_PC
