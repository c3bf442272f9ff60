"""Plots of the latent by spectral type and by cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from treadle.datasets.spectral_types import CLASS_START, spectral_class_letter, spectral_type_number
from treadle.runs.figures import (
    CATEGORIES,
    INK,
    MUTED,
    PALE,
    as_matrix,
    category_style,
    label_axes,
    new_figure,
    project_to_2d,
    save_figure,
    spread_apart,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap

_Float = npt.NDArray[np.float64]


def plot_latent_map(
    latent: npt.ArrayLike,
    labels: npt.ArrayLike,
    path: str | os.PathLike[str],
    *,
    label_name: str = "spectral type",
    title: str = "",
) -> Path:
    """Plot the latent in two dimensions, coloured by spectral type or by a number.

    Args:
        latent: (N, D) finite; projected on two principal components unless D = 2.
        labels: (N,) spectral types such as `"L5.0"`, or numbers (name the unit in `label_name`). Rows with unknown
            label (no type, NaN) are drawn in light grey below the others.
        path: output file, ending in `.png`.
        label_name: label of the colour bar.
        title: title of the plot; by default it names the label.

    Returns:
        The path.

    Raises:
        ValueError: shapes disagree, the latent is not finite or has a single column, or the path is not a `.png`.
        ImportError: matplotlib is not installed.

    Example:
        >>> z = np.random.default_rng(0).normal(size=(3, 8))
        >>> import tempfile
        >>> plot_latent_map(z, ["M8.0", "L5.0", ""], tempfile.mkdtemp() + "/map.png").name
        'map.png'
    """
    xy, shares = project_to_2d(latent)
    texts = np.asarray(labels)
    if texts.shape != (len(xy),):
        raise ValueError(f"labels has shape {texts.shape}, but must be ({len(xy)},): one per row of latent")
    types = texts.dtype.kind in "UO"
    values = spectral_type_number(texts).astype(np.float64) if types else texts.astype(np.float64)
    known = np.isfinite(values)
    figure = new_figure(8.2, 6.2)
    axes = figure.add_subplot()
    style_axes(axes)
    axes.set_aspect("equal", adjustable="datalim")
    grey = f"{'no subtype known' if types else 'unknown'} ({int((~known).sum())})"
    axes.scatter(xy[~known, 0], xy[~known, 1], s=16, color=PALE, linewidths=0, zorder=2, label=grey)
    if known.any():
        _draw_coloured(axes, xy[known], values[known], types=types, label_name=label_name)
    if not known.all():
        axes.legend(frameon=False, fontsize=9, loc="best")
    _label_map(axes, shares, title or f"Latent of {len(xy):,} spectra, coloured by {label_name}")
    return save_figure(figure, path)


def _draw_coloured(axes: Axes, xy: _Float, values: _Float, *, types: bool, label_name: str) -> None:
    """Draw the points with known labels, and their colour bar."""
    # Rare types are drawn last, so that common ones do not cover them.
    order = np.argsort(values, kind="stable")
    points = axes.scatter(
        xy[order, 0], xy[order, 1], c=values[order], cmap=_scale(), s=18, alpha=0.85, linewidths=0, zorder=3
    )
    if not types:
        # A few outliers would otherwise take up most of the scale; its pointed ends mark the truncation.
        points.set_clim(*np.percentile(values, [1, 99]))
    bar = axes.figure.colorbar(points, ax=axes, pad=0.02, aspect=32, extend="neither" if types else "both")
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=9, color=MUTED, labelcolor=INK)
    bar.set_label(label_name, fontsize=10, color=INK)
    if types:
        ticks = _type_ticks(float(values.min()), float(values.max()))
        bar.set_ticks(list(ticks), labels=list(ticks.values()))


def _scale() -> Colormap:
    """Return plasma without its palest end, which is invisible on white; its many hues separate M8 from L3."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap(colormaps["plasma_r"](np.linspace(0.08, 1.0, 256)))


def _type_ticks(low: float, high: float) -> dict[float, str]:
    """Return tick labels of every class at 0 and 5, within the range."""
    ticks = {}
    for letter, start in CLASS_START.items():
        ticks.update({start + step: f"{letter}{step}" for step in (0, 5) if low <= start + step <= high})
    return ticks


def _label_map(axes: Axes, shares: tuple[float, float] | None, title: str) -> None:
    if shares is None:
        names = ["first direction", "second direction"]
    else:
        names = [
            f"principal component {index} ({share:.0%} of the variance)" for index, share in enumerate(shares, start=1)
        ]
    label_axes(axes, x=names[0], y=names[1], title=title)


