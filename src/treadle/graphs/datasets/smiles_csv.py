"""Molecules from a user's file, with a SMILES column and target columns that may have unknown values."""

from __future__ import annotations

import csv
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from treadle.errors import ConfigError, nearest
from treadle.graphs.datasets.base import Described, Source, repeats_first, scaffold_split, tenths
from treadle.graphs.datasets.molecules import (
    ATOM_COLUMNS,
    BOND_COLUMNS,
    describe_unusable,
    murcko_scaffold,
    number_molecules,
    usable_graphs,
)
from treadle.graphs.datasets.packed import GraphSplit, pack

__all__ = ["load_smiles_csv", "read_smiles_to_predict"]

_log = logging.getLogger("treadle.graphs")

_TASKS = ("regression", "multilabel")
_SPLITS = ("scaffold", "random")


def load_smiles_csv(
    name: str,
    root: Path,
    *,
    num_workers: int | None,
    file: str | os.PathLike[str] | None = None,
    smiles: str | None = None,
    targets: str | Sequence[str] | None = None,
    task: str = "regression",
    split: str = "scaffold",
) -> Source:
    """Load molecules and their targets; an empty field is NaN, which losses and metrics ignore.

    Args:
        name: name of the data set.
        root: unused; the file is read from its own path.
        num_workers: processes that convert molecules.
        file: CSV file with a header.
        smiles: name of the SMILES column; None: the only one with "smiles" in its name, ignoring case.
        targets: column or columns to predict; None: all others.
        task: ``"regression"``, or ``"multilabel"`` for columns of 0 and 1.
        split: ``"scaffold"``, or ``"random"`` (80/10/10 with seed 0).

    Raises:
        ConfigError: an argument is invalid, the file lacks a column, or a target is not a number.
    """
    for argument, value, known in (("task", task, _TASKS), ("split", split, _SPLITS)):
        if value not in known:
            raise ConfigError(nearest(str(value), known), argument=argument, value=value)
    if file is None:
        raise ConfigError(f"{name!r} needs a file of molecules, such as file='new.csv'", argument="file", value=file)
    smiles, columns, rows, lines = _read_table(Path(file), smiles, "dataset.smiles")
    chosen = _chosen(targets, [column for column in columns if column != smiles], f"{str(file)!r}", smiles)
    values = [
        [_number(row[column], column, line, task) for column in chosen] for line, row in zip(lines, rows, strict=True)
    ]
    found, unusable = usable_graphs([row[smiles] for row in rows], num_workers=num_workers, lines=lines)
    if unusable:
        _log.warning("%s: %s", file, describe_unusable(unusable, len(rows)))
    graphs = []
    for graph, target in zip(found, values, strict=True):
        if graph is not None:
            graph.y = torch.tensor([target], dtype=torch.float32)
            graphs.append(graph)
    described = Described(
        "graph", task, len(ATOM_COLUMNS), len(chosen), len(BOND_COLUMNS),  # type: ignore[arg-type]
        target_names=tuple(chosen),
    )  # fmt: skip
    texts = [graph.smiles for graph in graphs]
    numbered = number_molecules(texts).numpy()
    if split == "scaffold":
        parts = scaffold_split([murcko_scaffold(text) for text in texts])
    else:
        parts = tenths(repeats_first(np.random.default_rng(0).permutation(len(graphs)), numbered))
    return Source(described, GraphSplit(pack(graphs)), parts, has_test_set=False, molecules=numbered)


def _chosen(targets: str | Sequence[str] | None, columns: Sequence[str], file: str, smiles: str) -> list[str]:
    """Return the target columns, or raise ConfigError if one is missing or there are none."""
    chosen = [targets] if isinstance(targets, str) else list(columns if targets is None else targets)
    for column in chosen:
        if column not in columns:
            raise ConfigError(
                f"{file} has no column {column!r}; {nearest(column, columns)}", argument="targets", value=chosen
            )
    if not chosen:
        raise ConfigError(f"targets: {file} has no column but {smiles!r}; name a file with targets")
    return chosen


