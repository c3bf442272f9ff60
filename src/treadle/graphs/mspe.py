"""Aliases for names of the mspe project (``src.training``, ``src.dataset``, ``src.pe``) that differ here.

Results are those of `treadle.graphs`; docs/coming-from/mspe.md lists where they differ from the project's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from treadle.errors import ConfigError
from treadle.graphs.encodings import (
    AddPositionalEncodings,
    NodePEConfig,
    RelativePEConfig,
    compute_node_pe,
    compute_relative_pe,
)
from treadle.graphs.encodings.config import HKSConfig, LapConfig, RoleConfig, RWSEConfig
from treadle.graphs.losses import GraphLoss, get_loss_fn
from treadle.graphs.metrics import GraphMetrics
from treadle.graphs.scheduler import get_scheduler
from treadle.graphs.statistics import graph_statistics
from treadle.seed import ReproducibilityContext, set_seed

set_global_seed = set_seed
"""The name in ``src.utils``."""
reproducibility_context = ReproducibilityContext
"""The name in ``src.utils``."""
CompositeTransform = AddPositionalEncodings
"""The transform that adds encodings of nodes and pairs."""


# -- losses and metrics ----------------------------------------------------------------------------------------------


class _OfTasks(type):
    """Metaclass whose ``isinstance`` check accepts the losses of given tasks, however they were built."""

    tasks: tuple[str, ...]

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, GraphLoss) and instance.task_type in cls.tasks


def _become(loss: GraphLoss, made: GraphLoss) -> None:
    vars(loss).update(vars(made))


class RegressionLoss(GraphLoss, metaclass=_OfTasks):
    """Regression loss.

    Example:
        >>> RegressionLoss("mae")(torch.tensor([[1.0], [2.0]]), torch.zeros(2, 1))
        tensor(1.5000)
        >>> isinstance(get_loss_fn("regression"), RegressionLoss)
        True
    """

    tasks: ClassVar[tuple[str, ...]] = ("regression",)

    def __init__(self, loss_type: str = "mse"):
        _become(self, get_loss_fn("regression", loss_type))


class ClassificationLoss(GraphLoss, metaclass=_OfTasks):
    """Classification loss.

    Example:
        >>> ClassificationLoss("bce_logits")(torch.zeros(2, 1), torch.tensor([[0.0], [1.0]]))
        tensor(0.6931)
    """

    tasks: ClassVar[tuple[str, ...]] = ("classification", "multilabel")

    def __init__(
        self,
        loss_type: str = "cross_entropy",
        num_classes: int | None = None,
        class_weights: Sequence[float] | Tensor | None = None,
    ):
        if num_classes is None:
            num_classes = 2 if loss_type == "cross_entropy" else 1
        _become(self, get_loss_fn("classification", loss_type, num_classes, class_weights))


class EdgePredictionLoss(GraphLoss, metaclass=_OfTasks):
    """Link-prediction loss.

    Example:
        >>> EdgePredictionLoss()(torch.zeros(3), torch.ones(3))
        tensor(0.6931)
    """

    tasks: ClassVar[tuple[str, ...]] = ("edge_prediction",)

    def __init__(self) -> None:
        _become(self, get_loss_fn("edge_prediction"))


class RegressionMetrics(GraphMetrics):
    """Regression metrics: ``mse``, ``mae``, ``rmse``."""

    def __init__(self) -> None:
        super().__init__("regression", 1, from_logits=True, k=100)


class ClassificationMetrics(GraphMetrics):
    """Classification metrics.

    Args:
        num_classes: number of classes for ``"multiclass"``.
        task: ``"binary"`` (one logit, or two columns with ``columns=2``), ``"multiclass"`` or ``"multilabel"``.
        columns: number of prediction columns for a binary task.

    Example:
        >>> ClassificationMetrics(task="multiclass", num_classes=3).names
        ('accuracy', 'f1_macro', 'roc_auc')
    """

    def __init__(self, num_classes: int = 2, task: str = "binary", *, columns: int = 1):
        if task not in ("binary", "multiclass", "multilabel"):
            raise ConfigError("must be 'binary', 'multiclass' or 'multilabel'", argument="task", value=task)
        kind = "multilabel" if task == "multilabel" else "classification"
        super().__init__(kind, columns if task == "binary" else num_classes, from_logits=True, k=100)


class EdgeMetrics(GraphMetrics):
    """Link-prediction metrics: ``roc_auc``, ``ap``, ``precision@100``."""

    def __init__(self) -> None:
        super().__init__("edge_prediction", 1, from_logits=True, k=100)


# -- schedules -------------------------------------------------------------------------------------------------------


def _schedule(optimizer: Optimizer, kind: str, total_epochs: int, **settings: Any) -> LambdaLR:
    made = get_scheduler(optimizer, kind, total_epochs, **settings)
    assert isinstance(made, LambdaLR)
    return made


def CosineWithWarmup(
    optimizer: Optimizer, warmup_epochs: int, total_epochs: int, min_lr: float = 1e-6, warmup_start_lr: float = 1e-7
) -> LambdaLR:
    """Build the schedule ``"cosine_warmup"`` of `get_scheduler`."""
    return _schedule(
        optimizer, "cosine_warmup", total_epochs, warmup_epochs=warmup_epochs, min_lr=min_lr,
        warmup_start_lr=warmup_start_lr,
    )  # fmt: skip


def WarmupScheduler(optimizer: Optimizer, warmup_epochs: int, warmup_start_lr: float = 1e-7) -> LambdaLR:
    """Build the schedule ``"warmup"`` of `get_scheduler`."""
    return _schedule(
        optimizer, "warmup", max(1, warmup_epochs), warmup_epochs=warmup_epochs, warmup_start_lr=warmup_start_lr
    )


# -- encodings -------------------------------------------------------------------------------------------------------


class NodePE:
    """Node encoding under its class name in ``src.pe.node``.

    Args:
        dim: width, zero-padded.
        settings: settings of the encoding.

    Example:
        >>> class Path:
        ...     edge_index, num_nodes = torch.tensor([[0, 1], [1, 2]]), 3
        >>> RWSE(dim=4, scales=[1, 2]).compute(Path()).tolist()
        [[0.0, 0.5, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.5, 0.0, 0.0]]
    """

    block: ClassVar[str]

    def __init__(self, dim: int | None = None, **settings: Any):
        self.config = NodePEConfig(type=self.block, dim=dim, **settings)

    def compute(self, data: Any) -> Tensor:
        """Return the encoding of a graph, (N, dim) float32."""
        return compute_node_pe(data.edge_index, data.num_nodes, self.config)

    def __call__(self, data: Any) -> Any:
        """Return the graph with its encoding as ``node_pe``."""
        data.node_pe = self.compute(data)
        return data


class LapPE(NodePE):
    """Laplacian eigenvectors: ``k`` of them, ``dim`` by default."""

    block = "lap"

    def __init__(self, dim: int, k: int | None = None, *, sign_invariance_method: str = "abs"):
        super().__init__(dim, lap=LapConfig(dim if k is None else k, sign_invariance_method))


class RWSE(NodePE):
    """Random-walk return probabilities after each of ``scales`` steps."""

    block = "rwse"

    def __init__(self, dim: int, scales: Sequence[int] = (1, 2, 4, 8)):
        super().__init__(dim, rwse=RWSEConfig(tuple(scales)))


class HKS(NodePE):
    """Heat kernel signature at each of ``scales`` times."""

    block = "hks"

    def __init__(self, dim: int, scales: Sequence[float] = HKSConfig.scales):
        super().__init__(dim, hks=HKSConfig(tuple(scales)))


class RolePE(NodePE):
    """Degree, clustering coefficient and core number; mspe calls ``kcore`` ``core``."""

    block = "role"

    def __init__(self, dim: int, features: Sequence[str] = RoleConfig.features):
        super().__init__(dim, role=RoleConfig(tuple("kcore" if name == "core" else name for name in features)))


class RelativePE:
    """Pair encoding under its class name in ``src.pe.relative``.

    Args:
        settings: settings of the encoding.

    Example:
        >>> class Edge:
        ...     edge_index, num_nodes = torch.tensor([[0], [1]]), 2
        >>> pairs, code = SPDBuckets(num_buckets=4, max_distance=3).compute(Edge())
        >>> pairs.tolist(), code.argmax(1).tolist()
        ([[0, 0, 1, 1], [0, 1, 0, 1]], [0, 1, 1, 0])
    """

    kind: ClassVar[str]

    def __init__(self, **settings: Any):
        self.config = RelativePEConfig(type=self.kind, **settings)

    def compute(self, data: Any) -> tuple[Tensor, Tensor]:
        """Return pairs (2, P) and their encoding (P, dim) float32."""
        return compute_relative_pe(data.edge_index, data.num_nodes, self.config)

    def __call__(self, data: Any) -> Any:
        """Return the graph with its encoding as ``edge_pe_index`` and ``edge_pe``."""
        data.edge_pe_index, data.edge_pe = self.compute(data)
        return data


class SPDBuckets(RelativePE):
    """One-hot shortest-path distances of all pairs."""

    kind = "spd"

    def __init__(self, num_buckets: int, max_distance: int):
        super().__init__(num_buckets=num_buckets, max_distance=max_distance)


class BFSDistance(RelativePE):
    """One-hot shortest-path distances of nearby pairs."""

    kind = "bfs"

    def __init__(self, num_buckets: int, max_distance: int):
        super().__init__(num_buckets=num_buckets, max_distance=max_distance)


class DiffusionPE(RelativePE):
    """Heat kernel between two nodes at each of ``scales`` times."""

    kind = "diffusion"

    def __init__(self, scales: Sequence[float] = RelativePEConfig.scales):
        super().__init__(scales=tuple(scales))


class EffectiveResistancePE(RelativePE):
    """Effective resistance between two nodes."""

    kind = "resistance"

    def __init__(self) -> None:
        super().__init__()


class LandmarkSPD(RelativePE):
    """Differences of the distances to landmarks."""

    kind = "landmark"

    def __init__(self, num_landmarks: int = 4, *, reduce: Sequence[str] = RelativePEConfig.reduce, seed: int = 0):
        super().__init__(num_landmarks=num_landmarks, reduce=tuple(reduce), seed=seed)


def ApplyNodePE(node_pe_config: dict[str, Any]) -> AddPositionalEncodings:
    """Build the transform for the section ``node`` only."""
    return AddPositionalEncodings({"node": node_pe_config})


def ApplyRelativePE(relative_pe_config: dict[str, Any]) -> AddPositionalEncodings:
    """Build the transform for the section ``relative`` only."""
    return AddPositionalEncodings({"relative": relative_pe_config})


# -- data ------------------------------------------------------------------------------------------------------------


def compute_dataset_stats(dataset: Sequence[Any]) -> dict[str, Any]:
    """Return the number of graphs, their sizes, and the mean and standard deviation of their targets.

    Example:
        >>> from types import SimpleNamespace
        >>> graph = SimpleNamespace(num_nodes=3, num_edges=4, x=torch.ones(3, 2), y=torch.tensor([1.0]))
        >>> stats = compute_dataset_stats([graph, graph])
        >>> stats["num_graphs"], stats["avg_num_nodes"], stats["num_features"], stats["target_std"]
        (2, 3.0, 2, 0.0)
    """
    graphs = list(dataset)
    nodes, edges = ([int(getattr(graph, name)) for graph in graphs] for name in ("num_nodes", "num_edges"))
    found: dict[str, Any] = {
        "num_graphs": len(graphs), "num_nodes": nodes, "num_edges": edges,
        "num_features": graphs[0].x.shape[-1] if getattr(graphs[0], "x", None) is not None else None,
        "avg_num_nodes": graph_statistics(graphs).mean_nodes, "avg_num_edges": sum(edges) / len(edges),
        "min_num_nodes": min(nodes), "max_num_nodes": max(nodes),
    }  # fmt: skip
    targets = [graph.y.flatten().double() for graph in graphs if getattr(graph, "y", None) is not None]
    if targets:
        values = torch.cat(targets)
        found |= {"target_mean": float(values.mean()), "target_std": float(values.std(correction=0))}
        found |= {"target_min": float(values.min()), "target_max": float(values.max())}
        found["num_classes"] = graphs[0].y.shape[-1] if graphs[0].y.dim() else 1
    return found


def create_random_split(
    dataset: Sequence[Any], train_ratio: float = 0.8, val_ratio: float = 0.1, seed: int = 42
) -> tuple[list[int], list[int], list[int]]:
    """Return the indices of three random splits, identical to mspe's for the seed; global generators are not touched.

    Example:
        >>> [len(part) for part in create_random_split(range(10))]
        [8, 1, 1]
    """
    drawn = np.random.RandomState(seed).permutation(len(dataset)).tolist()
    first, second = int(train_ratio * len(drawn)), int(val_ratio * len(drawn))
    return drawn[:first], drawn[first : first + second], drawn[first + second :]


def normalize_targets(
    dataset: Iterable[Any], mean: float | None = None, std: float | None = None
) -> tuple[float, float]:
    """Standardise the targets of graphs in place; the training set provides the mean and deviation for the others.

    Returns:
        The mean and the standard deviation.

    Raises:
        ConfigError: all targets are equal.
    """
    graphs = list(dataset)
    values = torch.cat([graph.y.flatten().double() for graph in graphs])
    mean = float(values.mean()) if mean is None else mean
    std = float(values.std(correction=0)) if std is None else std
    if not std > 0:
        raise ConfigError("all targets are equal, so there is nothing to scale by", argument="std", value=std)
    for graph in graphs:
        graph.y = (graph.y - mean) / std
    return mean, std


def ensure_data_has_pe(data: Any, *, node_pe_dim: int = 32, relative_pe_dim: int = 16) -> Any:
    """Add zero encodings to a graph without encodings, with one pair per edge.

    Example:
        >>> class Graph:
        ...     num_nodes, edge_index = 2, torch.tensor([[0], [1]])
        >>> graph = ensure_data_has_pe(Graph())
        >>> graph.node_pe.shape, graph.edge_pe.shape
        (torch.Size([2, 32]), torch.Size([1, 16]))
    """
    if getattr(data, "node_pe", None) is None:
        data.node_pe = torch.zeros(data.num_nodes, node_pe_dim)
    if getattr(data, "edge_pe", None) is None:
        data.edge_pe_index, data.edge_pe = data.edge_index, torch.zeros(data.edge_index.shape[1], relative_pe_dim)
    return data


def collate_with_pe(batch: Sequence[Any]) -> Any:
    """Return a torch_geometric batch, with zero encodings for graphs without encodings."""
    from torch_geometric.data import Batch

    return Batch.from_data_list([ensure_data_has_pe(data) for data in batch])
