"""Probing tasks whose targets depend on nodes at a known distance, and linear probes of hidden states.

Every generator has its own seed; the global generators are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from treadle.errors import ConfigError, nearest
from treadle.graphs.encodings import hop_distances


def _data(**fields: Any) -> Any:
    from torch_geometric.data import Data

    return Data(**fields)


def _both_ways(ends: Tensor) -> Tensor:
    return torch.cat([ends, ends.flip(0)], dim=1)


class PathParityProbe:
    """Probe on paths of bits: the label of a node is the parity of the bits up to it.

    Args:
        path_length: number of nodes.

    Example:
        >>> data = PathParityProbe(4).generate_path_graph(seed=0)
        >>> torch.equal(data.y, data.x[:, 0].long().cumsum(0) % 2), data.distances.tolist()
        (True, [0, 1, 2, 3])
    """

    def __init__(self, path_length: int = 10):
        self.path_length = path_length

    def generate_path_graph(self, seed: int = 42) -> Any:
        """Return a path with bits ``x`` (N, 1), parities ``y`` (N,) and ``distances`` (N,) from its start."""
        generator = torch.Generator().manual_seed(seed)
        bits = torch.randint(0, 2, (self.path_length,), generator=generator)
        nodes = torch.arange(self.path_length)
        edge_index = _both_ways(torch.stack([nodes[:-1], nodes[1:]]))
        return _data(x=bits.float()[:, None], edge_index=edge_index, y=bits.cumsum(0) % 2, distances=nodes)

    def generate_batch(self, batch_size: int = 32, base_seed: int = 42) -> list[Any]:
        """Return paths generated with consecutive seeds."""
        return [self.generate_path_graph(base_seed + number) for number in range(batch_size)]


class NodeCountingProbe:
    """Probe for the number of nodes within each number of hops.

    Args:
        max_hops: maximum number of hops.

    Example:
        >>> path = PathParityProbe(3).generate_path_graph()
        >>> NodeCountingProbe(2).generate_task(path)[0].tolist()
        [[1.0, 2.0, 3.0], [1.0, 3.0, 3.0], [1.0, 2.0, 3.0]]
    """

    def __init__(self, max_hops: int = 5):
        self.max_hops = max_hops

    def generate_task(self, data: Any) -> tuple[Tensor, Tensor]:
        """Return counts (N, max_hops + 1) and distances (N, N), with -1 for pairs unconnected or too far apart."""
        hops = hop_distances(data.edge_index, data.num_nodes)
        hops = torch.where(hops > self.max_hops, -1, hops)
        limits = torch.arange(self.max_hops + 1)
        counts = ((hops[:, :, None] >= 0) & (hops[:, :, None] <= limits)).sum(1)
        return counts.float(), hops


class DistantNodeFeatureProbe:
    """Probe for the mean features of the nodes at a given distance.

    Args:
        distance: in hops.

    Example:
        >>> path = PathParityProbe(5).generate_path_graph()
        >>> sources, features, distances = DistantNodeFeatureProbe(4).generate_task(path)
        >>> sources.tolist(), torch.equal(features[0], path.x[4]), distances.tolist()
        ([0, 4], True, [4, 4])
    """

    def __init__(self, distance: int = 5):
        self.distance = distance

    def generate_task(
        self, data: Any, num_samples: int | None = None, *, seed: int = 42
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return nodes (S,) with others at the distance, the mean features of those (S, F), and the distance (S,).

        Args:
            data: a graph with float ``x``.
            num_samples: number of nodes to draw; None uses all.
            seed: seed of the draw.
        """
        at = hop_distances(data.edge_index, data.num_nodes) == self.distance
        sources = at.any(1).nonzero().flatten()
        if num_samples is not None and len(sources) > num_samples:
            drawn = torch.randperm(len(sources), generator=torch.Generator().manual_seed(seed))[:num_samples]
            sources = sources[drawn]
        weights = at[sources].to(data.x.dtype)
        features = weights @ data.x / weights.sum(1, keepdim=True)
        return sources, features, torch.full_like(sources, self.distance)