def read_smiles_to_predict(path: Path, *, smiles: str | None) -> tuple[str, list[Mapping[str, Any]], list[int]]:
    """Read molecules to predict: the SMILES column, the rows, and the line on which each row ends.

    Args:
        path: a ``.smi`` or ``.txt`` file with one SMILES per line, optionally followed by other text; or a CSV file
            with a header.
        smiles: name of the SMILES column; None uses the only one whose name contains "smiles", case-insensitively.

    Raises:
        ConfigError: the file is missing, has no rows or no such column, or a row has too few fields.
    """
    if path.suffix in (".smi", ".txt"):
        return _read_lines(path)
    smiles, _, rows, lines = _read_table(path, smiles, "--smiles-column")
    if not rows:
        raise ConfigError(f"{str(path)!r} has a header and no molecules; add a row for each")
    return smiles, rows, lines


def _smiles_among(columns: Sequence[str], path: Path, setting: str) -> str:
    """Return the column of SMILES by its name; ``setting`` names it otherwise."""
    found = [column for column in columns if column.lower() == "smiles"]
    found = found or [column for column in columns if "smiles" in column.lower()]
    if len(found) != 1:
        raise ConfigError(
            f"{str(path)!r} has {len(found) or 'no'} columns with 'smiles' in their names; choose one with {setting}: "
            f"{', '.join(columns)}"
        )
    return found[0]


def _read_lines(path: Path) -> tuple[str, list[Mapping[str, Any]], list[int]]:
    try:
        texts = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot be read ({error}); name a file with one SMILES a line", argument="file", value=str(path)
        ) from error
    filled = [(line, text.split()[0]) for line, text in enumerate(texts, 1) if text.strip()]
    if not filled:
        raise ConfigError(f"{str(path)!r} has no molecules; add a line for each")
    return "smiles", [{"smiles": text} for _, text in filled], [line for line, _ in filled]


def _read_table(
    path: Path, smiles: str | None, setting: str
) -> tuple[str, list[str], list[Mapping[str, Any]], list[int]]:
    """Return the SMILES column, all columns, the rows and their lines; ``setting`` is what names the column."""
    rows: list[Mapping[str, Any]] = []
    lines: list[int] = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as opened:
            reader = csv.DictReader(opened)
            columns = list(reader.fieldnames or ())
            for fields in reader:  # which skips empty lines
                rows.append(fields)
                lines.append(reader.line_num)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            f"cannot be read ({error}); name a file of comma-separated values", argument="file", value=str(path)
        ) from error
    if not columns:
        raise ConfigError("is empty; its first line has the names of the columns", argument="file", value=str(path))
    other = next((mark for mark in ";\t|" if len(columns) == 1 and mark in columns[0]), None)
    if other is not None:
        raise ConfigError(
            f"its fields are separated by {other!r}, and must be by ','", argument="file", value=str(path)
        )
    if smiles is not None and smiles not in columns:
        raise ConfigError(
            f"{str(path)!r} has no such column; {nearest(smiles, columns)}", argument="smiles", value=smiles
        )
    for line, row in zip(lines, rows, strict=True):
        if None in row.values() or None in row:
            raise ConfigError(
                f"line {line} does not have {len(columns)} fields like the first line", argument="file", value=str(path)
            )
    return smiles or _smiles_among(columns, path, setting), columns, rows, lines


def _number(text: str, column: str, line: int, task: str) -> float:
    if not text.strip():
        return math.nan
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(
            f"targets: {column!r} has {text!r} in line {line}, which is not a number; leave it empty, or name the "
            "columns to predict, such as dataset.targets=logP"
        ) from None
    if math.isinf(value) or (task == "multilabel" and value not in (0.0, 1.0) and not math.isnan(value)):
        wanted = "0, 1 or empty" if task == "multilabel" else "finite or empty"
        raise ConfigError(f"targets: {column!r} has {text!r} in line {line}; it must be {wanted}")
    return value
