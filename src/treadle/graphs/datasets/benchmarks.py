"""Public benchmarks loaded with torch_geometric: ZINC, QM9, CIFAR10 and the Long Range Graph Benchmark.

torch_geometric downloads and processes them; here they are converted to one format. Codes of several properties, as in
the molecules of the long-range sets, become one-hot columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.datasets import QM9, ZINC, GNNBenchmarkDataset, LRGBDataset

from treadle.errors import ConfigError
from treadle.graphs.datasets.base import Described, Source, consecutive, tenths
from treadle.graphs.datasets.columns import ATOM_CODES, BOND_CODES
from treadle.graphs.datasets.download import on_disk
from treadle.graphs.datasets.packed import GraphSplit, pack

__all__ = ["load_cifar10", "load_lrgb", "load_qm9", "load_zinc"]

_SPLITS = ("train", "val", "test")


def load_zinc(name: str, root: Path, *, num_workers: int | None) -> Source:
    """Load the ZINC subset of 12,000 molecules: 28 atom types, 4 bond types, scaled penalised logP."""
    raw = [f"raw/{split}.{kind}" for split in _SPLITS for kind in ("pickle", "index")]
    processed = [f"subset/processed/{split}.pt" for split in _SPLITS]

    def graph(data: Data) -> Data:
        return Data(x=data.x, edge_index=data.edge_index, edge_attr=data.edge_attr, y=data.y.view(1, 1))

    with on_disk(name, root / "ZINC", [raw, processed]) as (folder, missing):
        read = partial(_local(ZINC, missing), str(folder), subset=True)
        parts = [[graph(data) for data in read(split=split)] for split in _SPLITS]
    described = Described("graph", "regression", num_features=28, num_classes=1, num_edge_features=4)
    return _source(described, parts)


def load_qm9(name: str, root: Path, *, num_workers: int | None, target: int = 4) -> Source:
    """Load QM9: 130,831 molecules with hydrogens. It has no official split; 80/10/10 with seed 0.

    ``target`` is a column of torch_geometric's table of 19 properties; 4 is the gap between HOMO and LUMO in eV.
    """
    if isinstance(target, bool) or not isinstance(target, int) or not 0 <= target < 19:
        raise ConfigError(
            " must be a whole number from 0 to 18, a property of torch_geometric's QM9", argument="target", value=target
        )
    raw = ["raw/gdb9.sdf", "raw/gdb9.sdf.csv", "raw/uncharacterized.txt"]

    def graph(data: Data) -> Data:
        y = data.y[:, target : target + 1]
        return Data(x=data.x, edge_index=data.edge_index, edge_attr=data.edge_attr, y=y, smiles=data.smiles)

    with on_disk(name, root / "QM9", [raw, ["processed/data_v3.pt"]]) as (folder, missing):
        graphs = [graph(data) for data in _local(QM9, missing)(str(folder))]
    order = np.random.default_rng(0).permutation(len(graphs))
    described = Described("graph", "regression", num_features=11, num_classes=1, num_edge_features=4)
    return Source(described, GraphSplit(pack(graphs)), tenths(order), has_test_set=False)


def load_cifar10(name: str, root: Path, *, num_workers: int | None) -> Source:
    """Load CIFAR10 as superpixel graphs (Dwivedi et al. 2020): 60,000 images in ten classes, with the official splits.

    A node has the mean colour and the position of its pixels, an edge the proximity of its ends.
    """
    raw = ["CIFAR10/raw/CIFAR10_v2.pt"]
    processed = [f"CIFAR10/processed/{split}_data.pt" for split in _SPLITS]

    def graph(data: Data) -> Data:
        x = torch.cat([data.x, data.pos], dim=1).float()
        return Data(x=x, edge_index=data.edge_index, edge_attr=data.edge_attr.view(-1, 1).float(), y=data.y.view(1))

    with on_disk(name, root / "CIFAR10-SP", [raw, processed]) as (folder, missing):
        read = partial(_local(GNNBenchmarkDataset, missing), str(folder), "CIFAR10")
        parts = [[graph(data) for data in read(split=split)] for split in _SPLITS]
    return _source(Described("graph", "classification", num_features=5, num_classes=10, num_edge_features=1), parts)


def _contacts(data: Data) -> Data:
    return Data(
        x=data.x,
        edge_index=data.edge_index,
        edge_attr=data.edge_attr,
        pair_index=data.edge_label_index,
        y=data.edge_label.float(),
    )


def _whole(data: Data) -> Data:
    return Data(x=data.x, edge_index=data.edge_index, edge_attr=data.edge_attr, y=data.y)


_ATOMS, _BONDS = sum(ATOM_CODES), sum(BOND_CODES)
_LRGB = {
    "pascalvoc_sp": Described("node", "classification", num_features=14, num_classes=21, num_edge_features=2),
    "coco_sp": Described("node", "classification", num_features=14, num_classes=81, num_edge_features=2),
    "peptides_func": Described("graph", "multilabel", _ATOMS, num_classes=10, num_edge_features=_BONDS),
    "peptides_struct": Described("graph", "regression", _ATOMS, num_classes=11, num_edge_features=_BONDS),
    "pcqm_contact": Described("edge", "edge_prediction", _ATOMS, num_classes=1, num_edge_features=_BONDS),
}


def load_lrgb(name: str, root: Path, *, num_workers: int | None) -> Source:
    """Load a data set of the Long Range Graph Benchmark (Dwivedi et al. 2022) with its official splits."""
    own_name = name.replace("_", "-")
    superpixels = name.endswith("_sp")
    graph = _contacts if name == "pcqm_contact" else _whole
    ending = "pickle" if superpixels else "pt"
    raw = [f"raw/{split}.{ending}" for split in _SPLITS]
    processed = [f"processed/{split}.pt" for split in _SPLITS]
    with on_disk(name, root / own_name, [raw, processed]) as (folder, missing):
        # The class appends the name to its root itself.
        read = partial(_local(LRGBDataset, missing), str(folder.parent), own_name)
        parts = [[graph(data) for data in read(split=split)] for split in _SPLITS]
    return _source(_LRGB[name], parts, one_hot=None if superpixels else {"x": ATOM_CODES, "edge_attr": BOND_CODES})


def _source(
    described: Described, parts: Sequence[Sequence[Data]], *, one_hot: Mapping[str, Sequence[int]] | None = None
) -> Source:
    graphs = GraphSplit(pack([graph for part in parts for graph in part]), one_hot=one_hot)
    return Source(described, graphs, consecutive(*map(len, parts)), has_test_set=True)


def _local(kind: Any, missing: bool) -> Any:
    """Return a torch_geometric class that downloads only if needed; it would otherwise fetch unneeded raw files."""
    return kind if missing else type(kind.__name__, (kind,), {"_download": lambda self: None})
