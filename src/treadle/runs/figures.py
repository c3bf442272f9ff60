"""Shared parts of the plots: private figures, colours and atomic writes.

Only matplotlib's object-oriented interface is used. pyplot would choose a backend and keep every figure alive, and
changing rcParams would affect the users' own plots.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from treadle.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 130
INK = "#222222"
MUTED = "#6b6b6b"
PALE = "#c9c9c9"
SHADE = "#e9e6df"
BLUE, ORANGE = "#0072B2", "#D55E00"
# Okabe and Ito's colours (distinguishable with every common kind of colour vision), without yellow, which is too faint
# on white, and with a dark and a middle grey at the end.
CATEGORIES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#222222", "#8C8C8C")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def new_figure(width: float, height: float) -> Figure:
    """Create an empty figure of the given size in inches, drawn by Agg and not registered with pyplot.

    Raises:
        ImportError: matplotlib is not installed.

    Example:
        >>> float(new_figure(6, 4).get_figwidth())
        6.0
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(f"the pictures need matplotlib ({error}): pip install 'treadle[cli]'") from error
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure as PNG, atomically.

    Args:
        figure: from `new_figure`.
        path: ends in `.png`; its folder is created if needed.

    Returns:
        The path.

    Raises:
        ValueError: the path does not end in `.png`.
        OSError: the folder cannot be written; an existing plot is left unchanged.

    Example:
        >>> import tempfile
        >>> save_figure(new_figure(2, 2), tempfile.mkdtemp() + "/empty.png").name
        'empty.png'
    """
    target = Path(path)
    if target.suffix.lower() != ".png":
        raise ValueError(f"path is {str(path)!r}, but must end in '.png'")
    target.parent.mkdir(parents=True, exist_ok=True)
    # The same folder, since a rename is atomic only within one file system.
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.stem}-", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as stream:
            figure.savefig(stream, format="png", dpi=DPI)
            stream.flush()
            os.fsync(stream.fileno())
        # mkstemp creates private files; a plot gets the permissions of any other file of the run.
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return target


def style_axes(axes: Axes, *, grid: bool = True) -> None:
    """Style axes like all plots: two spines, small ticks, a faint grid behind the data."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MUTED)
    axes.tick_params(which="both", labelsize=9, color=MUTED, labelcolor=INK)
    axes.set_axisbelow(True)
    if grid:
        axes.grid(True, color="#ececec", linewidth=0.8)


def label_axes(axes: Axes, *, x: str = "", y: str = "", title: str = "") -> None:
    """Set axis labels and a left-aligned title in the font sizes of all plots."""
    axes.set_xlabel(x, fontsize=10, color=INK)
    axes.set_ylabel(y, fontsize=10, color=INK)
    if title:
        axes.set_title(title, fontsize=11, color=INK, loc="left", fontweight="bold")


def epoch_axis(axes: Axes, epochs: npt.ArrayLike) -> None:
    """Set integer ticks for the numbers of epochs, from 1."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    axes.set_xlim(float(np.nanmin(epochs)) - 0.5, float(np.nanmax(epochs)) + 0.5)


def category_style(index: int) -> tuple[str, str]:
    """Return the colour and marker of a category; colours repeat after 8 with another marker."""
    return CATEGORIES[index % len(CATEGORIES)], MARKERS[(index // len(CATEGORIES)) % len(MARKERS)]


def as_matrix(name: str, array: npt.ArrayLike, *, num_rows: int | None = None) -> npt.NDArray[np.float64]:
    """Check that an array is (rows, columns), not empty, finite and, if given, has ``num_rows`` rows.

    Raises:
        ValueError: it is not.

    Example:
        >>> as_matrix("latent", [[1, 2]]).shape
        (1, 2)
    """
    matrix = np.asarray(array, dtype=np.float64)
    if matrix.ndim != 2 or matrix.size == 0:
        raise ValueError(f"{name} has shape {matrix.shape}, but must be (rows, columns) and not empty")
    if num_rows is not None and len(matrix) != num_rows:
        raise ValueError(f"{name} has {len(matrix)} rows, but must have {num_rows}, like the other arrays")
    if not np.isfinite(matrix).all():
        raise ValueError(f"{name} holds NaN or infinite values, but must be finite; drop such rows")
    return matrix


def project_to_2d(
    latent: npt.ArrayLike,
) -> tuple[npt.NDArray[np.float64], tuple[float, float] | None]:
    """Project rows on their first two principal components, with fixed signs.

    Args:
        latent: (N, D) with D of at least 2; for D = 2 the rows are returned as they are.

    Returns:
        (N, 2) coordinates, and the two shares of the variance (None for D = 2).

    Raises:
        ValueError: not (N, D), not finite, or D is 1.

    Example:
        >>> xy, shares = project_to_2d(np.random.default_rng(0).normal(size=(20, 5)))
        >>> xy.shape, len(shares)
        ((20, 2), 2)
    """
    rows = as_matrix("latent", latent)
    if rows.shape[1] < 2:
        raise ValueError("latent has 1 column, but must have at least 2: a map needs two directions")
    if rows.shape[1] == 2:
        return rows, None
    centred = rows - rows.mean(axis=0)
    variances, axes = np.linalg.eigh(centred.T @ centred)
    first_two = axes[:, [-1, -2]]
    # An eigenvector's sign is arbitrary: its largest entry is made positive, so that maps do not flip at random.
    largest = first_two[np.abs(first_two).argmax(axis=0), [0, 1]]
    first_two = first_two * np.where(largest < 0, -1.0, 1.0)
    total = max(float(variances.sum()), np.finfo(np.float64).tiny)
    return centred @ first_two, (float(variances[-1] / total), float(variances[-2] / total))


def spread_apart(places: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Move points closer than 0.07 (relative to the size of the map) apart, so that numbers do not overlap."""
    places, distance = places.copy(), 0.07
    for _ in range(50):
        for first in range(len(places)):
            for second in range(first):
                gap = places[first] - places[second]
                length = float(np.hypot(*gap))
                if length < distance:
                    # Two equal points have no direction between them, so they move apart sideways.
                    push = gap / length if length > 0 else np.array([1.0, 0.0])
                    places[first] += push * (distance - length) / 2
                    places[second] -= push * (distance - length) / 2
    return places
