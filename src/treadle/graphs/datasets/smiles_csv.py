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
from treadle.graphs.datasets.base import Described, Indices, Source, scaffold_split, split_molecules
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
    chosen = _chosen(targets, [column for column in columns if column != smiles], Path(file), smiles)
    values = [_column(name, [row[name] for row in rows], lines, task) for name in chosen]
    if task == "regression":
        _warn_of_odd(dict(zip(chosen, values, strict=True)), by_default=targets is None)
    found, unusable = usable_graphs([row[smiles] for row in rows], num_workers=num_workers, lines=lines)
    if unusable:
        _log.warning("%s: %s", file, describe_unusable(unusable, len(rows)))
    graphs = []
    for place, graph in enumerate(found):
        if graph is not None:
            graph.y = torch.tensor([[column[place] for column in values]], dtype=torch.float32)
            graphs.append(graph)
    if not graphs:
        raise ConfigError(
            f"it has {len(rows)} rows and no molecule that can be read; add some", argument="file", value=str(file)
        )
    described = Described(
        "graph", task, len(ATOM_COLUMNS), len(chosen), len(BOND_COLUMNS),  # type: ignore[arg-type]
        target_names=tuple(chosen),
    )  # fmt: skip
    texts = [graph.smiles for graph in graphs]
    numbered = number_molecules(texts).numpy()
    parts = _parts(texts, numbered, split, Path(file))
    return Source(described, GraphSplit(pack(graphs)), parts, has_test_set=False, molecules=numbered)


def _parts(smiles: Sequence[str], molecules: Indices, split: str, file: Path) -> tuple[Indices, Indices, Indices]:
    """Return indices of a training, a validation and a test split, or raise ConfigError if one is empty."""
    if split == "scaffold":
        parts = scaffold_split([murcko_scaffold(text) for text in smiles])
    else:
        tenth, order = len(smiles) // 10, np.random.default_rng(0).permutation(len(smiles))
        parts = split_molecules(order, molecules, (len(smiles) - 2 * tenth, tenth))
    if not all(map(len, parts)):
        other = ", or dataset.split=random" if split == "scaffold" else ""
        raise ConfigError(
            f"the {len(smiles)} molecules of {str(file)!r} do not fill a training, a validation and a test split, of "
            f"which the last two have a tenth each; use more{other}",
            argument="split",
            value=split,
        )
    return parts


def _warn_of_odd(targets: Mapping[str, Sequence[float]], *, by_default: bool) -> None:
    """Warn about a regression of what looks like identifiers, if they are targets by default, or like labels."""
    for column, values in targets.items():
        known = [value for value in values if not math.isnan(value)]
        others = [name for name in targets if name != column]
        if by_default and others and len(known) > 2 and len(set(known)) == len(known) and all(map(_is_whole, known)):
            _log.warning(
                "targets: %r has a different whole number in every row, like an identifier, and is predicted as all "
                "columns are; name those to predict: dataset.targets=%s",
                column, others[0] if len(others) == 1 else f"[{','.join(others)}]",
            )  # fmt: skip
        elif set(known) <= {0.0, 1.0}:
            _log.warning(
                "targets: %r has no values but 0 and 1, and is predicted as a number; dataset.task=multilabel "
                "predicts probabilities",
                column,
            )


def _is_whole(value: float) -> bool:
    return value == math.floor(value)


def _chosen(targets: str | Sequence[str] | None, columns: Sequence[str], file: Path, smiles: str) -> list[str]:
    """Return the target columns, or raise ConfigError if one is missing or there are none."""
    if targets is None:
        chosen = [column for column in columns if column]
        if len(chosen) < len(columns):
            _log.warning("%s: a column without a name, such as the index that pandas writes, is no target", file)
        if len(chosen) > 1:
            text = "%s: the targets are all columns but %r: %s; dataset.targets names others"
            _log.info(text, file, smiles, ", ".join(chosen))
    else:
        chosen = [targets] if isinstance(targets, str) else list(targets)
    for column in chosen:
        if column not in columns:
            raise ConfigError(
                f"{str(file)!r} has no column {column!r}; {nearest(column, columns)}", argument="targets", value=chosen
            )
    if not chosen:
        raise ConfigError(f"targets: {str(file)!r} has no column but {smiles!r}; name a file with targets")
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
            columns = reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
            for fields in reader:  # which skips empty lines
                rows.append(fields)
                lines.append(reader.line_num)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            f"cannot be read ({error}); name a file of comma-separated values in UTF-8",
            argument="file",
            value=str(path),
        ) from error
    if not columns:
        raise ConfigError("is empty; its first line has the names of the columns", argument="file", value=str(path))
    other = next((mark for mark in ";\t|" if len(columns) == 1 and mark in columns[0]), None)
    if other is not None:
        raise ConfigError(
            f"its fields are separated by {other!r}, and must be by ','", argument="file", value=str(path)
        )
    if twice := sorted({name for name in columns if name and columns.count(name) > 1}):
        raise ConfigError(f"has two columns named {twice[0]!r}; rename one", argument="file", value=str(path))
    if smiles is not None and smiles not in columns:
        raise ConfigError(
            f"{str(path)!r} has no such column; {nearest(smiles, columns)}", argument="smiles", value=smiles
        )
    for line, row in zip(lines, rows, strict=True):
        if None in row.values() or None in row:
            given = [item for value in row.values() for item in (value if isinstance(value, list) else [value])]
            found = sum(item is not None for item in given)
            raise ConfigError(
                f"line {line} has {found} fields, but the first line has {len(columns)}; quote a field with a comma "
                "in it",
                argument="file",
                value=str(path),
            )
    return smiles or _smiles_among(columns, path, setting), columns, rows, lines


def _column(name: str, texts: Sequence[str], lines: Sequence[int], task: str) -> list[float]:
    """Return the values of a target column, or raise ConfigError if a field is no number or all are empty."""
    values = [_number(text, name, line, task) for text, line in zip(texts, lines, strict=True)]
    if values and all(map(math.isnan, values)):
        raise ConfigError(
            f"targets: {name!r} has no value in any row; name the columns to predict, such as dataset.targets=logP"
        )
    return values


def _number(text: str, column: str, line: int, task: str) -> float:
    if not text.strip():
        return math.nan
    try:
        value = float(text if "_" not in text else "")  # Python alone reads 1_000
    except ValueError:
        raise ConfigError(
            f"targets: {column!r} has {text!r} in line {line}, which is not a number; leave it empty if it is unknown, "
            "write labels as 0 and 1, or name the columns to predict, such as dataset.targets=logP"
        ) from None
    if abs(value) > torch.finfo(torch.float32).max or (
        task == "multilabel" and value not in (0.0, 1.0) and not math.isnan(value)
    ):
        wanted = "0, 1 or empty" if task == "multilabel" else "empty or finite in float32"
        raise ConfigError(f"targets: {column!r} has {text!r} in line {line}; it must be {wanted}")
    return value
