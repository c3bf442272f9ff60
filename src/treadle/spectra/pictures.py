"""Plots of a run, each drawn from arrays to a PNG file by one call.

The two maps of the latent are in `latent_pictures`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from treadle.runs.curves import plot_training_curves
from treadle.runs.figures import (
    CATEGORIES,
    INK,
    MUTED,
    ORANGE,
    SHADE,
    as_matrix,
    label_axes,
    new_figure,
    save_figure,
    style_axes,
)
from treadle.spectra.few_labels import FewLabels
from treadle.spectra.latent_pictures import plot_cluster_map, plot_latent_map

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_cluster_map", "plot_few_labels", "plot_latent_map", "plot_reconstructions", "plot_training_curves"]

_PANELS_PER_ROW = 2


def plot_reconstructions(
    wavelengths: npt.ArrayLike,
    spectra: npt.ArrayLike,
    reconstructions: npt.ArrayLike,
    visible_masks: npt.ArrayLike,
    titles: Sequence[str],
    path: str | os.PathLike[str],
    *,
    wavelength_unit: str = "µm",
) -> Path:
    """Plot spectra with their reconstructions, shading the regions hidden from the model.

    Args:
        wavelengths: (L,) increasing, in `wavelength_unit`.
        spectra, reconstructions: (N, L) in SNV units (rows of mean 0 and standard deviation 1); about 8 fill a page.
        visible_masks: (N, L) bool, True = visible to the model.
        titles: N short strings, such as name and spectral type; long ones are shortened in the middle.
        path: output file, ending in `.png`.
        wavelength_unit: unit shown on the axis.

    Returns:
        The path. Each panel shows the mean squared error over its hidden channels.

    Raises:
        ValueError: shapes disagree, numbers are not finite, masks are not bool, or the path is not a `.png`.
        ImportError: matplotlib is not installed.

    Example:
        >>> x, seen = np.zeros((1, 4)), np.array([[True, True, False, False]])
        >>> import tempfile
        >>> plot_reconstructions(range(4), x, x, seen, ["flat"], tempfile.mkdtemp() + "/page.png").name
        'page.png'
    """
    rows = as_matrix("spectra", spectra)
    fits = as_matrix("reconstructions", reconstructions, num_rows=len(rows))
    grid = np.asarray(wavelengths, dtype=np.float64)
    seen = np.asarray(visible_masks)
    if seen.dtype != np.bool_ or not (seen.shape == fits.shape == rows.shape) or grid.shape != rows.shape[1:]:
        raise ValueError(
            f"wavelengths {grid.shape}, spectra {rows.shape}, reconstructions {fits.shape} and visible_masks "
            f"{seen.shape} of {seen.dtype} do not fit: they must be (L,), (N, L), (N, L) and (N, L) of bool"
        )
    if len(titles) != len(rows):
        raise ValueError(f"titles has {len(titles)} strings, but must have {len(rows)}, one per spectrum")
    columns = min(_PANELS_PER_ROW, len(rows))
    num_lines = math.ceil(len(rows) / columns)
    figure = new_figure(5.2 * columns, 2.15 * num_lines + 0.9)
    panels = figure.subplots(num_lines, columns, squeeze=False, sharex=True).ravel()
    for axes in panels[len(rows) :]:
        axes.set_visible(False)
    for index, axes in enumerate(panels[: len(rows)]):
        _draw_reconstruction(axes, grid, rows[index], fits[index], seen[index])
        lowest = index + columns >= len(rows)
        axes.tick_params(labelbottom=lowest)
        label_axes(axes, x=f"wavelength ({wavelength_unit})" if lowest else "", title=_shorten(titles[index]))
    figure.supylabel("flux (SNV units)", fontsize=10, color=INK)
    _shared_legend(figure, panels)
    return save_figure(figure, path)


def _shared_legend(figure: Figure, panels: Iterable[Axes]) -> None:
    """Draw one legend for all panels, since a panel with a fully visible spectrum has no shaded region."""
    entries: dict[str, Any] = {}
    for axes in panels:
        entries.update({label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)})
    figure.legend(
        list(entries.values()), list(entries), loc="outside upper center", ncols=3, frameon=False, fontsize=10
    )


def _shorten(title: str) -> str:
    """Shorten a long title in the middle: name and type are at its ends, and the error follows it."""
    return title if len(title) <= 38 else f"{title[:24]} … {title[-11:]}"


def _draw_reconstruction(
    axes: Axes,
    grid: npt.NDArray[np.float64],
    row: npt.NDArray[np.float64],
    fit: npt.NDArray[np.float64],
    seen: npt.NDArray[np.bool_],
) -> None:
    style_axes(axes, grid=False)
    steps = np.gradient(grid) / 2 if len(grid) > 1 else np.full(1, 0.5)
    hidden = ~seen
    edges = np.flatnonzero(np.diff(np.concatenate(([False], hidden, [False])).astype(np.int8)))
    label: str | None = "hidden from the model"
    for start, stop in zip(edges[::2], edges[1::2] - 1, strict=True):
        axes.axvspan(
            grid[start] - steps[start],
            grid[stop] + steps[stop],
            color=SHADE,
            linewidth=0,
            zorder=0,
            label=label,
        )
        label = None
    axes.plot(grid, row, color=INK, linewidth=1.3, label="measured", zorder=2)
    axes.plot(grid, fit, color=ORANGE, linewidth=1.5, alpha=0.9, label="reconstructed", zorder=3)
    axes.set_xlim(grid[0] - steps[0], grid[-1] + steps[-1])
    if hidden.any():
        error = float(np.mean((fit - row)[hidden] ** 2))
        # Next to the title, since a spectrum may be anywhere inside the axes.
        axes.set_title(f"hidden MSE {error:.3f}", fontsize=9, color=MUTED, loc="right")


def plot_few_labels(curves: Mapping[str, FewLabels], path: str | os.PathLike[str], *, unit: str = "") -> Path:
    """Plot the error by number of labelled rows, as a line with error bars per representation.

    Args:
        curves: name -> result of `few_labels`; the first is drawn on top.
        path: output file, ending in `.png`.
        unit: unit of the error, shown on the axis.

    Returns:
        The path.

    Raises:
        ValueError: there is no curve, or the path is not a `.png`.
        ImportError: matplotlib is not installed.

    Example:
        >>> curve = {"labels": [20, 50], "mae": [2.0, 1.0], "standard_error": [0.1, 0.1], "draws": {}}
        >>> import tempfile
        >>> plot_few_labels({"latent": curve}, tempfile.mkdtemp() + "/few.png").name
        'few.png'
    """
    if not curves:
        raise ValueError("curves is empty, it must name at least one: give the result of few_labels")
    figure = new_figure(8.2, 4.6)
    axes = figure.add_subplot()
    style_axes(axes)
    axes.set_xscale("log")
    axes.set_yscale("log")
    ends = []
    for index, (name, curve) in enumerate(curves.items()):
        colour = ORANGE if index == 0 else CATEGORIES[(index - 1) % 4]
        axes.errorbar(
            curve["labels"], curve["mae"], yerr=curve["standard_error"], color=colour, marker="o", markersize=4,
            linewidth=2.4 if index == 0 else 1.3, linestyle="--" if index > 4 else "-", capsize=2,
            zorder=5 if index == 0 else 3, label=name,
        )  # fmt: skip
        ends.extend(curve["labels"])
    numbers = sorted(set(ends))
    axes.set_xticks(numbers, labels=[f"{number:,}" for number in numbers])
    axes.set_xticks([], minor=True)
    low, high = axes.get_ylim()
    marks = [mark for mark in (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if low <= mark <= high]
    axes.set_yticks(marks, labels=[f"{mark:g}" for mark in marks])
    axes.set_yticks([], minor=True)
    axes.legend(frameon=False, fontsize=9, loc="best")
    label_axes(
        axes, x="labelled rows", y=f"mean absolute error{f' ({unit})' if unit else ''}",
        title="Error of held-out rows by the number of labels",
    )  # fmt: skip
    return save_figure(figure, path)
