"""Prediction by stored runs for a file of SMILES, without their data sets."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from treadle.checkpoint.store import load_weights
from treadle.device import get_device
from treadle.distributed.state_names import load_model_state
from treadle.errors import ConfigError
from treadle.graphs import GraphDataset, parse_pe_config
from treadle.graphs.calibration import COVERAGE, LEAST, HeldOut, TargetCalibration, calibrate, held_out_of
from treadle.graphs.datasets.molecules import ATOM_COLUMNS, BOND_COLUMNS, usable_graphs
from treadle.graphs.datasets.smiles_csv import read_smiles_to_predict
from treadle.graphs.ensemble import predict_graphs
from treadle.graphs.run_build import build_model
from treadle.runs.folder import run_folder_of
from treadle.runs.results import Predictions

if TYPE_CHECKING:
    from torch import Tensor, nn

    from treadle.graphs.run_config import GraphsConfig

_log = logging.getLogger("treadle.cli")

SMILES_SETS = ("smiles_csv", "nci", "zinc_clean_leads")
"""Data sets with the atom and bond columns of ``graph_from_smiles``."""
_COLUMNS = ("mean", "std")  # of each target
_MOST_NAMED = 20


@dataclass(frozen=True)
class StoredModel:
    """Trained model with its targets.

    Attributes:
        path: path of its checkpoint.
        config: the settings of its run.
        targets: a name for each output.
        task_type: ``"regression"`` or ``"multilabel"``.
        model: the model with the weights of the checkpoint.
        held_out: its predictions of validation and test molecules; None if the run stored none for these weights.
    """

    path: Path
    config: GraphsConfig
    targets: tuple[str, ...]
    task_type: str
    model: nn.Module
    held_out: HeldOut | None = None


def load_stored_model(config: GraphsConfig, path: Path, tree: Mapping[str, Any]) -> StoredModel:
    """Build the model of a run on molecules and load its weights.

    Args:
        config: the settings of the run.
        path: the checkpoint.
        tree: its contents.

    Raises:
        ConfigError: the run was trained on graphs that are not made from SMILES.
        CheckpointError: the weights do not match.
    """
    name = str(config.dataset.get("name"))
    if name not in SMILES_SETS:
        raise ConfigError(
            f"--smiles: {path} was trained on {name}, whose graphs are not made of SMILES; give a run of "
            f"dataset={', '.join(SMILES_SETS[:-1])} or {SMILES_SETS[-1]}"
        )
    trained = tree["config"]
    count = trained["num_classes"] or 1
    # Older checkpoints do not name targets.
    targets = tuple(trained.get("targets") or config.dataset.get("targets") or (f"target_{k}" for k in range(count)))
    pe = parse_pe_config(config.encodings)
    described = GraphDataset(
        "graph", trained["task_type"], len(ATOM_COLUMNS), count, len(BOND_COLUMNS),
        name=name, train=(), val=(), test=(), node_pe_dim=pe.node_dim, relative_pe_dim=pe.relative_dim,
        target_names=targets,
    )  # fmt: skip
    model = build_model(config, described, measure=False)
    load_model_state(model, load_weights(path))
    held_out = held_out_of(path, tree, run_folder_of(path))
    return StoredModel(path, config, targets, trained["task_type"], model, held_out)


def predict_file(
    stored: Sequence[StoredModel],
    file: str | os.PathLike[str],
    *,
    column: str | None = None,
    batch_size: int | None = None,
    device: str | None = None,
) -> Predictions:
    """Predict the molecules of a file, as the mean over models.

    Args:
        stored: models of one task, with the same targets and encodings.
        file: CSV file with a header and a SMILES column.
        column: name of the SMILES column; None finds it by name.
        batch_size: None uses that of training.
        device: None selects CUDA, then MPS, then the CPU.

    Returns:
        The columns of the file, ``<name>_mean`` for each target, and with several models ``<name>_std``, their standard
        deviation, calibrated on the validation molecules of the runs if that is possible; NaN for a SMILES that cannot
        be converted, with one warning that names the lines.

    Raises:
        ConfigError: the models do not predict the same targets, or the file cannot be read.
    """
    _refuse_mixed(stored)
    first, encodings = stored[0], parse_pe_config(stored[0].config.encodings)
    column, rows, lines = read_smiles_to_predict(Path(file), smiles=column)
    written = {f"{target}_{what}" for target in first.targets for what in _COLUMNS}
    if taken := [name for name in rows[0] if name in written]:
        raise ConfigError(
            f"--smiles: {str(file)!r} has columns with names of the output: {', '.join(taken)}; rename them"
        )
    smiles = [row[column].strip() for row in rows]
    found, unusable = usable_graphs(smiles, num_workers=0, lines=lines)
    if unusable:
        more = f"; and {len(unusable) - _MOST_NAMED:,} more" if len(unusable) > _MOST_NAMED else ""
        named = "; ".join(unusable[:_MOST_NAMED])
        _log.warning("%s: %d of %d rows have no prediction: %s%s", file, len(unusable), len(rows), named, more)
    mean, deviation = predict_graphs(
        [each.model for each in stored],
        found,
        encodings,
        task_type=first.task_type,
        batch_size=batch_size or first.config.training.batch_size,
        device=get_device(device),
    )
    if len(stored) > 1 and first.task_type == "regression":
        deviation *= torch.tensor(_factors(stored), dtype=deviation.dtype)
    arrays: dict[str, Any] = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    return Predictions({**arrays, **_by_name(first.targets, mean, deviation if len(stored) > 1 else None)})


def _refuse_mixed(stored: Sequence[StoredModel]) -> None:
    """Raise ConfigError for models with different targets or encodings."""
    for name, its in (
        ("targets", [each.targets for each in stored]),
        ("task", [each.task_type for each in stored]),
        ("encodings", [parse_pe_config(each.config.encodings) for each in stored]),
    ):
        for each, value in zip(stored, its, strict=True):
            if value != its[0]:
                raise ConfigError(
                    f"--smiles: {each.path} has other {name} than {stored[0].path}; give runs that differ only in the "
                    "seed"
                )


def _factors(stored: Sequence[StoredModel]) -> list[float]:
    """Return the calibration factor of each target's deviation, 1 where there is none, and log what it does."""
    targets = stored[0].targets
    members = [each.held_out for each in stored if each.held_out is not None]
    if len(members) < len(stored):
        missing = next(each.path for each in stored if each.held_out is None)
        _log.warning(
            "standard deviations are not calibrated: %s has no predictions of its validation molecules; use the "
            "best.pt of finished runs", missing,
        )  # fmt: skip
        return [1.0] * len(targets)
    found = calibrate(members)
    if found is None:
        _log.warning("standard deviations are not calibrated: the runs have different validation or test molecules")
        return [1.0] * len(targets)
    for name, each in zip(targets, found, strict=True):
        if each is None:
            _log.warning("%s_std is not calibrated: fewer than %d known validation values", name, LEAST)
        else:
            _log.info("%s_std: the deviation of %d runs times %.3g; %s", name, len(stored), each.factor, _shares(each))
    return [1.0 if each is None else each.factor for each in found]


def _shares(each: TargetCalibration) -> str:
    fitted = f"mean ± std covers {100 * COVERAGE:.0f} % of {each.num_val:,} validation values"
    if not each.num_test:
        return fitted
    return f"{fitted} and {100 * each.after:.0f} % of {each.num_test:,} test values ({100 * each.before:.0f} % without)"


def _by_name(targets: Sequence[str], mean: Tensor, deviation: Tensor | None) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for number, name in enumerate(targets):
        arrays[f"{name}_mean"] = mean[:, number].numpy()
        if deviation is not None:
            arrays[f"{name}_std"] = deviation[:, number].numpy()
    return arrays
