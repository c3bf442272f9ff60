"""Ensemble predictions for molecules, with the standard deviation over models as uncertainty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from treadle.device import get_device
from treadle.errors import ConfigError, nearest
from treadle.errors.arguments import checked
from treadle.graphs.calibration import HeldOut, calibrate
from treadle.graphs.encodings.compute import encode_graph
from treadle.graphs.encodings.config import parse_pe_config

if TYPE_CHECKING:
    from torch_geometric.data import Data

    from treadle.graphs.encodings import PEConfig
    from treadle.graphs.encodings.config import PEConfigLike

_TASKS = ("regression", "multilabel")


class SmilesPrediction(NamedTuple):
    """Ensemble prediction for M molecules and T targets."""

    mean: Tensor
    """(M, T) float64: values, or probabilities for a multilabel task; NaN for a SMILES that could not be converted."""
    deviation: Tensor
    """(M, T) float64: standard deviation over the models, calibrated if requested; NaN for one model."""
    unusable: list[str]
    """One line for every SMILES that could not be converted."""
    factors: Tensor | None = None
    """(T,) float64, by which deviations are multiplied; 1 for a target with too few known values, None if it was not
    requested."""


@checked
def predict_smiles(
    models: Sequence[nn.Module],
    smiles: Sequence[str],
    *,
    pe_config: PEConfigLike = "default",
    task_type: str = "regression",
    batch_size: int = 128,
    device: torch.device | str | int | None = None,
    calibrate_on: Sequence[Data] | None = None,
) -> SmilesPrediction:
    """Predict targets of molecules as the mean over models, for example of several seeds.

    Args:
        models: models of one task, trained on graphs from `get_dataset`; moved to the device and left in eval mode.
        smiles: M molecules.
        pe_config: the encodings that the models were trained with.
        task_type: ``"regression"``, or ``"multilabel"``, whose logits become probabilities.
        batch_size: molecules per batch.
        device: None selects CUDA, then MPS, then the CPU.
        calibrate_on: encoded graphs with known targets that no model was trained on, such as ``data.val``. Deviations
            are multiplied by one factor per target, so that mean ± deviation holds 68 % of them, as in ``treadle
            predict``. For a regression by several models.

    Raises:
        ConfigError: there are no models or molecules, the task is not supported, or deviations cannot be calibrated.
        ImportError: rdkit or torch_geometric is missing.

    Example:
        >>> from treadle.graphs import get_model
        >>> models = [get_model("mpnn", 40, hidden_dim=8, num_layers=1, num_edge_features=6) for _ in range(3)]
        >>> found = predict_smiles(models, ["CCO", "c1ccccc1", "C1CC"], pe_config=None, device="cpu")
        >>> found.mean.shape, found.deviation[:2].gt(0).all().item(), len(found.unusable)
        (torch.Size([3, 1]), True, 1)
    """
    from treadle.graphs.datasets.molecules import usable_graphs

    if not models or not smiles or batch_size < 1:
        raise ConfigError(
            f"predict_smiles: {len(models)} models, {len(smiles)} molecules, batch_size={batch_size}; give one or more"
        )
    if task_type not in _TASKS:
        raise ConfigError(nearest(str(task_type), _TASKS), argument="task_type", value=task_type)
    if calibrate_on is not None and (len(models) < 2 or task_type != "regression"):
        raise ConfigError(
            f"calibrate_on: deviations of a regression by several models are calibrated, and this is {task_type} by "
            f"{len(models)}; pass None"
        )
    settings, place = parse_pe_config(pe_config), get_device(device)
    found, unusable = usable_graphs(smiles, num_workers=0)
    mean, deviation = predict_graphs(models, found, settings, task_type=task_type, batch_size=batch_size, device=place)
    if calibrate_on is None:
        return SmilesPrediction(mean, deviation, unusable)
    factors = _factors(models, list(calibrate_on), batch_size, place)
    return SmilesPrediction(mean, deviation * factors, unusable, factors)


def _factors(models: Sequence[nn.Module], graphs: Sequence[Data], batch_size: int, device: torch.device) -> Tensor:
    if not graphs:
        raise ConfigError("there are no graphs; pass those of the validation split, or None", argument="calibrate_on")
    target = torch.stack([graph.y.double().flatten() for graph in graphs]).numpy()
    outputs = [_outputs(model, _batches(graphs, batch_size), device).numpy() for model in models]
    found = calibrate([HeldOut(output, target, output[:0], target[:0]) for output in outputs])
    assert found is not None  # all models have the same molecules
    return torch.tensor([1.0 if each is None else each.factor for each in found], dtype=torch.float64)


def _batches(graphs: Sequence[Data], batch_size: int) -> list[Any]:
    from torch_geometric.data import Batch

    return [Batch.from_data_list(graphs[at : at + batch_size]) for at in range(0, len(graphs), batch_size)]


def predict_graphs(
    models: Sequence[nn.Module],
    found: Sequence[Data | None],
    settings: PEConfig,
    *,
    task_type: str,
    batch_size: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return the mean and deviation of :class:`SmilesPrediction` for M graphs, which may be None."""
    usable = [number for number, graph in enumerate(found) if graph is not None]
    graphs = [
        encode_graph(graph.edge_index, graph.num_nodes, settings).attach(graph) for graph in found if graph is not None
    ]
    batches = _batches(graphs, batch_size)
    outputs = [_outputs(model.to(device).eval(), batches, device) for model in models]
    if not graphs:
        empty = torch.full((len(found), getattr(models[0], "num_classes", 1)), torch.nan, dtype=torch.float64)
        return empty, empty.clone()
    every = torch.stack(outputs)
    every = every.sigmoid() if task_type == "multilabel" else every
    mean, deviation = (torch.full((len(found), every.shape[2]), torch.nan, dtype=torch.float64) for _ in range(2))
    mean[usable] = every.mean(dim=0)
    if len(models) > 1:
        deviation[usable] = every.std(dim=0)
    return mean, deviation


@torch.no_grad()
def _outputs(model: nn.Module, batches: Sequence[Tensor], device: torch.device) -> Tensor:
    parts = [model(batch.clone().to(device)).double().cpu() for batch in batches]
    return torch.cat(parts) if parts else torch.zeros(0, 1, dtype=torch.float64)
