"""Graph transformer with message passing, attention within each graph, and node and pair encodings.

Shapes: N = nodes of the batch, E = directed edges, G = graphs, P = listed pairs, D = hidden width, C = outputs.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from treadle.data.graph_sizes import recorded_sizes
from treadle.errors import ConfigError, refuse_unknown
from treadle.errors.arguments import checked
from treadle.graphs.attention import AttentionLayout, GraphAttention, PairBias, batch_layout, padded_layout
from treadle.graphs.heads import EdgeHead, GraphHead, NodeHead
from treadle.graphs.inputs import FeatureEncoder, NodeEncodingInput, graphs_of, needed
from treadle.graphs.layers import GatedGCNLayer, GATLayer, GCNLayer, GINELayer, GraphLayer, Structure
from treadle.graphs.model_options import ModelOptions
from treadle.graphs.padded import PaddedGraphBatch
from treadle.graphs.statistics import GraphStatistics

logger = logging.getLogger(__name__)

EDGE_TYPES = 16
"""Rows of the table of edge types when ``num_edge_features`` is None."""


class GraphTransformer(nn.Module):
    """Graph transformer for any batch object with the attributes below; `get_model` validates options and builds it.

    Each layer adds message passing over the edges and attention within each graph to the nodes, followed by a
    feed-forward network. In eval mode the outputs of a graph depend neither on the other graphs of the batch nor on the
    numbering of its nodes.

    The forward pass reads ``x``; ``edge_index`` (2, E) and ``edge_attr``; ``batch`` (N,) and ``num_graphs`` (absent:
    one graph); ``node_pe`` (N, node_pe_dim); ``edge_pe_index`` (2, P) and ``edge_pe`` (P, relative_pe_dim);
    ``pair_index`` (2, P) for ``task="edge"``. A `PaddedGraphBatch` has static shapes: no value is read on the host, and
    the step can be captured. For other batches the sizes of the graphs are read on the host once, unless a trainer
    counted them before moving the batch.

    Attributes:
        num_classes: width C of the output.
    """

    @checked
    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.num_classes = options.num_classes
        self.level = options.task
        self._warned: set[str] = set()
        width, num_heads = options.hidden_dim, options.num_heads
        assert options.num_features is not None
        self.node_input = FeatureEncoder(options.num_features, width, what="x", argument="num_features")
        self.edge_input = None
        if options.use_local:
            num_edge_features = options.num_edge_features or EDGE_TYPES
            self.edge_input = FeatureEncoder(
                num_edge_features, width, what="edge_attr", argument="num_edge_features",
                takes_fewer=options.num_edge_features is None,
            )  # fmt: skip
        measured = options.measured
        self.node_pe = NodeEncodingInput(options.node_pe_dim, width, measured) if options.node_pe_dim else None
        self.pair_bias = PairBias(options.relative_pe_dim, num_heads=num_heads) if options.relative_pe_dim else None
        self.has_attention = options.has_attention
        self.layers = nn.ModuleList(_layer(options, index) for index in range(options.num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = _head(options)

    def forward(self, batch: Any) -> Tensor:
        """Return outputs (G, C), (N, C) or (P, C) for the task ``graph``, ``node`` or ``edge``.

        Raises:
            ValueError: features or encodings do not match the sizes the model was built for (ConfigError, a ValueError,
                if they are missing).
        """
        x = needed(batch, "x")
        graph_N, num_graphs = graphs_of(batch)
        nodes_ND = self._encode_nodes(batch, x)
        edge_index = needed(batch, "edge_index")
        edges_ED = self._encode_edges(batch, nodes_ND, edge_index.shape[1])
        structure = Structure.of(edge_index, graph_N, num_graphs, layout=self._layout(batch, graph_N, num_graphs))
        for layer in self.layers:
            nodes_ND, edges_ED = layer(nodes_ND, edges_ED, structure)
        outputs: Tensor = self.head(self.norm(nodes_ND), batch, structure)
        return outputs

    def _encode_nodes(self, batch: Any, x: Tensor) -> Tensor:
        nodes_ND: Tensor = self.node_input(x)
        node_pe = self._encoding(batch, "node_pe", self.node_pe is not None)
        if self.node_pe is None or node_pe is None:
            return nodes_ND
        _check_width("node_pe", node_pe, self.node_pe.node_pe_dim, "node_pe_dim")
        _check_rows("node_pe", node_pe, len(x), "nodes")
        encoded_ND: Tensor = self.node_pe(nodes_ND, node_pe)
        return encoded_ND

    def _encode_edges(self, batch: Any, nodes_ND: Tensor, num_edges: int) -> Tensor:
        if self.edge_input is None:
            return nodes_ND.new_zeros(0, nodes_ND.shape[1])
        edge_attr = getattr(batch, "edge_attr", None)
        if edge_attr is None:
            edge_attr = torch.zeros(num_edges, dtype=torch.long, device=nodes_ND.device)
        _check_rows("edge_attr", edge_attr, num_edges, "edges")
        encoded_ED: Tensor = self.edge_input(edge_attr)
        return encoded_ED

    def _layout(self, batch: Any, graph_N: Tensor, num_graphs: int) -> AttentionLayout | None:
        edge_pe = self._encoding(batch, "edge_pe", self.pair_bias is not None)
        if not self.has_attention:
            return None
        if isinstance(batch, PaddedGraphBatch):
            layout = padded_layout(graph_N.view(-1, batch.row_length))
        else:
            layout = batch_layout(graph_N, num_graphs, recorded_sizes(graph_N))
        if self.pair_bias is None or edge_pe is None:
            return layout
        _check_width("edge_pe", edge_pe, self.pair_bias.proj.in_features, "relative_pe_dim")
        pair_index = needed(batch, "edge_pe_index")
        _check_rows("edge_pe", edge_pe, pair_index.shape[1], "pairs of edge_pe_index")
        biased: AttentionLayout = self.pair_bias(layout, pair_index, edge_pe)
        return biased

    def _encoding(self, batch: Any, name: str, wanted: bool) -> Tensor | None:
        """Return an encoding of the batch if the model was built for it; raise if missing, warn if unused."""
        argument = {"node_pe": "node_pe_dim", "edge_pe": "relative_pe_dim"}[name]
        encoding: Tensor | None = getattr(batch, name, None)
        if wanted and encoding is None:
            raise ConfigError(
                f"the batch has no {name}, but the model was built with {argument}; add the encodings to the data "
                f"(AddPositionalEncodings), or build the model with {argument}=None"
            )
        if not wanted and encoding is not None and name not in self._warned:
            self._warned.add(name)
            logger.warning(
                "the batch has %s, but the model was built with %s=None and does not use it; pass %s=%d to get_model",
                name, argument, argument, encoding.shape[-1],
            )  # fmt: skip
        return encoding if wanted else None


def _layer(options: ModelOptions, index: int) -> GraphLayer:
    width, heads, last = options.hidden_dim, options.num_heads, options.num_layers - 1
    local: nn.Module | None = None
    if options.use_local and options.mpnn_type == "gat":
        local = GATLayer(width, num_heads=heads, dropout=options.attn_rate)
    elif options.use_local and options.mpnn_type == "gatedgcn":
        local = GatedGCNLayer(width, update_edges=index < last)
    elif options.use_local:
        local = GCNLayer(width) if options.mpnn_type == "gcn" else GINELayer(width)
    attention = None
    if options.has_attention:
        attention = GraphAttention(width, num_heads=heads, dropout=options.attn_rate)
    return GraphLayer(
        local,
        attention,
        hidden_dim=width,
        ffn_dim=options.ffn_width,
        dropout=options.dropout,
        # Later layers are dropped more often (Huang et al. 2016, "Deep Networks with Stochastic Depth").
        drop_path=options.drop_path_rate * index / max(1, last),
    )


def _head(options: ModelOptions) -> nn.Module:
    width, num_classes, dropout = options.hidden_dim, options.num_classes, options.dropout
    if options.task == "graph":
        measured = options.measured or GraphStatistics.unknown(None)
        return GraphHead(
            width, num_classes, dropout=dropout, readout=options.pooling, mean_nodes=measured.mean_nodes,
            targets=measured.targets,
        )  # fmt: skip
    if options.task == "node":
        return NodeHead(width, num_classes, dropout=dropout)
    return EdgeHead(width, num_classes, dropout=dropout)


def _check_rows(name: str, value: Tensor, rows: int, what: str) -> None:
    """Raise an error for a shape that would be broadcast."""
    if len(value) != rows:
        raise ConfigError(f"{name} has {len(value)} rows, but the batch has {rows} {what}; give one row for each")


def _check_width(name: str, value: Tensor, width: int, argument: str) -> None:
    if value.dim() != 2 or value.shape[1] != width:
        raise ConfigError(
            f"{name} has shape {tuple(value.shape)}, but the model was built with {argument}={width}; "
            f"pass {argument}={value.shape[-1]} to get_model, or change the encodings"
        )


@checked
def get_model(
    name: str = "graph_transformer",
    num_features: int | None = None,
    num_classes: int = 1,
    hidden_dim: int = 256,
    num_layers: int = 6,
    num_heads: int = 8,
    dropout: float = 0.1,
    *,
    num_edge_features: int | None = None,
    node_pe_dim: int | None = None,
    relative_pe_dim: int | None = None,
    task: str = "graph",
    mpnn_type: str = "gin",
    attn_dropout: float | None = None,
    ffn_dim: int | None = None,
    use_local: bool = True,
    use_global: bool | None = True,
    drop_path_rate: float = 0.0,
    readout: str | None = None,
    statistics: GraphStatistics | bool | None = None,
    **unknown: Any,
) -> GraphTransformer:
    """Build a graph model by name; see `ModelOptions` for the options. Every option is either used or rejected.

    ``statistics=graph_statistics(training_graphs)`` standardises the encodings and makes ``"mean_add"`` the default
    readout, as in ``treadle train graphs``. Without it, checkpoints of earlier releases are compatible.

    Raises:
        ConfigError: an option is unknown (the closest match is named), out of range, or without effect in combination
            with the others.

    Example:
        >>> from types import SimpleNamespace
        >>> model = get_model("gt", num_features=3, hidden_dim=16, num_layers=2, num_heads=2).eval()
        >>> path = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
        >>> model(SimpleNamespace(x=torch.tensor([0, 2, 0]), edge_index=path)).shape
        torch.Size([1, 1])
    """
    # Must be the first statement: locals() then holds only the arguments.
    given = {option: value for option, value in locals().items() if option != "unknown"}
    refuse_unknown("get_model", unknown, given)
    return GraphTransformer(ModelOptions(**given))