def plot_cluster_map(
    latent2d: npt.ArrayLike,
    cluster: npt.ArrayLike,
    spectra: npt.ArrayLike,
    wavelengths: npt.ArrayLike,
    path: str | os.PathLike[str],
    *,
    labels: npt.ArrayLike | None = None,
    wavelength_unit: str = "µm",
) -> Path:
    """Plot the latent coloured by cluster, the mean spectrum of each cluster, and clusters against classes.

    Args:
        latent2d: (N, 2) coordinates; (N, D) is projected on two principal components.
        cluster: (N,) integers, used as cluster names.
        spectra: (N, L) in SNV units.
        wavelengths: (L,) in `wavelength_unit`.
        path: output file, ending in `.png`.
        labels: (N,) spectral types such as `"L5.0"`, empty where unknown; None omits the table.
        wavelength_unit: unit shown on the axis.

    Returns:
        The path. Mean spectra are shifted below each other so that no two cross.

    Raises:
        ValueError: shapes disagree, numbers are not finite, or the path is not a `.png`.
        ImportError: matplotlib is not installed.

    Example:
        >>> z, x = np.random.default_rng(0).normal(size=(9, 2)), np.zeros((9, 5))
        >>> import tempfile
        >>> plot_cluster_map(z, np.arange(9) % 3, x, range(5), tempfile.mkdtemp() + "/clusters.png").name
        'clusters.png'
    """
    xy, shares = project_to_2d(latent2d)
    rows = as_matrix("spectra", spectra, num_rows=len(xy))
    grid = np.asarray(wavelengths, dtype=np.float64)
    members = np.asarray(cluster)
    if members.shape != (len(xy),) or members.dtype.kind not in "iu" or grid.shape != rows.shape[1:]:
        raise ValueError(
            f"cluster {members.shape} of {members.dtype} and wavelengths {grid.shape} do not fit latent2d "
            f"{xy.shape} and spectra {rows.shape}: they must be (N,) whole numbers and (L,)"
        )
    names = np.unique(members)
    ratios = (1.25, 1.0) if labels is None else (1.25, 1.0, 0.62)
    figure = new_figure(4.2 * sum(ratios), max(5.0, 0.42 * len(names) + 2.0))
    panels = figure.add_gridspec(1, len(ratios), width_ratios=ratios)
    axes = figure.add_subplot(panels[0])
    style_axes(axes)
    axes.set_aspect("equal", adjustable="datalim")
    for index, name in enumerate(names):
        colour, marker = category_style(index)
        x, y = xy[members == name].T
        axes.scatter(x, y, s=16, color=colour, marker=marker, alpha=0.75, linewidths=0, zorder=2)
    _name_clusters(axes, xy, members, names)
    _label_map(axes, shares, f"{len(names)} clusters of {len(xy):,} spectra")
    _draw_means(figure.add_subplot(panels[1]), grid, rows, members, names, wavelength_unit)
    if labels is not None:
        _draw_table(figure.add_subplot(panels[2]), members, names, np.asarray(labels))
    return save_figure(figure, path)


def _name_clusters(
    axes: Axes, xy: _Float, members: npt.NDArray[np.integer[Any]], names: npt.NDArray[np.integer[Any]]
) -> None:
    """Write each cluster's number at its median, so that the map is readable without colours."""
    size = np.maximum(np.ptp(xy, axis=0), np.finfo(np.float64).tiny)
    places = spread_apart(np.array([np.median(xy[members == name], axis=0) for name in names]) / size) * size
    for index, (name, place) in enumerate(zip(names, places, strict=True)):
        colour = category_style(index)[0]
        axes.text(
            float(place[0]),
            float(place[1]),
            str(name),
            fontsize=10,
            fontweight="bold",
            color=INK,
            ha="center",
            va="center",
            zorder=5,
            bbox={"boxstyle": "circle,pad=0.25", "facecolor": "white", "edgecolor": colour, "linewidth": 2},
        )


def _draw_means(
    axes: Axes,
    grid: _Float,
    rows: _Float,
    members: npt.NDArray[np.integer[Any]],
    names: npt.NDArray[np.integer[Any]],
    wavelength_unit: str,
) -> None:
    """Draw the mean spectra in the order of their numbers; the band covers the middle half of the rows."""
    style_axes(axes, grid=False)
    means = [rows[members == name].mean(axis=0) for name in names]
    # Each mean is below the previous one by at least this gap, so that no two cross.
    gap = 0.3 * float(np.median([np.ptp(mean) for mean in means])) or 1.0
    shift = 0.0
    for index, (name, mean) in enumerate(zip(names, means, strict=True)):
        colour = CATEGORIES[index % len(CATEGORIES)]
        if index > 0:
            shift += float(np.min(means[index - 1] - mean)) - gap
        low, high = np.percentile(rows[members == name], [25, 75], axis=0)
        axes.fill_between(grid, low + shift, high + shift, color=colour, alpha=0.2, linewidth=0)
        axes.plot(grid, mean + shift, color=colour, linewidth=1.7)
        axes.annotate(
            f"{name}  (n = {int((members == name).sum())})",
            xy=(1.0, mean[-1] + shift),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            fontsize=9,
            color=colour,
            va="center",
        )
    axes.set_xlim(grid[0], grid[-1])
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    label_axes(
        axes,
        x=f"wavelength ({wavelength_unit})",
        y="flux (SNV units, shifted); band: middle half",
        title="Mean spectrum of each cluster",
    )


def _draw_table(
    axes: Axes,
    members: npt.NDArray[np.integer[Any]],
    names: npt.NDArray[np.integer[Any]],
    labels: npt.NDArray[Any],
) -> None:
    """Draw the count of each class in each cluster, shaded by the fraction within the cluster."""
    if labels.shape != members.shape:
        raise ValueError(f"labels has shape {labels.shape}, but must be {members.shape}: one per spectrum")
    letters = spectral_class_letter(labels)
    classes = [*CLASS_START, ""]
    counts = np.array([[np.sum((members == name) & (letters == c)) for c in classes] for name in names])
    shares = counts / counts.sum(axis=1, keepdims=True)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for (row, column), count in np.ndenumerate(counts):
        colour = "white" if shares[row, column] > 0.55 else INK
        axes.text(column, row, f"{count}", ha="center", va="center", fontsize=9, color=colour)
    axes.set_xticks(range(len(classes)), labels=[c or "unknown" for c in classes])
    axes.set_yticks(range(len(names)), labels=[str(name) for name in names])
    for index, tick in enumerate(axes.get_yticklabels()):
        tick.set_color(category_style(index)[0])
        tick.set_fontweight("bold")
    axes.tick_params(length=0, labelsize=10)
    for side in axes.spines.values():
        side.set_visible(False)
    label_axes(axes, x="spectral class\n(shade: share of cluster)", y="cluster", title="Clusters and classes")
