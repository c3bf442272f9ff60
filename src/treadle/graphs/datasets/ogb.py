"""Molecules of the Open Graph Benchmark (Hu et al. 2020), read from the files in its archives.

The package `ogb` is not used: its reader unpickles files, which torch 2.6 and later reject, and prompts on the
terminal. The folder layout is the same, so data downloaded by it are found.
"""

from __future__ import annotations

import gzip
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch_geometric.data import Data, download_url

from treadle.errors import ConfigError
from treadle.graphs.datasets.base import Described, Source
from treadle.graphs.datasets.columns import ATOM_CODES, BOND_CODES
from treadle.graphs.datasets.download import on_disk
from treadle.graphs.datasets.packed import GraphSplit, pack

__all__ = ["load_ogb"]

_URL = "http://snap.stanford.edu/ogb/data/graphproppred/csv_mol_download"
_ARCHIVES = {"lipo": "lipophilicity"}  # all others are named like the data set
_NUM_TARGETS = {
    "bace": 1, "bbbp": 1, "clintox": 2, "esol": 1, "freesolv": 1, "hiv": 1, "lipo": 1, "muv": 17, "pcba": 128,
    "sider": 27, "tox21": 12, "toxcast": 617,
}  # fmt: skip
_REGRESSION = ("esol", "freesolv", "lipo")
_RAW = ("edge", "node-feat", "edge-feat", "graph-label", "num-node-list", "num-edge-list")
_PARTS = ("train", "valid", "test")


def load_ogb(name: str, root: Path, *, num_workers: int | None) -> Source:
    """Load an OGB molecule data set with its scaffold split; unknown labels are NaN."""
    short = name.removeprefix("ogbg_mol")
    files = [f"raw/{part}.csv.gz" for part in _RAW] + [f"split/scaffold/{part}.csv.gz" for part in _PARTS]
    with on_disk(name, root / name, [files]) as (folder, missing):
        if missing:
            _download(folder, _ARCHIVES.get(short, short))
        tables = {part: _table(folder / f"raw/{part}.csv.gz") for part in _RAW}
        train, val, test = (_table(folder / f"split/scaffold/{part}.csv.gz")[:, 0] for part in _PARTS)
    graphs = _graphs(name, tables)
    described = Described(
        "graph",
        "regression" if short in _REGRESSION else "multilabel",
        num_features=sum(ATOM_CODES),
        num_classes=_NUM_TARGETS[short],
        num_edge_features=sum(BOND_CODES),
    )
    official = (train.astype(np.int64), val.astype(np.int64), test.astype(np.int64))
    split = GraphSplit(pack(graphs), one_hot={"x": ATOM_CODES, "edge_attr": BOND_CODES})
    return Source(described, split, official, has_test_set=True)


def _download(folder: Path, archive_name: str) -> None:
    """Download an archive and unpack the contents of its single folder."""
    archive = Path(download_url(f"{_URL}/{archive_name}.zip", str(folder), log=False))
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(folder)
    archive.unlink()
    for path in (folder / archive_name).iterdir():
        path.rename(folder / path.name)
    (folder / archive_name).rmdir()


def _table(path: Path) -> npt.NDArray[np.float64]:
    """Return the numbers of a file, one row per line; an empty field is NaN."""
    with gzip.open(path, "rt") as file:
        lines = (",".join(field or "nan" for field in line.rstrip("\n").split(",")) for line in file)
        return np.loadtxt(lines, delimiter=",", ndmin=2)


def _graphs(name: str, tables: Mapping[str, npt.NDArray[np.float64]]) -> list[Data]:
    num_nodes = tables["num-node-list"][:, 0].astype(np.int64)
    num_edges = tables["num-edge-list"][:, 0].astype(np.int64)
    rows = {"node-feat": num_nodes.sum(), "edge": num_edges.sum(), "edge-feat": num_edges.sum()}
    rows |= {"graph-label": len(num_nodes), "num-edge-list": len(num_nodes)}
    for part, expected in rows.items():
        if len(tables[part]) != expected:
            raise ConfigError(
                f"data set {name!r}: {part}.csv.gz has {len(tables[part]):,} lines, and the lists of sizes have "
                f"{expected:,}; remove its folder so that it is downloaded again"
            )
    x = _per_graph(tables["node-feat"], num_nodes)
    bonds, ends = _per_graph(tables["edge-feat"], num_edges), _per_graph(tables["edge"], num_edges)
    labels = torch.from_numpy(tables["graph-label"]).float()
    # A bond is listed once; its two directions are adjacent, as in ogb's own reader.
    return [
        Data(
            x=x_i,
            edge_index=torch.stack([ends_i, ends_i.flip(1)], 1).view(-1, 2).t().contiguous(),
            edge_attr=bonds_i.repeat_interleave(2, 0),
            y=y_i.unsqueeze(0),
        )
        for x_i, ends_i, bonds_i, y_i in zip(x, ends, bonds, labels, strict=True)
    ]


def _per_graph(table: npt.NDArray[np.float64], counts: npt.NDArray[np.int64]) -> list[Tensor]:
    return [torch.from_numpy(rows) for rows in np.split(table.astype(np.int64), counts.cumsum()[:-1])]
