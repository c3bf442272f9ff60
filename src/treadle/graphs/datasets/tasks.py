"""Six tasks on generated graphs, at graph, node or pair level.

A task provides ``x`` (N, F) float32 and ``y``, one value per graph, node or pair; pairs are listed in ``pair_index``
(2, P). For tasks without a node signal, ``x`` is log(1 + degree), one column.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from treadle.errors import ConfigError, nearest, refuse_unknown
from treadle.errors.arguments import check_argument, check_whole, check_within
from treadle.graphs.datasets.base import Described
from treadle.graphs.encodings import core_numbers, hop_distances

__all__ = ["TASKS", "make_task"]

Fields: TypeAlias = dict[str, Tensor]


class SyntheticTask:
    """Base class of tasks, which describe themselves and add fields to a graph."""

    described: Described

    def label(self, edge_index: Tensor, num_nodes: int, rng: np.random.Generator) -> Fields | None:
        """Return ``x``, ``y`` and, for pairs, ``pair_index``; None if the task is undefined on the graph."""
        raise NotImplementedError


@dataclass(frozen=True)
class PairwiseDistanceClassification(SyntheticTask):
    """Classification of node pairs by whether at most `distance_threshold` hops separate them (unconnected: no)."""

    distance_threshold: int = 3
    num_pairs: int = 64
    described = Described(level="edge", task_type="edge_prediction", num_features=1, num_classes=1)

    def label(self, edge_index: Tensor, num_nodes: int, rng: np.random.Generator) -> Fields | None:
        """Return ``y`` (P,) of 0.0 and 1.0."""
        hops = hop_distances(edge_index, num_nodes)
        pairs = _draw_pairs(torch.ones_like(hops, dtype=torch.bool), self.num_pairs, rng)
        if pairs is None:
            return None
        distances = hops[pairs[0], pairs[1]]
        near = (distances >= 0) & (distances <= self.distance_threshold)
        return {"x": _log_degrees(edge_index, num_nodes), "y": near.float(), "pair_index": pairs}


@dataclass(frozen=True)
class DistanceRegression(SyntheticTask):
    """Regression of the number of hops between two connected nodes."""

    num_pairs: int = 64
    described = Described(level="edge", task_type="regression", num_features=1, num_classes=1)

    def label(self, edge_index: Tensor, num_nodes: int, rng: np.random.Generator) -> Fields | None:
        """Return ``y`` (P,) in hops, float32."""
        hops = hop_distances(edge_index, num_nodes)
        pairs = _draw_pairs(hops > 0, self.num_pairs, rng)
        if pairs is None:
            return None
        return {"x": _log_degrees(edge_index, num_nodes), "y": hops[pairs[0], pairs[1]].float(), "pair_index": pairs}


@dataclass(frozen=True)
class PECapacity(SyntheticTask):
    """Classification of pair distance with identical node features, which tests what encodings alone convey.

    Class c means c + 1 hops, the last one `max_distance` or more.
    """

    max_distance: int = 8
    num_pairs: int = 64

    @property
    def described(self) -> Described:  # type: ignore[override]
        """Description with one class per pair."""
        return Described("edge", "classification", num_features=1, num_classes=self.max_distance)

    def label(self, edge_index: Tensor, num_nodes: int, rng: np.random.Generator) -> Fields | None:
        """Return ``y`` (P,) of classes, int64, and ``x`` of ones."""
        hops = hop_distances(edge_index, num_nodes)
        pairs = _draw_pairs(hops > 0, self.num_pairs, rng)
        if pairs is None:
            return None
        classes = hops[pairs[0], pairs[1]].clamp(max=self.max_distance) - 1
        return {"x": torch.ones(num_nodes, 1), "y": classes, "pair_index": pairs}


@dataclass(frozen=True)
class StructuralRole(SyntheticTask):
    """Classification of nodes by core number; class `num_classes` - 1 includes all higher ones."""

    num_classes: int = 4

    @property
    def described(self) -> Described:  # type: ignore[override]
        """Description with one class per node."""
        return Described("node", "classification", num_features=1, num_classes=self.num_classes)

    def label(self, edge_index: Tensor, num_nodes: int, rng: np.random.Generator) -> Fields | None:
        """Return ``y`` (N,) of classes, int64."""
        roles = core_numbers(edge_index, num_nodes).clamp(max=self.num_classes - 1)
        return {"x": _log_degrees(edge_index, num_nodes), "y": roles}


@dataclass(frozen=True)
class LocalVsGlobal(SyntheticTask):
    """Classification by whether a random signal is positive on average near or far from a marked node, by `scope`.

    Near nodes are within `local_threshold` hops, including the marked one; far nodes at `global_threshold` or more.
    """

    scope: str = "global"
    local_threshold: int = 3
    global_threshold: int = 5
    described = Described(level="graph", task_type="classification", num_features=2, num_classes=2)

    def __post_init__(self) -> None:
        if self.scope not in ("local", "global"):
            raise ConfigError(
                f"{nearest(str(self.scope), ('local', 'global'))}", argument="task_params.scope", value=self.scope
            )

    def label(self, edge_index: Tensor, num_nodes: int, rng: np.random.Generator) -> Fields | None:
        """Return ``y`` (1,), 0 or 1, and ``x`` (N, 2): the signal and the mark."""
        hops = hop_distances(edge_index, num_nodes)
        near = (hops >= 0) & (hops <= self.local_threshold)
        asked = near if self.scope == "local" else hops >= self.global_threshold
        candidates = asked.any(1).nonzero().flatten()
        if len(candidates) == 0:
            return None
        marked = int(rng.choice(candidates.numpy()))
        signal = torch.from_numpy(rng.standard_normal(num_nodes, dtype=np.float32))
        mark = torch.zeros(num_nodes)
        mark[marked] = 1.0
        positive = signal[asked[marked]].double().mean() > 0
        return {"x": torch.stack([signal, mark], 1), "y": positive.long().view(1)}


@dataclass(frozen=True)
class DiffusionSource(SyntheticTask):
    """Localisation of a diffusion source: at each step every node passes a fraction `rate` evenly to its neighbours."""

    diffusion_steps: int = 5
    rate: float = 0.5
    described = Described(level="node", task_type="classification", num_features=1, num_classes=2)

    def label(self, edge_index: Tensor, num_nodes: int, rng: np.random.Generator) -> Fields | None:
        """Return ``y`` (N,), 1 at the source, and ``x`` (N, 1), the state, whose sum is 1."""
        source = int(rng.integers(num_nodes))
        degrees = torch.bincount(edge_index[0], minlength=num_nodes)
        state = torch.zeros(num_nodes, dtype=torch.float64)
        state[source] = 1.0
        for _ in range(self.diffusion_steps):
            handed = torch.where(degrees > 0, self.rate * state, 0.0)
            share = handed / degrees.clamp(min=1)
            state = state - handed + torch.zeros_like(state).index_add_(0, edge_index[1], share[edge_index[0]])
        is_source = torch.zeros(num_nodes, dtype=torch.int64)
        is_source[source] = 1
        return {"x": state.float().unsqueeze(1), "y": is_source}


TASKS: dict[str, Callable[..., SyntheticTask]] = {
    "diffusion_source": DiffusionSource,
    "distance_regression": DistanceRegression,
    "local_vs_global": LocalVsGlobal,
    "pairwise_distance_classification": PairwiseDistanceClassification,
    "pe_capacity": PECapacity,
    "structural_role": StructuralRole,
}
"""The tasks by name."""


def make_task(name: str, params: Mapping[str, Any]) -> SyntheticTask:
    """Build a task and validate its settings.

    Raises:
        ConfigError: the task or a setting is unknown, or a value is out of range.

    Example:
        >>> make_task("structural_role", {"num_classes": 3}).described.num_classes
        3
    """
    if name not in TASKS:
        raise ConfigError(nearest(str(name), TASKS), argument="task", value=name)
    kind: Any = TASKS[name]
    refuse_unknown(f"task_params of {name}", params, [field.name for field in dataclasses.fields(kind)])
    least = {"num_classes": 2, "max_distance": 2, "diffusion_steps": 0, "local_threshold": 0}
    for key, value in params.items():
        if key == "rate":
            check_argument("task_params.rate", value, float)
            check_within("(0, 1]", task_params__rate=value)
        elif key != "scope":
            check_whole(least.get(key, 1), **{f"task_params.{key}": value})
    task: SyntheticTask = kind(**params)
    return task


def _log_degrees(edge_index: Tensor, num_nodes: int) -> Tensor:
    return torch.bincount(edge_index[0], minlength=num_nodes).float().log1p().unsqueeze(1)


def _draw_pairs(allowed_NN: Tensor, most: int, rng: np.random.Generator) -> Tensor | None:
    """Draw up to ``most`` distinct pairs (2, P), the smaller index first; return None if none is allowed."""
    pairs = allowed_NN.triu(1).nonzero()
    if len(pairs) == 0:
        return None
    chosen = rng.choice(len(pairs), min(most, len(pairs)), replace=False)
    return pairs[torch.from_numpy(np.sort(chosen))].t().contiguous()
