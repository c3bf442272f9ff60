"""torch_geometric, imported where its own warnings are let through, for tests of the data sets of graphs."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    # It compiles functions with torch.jit.script when it is imported, which torch calls deprecated.
    warnings.filterwarnings("ignore", ".*torch.jit.script", DeprecationWarning)
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader

__all__ = ["Data", "DataLoader", "fields"]


def fields(graph):
    """Return every attribute of a graph as plain values, so that two graphs can be compared at once."""
    return {key: value.tolist() if hasattr(value, "tolist") else value for key, value in graph.to_dict().items()}
