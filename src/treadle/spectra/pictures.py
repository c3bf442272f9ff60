"""The pictures of a run, each one call from arrays to a PNG.

`plot_training_curves` and `plot_reconstructions` are here, the two maps of the latent in `latent_pictures`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from treadle.spectra.figures import (
    BLUE,
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
from treadle.spectra.latent_pictures import plot_cluster_map, plot_latent_map

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_cluster_map", "plot_latent_map", "plot_reconstructions", "plot_training_curves"]

_LOG_SCALE_FROM = 4.0
_PANELS_PER_ROW = 2


def plot_training_curves(history: Sequence[Mapping[str, Any]], path: str | os.PathLike[str]) -> Path:
    """Draws training and validation loss by epoch, the best epoch marked, with the learning rate below.

    Args:
        history: one mapping per epoch with `epoch`, `train_loss`, `val_loss` and `lr`; numbers may be None or
            NaN. Losses share one axis, logarithmic once they span a factor of 4 and are all positive.
        path: where to write, ending in `.png`.

    Returns:
        The path.

    Raises:
        ValueError: `history` is empty, lacks a key, or the path does not end in `.png`.
        ImportError: matplotlib is not installed.

    Example:
        >>> record = {"epoch": 1, "train_loss": 0.5, "val_loss": None, "lr": 1e-3}
        >>> import tempfile
        >>> plot_training_curves([record], tempfile.mkdtemp() + "/curves.png").name
        'curves.png'
    """
    if len(history) == 0:
        raise ValueError("history is empty, it must hold at least one epoch: train before drawing")
    epochs, train, val, rate = (_column(history, key) for key in ("epoch", "train_loss", "val_loss", "lr"))
    figure = new_figure(8.0, 5.6)
    grid = figure.add_gridspec(2, 1, height_ratios=(3, 1))
    losses = figure.add_subplot(grid[0])
    rates = figure.add_subplot(grid[1], sharex=losses)
    for axes in (losses, rates):
        style_axes(axes)
    _epoch_axis(losses, epochs)
    # A single epoch has no line to see, so short runs show their points.
    marker = "o" if len(history) <= 15 else ""
    line: dict[str, Any] = {"linewidth": 1.8, "marker": marker, "markersize": 4}
    losses.plot(epochs, train, color=BLUE, label="training", **line)
    if np.isfinite(val).any():
        losses.plot(epochs, val, color=ORANGE, label="validation", **line)
    finite = np.concatenate([train, val])
    finite = finite[np.isfinite(finite)]
    if len(finite) and finite.min() > 0 and finite.max() > _LOG_SCALE_FROM * finite.min():
        _log_scale(losses)
    _mark_best(losses, epochs, val)
    if losses.get_legend_handles_labels()[0]:
        # Above the axes, since curves and the mark of the best epoch may run anywhere inside them.
        losses.legend(frameon=False, fontsize=9, ncols=3, loc="lower right", bbox_to_anchor=(1.0, 0.99))
    losses.tick_params(labelbottom=False)
    label_axes(losses, y="loss", title="Loss by epoch")
    rates.plot(epochs, rate, color=INK, **line)
    rates.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    rates.yaxis.get_offset_text().set_fontsize(9)
    rates.set_ylim(bottom=0)
    label_axes(rates, x="epoch", y="learning rate")
    figure.align_ylabels([losses, rates])
    return save_figure(figure, path)


def _column(history: Sequence[Mapping[str, Any]], key: str) -> npt.NDArray[np.float64]:
    values = []
    for index, record in enumerate(history):
        if key not in record:
            raise ValueError(
                f"history[{index}] has the keys {sorted(record)}, it must have {key!r}: "
                "give the records as the trainer writes them"
            )
        values.append(math.nan if record[key] is None else float(record[key]))
    return np.asarray(values, dtype=np.float64)


def _epoch_axis(axes: Axes, epochs: npt.NDArray[np.float64]) -> None:
    """Whole epochs only, and no epoch 0, which no history has."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    axes.set_xlim(float(np.nanmin(epochs)) - 0.5, float(np.nanmax(epochs)) + 0.5)


def _log_scale(axes: Axes) -> None:
    """A logarithmic axis labelled in plain numbers (0.2, not 2 times ten to the minus one)."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _mark_best(axes: Axes, epochs: npt.NDArray[np.float64], val: npt.NDArray[np.float64]) -> None:
    """Marks the lowest finite validation loss; without one there is nothing to mark."""
    if not np.isfinite(val).any():
        return
    best = int(np.nanargmin(np.where(np.isfinite(val), val, np.nan)))
    axes.axvline(epochs[best], color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    label = f"best: epoch {epochs[best]:.0f}, validation {val[best]:.4g}"
    axes.plot(
        epochs[best],
        val[best],
        linestyle="",
        marker="o",
        markersize=9,
        markerfacecolor="white",
        markeredgecolor=ORANGE,
        markeredgewidth=2,
        zorder=5,
        label=label,
    )


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
    """Draws a page of spectra with their reconstructions, the regions hidden from the model shaded.

    Args:
        wavelengths: (L,) increasing, in `wavelength_unit`.
        spectra, reconstructions: (N, L) in SNV units (rows of mean 0 and deviation 1); about 8 fill a page.
        visible_masks: (N, L) bool, True where the model saw the spectrum.
        titles: N short texts, such as name and spectral type; long ones lose their middle.
        path: where to write, ending in `.png`.
        wavelength_unit: written on the axis.

    Returns:
        The path. Each panel states the mean squared error over its hidden channels.

    Raises:
        ValueError: shapes disagree, numbers are not finite, masks are not bool, or the path is no `.png`.
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
        raise ValueError(f"titles has {len(titles)} texts, it must have {len(rows)}, one per spectrum")
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
    """One legend for all panels, since one whose spectrum was fully visible has no shade to explain."""
    entries: dict[str, Any] = {}
    for axes in panels:
        entries.update({label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)})
    figure.legend(
        list(entries.values()), list(entries), loc="outside upper center", ncols=3, frameon=False, fontsize=10
    )


def _shorten(title: str) -> str:
    """Cuts the middle out of a long title: name and type stand at its ends, the error beside it."""
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
        # Beside the title and not inside the axes, where a spectrum may run anywhere.
        axes.set_title(f"hidden MSE {error:.3f}", fontsize=9, color=MUTED, loc="right")
