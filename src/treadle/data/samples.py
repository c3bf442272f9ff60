"""Errors for samples that were not joined into batches: single graphs, and what torch's default collate refuses."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Subset, default_collate

from treadle.errors import ConfigError, TreadleError
from treadle.nested import shapes_of

_COLLATE = default_collate.__code__.co_filename
_LOADER = "torch_geometric.loader.DataLoader(dataset, batch_size=..., shuffle=True)"


def refuse_single_graphs(loader: Any, argument: str) -> None:
    """Raise ConfigError for graphs of torch_geometric that nothing joins into batches.

    These are a data set of several graphs, a list of several graphs with one target each, and a DataLoader of torch
    over them with its default collate function. A list of graphs with a target for each node is one batch per graph.

    Args:
        loader: the user's argument.
        argument: name of the argument.
    """
    if isinstance(loader, DataLoader):
        if loader.collate_fn is default_collate and _first_graph(loader.dataset) is not None:
            raise ConfigError(
                f"a DataLoader of torch cannot batch graphs of torch_geometric; use {_LOADER}", argument=argument
            )
        return
    first = _first_graph([loader])
    if first is not None:
        raise ConfigError(
            "is a single graph, whose attributes would be taken for batches; pass [graph] for steps over all of it",
            argument=argument,
        )
    first = _first_graph(loader)
    if first is None or len(loader) < 2:
        return
    if not isinstance(loader, list | tuple) or _has_one_target(first):
        raise ConfigError(
            f"a {type(loader).__name__} of {len(loader)} single graphs, each of which would be a batch; use {_LOADER}, "
            "with batch_size=1 for steps of one graph",
            argument=argument,
        )


def _first_graph(data: Any) -> Any:
    """Return the first graph of a data set, list or subset of graphs of torch_geometric; None for anything else."""
    library: Any = sys.modules.get("torch_geometric.data")
    while isinstance(data, Subset):
        data = data.dataset
    if library is None or not isinstance(data, (list, tuple, library.Dataset)) or not len(data):
        return None
    first = data[0]
    joined = isinstance(first, library.Batch) or getattr(first, "batch", None) is not None
    return first if isinstance(first, library.data.BaseData) and not joined else None


def _has_one_target(graph: Any) -> bool:
    """Return whether a graph of several nodes has a target for the whole graph."""
    target, nodes = getattr(graph, "y", None), getattr(graph, "num_nodes", None)
    rows = 1 if not isinstance(target, Tensor) or not target.dim() else len(target)
    return target is not None and rows == 1 and nodes is not None and nodes > 1


def explain_collate(error: BaseException, loader: Any) -> None:
    """Raise a ConfigError that shows the samples, if torch's default collate function failed to join them.

    Args:
        error: error of the data, in this process.
        loader: the loader.

    Raises:
        ConfigError: torch's function raised the error.
    """
    if getattr(loader, "collate_fn", None) is not default_collate or not isinstance(error, (TypeError, RuntimeError)):
        return
    trace, samples = error.__traceback__, None
    while trace is not None:
        code = trace.tb_frame.f_code
        if samples is None and code.co_filename == _COLLATE:
            samples = trace.tb_frame.f_locals.get("batch")
        trace = trace.tb_next
    if isinstance(samples, list):
        raise unjoined(error, samples) from error


def unjoined(error: Exception, samples: Sequence[Any]) -> Exception:
    """Return the error for samples that torch's default collate function failed to join.

    Example:
        >>> print(unjoined(TypeError("found NoneType"), [None, None]))
        collate_fn: torch's default collate function cannot batch these samples: found NoneType. The first ones are
        (NoneType, NoneType); pass collate_fn= to the DataLoader, or return tensors of one shape, numbers or strings
    """
    if isinstance(error, TreadleError):
        return error
    library: Any = sys.modules.get("torch_geometric.data")
    graphs = library is not None and any(isinstance(sample, library.data.BaseData) for sample in samples)
    fix = "pass collate_fn= to the DataLoader, or return tensors of one shape, numbers or strings"
    text = str(error).strip().rstrip(".")
    return ConfigError(
        f"torch's default collate function cannot batch these samples: {text}. The first ones are "
        f"{shapes_of(list(samples[:3]))}; {f'use {_LOADER}' if graphs else fix}",
        argument="collate_fn",
    )