class SyntheticLongRangeTask:
    """Random graphs with node labels that depend on nodes a given number of hops away.

    The label of a node is whether the first feature of the nodes at ``signal_distance`` is positive on average, and 0.5
    if there are none.

    Args:
        graph_size: number of nodes.
        signal_distance: in hops.
        noise_level: scale of the features.

    Example:
        >>> data = SyntheticLongRangeTask(20, 3).generate(seed=1)
        >>> data.num_nodes, data.x.shape, sorted(set(data.y.flatten().tolist()) - {0.5})
        (20, torch.Size([20, 16]), [0.0, 1.0])
    """

    def __init__(self, graph_size: int = 100, signal_distance: int = 10, noise_level: float = 0.1):
        self.graph_size, self.signal_distance, self.noise_level = graph_size, signal_distance, noise_level

    def generate(self, seed: int = 42) -> Any:
        """Return a graph with ``x`` (N, 16), ``y`` (N, 1) and ``distances`` (N,) from node 0."""
        generator = torch.Generator().manual_seed(seed)
        later = torch.arange(1, self.graph_size)
        earlier = (torch.rand(len(later), generator=generator) * later).long()
        edge_index = _both_ways(torch.stack([later, earlier]))
        x = torch.randn(self.graph_size, 16, generator=generator) * self.noise_level
        hops = hop_distances(edge_index, self.graph_size)
        at = (hops == self.signal_distance).float()
        signal = at @ x[:, 0] / at.sum(1).clamp(min=1)
        y = torch.where(at.any(1), (signal > 0).float(), 0.5)
        return _data(x=x, edge_index=edge_index, y=y[:, None], distances=hops[0], signal_distance=self.signal_distance)


def create_probing_dataset(probe_type: str, num_samples: int = 100, **settings: Any) -> list[Any]:
    """Return graphs of a probing task, generated with consecutive seeds.

    Args:
        probe_type: ``"parity"`` or ``"long_range"``.
        num_samples: number of graphs.
        settings: arguments of the task's class.

    Raises:
        ConfigError: there is no such task.

    Example:
        >>> [graph.num_nodes for graph in create_probing_dataset("parity", 2, path_length=6)]
        [6, 6]
    """
    makers: dict[str, Callable[[], list[Any]]] = {
        "parity": lambda: PathParityProbe(**settings).generate_batch(num_samples),
        "long_range": lambda: [SyntheticLongRangeTask(**settings).generate(seed) for seed in range(num_samples)],
    }
    if probe_type not in makers:
        raise ConfigError(nearest(probe_type, makers), argument="probe_type", value=probe_type)
    return makers[probe_type]()


def linear_probe(hidden: Tensor, targets: Tensor, *, ridge: float = 1e-6) -> Callable[[Tensor], Tensor]:
    """Fit a linear map from hidden states to targets by ridge regression.

    Args:
        hidden: (A, D) hidden states, such as those of one layer.
        targets: (A,) or (A, T).
        ridge: L2 penalty.

    Returns:
        A function from (A, D) to predictions in the shape of the targets.

    Example:
        >>> hidden = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
        >>> probe = linear_probe(hidden, hidden @ torch.tensor([1.0, -2.0, 0.5]) + 3)
        >>> float((probe(torch.ones(1, 3)) - 2.5).abs()) < 1e-3
        True
    """
    with torch.no_grad():
        wide = hidden.double()
        mean, center = wide.mean(0), targets.double().mean(0)
        left = wide - mean
        gram = left.T @ left + ridge * torch.eye(left.shape[1], dtype=torch.float64, device=left.device)
        weights = torch.linalg.solve(gram, left.T @ (targets.double() - center))
    return lambda states: ((states.double() - mean) @ weights + center).to(hidden.dtype)


def probe_layers(
    hidden_states: Sequence[Tensor], targets: Tensor, distances: Tensor, *, max_distance: int = 20, holdout: float = 0.5
) -> list[dict[str, Any]]:
    """Evaluate linear probes of the targets on each layer, by distance.

    Args:
        hidden_states: (A, D) for each layer.
        targets: (A,).
        distances: (A,) in hops.
        max_distance: maximum distance.
        holdout: fraction of samples, taken from the end, that are scored and not fitted.

    Returns:
        The result of :meth:`treadle.graphs.long_range.LongRangeEvaluator.compute` for each layer.
    """
    from treadle.graphs.long_range import LongRangeEvaluator

    first = round(len(targets) * (1 - holdout))
    found = []
    for hidden in hidden_states:
        evaluator = LongRangeEvaluator(max_distance)
        probe = linear_probe(hidden[:first], targets[:first])
        evaluator.update(probe(hidden[first:]), targets[first:], distances[first:])
        found.append(evaluator.compute())
    return found
