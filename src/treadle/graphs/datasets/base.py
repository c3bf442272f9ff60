"""Common interface of graph data sets: three splits, feature widths, and the type of target."""

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
    """Properties of the graphs that a model and a trainer need."""

    level: Level
    """Level of the targets: the graph, each node, or each pair of `pair_index`."""
    task_type: TaskType
    """Task type, as in `get_loss_fn` and `get_metrics`."""
    num_features: int
    """Number of types for integer `x`; number of columns for float `x`."""
    num_classes: int
    """Number of model outputs: 1 for one regression target or one logit."""
    num_edge_features: int | None = None
    """Number of types for integer `edge_attr`, number of columns for float `edge_attr`; None: no edge features."""
    target_names: tuple[str, ...] = field(default=(), kw_only=True)
    """Name of each column of `y`; empty if the source does not name them."""
    file_digest: str | None = field(default=None, kw_only=True, repr=False)
    """Hash of the contents of the files that the graphs are made from; None: they do not come from one."""


@checked
@dataclass(frozen=True)
class GraphDataset(Described):
    """Three splits of graphs and the properties a model needs.

    A split is list-like: ``len(split)``, ``split[i]`` (a ``torch_geometric.data.Data``), ``split[:100]``, and any
    DataLoader of torch_geometric reads it.
    """

    name: str = field(kw_only=True)
    """Name of the data set, as requested."""
    train: Sequence[Any] = field(kw_only=True, repr=False)
    """Graphs to train on."""
    val: Sequence[Any] = field(kw_only=True, repr=False)
    """Graphs for model selection."""
    test: Sequence[Any] = field(kw_only=True, repr=False)
    """Graphs for the final test, disjoint from the other two splits."""
    node_pe_dim: int | None = None
    """Columns of `node_pe`; None: no node encoding."""
    relative_pe_dim: int | None = None
    """Columns of `edge_pe`; None: no pair encoding."""

    def get_splits(self) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """Return the training, validation and test split."""
        return self.train, self.val, self.test


@dataclass(frozen=True)
class Source:
    """All graphs of one source, before encodings, with its splits."""

    described: Described
    graphs: GraphSplit
    official: tuple[Indices, Indices, Indices]
    """Indices of the training, validation and test graphs."""
    has_test_set: bool
    """Whether the test set is defined by the source, so that no other split may change it."""
    molecules: Indices | None = None
    """(G,) molecule numbers; duplicates stay in the training split. None: there are no duplicates."""

    def __post_init__(self) -> None:
        for name, chosen in zip(("training", "validation", "test"), self.official, strict=True):
            if len(chosen) == 0:
                raise ConfigError(
                    f"the {name} split would be empty with {len(self.graphs)} graphs; use more, or another split: a "
                    "tenth each is validation and test"
                )

    def redrawn(self, seed: int) -> tuple[Indices, Indices, Indices]:
        """Return random splits of the same sizes drawn with ``seed``; a test set defined by the source is kept."""
        train, val, test = self.official
        pool = np.concatenate([train, val] if self.has_test_set else [train, val, test])
        drawn = np.random.default_rng(seed).permutation(np.sort(pool))
        if self.molecules is None:
            first, second, third = np.split(drawn, [len(train), len(train) + len(val)])
        else:
            first, second, third = split_molecules(drawn, self.molecules, (len(train), len(val)))
        return first, second, test if self.has_test_set else third


def split_molecules(order: Indices, molecules: Indices, sizes: tuple[int, int]) -> tuple[Indices, Indices, Indices]:
    """Split indices so that duplicates of a molecule are in one split: in the first, as far as they fit.

    Args:
        order: (N,) indices of graphs.
        molecules: (G,) molecule numbers; equal numbers are duplicates.
        sizes: sizes of the first two splits; one ends before a molecule whose duplicates it would divide.

    Example:
        >>> parts = split_molecules(np.array([0, 1, 2, 3]), np.array([7, 8, 8, 7]), (3, 1))
        >>> [part.tolist() for part in parts]
        [[0, 3], [1, 2], []]
    """
    moved = repeats_first(order, molecules)
    begins = np.flatnonzero(np.r_[True, np.diff(molecules[moved]) != 0, True])  # of each molecule, and the end
    first, second = (begins[begins <= size].max() for size in (sizes[0], sum(sizes)))
    return moved[:first], moved[first:second], moved[second:]


def repeats_first(order: Indices, molecules: Indices) -> Indices:
    """Move duplicates to the front, equal ones adjacent.

    Args:
        order: (N,) indices of graphs.
        molecules: (G,) molecule numbers; equal numbers are duplicates.

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
    """Split molecules 80/10/10 so that no scaffold is in two splits; the largest groups are for training.

    The standard split of molecules (Wu et al. 2018, "MoleculeNet"): it tests on scaffolds not seen in training.

    Args:
        scaffolds: scaffold of each molecule, from `murcko_scaffold`.

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
    """Split indices into the first 80 %, the next 10 % and the last 10 %, rounded in favour of the first.

    Example:
        >>> [len(part) for part in tenths(np.arange(4990))]
        [3992, 499, 499]
    """
    tenth = len(numbers) // 10
    train = len(numbers) - 2 * tenth
    return numbers[:train], numbers[train : train + tenth], numbers[train + tenth :]


def consecutive(*sizes: int) -> tuple[Indices, Indices, Indices]:
    """Return the indices of three consecutive splits.

    Example:
        >>> [part.tolist() for part in consecutive(2, 1, 1)]
        [[0, 1], [2], [3]]
    """
    train, val, test = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    return train, val, test
