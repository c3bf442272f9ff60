"""Pair encodings: hop distance, diffusion, effective resistance, distance to landmarks.

Pairs of one graph are stored densely: as an integer if there are only a few codes (``spd``, ``bfs``), else as a vector.
:func:`listed` converts either to the list of pairs that a model reads. A one-hot code takes a hundred times the memory
of its integer, so whole data sets are stored as integers (:class:`EncodedGraphs`).

Shapes: B = graphs, N = nodes, M = eigenvectors (= N), P = listed pairs, D = width, T = scales, L = landmarks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from treadle.errors import ConfigError
from treadle.errors.arguments import checked
from treadle.graphs.encodings.config import RelativePEConfig
from treadle.graphs.encodings.graphs import PlainGraphs, apart


@checked
def spd_pe(
    edge_index: Tensor, num_nodes: int, *, num_buckets: int = 32, max_distance: int = 10
) -> tuple[Tensor, Tensor]:
    """Return the one-hot hop distance of all pairs of nodes, including each node with itself.

    Distance d falls into bucket ⌊min(d, max_distance)·(num_buckets - 1)/max_distance⌋; an unconnected pair has the zero
    vector.

    Args:
        edge_index: (2, E) integer; direction, duplicates and self-loops are ignored.
        num_nodes: N.
        num_buckets: width of the code, at least 2.
        max_distance: larger distances share the last bucket.

    Returns:
        ``edge_pe_index`` (2, N²) int64 and ``edge_pe`` (N², num_buckets) float32.

    Raises:
        ConfigError: a setting is out of range, or an edge refers to a node outside the graph.

    Example:
        >>> pairs, code = spd_pe(torch.tensor([[0, 1], [1, 2]]), 3, num_buckets=3, max_distance=2)
        >>> pairs[:, 2].tolist(), code[2].tolist()
        ([0, 2], [0.0, 0.0, 1.0])
    """
    return _alone(edge_index, num_nodes, RelativePEConfig("spd", num_buckets, max_distance))


@checked
def bfs_pe(
    edge_index: Tensor, num_nodes: int, *, num_buckets: int = 32, max_distance: int = 10
) -> tuple[Tensor, Tensor]:
    """Return the code of :func:`spd_pe` only for pairs at distances 1 to ``max_distance``.

    The arguments are those of :func:`spd_pe`; pairs farther apart than ``max_distance`` are not listed.

    Returns:
        ``edge_pe_index`` (2, P) int64 and ``edge_pe`` (P, num_buckets) float32.

    Raises:
        ConfigError: a setting is out of range, or an edge refers to a node outside the graph.

    Example:
        >>> bfs_pe(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]]), 5, max_distance=2)[0].shape
        torch.Size([2, 14])
    """
    return _alone(edge_index, num_nodes, RelativePEConfig("bfs", num_buckets, max_distance))


@checked
def diffusion_pe(
    edge_index: Tensor, num_nodes: int, *, scales: Sequence[float] = (0.1, 1.0, 10.0)
) -> tuple[Tensor, Tensor]:
    """Return the heat that flows between all pairs of nodes: exp(-tL) of the normalised Laplacian.

    Args:
        edge_index: (2, E) integer; direction, duplicates and self-loops are ignored.
        num_nodes: N.
        scales: times t, above 0.

    Returns:
        ``edge_pe_index`` (2, N²) int64 and ``edge_pe`` (N², len(scales)) float32.

    Raises:
        ConfigError: a setting is out of range, or an edge refers to a node outside the graph.

    Example:
        >>> pairs, heat = diffusion_pe(torch.tensor([[0, 1, 2], [1, 2, 0]]), 3, scales=[1.0])
        >>> pairs[:, 1].tolist(), round(heat[1].item(), 6)
        ([0, 1], 0.258957)
    """
    return _alone(edge_index, num_nodes, RelativePEConfig("diffusion", scales=scales))


@checked
def resistance_pe(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Return the effective resistance between all pairs, with every edge a unit resistor.

    It is L⁺ᵢᵢ + L⁺ⱼⱼ - 2L⁺ᵢⱼ with L = D - A. It never exceeds the hop distance, and equals it if there is only one path
    (Klein and Randić 1993).

    Args:
        edge_index: (2, E) integer; direction, duplicates and self-loops are ignored.
        num_nodes: N.

    Returns:
        ``edge_pe_index`` (2, N²) int64 and ``edge_pe`` (N², 1) float32; 0 between components.

    Raises:
        ConfigError: an edge refers to a node outside the graph.

    Example:
        >>> pairs, ohm = resistance_pe(torch.tensor([[0, 1, 2], [1, 2, 0]]), 3)
        >>> pairs[:, 1].tolist(), round(ohm[1].item(), 6)
        ([0, 1], 0.666667)
    """
    return _alone(edge_index, num_nodes, RelativePEConfig("resistance"))


