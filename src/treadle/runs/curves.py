"""Plots of a run's losses and learning rate by epoch."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from treadle.runs.figures import BLUE, INK, MUTED, ORANGE, epoch_axis, label_axes, new_figure, save_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LOG_SCALE_FROM = 4.0


def plot_training_curves(history: Sequence[Mapping[str, Any]], path: str | os.PathLike[str]) -> Path:
    """Plot training and validation loss by epoch, with the best epoch marked and the learning rate below.

    Args:
        history: one mapping per epoch with `epoch`, `train_loss`, `val_loss` and `lr`; numbers may be None or
            NaN. Losses share one axis, logarithmic once they span a factor of 4 and are all positive.
        path: the output file, ending in `.png`.

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
        raise ValueError("history is empty, but must hold at least one epoch; train before drawing")
    epochs, train, val, rate = (_column(history, key) for key in ("epoch", "train_loss", "val_loss", "lr"))
    figure = new_figure(8.0, 5.6)
    grid = figure.add_gridspec(2, 1, height_ratios=(3, 1))
    losses = figure.add_subplot(grid[0])
    rates = figure.add_subplot(grid[1], sharex=losses)
    for axes in (losses, rates):
        style_axes(axes)
    epoch_axis(losses, epochs)
    # A single epoch has no visible line, so short runs show their points.
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
        # Above the axes, since curves and the mark of the best epoch may be anywhere inside.
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
                f"history[{index}] has the keys {sorted(record)}, but must have {key!r}; pass the records as the "
                "trainer writes them"
            )
        values.append(math.nan if record[key] is None else float(record[key]))
    return np.asarray(values, dtype=np.float64)


def _log_scale(axes: Axes) -> None:
    """Make an axis logarithmic with plain labels (0.2, not 2 times ten to the minus one)."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _mark_best(axes: Axes, epochs: npt.NDArray[np.float64], val: npt.NDArray[np.float64]) -> None:
    """Mark the lowest finite validation loss, if there is one."""
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
