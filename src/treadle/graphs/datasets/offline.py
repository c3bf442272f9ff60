"""Two sets of real molecules that are bundled with packages and need no download: `nci` and `zinc_clean_leads`."""

from __future__ import annotations

import dataclasses
import gzip
import importlib.util
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from treadle.errors import ConfigError
from treadle.graphs.datasets.base import Described, Source, consecutive, split_molecules
from treadle.graphs.datasets.files import cached, digest
from treadle.graphs.datasets.molecules import (
    ATOM_COLUMNS,
    BOND_COLUMNS,
    describe_unusable,
    graphs_from_smiles,
    number_molecules,
)
from treadle.graphs.datasets.packed import GraphSplit, pack
from treadle.graphs.datasets.targets import import_rdkit, rdkit_file

__all__ = ["load_nci", "load_zinc_clean_leads"]

_log = logging.getLogger("treadle.graphs")

_VERSION = 2  # version of the molecule conversion; files of a lower version are not read
_MOLECULES = Described(
    level="graph",
    task_type="regression",
    num_features=len(ATOM_COLUMNS),
    num_classes=1,
    num_edge_features=len(BOND_COLUMNS),
    target_names=("penalised_logp",),
)


def load_nci(name: str, root: Path, *, num_workers: int | None) -> Source:
    """Load the first 5,000 compounds of the NCI open database, bundled with RDKit; 80/10/10 with seed 0.

    The file contains some molecules more than once, with different SMILES or as mirror images, which are the same graph
    here. All duplicates are in the training split: otherwise a test molecule could have been seen in training.
    """
    path = rdkit_file("RDDataDir", "NCI/first_5K.smi", use=f"{name!r} is made from it")

    def build() -> dict[str, Any]:
        smiles = [line.split()[0] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        graphs, unusable = graphs_from_smiles(smiles, source=name, num_workers=num_workers)
        molecules = number_molecules([graph.smiles for graph in graphs])
        return {"graphs": pack(graphs), "unusable": unusable, "total": len(smiles), "molecules": molecules}

    found = digest(path)
    content = _processed(name, root, {"files": found, "numbered": True}, build)
    graphs, molecules = GraphSplit(content["graphs"]), content["molecules"].numpy()
    tenth, order = len(graphs) // 10, np.random.default_rng(0).permutation(len(graphs))
    parts = split_molecules(order, molecules, (len(graphs) - 2 * tenth, tenth))
    described = dataclasses.replace(_MOLECULES, file_digest=found)
    return Source(described, graphs, parts, has_test_set=False, molecules=molecules)


def load_zinc_clean_leads(
    name: str,
    root: Path,
    *,
    num_workers: int | None,
    num_train: int = 10_000,
    num_val: int = 1_000,
    num_test: int = 1_000,
    seed: int = 0,
) -> Source:
    """Sample molecules from the ZINC clean leads of the MOSES benchmark; the test set comes from its test file."""
    sizes = {"num_train": num_train, "num_val": num_val, "num_test": num_test}
    for argument, size in sizes.items():
        if size < 1:
            raise ConfigError(f"={size} must be at least 1", argument=argument)
    train_file, test_file = _moses_files(name)

    def build() -> dict[str, Any]:
        train_lines, test_lines = _lines(train_file), _lines(test_file)
        rng_train, rng_test = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1])
        drawn = [
            *train_lines.draw(num_train + num_val, rng_train, argument="num_train + num_val"),
            *test_lines.draw(num_test, rng_test, argument="num_test"),
        ]
        graphs, unusable = graphs_from_smiles(drawn, source=name, num_workers=num_workers)
        usable = {graph.smiles for graph in graphs}
        parts = (drawn[part[0] : part[-1] + 1] for part in consecutive(num_train, num_val, num_test))
        left = [sum(smiles in usable for smiles in part) for part in parts]
        return {"graphs": pack(graphs), "unusable": unusable, "total": len(drawn), "sizes": left}

    found = digest(train_file, test_file)
    content = _processed(name, root, {"files": found, "seed": seed, **sizes}, build)
    described = dataclasses.replace(_MOLECULES, file_digest=found)
    return Source(described, GraphSplit(content["graphs"]), consecutive(*content["sizes"]), has_test_set=True)


def _processed(name: str, root: Path, key: dict[str, Any], build: Any) -> dict[str, Any]:
    rdkit_version = import_rdkit("rdBase").rdkitVersion
    key = {"name": name, "version": _VERSION, "rdkit": rdkit_version, **key}
    content, from_file = cached(root / name, key, build)
    if from_file and content["unusable"]:  # all were reported when the file was made
        _log.info("%s: %s", name, describe_unusable(content["unusable"], content["total"], most=3))
    return content


def _moses_files(name: str) -> tuple[Path, Path]:
    """Find the two files without importing the package, whose models have many more dependencies."""
    spec = importlib.util.find_spec("moses")
    folders: Sequence[str] = [] if spec is None else spec.submodule_search_locations or []
    for folder in folders:
        train, test = (Path(folder) / "dataset" / "data" / f"{part}.csv.gz" for part in ("train", "test"))
        if train.is_file() and test.is_file():
            return train, test
    raise ImportError(
        f"{name!r} is read from the files of the package molsets, which is not installed: "
        "pip install --no-deps molsets",
        name="moses",
    )


class _Lines:
    """Lazily decoded lines of a text, located by line ends; splitting it into a million strings would be slow."""

    def __init__(self, text: bytes):
        self.text = text
        self.ends = np.flatnonzero(np.frombuffer(text, dtype=np.uint8) == ord("\n"))

    def __len__(self) -> int:
        return len(self.ends) - 1  # the first line is the header

    def draw(self, count: int, rng: np.random.Generator, *, argument: str) -> list[str]:
        """Return ``count`` distinct lines in random order."""
        if count > len(self):
            raise ConfigError(f"{argument} = {count:,} is more than the {len(self):,} molecules of the file")
        chosen = rng.choice(len(self), count, replace=False)
        return [self.text[self.ends[i] + 1 : self.ends[i + 1]].decode().split(",")[0].strip() for i in chosen]


def _lines(path: Path) -> _Lines:
    with gzip.open(path) as file:
        text = file.read()
    header = text[: text.find(b"\n")].decode().strip()
    if header.split(",")[0] != "SMILES":
        raise ConfigError(f"{path} begins with {header!r}, not with the column SMILES; reinstall molsets")
    return _Lines(text if text.endswith(b"\n") else text + b"\n")
