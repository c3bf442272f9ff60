"""What every data set of graphs looks like: three splits, the widths a model needs, and the kind of its target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from treadle.errors import ConfigError
from treadle.errors.arguments import checked

if TYPE_CHECKING:
    from treadle.graphs.datasets.packed import GraphSplit

Level: TypeAlias = Literal["graph", "node", "edge"]
TaskType: TypeAlias = Literal["regression", "classification", "multilabel", "edge_prediction"]
Indices: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Described:
    """What a model and a trainer need to know of the graphs."""

    level: Level
    """What a target belongs to: the graph, each node, or each pair of `pair_index`."""
    task_type: TaskType
    """Which loss and metrics fit, as in `get_loss_fn` and `get_metrics`."""
    num_features: int
    """Rows of the atom table for integer `x`; columns of a float `x`."""
    num_classes: int
    """Outputs of the model: 1 for one regression target or one logit."""
    num_edge_features: int | None = None
    """Rows of the bond table for integer `edge_attr`, columns of a float one; None: the edges carry nothing."""
    target_names: tuple[str, ...] = field(default=(), kw_only=True)
    """A name for each column of `y`; empty where the source names none."""


@checked
@dataclass(frozen=True)
class GraphDataset(Described):
    """Three splits of graphs and what a model needs to know of them.

    A split is list-like: ``len(split)``, ``split[i]`` (a ``torch_geometric.data.Data``), ``split[:100]``, and any
    DataLoader of torch_geometric reads it.
    """

    name: str = field(kw_only=True)
    """The name that was asked for."""
    train: Sequence[Any] = field(kw_only=True, repr=False)
    """Graphs to train on."""
    val: Sequence[Any] = field(kw_only=True, repr=False)
    """Graphs to choose by."""
    test: Sequence[Any] = field(kw_only=True, repr=False)
    """Graphs to report on; never part of the other two."""
    node_pe_dim: int | None = None
    """Columns of `node_pe`; None: no node encoding was asked for."""
    relative_pe_dim: int | None = None
    """Columns of `edge_pe`; None: no relative encoding was asked for."""

    def get_splits(self) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """Return the training, validation and test split."""
        return self.train, self.val, self.test


@dataclass(frozen=True)
class Source:
    """All graphs of one source, before encodings, and how it splits them."""

    described: Described
    graphs: GraphSplit
    official: tuple[Indices, Indices, Indices]
    """Numbers of the graphs for training, validation and test."""
    has_test_set: bool
    """Whether the test set is the source's own, which no other split may change."""
    molecules: Indices | None = None
    """(G,) graphs of one number are one and the same, and stay in the training part; None: none is there twice."""

    def __post_init__(self) -> None:
        for name, chosen in zip(("training", "validation", "test"), self.official, strict=True):
            if len(chosen) == 0:
                raise ConfigError(
                    f"the {name} split would be empty with {len(self.graphs)} graphs; ask for more: a tenth each is "
                    "validation and test"
                )

    def redrawn(self, seed: int) -> tuple[Indices, Indices, Indices]:
        """Return splits of the same sizes drawn by ``seed``; a test set of the source's own stays as it is."""
        train, val, test = self.official
        pool = np.concatenate([train, val] if self.has_test_set else [train, val, test])
        drawn = np.random.default_rng(seed).permutation(np.sort(pool))
        if self.molecules is not None:
            drawn = repeats_first(drawn, self.molecules)
        rest = test if self.has_test_set else drawn[len(train) + len(val) :]
        return drawn[: len(train)], drawn[len(train) : len(train) + len(val)], rest


def repeats_first(order: Indices, molecules: Indices) -> Indices:
    """Move repeated items to the front, equal ones side by side, so that no later part has it too.

    Args:
        order: (N,) numbers of graphs.
        molecules: (G,) graphs of one number are one and the same.

    Example:
        >>> repeats_first(np.array([3, 0, 2, 1]), np.array([7, 8, 9, 7])).tolist()
        [3, 0, 2, 1]
        >>> repeats_first(np.array([2, 0, 1, 3]), np.array([7, 8, 9, 7])).tolist()
        [0, 3, 2, 1]
    """
    _, first, number, counts = np.unique(molecules[order], return_index=True, return_inverse=True, return_counts=True)
    place = np.where(counts > 1, first, len(order))[number]
    return order[np.argsort(place, kind="stable")]


def scaffold_split(scaffolds: Sequence[str]) -> tuple[Indices, Indices, Indices]:
    """Split molecules 80/10/10 so that no scaffold is in two parts: the largest groups are for training.

    The usual split of molecules (Wu et al. 2018, "MoleculeNet"): it tests on scaffolds that were not trained on.

    Args:
        scaffolds: that of each molecule, as `murcko_scaffold` names it.

    Example:
        >>> [part.tolist() for part in scaffold_split(["a"] * 7 + ["b", "c", "d"])]
        [[0, 1, 2, 3, 4, 5, 6, 7], [8], [9]]
    """
    groups: dict[str, list[int]] = {}
    for number, scaffold in enumerate(scaffolds):
        groups.setdefault(scaffold, []).append(number)
    most_train, most_val = (8 * len(scaffolds)) // 10, (9 * len(scaffolds)) // 10
    train: list[int] = []
    val: list[int] = []
    test: list[int] = []
    for group in sorted(groups.values(), key=lambda group: (-len(group), group[0])):
        if len(train) + len(group) <= most_train:
            train += group
        elif len(train) + len(val) + len(group) <= most_val:
            val += group
        else:
            test += group
    first, second, third = (np.array(sorted(part), dtype=np.int64) for part in (train, val, test))
    return first, second, third


def tenths(numbers: Indices) -> tuple[Indices, Indices, Indices]:
    """Cut numbers into the first 80 %, the next 10 % and the last 10 %, rounded in favour of the first.

    Example:
        >>> [len(part) for part in tenths(np.arange(4990))]
        [3992, 499, 499]
    """
    tenth = len(numbers) // 10
    train = len(numbers) - 2 * tenth
    return numbers[:train], numbers[train : train + tenth], numbers[train + tenth :]


def consecutive(*sizes: int) -> tuple[Indices, Indices, Indices]:
    """Return the numbers of three splits that lie one after the other.

    Example:
        >>> [part.tolist() for part in consecutive(2, 1, 1)]
        [[0, 1], [2], [3]]
    """
    train, val, test = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    return train, val, test
