"""Penalised logP, the target of the offline molecules."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

from treadle.errors import MissingExtraError

__all__ = ["import_rdkit", "penalized_logp"]


def import_rdkit(module: str) -> Any:
    """Import a module of RDKit.

    Raises:
        ImportError: RDKit is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(f"rdkit.{module}")
    except ImportError as error:
        raise MissingExtraError(
            "molecules need RDKit, which is not installed: pip install 'treadle[graphs]'", name="rdkit"
        ) from error


def rdkit_file(folder: str, name: str, *, use: str) -> Path:
    """Return the path of a file bundled with RDKit.

    Args:
        folder: attribute of ``rdkit.RDConfig``.
        name: name of the file in that folder.
        use: purpose of the file, for the error message.

    Raises:
        ImportError: RDKit is not installed, or its build lacks the file.
    """
    path = Path(getattr(import_rdkit("RDConfig"), folder)) / name
    if not path.is_file():
        raise MissingExtraError(
            f"this RDKit has no {path}: {use}; install RDKit from its wheel: pip install 'treadle[graphs]'",
            name="rdkit",
        )
    return path


@cache
def _synthetic_accessibility() -> Any:
    """Import the Ertl and Schuffenhauer scorer from RDKit's Contrib folder, which is not a package.

    It reads its fragment table from the same folder at the first score.
    """
    use = "penalised logP needs its synthetic-accessibility score"
    path = rdkit_file("RDContribDir", "SA_Score/sascorer.py", use=use)
    spec = importlib.util.spec_from_file_location("_treadle_sascorer", path)
    assert spec is not None
    assert spec.loader is not None
    scorer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scorer)
    return scorer


def penalized_logp(molecule: Any) -> float:
    """Return logP - SA - max(0, largest ring - 6), not normalised.

    logP is Crippen's estimate of the octanol-water partition coefficient, SA the synthetic accessibility of Ertl and
    Schuffenhauer (1 easy, 10 hard); ring sizes are those of RDKit's smallest set of smallest rings. After
    Gómez-Bombarelli et al., ACS Cent. Sci. 2018, 4, 268.

    Args:
        molecule: an RDKit molecule, or its SMILES.

    Raises:
        ValueError: RDKit cannot parse the SMILES.
        ImportError: RDKit, or its scorer, is not installed.

    Example:
        >>> round(penalized_logp("CC(=O)Oc1ccccc1C(=O)O"), 4)  # aspirin: 1.3101 - 1.5800 - 0
        -0.2699
    """
    if isinstance(molecule, str):
        parsed = import_rdkit("Chem").MolFromSmiles(molecule)
        if parsed is None:
            raise ValueError(f"RDKit cannot read the SMILES {molecule!r}")
        molecule = parsed
    log_p = import_rdkit("Chem.Crippen").MolLogP(molecule)
    largest = max((len(ring) for ring in molecule.GetRingInfo().AtomRings()), default=0)
    return float(log_p - _synthetic_accessibility().calculateScore(molecule) - max(0, largest - 6))
