"""The NCI molecules of the graph benchmarks, with 20 return probabilities of a random walk at each atom.

python benchmarks/molecules.py molecules.pt     # where rdkit is; then copy the file to where it is not
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treadle.graphs.encodings import rwse_pe

ATOM_TYPES, BOND_TYPES, WALK = 28, 4, tuple(range(1, 21))


def from_rdkit() -> list[dict[str, Tensor]]:
    """Read the NCI file in the rdkit package: heavy atoms by element, bonds by type, a number to predict."""
    from rdkit import Chem, RDConfig, rdBase
    from rdkit.Chem import Crippen

    with rdBase.BlockLogs():
        lines = (Path(RDConfig.RDDataDir) / "NCI" / "first_5K.smi").read_text(encoding="utf-8").splitlines()
        parsed = (Chem.MolFromSmiles(line.split()[0]) for line in lines if line.strip())
        molecules = [molecule for molecule in parsed if molecule is not None and molecule.GetNumAtoms() > 0]
    elements: dict[int, int] = {}
    bond_types: dict[Any, int] = {}
    graphs = []
    for molecule in molecules:
        x = [min(elements.setdefault(a.GetAtomicNum(), len(elements)), ATOM_TYPES - 1) for a in molecule.GetAtoms()]
        bonds = [(b.GetBeginAtomIdx(), b.GetEndAtomIdx(), b.GetBondType()) for b in molecule.GetBonds()]
        kinds = [min(bond_types.setdefault(kind, len(bond_types)), BOND_TYPES - 1) for _, _, kind in bonds]
        ends = torch.tensor([(a, b) for a, b, _ in bonds], dtype=torch.long).view(-1, 2).T
        graphs.append(_graph(torch.tensor(x), ends, torch.tensor(kinds, dtype=torch.long), Crippen.MolLogP(molecule)))
    return graphs


def made_up(count: int = 2000) -> list[dict[str, Tensor]]:
    """Return molecule-like graphs of 20 to 30 nodes: a random tree of low degree and two rings."""
    draw = torch.Generator().manual_seed(0)
    graphs = []
    for _ in range(count):
        size = int(torch.randint(20, 31, (1,), generator=draw))
        parents = [max(0, i - 1 - int(torch.randint(0, 3, (1,), generator=draw))) for i in range(1, size)]
        ends = torch.tensor([*zip(range(1, size), parents, strict=True), (0, 5), (9, 14)]).T
        x = torch.randint(0, 4, (size,), generator=draw)
        kinds = torch.randint(0, BOND_TYPES, (ends.shape[1],), generator=draw)
        graphs.append(_graph(x, ends, kinds, float(x.float().mean())))
    return graphs


def _graph(x: Tensor, ends: Tensor, kinds: Tensor, target: float) -> dict[str, Tensor]:
    edge_index = torch.cat([ends, ends.flip(0)], dim=1)
    return {
        "x": x, "edge_index": edge_index, "edge_attr": kinds.repeat(2), "y": torch.tensor([target]),
        "node_pe": rwse_pe(edge_index, len(x), scales=WALK),
    }  # fmt: skip


def load(path: Path | None) -> tuple[list[dict[str, Tensor]], str]:
    """Return the graphs and their description: from a file, else from rdkit, else synthetic."""
    if path is not None:
        return torch.load(path, weights_only=True), "NCI molecules"
    try:
        return from_rdkit(), "NCI molecules"
    except ImportError:
        return made_up(), "made-up graphs of 20 to 30 nodes"


if __name__ == "__main__":
    torch.save(from_rdkit(), sys.argv[1])
