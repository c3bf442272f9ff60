"""Ten families of random graphs. A size is a number, or the bounds of a range it is drawn from."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import networkx as nx
import numpy as np
import torch
from torch import Tensor

from treadle.errors import ConfigError, refuse_unknown
from treadle.errors.arguments import check_argument, check_whole, check_within

__all__ = ["FAMILIES", "check_graph_params", "draw_graph"]

Size: TypeAlias = "int | Sequence[int]"


def grid_2d(rng: np.random.Generator, *, height: Size = (4, 8), width: Size = (4, 8)) -> Any:
    """Draw a rectangular grid."""
    return nx.grid_graph([_size(rng, height), _size(rng, width)])


def grid_3d(rng: np.random.Generator, *, height: Size = (2, 4), width: Size = (2, 4), depth: Size = (3, 4)) -> Any:
    """Draw a three-dimensional grid."""
    return nx.grid_graph([_size(rng, height), _size(rng, width), _size(rng, depth)])


def ring(rng: np.random.Generator, *, num_nodes: Size = (16, 40)) -> Any:
    """Draw one cycle."""
    return nx.cycle_graph(_size(rng, num_nodes))


def tree(
    rng: np.random.Generator, *, num_nodes: Size = (16, 40), branching: Size | None = None, height: Size = 4
) -> Any:
    """Draw a uniformly random labelled tree, or with `branching` a full tree with that many branches per node."""
    if branching is not None:
        return nx.balanced_tree(_size(rng, branching), _size(rng, height))
    return nx.random_labeled_tree(_size(rng, num_nodes), seed=_seed(rng))


def random_regular(rng: np.random.Generator, *, num_nodes: Size = (16, 40), degree: int = 3) -> Any:
    """Draw a graph where every node has `degree` neighbours; if both numbers are odd, it has one more node."""
    size = _size(rng, num_nodes)
    return nx.random_regular_graph(degree, size + size * degree % 2, seed=_seed(rng))


def barabasi_albert(rng: np.random.Generator, *, num_nodes: Size = (16, 40), m: int = 2) -> Any:
    """Draw a graph by preferential attachment: each new node joins `m` others, favouring those with many neighbours."""
    return nx.barabasi_albert_graph(_size(rng, num_nodes), m, seed=_seed(rng))


def watts_strogatz(rng: np.random.Generator, *, num_nodes: Size = (16, 40), k: int = 4, p: float = 0.1) -> Any:
    """Draw a ring with edges to the `k` nearest nodes, each rewired to a random end with probability `p`."""
    return nx.watts_strogatz_graph(_size(rng, num_nodes), k, p, seed=_seed(rng))


def erdos_renyi(rng: np.random.Generator, *, num_nodes: Size = (16, 40), p: float = 0.1) -> Any:
    """Draw a graph where every pair is an edge with probability `p`."""
    return nx.gnp_random_graph(_size(rng, num_nodes), p, seed=_seed(rng))


def sbm(
    rng: np.random.Generator,
    *,
    num_blocks: Size = (2, 4),
    block_size: Size = (6, 12),
    p_in: float = 0.4,
    p_out: float = 0.02,
) -> Any:
    """Draw blocks of nodes: a pair is an edge with probability `p_in` within a block and `p_out` between blocks."""
    sizes = [_size(rng, block_size) for _ in range(_size(rng, num_blocks))]
    chances = np.where(np.eye(len(sizes)) > 0, p_in, p_out)
    return nx.stochastic_block_model(sizes, chances.tolist(), seed=_seed(rng))


def random_geometric(rng: np.random.Generator, *, num_nodes: Size = (16, 40), radius: float = 0.25) -> Any:
    """Draw points in the unit square, joined up to the distance `radius`."""
    return nx.random_geometric_graph(_size(rng, num_nodes), radius, seed=_seed(rng))


FAMILIES = {
    family.__name__: family
    for family in (
        barabasi_albert, erdos_renyi, grid_2d, grid_3d, random_geometric, random_regular, ring, sbm, tree,
        watts_strogatz,
    )
}  # fmt: skip
"""The families by name."""
_OTHER_NAMES: Mapping[str, Mapping[str, str]] = {
    "grid_2d": {"m": "height", "n": "width"},
    "grid_3d": {"m": "height", "n": "width", "k": "depth"},
    "tree": {"n": "num_nodes", "r": "branching", "h": "height"},
    "random_regular": {"n": "num_nodes", "d": "degree"},
    **{
        name: {"n": "num_nodes"}
        for name in ("barabasi_albert", "erdos_renyi", "random_geometric", "ring", "watts_strogatz")
    },
}
"""Names of settings in networkx and mspe, by family."""


def graph_params_of(family: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the settings of a family to this library's names.

    Raises:
        ConfigError: a setting is given under both of its names.

    Example:
        >>> graph_params_of("ring", {"n": 20}), graph_params_of("grid_2d", {"m": 3, "width": 4})
        ({'num_nodes': 20}, {'height': 3, 'width': 4})
    """
    names = _OTHER_NAMES.get(family, {})
    found: dict[str, Any] = {}
    for name, value in params.items():
        ours = names.get(name, name)
        if ours in found:
            raise ConfigError(f"is given twice, as {name!r} too; give one", argument=f"graph_params.{ours}")
        found[ours] = value
    return found


