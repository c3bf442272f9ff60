"""Plots of a graph run's results and their captions."""

from __future__ import annotations

from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from treadle.graphs import GraphDataset, GraphTrainer, parse_pe_config
from treadle.graphs.contributions import atom_contributions, plot_contributions, typical_and_worst
from treadle.graphs.datasets.molecules import ATOM_COLUMNS
from treadle.graphs.distances import errors_by_distance, plot_distances
from treadle.graphs.pictures import is_molecule, plot_encodings, plot_molecules, plot_predictions, plot_targets
from treadle.graphs.run_build import loader
from treadle.graphs.run_config import GraphsConfig
from treadle.runs.curves import plot_training_curves
from treadle.runs.report import Picture

_Numbers = npt.NDArray[np.float64]

_MOST_PANELS = 12  # of predicted against true values
_MOST_TARGETS = 3  # that get a plot of contributions
_MOLECULE_SIZES = range(18, 27)  # of the molecule whose encodings are drawn: informative, yet readable


def draw(config: GraphsConfig, data: GraphDataset, trainer: GraphTrainer, folder: Path) -> list[Picture]:
    """Draw plots of the trainer's model on the test set.

    Args:
        config: the settings of the run.
        data: the data set.
        trainer: its model has the best weights.
        folder: output folder.

    Returns:
        The plots with their captions.
    """
    predicted = trainer.predict(loader(data.test, config.training.batch_size))
    curves = plot_training_curves(_curves(trainer), folder / "training_curves.png")
    caption = "Loss by epoch on training and validation graphs, with the best epoch marked; below, the learning rate."
    return [
        *_predictions(data, predicted, folder),
        *_contributions(data, trainer, predicted, folder),
        *_distances(data, predicted, folder),
        *_encodings(config, data, folder),
        Picture(curves, "Training", caption),
    ]


def _predictions(data: GraphDataset, predicted: Tensor, folder: Path) -> list[Picture]:
    """Draw predicted against true values of a regression of graphs."""
    if data.task_type != "regression" or data.level != "graph":
        return []
    true = torch.cat([graph.y.reshape(1, -1) for graph in data.test]).double().numpy()
    guessed = predicted.double().numpy()
    if true.shape[1] > 1:
        return _several_targets(data, true, guessed, folder)
    known = ~np.isnan(true[:, 0])
    graphs = list(compress(data.test, known.tolist()))
    if not graphs:
        return []
    true, guessed = true[known, 0], guessed[known, 0]
    sizes = np.array([graph.num_nodes for graph in graphs])
    path = plot_predictions(true, guessed, sizes, folder / "predictions.png", what=_shown_name(data, 0))
    caption = (
        "Left: one dot per test graph; on the line, prediction and target are equal. Right: the absolute error by the "
        "number of nodes, with the median and the middle half of groups of graphs of similar size."
    )
    pictures = [Picture(path, "Predicted against true", caption)]
    if "smiles" in graphs[0]:
        path = plot_molecules([graph.smiles for graph in graphs], true, guessed, folder / "molecules.png")
        caption = "The test molecules with the smallest and the largest errors."
        pictures.append(Picture(path, "Best and worst molecules", caption))
    return pictures


def _several_targets(data: GraphDataset, true: _Numbers, guessed: _Numbers, folder: Path) -> list[Picture]:
    count = true.shape[1]
    shown = min(count, _MOST_PANELS)
    names = [_shown_name(data, target) if data.target_names else f"target {target}" for target in range(shown)]
    path = plot_targets(true[:, :shown], guessed[:, :shown], folder / "predictions.png", names=names)
    caption = "One dot per test graph with a known value; on the line, prediction and target are equal."
    caption += f" The first {shown} of {count} targets." if shown < count else ""
    return [Picture(path, "Predicted against true", caption)]


def _shown_name(data: GraphDataset, target: int) -> str:
    return data.target_names[target].replace("penalised_logp", "penalised logP") if data.target_names else "target"


