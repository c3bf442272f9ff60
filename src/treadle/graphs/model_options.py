"""Options of a graph model, validated before anything is built; each is either used or rejected."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.errors import ConfigError, nearest
from treadle.errors.arguments import check_least, check_within, checked
from treadle.graphs.statistics import GraphStatistics

MODEL_NAMES = ("gps", "graph_transformer", "gt", "mpnn")
TASKS = ("edge", "graph", "node")
MPNN_TYPES = ("gat", "gatedgcn", "gcn", "gin")
READOUTS = ("add", "max", "mean", "mean_add")


@checked
@dataclass(frozen=True)
class ModelOptions:
    """Arguments of `get_model` with their defaults.

    Raises:
        ConfigError: an option is out of range, or without effect in combination with the others.

    Example:
        >>> ModelOptions(num_features=28, hidden_dim=64).ffn_width
        128
    """

    name: str = "graph_transformer"
    """``"graph_transformer"`` (aliases ``"gt"`` and ``"gps"``), or ``"mpnn"``, the model without attention."""
    num_features: int | None = None
    """Number of node types, or of float feature columns. Required."""
    num_classes: int = 1
    """Number of outputs."""
    hidden_dim: int = 256
    """Node width, a multiple of ``num_heads`` if there are heads."""
    num_layers: int = 6
    """Number of layers, 1 or more."""
    num_heads: int = 8
    """Heads of the attention and of ``mpnn_type="gat"``."""
    dropout: float = 0.1
    """Dropout probability, in [0, 1)."""
    num_edge_features: int | None = None
    """Number of edge types, or of float feature columns; None: up to 16 of either."""
    node_pe_dim: int | None = None
    """Columns of ``batch.node_pe``; None or 0: not used."""
    relative_pe_dim: int | None = None
    """Columns of ``batch.edge_pe``; None or 0: not used."""
    task: str = "graph"
    """Level of the outputs: ``"graph"``, ``"node"``, or ``"edge"`` (a pair of nodes)."""
    mpnn_type: str = "gin"
    """Message passing: ``"gin"`` (GINE), ``"gat"``, ``"gcn"`` or ``"gatedgcn"``, all with edge features."""
    attn_dropout: float | None = None
    """Dropout of the attention weights, including those of ``"gat"``, in [0, 1); None: ``dropout``."""
    ffn_dim: int | None = None
    """Width of the feed-forward network; None: twice ``hidden_dim``."""
    use_local: bool = True
    """Whether to use message passing over the edges."""
    use_global: bool | None = True
    """Whether to use attention within each graph, which ``"mpnn"`` never does; None: True."""
    drop_path_rate: float = 0.0
    """Probability of dropping the last layer for a graph in training, decreasing to 0 at the first layer."""
    readout: str | None = None
    """``"mean"``, ``"add"`` or ``"max"`` over the nodes of a graph, or ``"mean_add"``: the mean concatenated with the
    sum over the mean number of nodes, which needs ``statistics``. None: ``"mean_add"`` with statistics, else
    ``"mean"``. Only for ``task="graph"``."""
    statistics: GraphStatistics | bool | None = None
    """Statistics of the training graphs (`graph_statistics`), part of the model state, which standardise ``node_pe``
    and, if targets were measured, scale the outputs to their units. True: a checkpoint provides them, and outputs are
    NaN until it is loaded; so does a `GraphStatistics` of NaN. None or False: not used."""

    @property
    def has_attention(self) -> bool:
        """Whether there is attention within each graph."""
        return self.name != "mpnn" and self.use_global is not False

    @property
    def measured(self) -> GraphStatistics | None:
        """``statistics``, with NaN for those that a checkpoint provides; None without statistics."""
        if self.statistics is True:
            return GraphStatistics.unknown(self.node_pe_dim)
        return self.statistics or None

    @property
    def pooling(self) -> str:
        """``readout``, or its default."""
        return self.readout or ("mean" if self.measured is None else "mean_add")

    @property
    def ffn_width(self) -> int:
        """``ffn_dim``, or its default."""
        return 2 * self.hidden_dim if self.ffn_dim is None else self.ffn_dim

    @property
    def attn_rate(self) -> float:
        """``attn_dropout``, or its default."""
        return self.dropout if self.attn_dropout is None else self.attn_dropout

    def __post_init__(self) -> None:
        for option, known in (
            ("name", MODEL_NAMES), ("task", TASKS), ("mpnn_type", MPNN_TYPES), ("readout", READOUTS),
        ):  # fmt: skip
            value = getattr(self, option)
            if value not in known and not (option == "readout" and value is None):
                raise ConfigError(f" is unknown; {nearest(str(value), known)}", argument=option, value=value)
        if self.num_features is None:
            raise ConfigError("num_features is required: the types of nodes or columns of x (dataset.num_features)")
        self._check_numbers()
        self._check_parts()
        self._check_statistics()

    def _check_numbers(self) -> None:
        check_least(1, num_features=self.num_features, num_classes=self.num_classes, hidden_dim=self.hidden_dim)
        check_least(1, num_layers=self.num_layers, num_heads=self.num_heads, ffn_dim=self.ffn_dim)
        check_least(1, num_edge_features=self.num_edge_features)
        check_least(0, node_pe_dim=self.node_pe_dim, relative_pe_dim=self.relative_pe_dim)
        rates = {"dropout": self.dropout, "attn_dropout": self.attn_dropout, "drop_path_rate": self.drop_path_rate}
        check_within("[0, 1)", **rates)

    def _check_parts(self) -> None:
        has_gat = self.use_local and self.mpnn_type == "gat"
        if self.name == "mpnn" and not self.use_local:
            raise ConfigError(
                "='mpnn' is message passing without attention, which use_local=False removes; leave it out, or use "
                "name='graph_transformer'",
                argument="name",
            )
        if not (self.use_local or self.has_attention):
            raise ConfigError("=False and use_global=False leave no layer; turn one of them on", argument="use_local")
        if (self.has_attention or has_gat) and self.hidden_dim % self.num_heads:
            raise ConfigError(
                f"={self.hidden_dim} must be a multiple of num_heads={self.num_heads}, as every head gets "
                "an equal share; change one of the two",
                argument="hidden_dim",
            )
        without_effect = [
            ("relative_pe_dim", bool(self.relative_pe_dim) and not self.has_attention, "there is no attention"),
            ("attn_dropout", self.attn_dropout is not None and not (self.has_attention or has_gat),
             "there is no attention"),
            ("mpnn_type", self.mpnn_type != "gin" and not self.use_local, "use_local is False"),
            ("num_edge_features", self.num_edge_features is not None and not self.use_local, "use_local is False"),
            ("readout", self.readout not in (None, "mean") and self.task != "graph", f"task is {self.task!r}"),
            ("drop_path_rate", self.drop_path_rate > 0 and self.num_layers == 1, "the first layer is never dropped"),
        ]  # fmt: skip
        for option, is_idle, reason in without_effect:
            if is_idle:
                raise ConfigError(
                    f" has no effect, as {reason}; leave it out", argument=option, value=getattr(self, option)
                )

    def _check_statistics(self) -> None:
        if self.readout == "mean_add" and self.measured is None:
            raise ConfigError(
                " divides sums by the mean number of nodes of a training graph, and statistics is "
                f"{self.statistics!r}; pass statistics=graph_statistics(training_graphs), or another readout",
                argument="readout",
                value=self.readout,
            )
        if not isinstance(self.statistics, GraphStatistics):
            return
        found = self.statistics.node_pe_dim
        if found != (self.node_pe_dim or None):
            raise ConfigError(
                f"statistics are of graphs whose node_pe has {found} columns, and node_pe_dim={self.node_pe_dim!r}; "
                "measure the graphs that the model is trained on"
            )
        targets = self.statistics.target_mean
        if targets is not None and (self.task != "graph" or len(targets) != self.num_classes):
            raise ConfigError(
                f"statistics are of {len(targets)} targets of a graph, and the model has {self.num_classes} outputs "
                f"for task={self.task!r}; measure targets=False, or build the model for these targets"
            )