@checked
def landmark_pe(
    edge_index: Tensor,
    num_nodes: int,
    *,
    num_landmarks: int = 4,
    reduce: Sequence[str] = ("min", "max", "mean"),
    seed: int = 0,
    landmarks: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the difference between two nodes' distances to landmarks, |d(i, l) - d(j, l)|, reduced over landmarks l.

    Landmarks in a different component than the pair are ignored; a pair without any, or unconnected, has 0.

    Args:
        edge_index: (2, E) integer; direction, duplicates and self-loops are ignored.
        num_nodes: N.
        num_landmarks: nodes to draw; all nodes if there are fewer.
        reduce: ``"min"``, ``"max"`` and ``"mean"``, one column each.
        seed: seed of the draw. Nodes are drawn by index, so a different numbering gives different landmarks.
        landmarks: explicit landmark nodes instead of drawn ones.

    Returns:
        ``edge_pe_index`` (2, N²) int64 and ``edge_pe`` (N², len(reduce)) float32.

    Raises:
        ConfigError: a setting is out of range, or an edge or landmark refers to a node outside the graph.

    Example:
        >>> path = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
        >>> pairs, difference = landmark_pe(path, 5, landmarks=[0], reduce=["max"])
        >>> pairs[:, 8].tolist(), difference[8].item()
        ([1, 3], 2.0)
    """
    config = RelativePEConfig("landmark", num_landmarks=num_landmarks, reduce=reduce, seed=seed)
    graphs = PlainGraphs([edge_index], num_nodes)
    if landmarks is None:
        return _on(edge_index, *listed(pair_encoding(graphs, config)[0], config))
    if len(landmarks) == 0 or not all(0 <= node < num_nodes for node in landmarks):
        raise ConfigError(
            f"={list(landmarks)}: must be one node or more, numbered 0 to {num_nodes - 1}", argument="landmarks"
        )
    block_BNND = _landmark(graphs, torch.tensor(list(landmarks)), reduce)
    return _on(edge_index, *listed(block_BNND[0], config))


def pair_encoding(graphs: PlainGraphs, config: RelativePEConfig) -> Tensor:
    """Return the encoding of all pairs in the format of :func:`listed`.

    Returns:
        ``spd``, ``bfs``: (B, N, N) uint8, or int16 for more than 254 buckets; 1 + the bucket, and 0 for no code.
        Others: (B, N, N, D) float32.
    """
    if config.type in ("spd", "bfs"):
        return _buckets(graphs, config)
    if config.type == "diffusion":
        return _diffusion(graphs, config.scales)
    if config.type == "resistance":
        return _resistance(graphs)
    drawn = torch.randperm(graphs.num_nodes, generator=torch.Generator().manual_seed(config.seed))
    return _landmark(graphs, drawn[: config.num_landmarks], config.reduce)


def listed(block: Tensor, config: RelativePEConfig) -> tuple[Tensor, Tensor]:
    """Return the pairs of one graph and their vectors, ordered by the first node and then by the second.

    Args:
        block: one graph of :func:`pair_encoding`.
        config: settings of the encoding.

    Returns:
        ``edge_pe_index`` (2, P) int64 and ``edge_pe`` (P, dim) float32.
    """
    # This runs for every access to a graph; nonzero and index_select are several times as fast as the alternatives.
    kept_NN = block > 0 if config.type == "bfs" else torch.ones(block.shape[:2], dtype=torch.bool)
    index_2P = kept_NN.nonzero().T.contiguous()
    if block.is_floating_point():
        return index_2P, block.flatten(0, 1).clone()  # owned by the caller, like the code
    one_hot = torch.eye(config.num_buckets + 1)[:, 1:]  # code 0 is the zero vector
    return index_2P, one_hot.index_select(0, block[kept_NN].int())


def _alone(edge_index: Tensor, num_nodes: int, config: RelativePEConfig) -> tuple[Tensor, Tensor]:
    block_BNN = pair_encoding(PlainGraphs([edge_index], num_nodes), config)
    return _on(edge_index, *listed(block_BNN[0], config))


def _on(edge_index: Tensor, index_2P: Tensor, values_PD: Tensor) -> tuple[Tensor, Tensor]:
    return index_2P.to(edge_index.device), values_PD.to(edge_index.device)


def _buckets(graphs: PlainGraphs, config: RelativePEConfig) -> Tensor:
    hops_BNN = graphs.hops_BNN
    near_BNN = hops_BNN.clamp(max=config.max_distance).long()
    codes_BNN = 1 + near_BNN * (config.num_buckets - 1) // config.max_distance
    if config.type == "bfs":
        coded_BNN = (hops_BNN >= 1) & (hops_BNN <= config.max_distance)
    else:
        coded_BNN = graphs.connected_BNN
    return torch.where(coded_BNN, codes_BNN, 0).to(torch.uint8 if config.num_buckets <= 254 else torch.int16)


def _diffusion(graphs: PlainGraphs, scales: Sequence[float]) -> Tensor:
    def heat(values_M: Tensor, vectors_NM: Tensor) -> Tensor:
        return torch.stack([(vectors_NM * torch.exp(-t * values_M)) @ vectors_NM.mT for t in scales], dim=-1)

    # Between components the sum is 0 up to rounding.
    return (apart(heat, *graphs.spectrum) * graphs.connected_BNN.unsqueeze(-1)).float()


def _resistance(graphs: PlainGraphs) -> Tensor:
    """Return Σ (φ(i)/√dᵢ - φ(j)/√dⱼ)² / λ over the eigenvectors of the normalised Laplacian with λ > 0.

    This equals the formula for L = D - A (Lovász, "Random walks on graphs", 1993, from hitting times) without a second
    decomposition. λ = 0 occurs once per component.
    """
    values_BM, vectors_BNM = graphs.spectrum
    positive_BM = torch.arange(graphs.num_nodes) >= graphs.components_B.unsqueeze(-1)
    weight_BM = torch.where(positive_BM, values_BM.clamp(min=1e-300).rsqrt(), 0.0)
    scale_BN = graphs.degrees_BN.double().clamp(min=1).rsqrt()
    spread_BNM = vectors_BNM * weight_BM.unsqueeze(1) * scale_BN.unsqueeze(-1)
    gram_BNN = apart(lambda spread_NM: spread_NM @ spread_NM.mT, spread_BNM)
    own_BN = gram_BNN.diagonal(dim1=-2, dim2=-1)
    ohm_BNN = (own_BN.unsqueeze(-1) + own_BN.unsqueeze(-2) - 2 * gram_BNN).clamp(min=0.0)
    ohm_BNN.diagonal(dim1=-2, dim2=-1).zero_()
    return (ohm_BNN * graphs.connected_BNN).unsqueeze(-1).float()


def _landmark(graphs: PlainGraphs, landmarks_L: Tensor, reduce: Sequence[str]) -> Tensor:
    hops_BNL = graphs.hops_BNN[:, :, landmarks_L].double()
    difference_BNNL = (hops_BNL.unsqueeze(2) - hops_BNL.unsqueeze(1)).abs()
    # For a connected pair, one node reaches the landmark if and only if the other does.
    counts_BNNL = (hops_BNL >= 0).unsqueeze(2) & graphs.connected_BNN.unsqueeze(-1)
    counted_BNN = counts_BNNL.sum(dim=-1)
    reduced = {
        "min": lambda: difference_BNNL.masked_fill(~counts_BNNL, torch.inf).amin(dim=-1),
        "max": lambda: (difference_BNNL * counts_BNNL).amax(dim=-1),
        "mean": lambda: (difference_BNNL * counts_BNNL).sum(dim=-1) / counted_BNN,
    }
    stacked_BNND = torch.stack([reduced[name]() for name in reduce], dim=-1)
    return torch.where((counted_BNN > 0).unsqueeze(-1), stacked_BNND, 0.0).float()
