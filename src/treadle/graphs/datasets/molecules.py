"""Conversion of SMILES to graphs: one node per heavy atom, two directed edges per bond, one-hot columns for both.

Each property of an atom is one-hot and the columns are concatenated, so a linear layer over them sums one learned
vector per property. The last entry of a property covers every value that is not listed. Bonds have no such entry: a
molecule with a bond type other than the four is counted as unusable. Stereo is not encoded, since neither of the
offline molecule sets has any.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch_geometric.data import Data

from treadle.graphs.datasets.parallel import parallel_map
from treadle.graphs.datasets.targets import import_rdkit, penalized_logp

__all__ = ["ATOM_COLUMNS", "BOND_COLUMNS", "graph_from_smiles", "graphs_from_smiles"]

_log = logging.getLogger("treadle.graphs")

_Array: TypeAlias = npt.NDArray[Any]

_OTHER = "other"
_ATOM_PROPERTIES: dict[str, tuple[str | int, ...]] = {
    "element": ("B", "C", "N", "O", "F", "Si", "P", "S", "Cl", "As", "Se", "Br", "I", _OTHER),
    "degree": (0, 1, 2, 3, 4, 5, _OTHER),  # bonded neighbours, including hydrogens
    "charge": (-2, -1, 0, 1, 2, _OTHER),
    "hydrogens": (0, 1, 2, 3, _OTHER),
    "hybridisation": ("SP", "SP2", "SP3", "SP3D", "SP3D2", _OTHER),
}
_NAMED = 3  # molecules that a warning of unusable ones names
_BONDS = ("SINGLE", "DOUBLE", "TRIPLE", "AROMATIC")

ATOM_COLUMNS = (
    *(f"{name} {value}" for name, values in _ATOM_PROPERTIES.items() for value in values),
    "aromatic",
    "in ring",
)
"""Meaning of each atom column of `x`."""
BOND_COLUMNS = (*(f"bond {kind}" for kind in _BONDS), "conjugated", "in ring")
"""Meaning of each bond column of `edge_attr`."""

# For each property, the column of each of its values.
_COLUMN_OF = [
    {value: ATOM_COLUMNS.index(f"{name} {value}") for value in values} for name, values in _ATOM_PROPERTIES.items()
]


class UnusableMoleculeError(ValueError):
    """Error for a SMILES that cannot be converted to a graph; the message has the reason."""


def graph_from_smiles(smiles: str) -> Data:
    """Convert one molecule to a graph.

    Args:
        smiles: a SMILES that RDKit can parse.

    Returns:
        ``x`` (N, 40) and ``edge_attr`` (E, 6), one-hot float32 with the columns :data:`ATOM_COLUMNS` and
        :data:`BOND_COLUMNS`; ``edge_index`` (2, E) with both directions of every bond; and ``smiles``.

    Raises:
        UnusableMoleculeError: RDKit cannot parse it, it has no atoms, or a bond is not of the four types.
        ImportError: RDKit is not installed.

    Example:
        >>> water_in_ethanol = graph_from_smiles("CCO.O")
        >>> water_in_ethanol.x.shape, water_in_ethanol.edge_index.tolist()
        (torch.Size([4, 40]), [[0, 1, 1, 2], [1, 0, 2, 1]])
    """
    try:
        return _data(_arrays(_molecule(smiles)), smiles)
    except UnusableMoleculeError as error:
        raise UnusableMoleculeError(f"smiles={smiles!r}: {error}") from None


def _molecule(smiles: str) -> Any:
    with import_rdkit("rdBase").BlockLogs():  # its messages go to stderr, bypassing logging
        molecule = import_rdkit("Chem").MolFromSmiles(smiles)
    if molecule is None:
        raise UnusableMoleculeError("RDKit cannot read it")
    if molecule.GetNumAtoms() == 0:
        raise UnusableMoleculeError("no atoms")
    return molecule


def _arrays(molecule: Any) -> dict[str, _Array]:
    ends: list[tuple[int, int]] = []
    bonds: list[list[int]] = []
    for bond in molecule.GetBonds():
        begin, end, row = bond.GetBeginAtomIdx(), bond.GetEndAtomIdx(), _bond_row(bond)
        ends += [(begin, end), (end, begin)]
        bonds += [row, row]
    return {
        "x": _atom_rows(molecule),
        "edge_index": np.array(ends, dtype=np.int64).reshape(-1, 2).T.copy(),
        "edge_attr": np.array(bonds, dtype=np.float32).reshape(-1, len(BOND_COLUMNS)),
    }


def _atom_rows(molecule: Any) -> _Array:
    rows = np.zeros((molecule.GetNumAtoms(), len(ATOM_COLUMNS)), dtype=np.float32)
    for row, atom in zip(rows, molecule.GetAtoms(), strict=True):
        values = (
            atom.GetSymbol(),
            atom.GetTotalDegree(),
            atom.GetFormalCharge(),
            atom.GetTotalNumHs(),
            str(atom.GetHybridization()),
        )
        for value, columns in zip(values, _COLUMN_OF, strict=True):
            row[columns.get(value, columns[_OTHER])] = 1
        row[-2:] = atom.GetIsAromatic(), atom.IsInRing()
    return rows


def _bond_row(bond: Any) -> list[int]:
    kind = str(bond.GetBondType())
    if kind not in _BONDS:
        raise UnusableMoleculeError(f"a bond of kind {kind}; the kinds are {', '.join(_BONDS)}")
    return [*(int(kind == known) for known in _BONDS), int(bond.GetIsConjugated()), int(bond.IsInRing())]


def _data(arrays: Mapping[str, _Array], smiles: str) -> Data:
    return Data(**{name: torch.from_numpy(array) for name, array in arrays.items()}, smiles=smiles)


def _labelled(smiles: str) -> dict[str, _Array] | str:
    """Return the arrays of a graph with its penalised logP, or the reason for failure as a string."""
    try:
        molecule = _molecule(smiles)
        arrays = _arrays(molecule)
    except UnusableMoleculeError as error:
        return str(error)
    return {**arrays, "y": np.array([[penalized_logp(molecule)]], dtype=np.float32)}


def graphs_from_smiles(
    smiles: Sequence[str], *, source: str, num_workers: int | None = None
) -> tuple[list[Data], list[str]]:
    """Convert molecules to graphs with their penalised logP, in several processes.

    Args:
        smiles: the molecules.
        source: name of the molecules for the log.
        num_workers: see :func:`parallel_map`; the result does not depend on it.

    Returns:
        The graphs in the given order, each with ``y`` (1, 1), and one line for every molecule that failed. If there are
        any, one warning counts them and names the first.

    Example:
        >>> graphs, unusable = graphs_from_smiles(["CCO", "C1CC", "c1ccccc1"], source="three", num_workers=0)
        >>> len(graphs), unusable
        (2, ["number 2, 'C1CC': RDKit cannot read it"])
    """
    import_rdkit("Chem")  # if it is missing, raise once here rather than in each process
    results = parallel_map(_labelled, smiles, num_workers=num_workers)
    unusable = [
        f"number {number}, {text!r}: {result}"
        for number, (text, result) in enumerate(zip(smiles, results, strict=True), 1)
        if isinstance(result, str)
    ]
    if unusable:
        _log.warning("%s: %s", source, describe_unusable(unusable, len(smiles), most=_NAMED))
    graphs = [_data(result, text) for text, result in zip(smiles, results, strict=True) if not isinstance(result, str)]
    return graphs, unusable


def usable_graphs(
    smiles: Sequence[str], *, num_workers: int | None = None, lines: Sequence[int] | None = None
) -> tuple[list[Data | None], list[str]]:
    """Convert molecules to graphs without targets, in several processes.

    Args:
        smiles: the molecules.
        num_workers: see :func:`parallel_map`; the result does not depend on it.
        lines: line numbers of a file, used to name molecules; None names them by their index.

    Returns:
        A graph for each molecule, or None if it failed, and one line for every molecule that failed.

    Example:
        >>> graphs, unusable = usable_graphs(["CCO", "C1CC"], num_workers=0)
        >>> graphs[1] is None, unusable
        (True, ["number 2, 'C1CC': RDKit cannot read it"])
    """
    import_rdkit("Chem")
    results = parallel_map(_arrays_or_reason, smiles, num_workers=num_workers)
    graphs = [
        None if isinstance(found, str) else _data(found, text) for text, found in zip(smiles, results, strict=True)
    ]
    places = [f"number {at}" for at in range(1, len(results) + 1)] if lines is None else [f"line {at}" for at in lines]
    unusable = [
        f"{place}, {text!r}: {found}"
        for place, text, found in zip(places, smiles, results, strict=True)
        if isinstance(found, str)
    ]
    return graphs, unusable


def _arrays_or_reason(smiles: str) -> dict[str, _Array] | str:
    try:
        return _arrays(_molecule(smiles))
    except UnusableMoleculeError as error:
        return str(error)


def murcko_scaffold(smiles: str) -> str:
    """Return the Murcko scaffold (rings and their linkers) as canonical SMILES; empty for a molecule without rings.

    Example:
        >>> murcko_scaffold("CCc1ccccc1"), murcko_scaffold("CCO")
        ('c1ccccc1', '')
    """
    scaffold: str = import_rdkit("Chem.Scaffolds.MurckoScaffold").MurckoScaffoldSmiles(mol=_molecule(smiles))
    return scaffold


def number_molecules(smiles: Sequence[str]) -> Tensor:
    """Number molecules so that equal ones share a number, whatever their SMILES; stereo is ignored.

    Args:
        smiles: molecules that RDKit can parse.

    Returns:
        (N,) int64.

    Example:
        >>> number_molecules(["CCO", "CC", "OCC"]).tolist()
        [0, 1, 0]
    """
    chem = import_rdkit("Chem")
    numbers: dict[str, int] = {}
    canonical = (chem.MolToSmiles(_molecule(text), isomericSmiles=False) for text in smiles)
    return torch.tensor([numbers.setdefault(name, len(numbers)) for name in canonical])


def describe_unusable(unusable: Sequence[str], total: int, *, most: int = 20) -> str:
    """Return a sentence with the number of molecules that failed, naming up to ``most`` of them.

    Example:
        >>> describe_unusable(["number 2, 'C1CC': RDKit cannot read it"], 3)
        "1 of 3 SMILES left out: number 2, 'C1CC': RDKit cannot read it"
    """
    more = f"; and {len(unusable) - most:,} more" if len(unusable) > most else ""
    return f"{len(unusable):,} of {total:,} SMILES left out: {'; '.join(unusable[:most])}{more}"