def _contributions(data: GraphDataset, trainer: GraphTrainer, predicted: Tensor, folder: Path) -> list[Picture]:
    """Draw test molecules with coloured atoms, one plot for each of the first targets."""
    if data.level != "graph" or data.task_type not in ("regression", "multilabel"):
        return []
    graphs = list(data.test)
    if graphs[0].x.shape[1:] != (len(ATOM_COLUMNS),) or not is_molecule(graphs[0]):
        return []
    labels = data.task_type == "multilabel"
    guessed = (predicted.sigmoid() if labels else predicted).double().numpy()
    true = torch.cat([graph.y for graph in graphs]).double().numpy()
    pictures = []
    for target in range(min(true.shape[1], _MOST_TARGETS)):
        name = _shown_name(data, target)
        chosen = typical_and_worst(np.abs(guessed[:, target] - true[:, target]))
        rows = {}
        for row, numbers in chosen.items():
            rows[row] = [
                (
                    graphs[number].smiles,
                    f"true {true[number, target]:.3g}, predicted {guessed[number, target]:.3g}",
                    atom_contributions(trainer.model, graphs[number])[:, target].numpy(),
                )
                for number in numbers.tolist()
                if is_molecule(graphs[number])
            ]
        if not any(rows.values()):
            continue
        unit = f"log-odds of {name}" if labels else f"in units of {name}"
        path = plot_contributions(rows, folder / f"contributions{f'_{target}' if target else ''}.png", unit=unit)
        caption = (
            f"Contribution of each atom to the predicted {name}: the prediction minus that of the same molecule "
            "without the features of the atom, keeping its bonds and encodings (Riniker and Landrum 2013). Orange "
            "raises it, blue lowers it, on one scale; the contributions need not add up to the prediction. Top: test "
            "molecules with errors nearest to the median; bottom: those with the largest errors."
        )
        pictures.append(Picture(path, f"Contributions of atoms to {name}", caption))
    return pictures


def _distances(data: GraphDataset, predicted: Tensor, folder: Path) -> list[Picture]:
    errors = errors_by_distance(data, predicted)
    path = None if errors is None else plot_distances(errors, folder / "distances.png")
    if errors is None or path is None:
        return []
    caption = (
        f"The {errors.measure} by the {errors.across}, compared with that of a constant guess; shaded: standard "
        "error. Below, the number of test targets at each distance."
    )
    return [Picture(path, "Error by distance", caption)]


def _encodings(config: GraphsConfig, data: GraphDataset, folder: Path) -> list[Picture]:
    pe = parse_pe_config(config.encodings)
    graph = _shown_molecule(data)
    if graph is None or (pe.node is None and pe.relative is None):
        return []
    path = plot_encodings(graph, pe, folder / "encodings.png")
    caption = (
        "Encodings of the atoms of one test molecule, drawn as colours: columns of the node encodings"
        f"{', and the encoding of the pairs with one atom' if pe.relative is not None else ''}. The molecule is the "
        "one with the most rings among those of readable size."
    )
    return [Picture(path, "Encodings", caption)]


def _shown_molecule(data: GraphDataset) -> Any:
    """Return the test molecule with the most rings among those of readable size, or None; not picked by hand."""
    graphs = list(data.test)
    fitting = [graph for graph in graphs if graph.num_nodes in _MOLECULE_SIZES] or graphs
    by_rings = sorted(fitting, key=lambda graph: graph.num_edges - 2 * graph.num_nodes, reverse=True)
    return next(filter(is_molecule, by_rings), None)


def _curves(trainer: GraphTrainer) -> list[dict[str, Any]]:
    train, val = trainer.history["train"], trainer.history["val"]
    return [
        {"epoch": t["epoch"], "train_loss": t["loss"], "val_loss": v["loss"], "lr": t["lr"]}
        for t, v in zip(train, val, strict=True)
    ]
