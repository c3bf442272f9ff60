"""Graphs packed into a few large tensors: fast to load, compact, and list-like for a DataLoader.

Each field of all graphs is one tensor, in the narrowest dtype that represents its values exactly: one-hot columns take
one byte per value instead of four. A graph is sliced and converted back when accessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, InMemoryDataset

from treadle.errors import ConfigError
from treadle.graphs.datasets.columns import check_codes, one_hot_columns
from treadle.graphs.encodings import EncodedGraphs

__all__ = ["GraphSplit", "pack"]

_NARROW = (torch.uint8, torch.int16, torch.int32)


class GraphSplit(InMemoryDataset):  # type: ignore[misc]  # torch_geometric is untyped
    """Split of a data set: a list of ``torch_geometric.data.Data`` backed by packed tensors.

    Args:
        packed: result of :func:`pack`, possibly loaded from a file.
        one_hot: fields of integer codes, with the number of values of each column; a graph gets the columns of
            :func:`one_hot_columns` instead.

    Attributes:
        encodings: encodings of every graph, in the same order; attached when a graph is accessed.

    Raises:
        ConfigError: a code is out of range.

    Example:
        >>> triangle = Data(x=torch.ones(3, 1), edge_index=torch.tensor([[0, 1, 2], [1, 2, 0]]), y=torch.zeros(1, 1))
        >>> split = GraphSplit(pack([triangle] * 4))
        >>> len(split), len(split[:2]), split[3].x.dtype, split._data.x.dtype
        (4, 2, torch.float32, torch.uint8)
    """

    def __init__(self, packed: Mapping[str, Any], *, one_hot: Mapping[str, Sequence[int]] | None = None):
        super().__init__()
        self.encodings: EncodedGraphs | None = None
        self._data = Data.from_dict(dict(packed["fields"]))
        self.slices = packed["slices"]
        self._wide = {name: getattr(torch, dtype) for name, dtype in packed["dtypes"].items()}
        self._one_hot = dict(one_hot or {})
        for name, sizes in self._one_hot.items():
            check_codes(name, self._data[name], sizes)

    def get(self, idx: int) -> Data:
        """Return graph ``idx`` in its original dtypes; changing its attributes affects no other copy."""
        data = super().get(idx)
        for name, dtype in self._wide.items():
            data[name] = data[name].to(dtype)
        for name, sizes in self._one_hot.items():
            data[name] = one_hot_columns(data[name], sizes)
        return data if self.encodings is None else self.encodings[idx].attach(data)


def pack(graphs: Sequence[Data]) -> dict[str, Any]:
    """Concatenate graphs field by field, each in the narrowest dtype that represents it exactly.

    Args:
        graphs: at least one; all with the same attributes.

    Returns:
        Plain tensors, lists and strings: ``fields`` (name -> values of all graphs), ``slices`` (name -> start of each
        graph; None for a single graph) and ``dtypes`` (name -> original dtype of a narrowed field).

    Raises:
        ConfigError: there are no graphs.
    """
    if not graphs:
        raise ConfigError("there are no graphs; a data set must have at least one")
    narrow: dict[str, torch.dtype] = {}
    wide: dict[str, torch.dtype] = {}
    for graph in graphs:
        for name, value in graph.to_dict().items():
            if isinstance(value, Tensor):
                dtypes = (narrow.get(name, torch.uint8), _narrowest(value))
                narrow[name] = max(dtypes, key=lambda dtype: dtype.itemsize)
                wide[name] = value.dtype
    kept = {name: dtype for name, dtype in narrow.items() if dtype.itemsize < wide[name].itemsize}
    fields, slices = InMemoryDataset.collate([_narrowed(graph, kept) for graph in graphs])
    return {
        "fields": fields.to_dict(),
        "slices": None if slices is None else dict(slices),
        "dtypes": {name: str(wide[name]).removeprefix("torch.") for name in kept},
    }


def _narrowed(graph: Data, dtypes: Mapping[str, torch.dtype]) -> Data:
    values = graph.to_dict()
    return Data.from_dict({name: v.to(dtypes[name]) if name in dtypes else v for name, v in values.items()})


def _narrowest(value: Tensor) -> torch.dtype:
    """Return the smallest dtype that represents the values exactly."""
    for dtype in _NARROW:
        if dtype.itemsize < value.dtype.itemsize and torch.equal(value.to(dtype).to(value.dtype), value):
            return dtype
    return value.dtype
