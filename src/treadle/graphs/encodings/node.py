"""Node encodings: Laplacian eigenvectors, random walks, heat kernels, structural roles.

All are computed on the plain graph (:mod:`treadle.graphs.encodings.graphs`), in float64, and returned as float32.

Shapes: B = graphs, N = nodes, M = eigenvectors (= N), K = columns, T = scales.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from treadle.errors.arguments import checked
from treadle.graphs.encodings.config import HKSConfig, LapConfig, NodePEConfig, RoleConfig, RWSEConfig
from treadle.graphs.encodings.graphs import PlainGraphs, apart

# Eigenvalues closer than this are treated as equal, and those below it as zero. eigh is accurate to about 1e-15.
_EQUAL = 1e-6


@checked
def lap_pe(edge_index: Tensor, num_nodes: int, *, k: int = 16, sign_invariant: str = "abs") -> Tensor:
    """Return eigenvectors φ of the normalised Laplacian I - D^-½ A D^-½ (the row of an isolated node is 0).

    Eigenvalues below 1e-6 are skipped; the rest are in ascending order. An eigenvector's sign is arbitrary, and so is
    its direction within a repeated eigenspace, so one of three functions of it is returned.

    Args:
        edge_index: (2, E) integer; direction, duplicates and self-loops are ignored.
        num_nodes: N.
        k: columns, zero-padded.
        sign_invariant: ``"abs"``: the absolute value; for repeated eigenvalues, the root of the mean of φ² over the
            eigenspace. ``"square"``: the mean of φ² over the eigenspace. Neither depends on the basis found for an
            eigenspace. ``"flip"``: φ with its largest entry positive (the first if tied); :class:`RandomSignFlip` draws
            new signs in training. For repeated eigenvalues, ``"flip"`` depends on the numbering of the nodes.

    Returns:
        (N, k) float32.

    Raises:
        ConfigError: a setting is out of range, or an edge refers to a node outside the graph.

    Example:
        >>> path = torch.tensor([[0, 1], [1, 2]])
        >>> lap_pe(path, 3, k=3).abs().mul(100).round().tolist()
        [[71.0, 50.0, 0.0], [0.0, 71.0, 0.0], [71.0, 50.0, 0.0]]
    """
    return _alone(_lap, edge_index, num_nodes, LapConfig(k, sign_invariant))


@checked
def rwse_pe(edge_index: Tensor, num_nodes: int, *, scales: Sequence[int] = RWSEConfig.scales) -> Tensor:
    """Return the probability that a random walk returns to its start after t steps: diag(P^t), P = D⁻¹A.

    Args:
        edge_index: (2, E) integer; direction, duplicates and self-loops are ignored.
        num_nodes: N.
        scales: numbers of steps t, at least 1.

    Returns:
        (N, len(scales)) float32; 0 for an isolated node.

    Raises:
        ConfigError: a setting is out of range, or an edge refers to a node outside the graph.

    Example:
        >>> rwse_pe(torch.tensor([[0, 1, 2], [1, 2, 0]]), 3, scales=[1, 2, 3, 4])[0].tolist()
        [0.0, 0.5, 0.25, 0.375]
    """
    return _alone(_rwse, edge_index, num_nodes, RWSEConfig(scales))


@checked
def hks_pe(edge_index: Tensor, num_nodes: int, *, scales: Sequence[float] = (0.1, 0.5, 1.0, 2.0, 5.0)) -> Tensor:
    """Return the heat kernel signature diag(exp(-tL)) of the normalised Laplacian, over all eigenvalues.

    Sun, Ovsjanikov and Guibas, "A concise and provably informative multi-scale signature based on heat diffusion",
    2009.

    Args:
        edge_index: (2, E) integer; direction, duplicates and self-loops are ignored.
        num_nodes: N.
        scales: times t, above 0.

    Returns:
        (N, len(scales)) float32, between 0 and 1; 1 for an isolated node.

    Raises:
        ConfigError: a setting is out of range, or an edge refers to a node outside the graph.

    Example:
        >>> round(hks_pe(torch.tensor([[0, 1, 2], [1, 2, 0]]), 3, scales=[1.0])[0].item(), 6)
        0.482087
    """
    return _alone(_hks, edge_index, num_nodes, HKSConfig(scales))


@checked
def role_pe(
    edge_index: Tensor, num_nodes: int, *, features: Sequence[str] = ("degree", "clustering", "kcore")
) -> Tensor:
    """Return the structural role of each node: log(1 + degree), clustering coefficient, core number.

    Args:
        edge_index: (2, E) integer; direction, duplicates and self-loops are ignored.
        num_nodes: N.
        features: which of the three, in order.

    Returns:
        (N, len(features)) float32.

    Raises:
        ConfigError: a setting is out of range, or an edge refers to a node outside the graph.

    Example:
        >>> role_pe(torch.tensor([[0, 1, 2], [1, 2, 0]]), 3, features=["clustering", "kcore"])[0].tolist()
        [1.0, 2.0]
    """
    return _alone(_role, edge_index, num_nodes, RoleConfig(features))


def node_encoding(graphs: PlainGraphs, config: NodePEConfig) -> Tensor:
    """Return the configured encoding, (B, N, dim) float32, zero-padded to ``dim`` columns."""
    parts: dict[str, Callable[[], Tensor]] = {
        "lap": lambda: _lap(graphs, config.lap),
        "rwse": lambda: _rwse(graphs, config.rwse),
        "hks": lambda: _hks(graphs, config.hks),
        "role": lambda: _role(graphs, config.role),
    }
    found_BNK = torch.cat([parts[name]() for name in config.blocks], dim=-1)
    if config.normalize == "graph":
        found_BNK = apart(_standardised, found_BNK)
    return torch.nn.functional.pad(found_BNK.float(), (0, config.width - config.columns))


def _alone(encoding: Callable[..., Tensor], edge_index: Tensor, num_nodes: int, config: object) -> Tensor:
    return encoding(PlainGraphs([edge_index], num_nodes), config)[0].float().to(edge_index.device)


def _lap(graphs: PlainGraphs, config: LapConfig) -> Tensor:
    values_BM, vectors_BNM = graphs.spectrum
    vectors_BNM = apart(partial(_without_sign, how=config.sign_invariant), values_BM, vectors_BNM)
    zeros_B1 = (values_BM < _EQUAL).sum(dim=-1, keepdim=True)
    wanted_BK = zeros_B1 + torch.arange(config.k)
    there_BK = wanted_BK < graphs.num_nodes
    column_BNK = wanted_BK.clamp(max=graphs.num_nodes - 1).unsqueeze(1).expand(-1, graphs.num_nodes, -1)
    return torch.where(there_BK.unsqueeze(1), vectors_BNM.gather(2, column_BNK), 0.0)


def _without_sign(values_M: Tensor, vectors_NM: Tensor, how: str) -> Tensor:
    size_NM = vectors_NM.abs()
    if how == "flip":
        largest_NM = size_NM >= size_NM.amax(dim=0) - _EQUAL
        first_1M = largest_NM.to(torch.uint8).argmax(dim=0, keepdim=True)
        return vectors_NM * vectors_NM.gather(0, first_1M).sign()
    # Number the eigenspaces, sum φ² within each, and give every column the mean of its eigenspace.
    space_M = (torch.diff(values_M, prepend=values_M[:1]) > _EQUAL).cumsum(dim=0)
    width_M = torch.bincount(space_M, minlength=len(space_M))[space_M]
    summed_NM = torch.zeros_like(vectors_NM).index_add_(1, space_M, vectors_NM.square())[:, space_M]
    mean_NM = summed_NM / width_M
    return mean_NM if how == "square" else torch.where(width_M > 1, mean_NM.sqrt(), size_NM)


def _rwse(graphs: PlainGraphs, config: RWSEConfig) -> Tensor:
    return apart(partial(_return_probabilities, scales=config.scales), graphs.transition_BNN)


def _return_probabilities(transition_NN: Tensor, scales: Sequence[int]) -> Tensor:
    powers = {1: transition_NN}

    def power(steps: int) -> Tensor:
        if steps not in powers:
            powers[steps] = power((steps + 1) // 2) @ power(steps // 2)
        return powers[steps]

    def returning(steps: int) -> Tensor:
        if steps == 1:  # there are no self-loops
            return transition_NN.new_zeros(len(transition_NN))
        # The diagonal of a product does not need the full product.
        return (power((steps + 1) // 2) * power(steps // 2).mT).sum(dim=-1)

    return torch.stack([returning(steps) for steps in scales], dim=-1)


def _hks(graphs: PlainGraphs, config: HKSConfig) -> Tensor:
    times_T = torch.tensor(list(config.scales), dtype=torch.float64)

    def signature(values_M: Tensor, vectors_NM: Tensor) -> Tensor:
        return vectors_NM.square() @ torch.exp(-values_M.unsqueeze(-1) * times_T)

    return apart(signature, *graphs.spectrum)


def _role(graphs: PlainGraphs, config: RoleConfig) -> Tensor:
    features: dict[str, Callable[[], Tensor]] = {
        "degree": lambda: apart(torch.log1p, graphs.degrees_BN.double()),
        "clustering": lambda: _clustering(graphs),
        "kcore": lambda: graphs.cores_BN.double(),
    }
    return torch.stack([features[name]() for name in config.features], dim=-1)


def _clustering(graphs: PlainGraphs) -> Tensor:
    """Return triangles at each node over pairs of its neighbours, both integers; 0 if there are no pairs."""
    adjacency_BNN = graphs.adjacency_BNN
    twice_triangles_BN = ((adjacency_BNN @ adjacency_BNN) * adjacency_BNN).sum(dim=-1)
    degrees_BN = graphs.degrees_BN
    return twice_triangles_BN / (degrees_BN * (degrees_BN - 1)).clamp(min=1)


def _standardised(values_NK: Tensor) -> Tensor:
    centred_NK = values_NK - values_NK.mean(dim=0)
    deviation_K = centred_NK.square().mean(dim=0).sqrt()
    # Rounding leaves about 1e-16 of a constant column; real columns vary much more.
    constant_K = deviation_K <= 1e-12 * values_NK.abs().amax(dim=0).clamp(min=1.0)
    return torch.where(constant_K, 0.0, centred_NK / deviation_K)
