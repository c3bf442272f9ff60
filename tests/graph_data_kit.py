"""Import of torch_geometric with its own warnings allowed, for tests of graph data sets."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    # On import it compiles functions with torch.jit.script, which torch has deprecated.
    warnings.filterwarnings("ignore", ".*torch.jit.script", DeprecationWarning)
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader

__all__ = ["Data", "DataLoader", "fields"]


def fields(graph):
    """Return every attribute of a graph as plain values, so that two graphs can be compared at once."""
    return {key: value.tolist() if hasattr(value, "tolist") else value for key, value in graph.to_dict().items()}
