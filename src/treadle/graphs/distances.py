"""Error of a graph run by distance: hops between the nodes of a pair, or the diameter of a graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from treadle.graphs import GraphDataset, hop_distances
from treadle.runs.figures import MUTED, ORANGE, PALE, label_axes, new_figure, save_figure, style_axes

_FEWEST = 10  # minimum number of answers per distance: a mean of fewer is noise


@dataclass(frozen=True)
class ErrorsByDistance:
    """Errors of the model and of a constant guess for each known test target, with the target's distance."""

    hops: npt.NDArray[np.int64]
    """(A,) hops; -1 for an unconnected pair."""
    error: npt.NDArray[np.float64]
    """(A,) absolute error for regression; for classes, 1 if the prediction is wrong, else 0."""
    guess: npt.NDArray[np.float64]
    """(A,) the same for predicting the mean, or the most frequent class, of the training targets."""
    of_pairs: bool
    of_classes: bool

    @property
    def across(self) -> str:
        """Description of the distance."""
        return "hops between the two nodes" if self.of_pairs else "hops between the graph's farthest nodes"

    @property
    def measure(self) -> str:
        """Description of the error."""
        return "share of wrong answers" if self.of_classes else "mean absolute error"


def errors_by_distance(data: GraphDataset, predicted: Tensor) -> ErrorsByDistance | None:
    """Return the errors on the test set with their distances.

    Args:
        data: the data set; its graphs on the CPU.
        predicted: (A, C), raw outputs for the test set, in order.

    Returns:
        None if targets have no distance, such as those of single nodes, or several values each.
    """
    if data.level == "node" or data.task_type == "multilabel":
        return None
    train, true = _targets(data.train), _targets(data.test)
    if len(true) != len(predicted):
        return None
    outputs = predicted if predicted.ndim == 2 else predicted[:, None]
    of_classes = data.task_type != "regression"
    if of_classes:
        answers = outputs.argmax(1) if outputs.shape[1] > 1 else (outputs[:, 0] > 0).long()
        guess = train[~train.isnan()].mode().values
        error, guessed = answers != true, guess != true
    else:
        error, guessed = (outputs[:, 0] - true).abs(), (train.nanmean() - true).abs()
    known = ~true.isnan()
    hops = torch.cat([_hops(graph) for graph in data.test])
    return ErrorsByDistance(
        hops[known].numpy(),
        error[known].double().numpy(),
        guessed[known].double().numpy(),
        of_pairs=data.level == "edge",
        of_classes=of_classes,
    )


def _targets(graphs: Iterable[Any]) -> Tensor:
    return torch.cat([graph.y.double().flatten() for graph in graphs])


def _hops(graph: Any) -> Tensor:
    hops = hop_distances(graph.edge_index, graph.num_nodes)
    pairs = graph.pair_index if "pair_index" in graph else None
    return hops.max().view(1) if pairs is None else hops[pairs[0], pairs[1]]


def plot_distances(errors: ErrorsByDistance, path: Path) -> Path | None:
    """Plot the mean error at every distance with that of a constant guess, and the number of targets.

    Args:
        errors: errors on the test set.
        path: output file, ending in ``.png``.

    Returns:
        The path; None, without a plot, if fewer than two distances have enough targets for a mean.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.ticker import MaxNLocator

    hops = [h for h in np.unique(errors.hops[errors.hops >= 0]) if (errors.hops == h).sum() >= _FEWEST]
    if len(hops) < 2:
        return None
    groups = [errors.error[errors.hops == h] for h in hops]
    mean = np.array([group.mean() for group in groups])
    deviation = np.array([group.std() / np.sqrt(len(group)) for group in groups])
    figure = new_figure(8.0, 5.2)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for axes in (top, bottom):
        style_axes(axes)
    guess = "most frequent class" if errors.of_classes else "mean of the training targets"
    top.plot(
        hops, [errors.guess[errors.hops == h].mean() for h in hops],
        color=MUTED, linestyle="--", marker="o", markersize=3, label=f"guess: {guess}",
    )  # fmt: skip
    top.fill_between(hops, mean - deviation, mean + deviation, color=ORANGE, alpha=0.25, linewidth=0)
    top.plot(hops, mean, color=ORANGE, marker="o", markersize=5, label="the model")
    top.set_ylim(bottom=0)
    top.legend(frameon=False, fontsize=10)
    label_axes(top, y=errors.measure, title="Error by distance")
    few = len(errors.hops) - sum(map(len, groups))
    noun = "pairs" if errors.of_pairs else "graphs"
    if few:
        note = f"{few} {noun} left out: fewer than {_FEWEST} at their distance" + (
            ", or no path" if errors.of_pairs else ""
        )
        top.set_title(note, fontsize=9, color=MUTED, loc="right")
    bottom.bar(hops, [len(group) for group in groups], color=PALE)
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    label_axes(bottom, x=errors.across, y=noun)
    return save_figure(figure, path)
