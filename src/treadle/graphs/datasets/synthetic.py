"""Generated graphs: ten families and six tasks, each graph determined by the seed and its index."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch_geometric.data import Data

from treadle.errors import ConfigError
from treadle.errors.arguments import check_whole
from treadle.graphs.datasets.base import Source, tenths
from treadle.graphs.datasets.families import check_graph_params, draw_graph, graph_params_of
from treadle.graphs.datasets.packed import GraphSplit, pack
from treadle.graphs.datasets.parallel import parallel_map
from treadle.graphs.datasets.tasks import SyntheticTask, make_task

__all__ = ["load_synthetic"]

_log = logging.getLogger("treadle.graphs")

_TRIES = 100


def load_synthetic(
    name: str,
    root: Path,
    *,
    num_workers: int | None,
    num_graphs: int = 1_000,
    graph_params: Mapping[str, Any] | None = None,
    task: str = "pairwise_distance_classification",
    task_params: Mapping[str, Any] | None = None,
    seed: int = 42,
) -> Source:
    """Generate graphs of one family with one task; the first 80 % are for training. Nothing is written to disk."""
    check_whole(10, num_graphs=num_graphs)
    check_whole(0, seed=seed)
    family = name.removeprefix("synthetic_")
    params = graph_params_of(family, graph_params or {})
    check_graph_params(family, params)
    asked = make_task(task, dict(task_params or {}))
    generate = partial(_generate, family=family, params=params, task=asked, seed=seed)
    fields = parallel_map(generate, range(num_graphs), num_workers=num_workers)
    graphs = [Data(**{key: torch.from_numpy(value) for key, value in each.items()}) for each in fields]
    _warn_if_constant(name, task, graphs)
    return Source(asked.described, GraphSplit(pack(graphs)), tenths(np.arange(num_graphs)), has_test_set=False)


def _generate(
    number: int, *, family: str, params: Mapping[str, Any], task: SyntheticTask, seed: int
) -> dict[str, npt.NDArray[Any]]:
    """Draw graph ``number``, repeating until the task can define a target."""
    rng = np.random.default_rng([seed, number])
    for _ in range(_TRIES):
        edge_index, num_nodes = draw_graph(family, params, rng)
        fields = task.label(edge_index, num_nodes, rng)
        if fields is not None:
            return {"edge_index": edge_index.numpy(), **{key: value.numpy() for key, value in fields.items()}}
    raise ConfigError(
        f"none of {_TRIES} graphs of the family {family} has nodes suitable for {task}: choose larger or other graphs "
        "with graph_params, or smaller distances with task_params"
    )


def _warn_if_constant(name: str, task: str, graphs: list[Data]) -> None:
    targets = torch.cat([graph.y.flatten() for graph in graphs])
    if bool((targets == targets[0]).all()):
        _log.warning(
            "%s, task %s: every target is %g, so there is nothing to learn; another family or other graph_params give "
            "different ones", name, task, float(targets[0]),
        )  # fmt: skip