def check_graph_params(family: str, params: Mapping[str, Any]) -> None:
    """Raise ConfigError for an unknown setting of the family, or an invalid value.

    Example:
        >>> check_graph_params("ring", {"num_nodes": (30, 20)})
        Traceback (most recent call last):
        treadle.errors.ConfigError: graph_params.num_nodes=(30, 20) must be a whole number of at least 1, or the lowest
        and the highest of a range
    """
    known = inspect.signature(FAMILIES[family]).parameters.keys() - {"rng"}
    refuse_unknown(f"graph_params of {family}", params, known)
    for name, value in params.items():
        if name in ("p", "p_in", "p_out", "radius"):
            check_argument(f"graph_params.{name}", value, float)
            check_within("[0, 1]", **{f"graph_params.{name}": value})
        elif name in ("m", "k", "degree"):
            check_whole(1, **{f"graph_params.{name}": value})
        else:
            _check_size(name, value)


def _check_size(name: str, value: Any) -> None:
    ends = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value, value]
    whole = len(ends) == 2 and all(isinstance(end, int) and not isinstance(end, bool) for end in ends)
    if not whole or not 1 <= ends[0] <= ends[1]:
        raise ConfigError(
            " must be a whole number of at least 1, or the lowest and the highest of a range",
            argument=f"graph_params.{name}",
            value=value,
        )


def draw_graph(family: str, params: Mapping[str, Any], rng: np.random.Generator) -> tuple[Tensor, int]:
    """Draw one graph.

    Args:
        family: a key of :data:`FAMILIES`.
        params: its settings, as validated by :func:`check_graph_params`.
        rng: the only source of randomness.

    Returns:
        ``edge_index`` (2, E) int64 with both directions of every edge and no self-loops, and the number of nodes.

    Raises:
        ConfigError: no graph has these settings, such as more neighbours than nodes.

    Example:
        >>> edge_index, num_nodes = draw_graph("ring", {"num_nodes": 4}, np.random.default_rng(0))
        >>> num_nodes, edge_index.shape
        (4, torch.Size([2, 8]))
    """
    try:
        graph = FAMILIES[family](rng, **params)
    except nx.NetworkXException as error:
        raise ConfigError(
            f"={dict(params)} give no graph of the family {family}: {error}", argument="graph_params"
        ) from error
    number = {node: index for index, node in enumerate(graph)}
    ends = [(number[a], number[b]) for a, b in graph.edges if a != b]
    one_way = torch.tensor(ends, dtype=torch.int64).view(-1, 2).t()
    both = torch.cat([one_way, one_way.flip(0)], dim=1)
    order = (both[0] * len(number) + both[1]).argsort()
    return both[:, order], len(number)


def _size(rng: np.random.Generator, size: Size) -> int:
    low, high = (size, size) if isinstance(size, int) else size
    return int(rng.integers(low, high, endpoint=True))


def _seed(rng: np.random.Generator) -> int:
    return int(rng.integers(2**31))
