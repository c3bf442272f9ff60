"""Plots of ``treadle train astro``: spectra, galaxy images, scalars, and loss terms.

Shapes: P = panels, L = points of a spectrum, R = draws, H, W = height and width of an image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from treadle.astro.cross_modal import CrossResult
from treadle.runs.figures import (
    BLUE,
    INK,
    MUTED,
    ORANGE,
    PALE,
    epoch_axis,
    label_axes,
    new_figure,
    save_figure,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Numbers = NDArray[Any]

_PER_ROW = 3
_GROUPS = 8
_MANY = 500  # objects beyond which dots would overlap
_MINUS = "\N{MINUS SIGN}"
NAMES = {
    "spex.type": ("spectral type", "spectral type (M0 = 0, L0 = 10, T0 = 20)"),
    "spex.J-Ks": (f"J {_MINUS} Ks", f"J {_MINUS} Ks (mag)"),
    "xdf.mag": ("magnitude", "magnitude (mag, relative)"),
    "xdf.blue-red": (f"blue {_MINUS} red", f"blue {_MINUS} red (mag, relative)"),
    "sdss.redshift": ("redshift", "redshift"),
}
"""Column -> its name, and its name with its unit."""


# -- spectra ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShownSpectra:
    """Spectra of test objects and their reconstructions.

    Attributes:
        wavelengths: (L,) in µm.
        true: (P, L) fluxes.
        codebook: (P, L) decoded from their tokens.
        drawn: (P, R, L) sampled given the scalars alone.
        titles: P strings.
    """

    wavelengths: Numbers
    true: Numbers
    codebook: Numbers
    drawn: Numbers
    titles: Sequence[str]


def plot_spectra(shown: ShownSpectra, path: Path) -> Path:
    """Plot each spectrum, its reconstruction from tokens, and the model's samples given the scalars alone.

    Raises:
        ImportError: matplotlib is not installed.
    """
    num_rows = -(-len(shown.true) // _PER_ROW)
    figure = new_figure(4.0 * _PER_ROW, 2.7 * num_rows + 0.5)
    panels = figure.subplots(num_rows, _PER_ROW, squeeze=False, sharex=True)
    for axes in panels.ravel()[len(shown.true) :]:
        axes.axis("off")
    for number, title in enumerate(shown.titles):
        axes = panels.ravel()[number]
        style_axes(axes)
        low, middle, high = np.quantile(shown.drawn[number], (1 / 6, 0.5, 5 / 6), axis=0)
        axes.fill_between(shown.wavelengths, low, high, color=ORANGE, alpha=0.25, linewidth=0)
        axes.plot(shown.wavelengths, middle, color=ORANGE, linewidth=1.5, label="from the scalars: median, middle 2/3")
        axes.plot(shown.wavelengths, shown.codebook[number], color=BLUE, linewidth=1.3, label="its own tokens, decoded")
        axes.plot(shown.wavelengths, shown.true[number], color=INK, linewidth=0.9, label="true")
        bottom, top = shown.true[number].min(), shown.true[number].max()
        axes.set_ylim(bottom - 0.2 * (top - bottom), top + 0.35 * (top - bottom))
        is_last, is_first = number + _PER_ROW >= len(shown.true), number % _PER_ROW == 0
        label_axes(
            axes, x="wavelength (µm)" if is_last else "", y="relative flux" if is_first else "", title=title
        )  # fmt: skip
        axes.tick_params(labelbottom=is_last)
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(), frameon=False, fontsize=10, ncols=3, loc="outside upper center"
    )
    return save_figure(figure, path)


# -- images -------------------------------------------------------------------------------------------------------


def plot_images(rows: Mapping[str, Numbers], titles: Sequence[str], path: Path) -> Path:
    """Plot galaxy images, one row per method and one column per galaxy.

    Args:
        rows: name -> (P, 3, H, W) in [0, 255]; the others are compared with the first.
        titles: P strings.
        path: ends in ``.png``.

    Raises:
        ImportError: matplotlib is not installed.
    """
    first = next(iter(rows))
    true = rows[first].astype(np.float64)
    figure = new_figure(1.9 * len(titles) + 0.8, 2.15 * len(rows) + 0.3)
    panels = figure.subplots(len(rows), len(titles), squeeze=False)
    for line, (name, pictures) in zip(panels, rows.items(), strict=True):
        for number, axes in enumerate(line):
            picture = pictures[number].astype(np.float64)
            axes.imshow(np.clip(picture, 0, 255).astype(np.uint8).transpose(1, 2, 0), interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            error = np.sqrt(np.square(picture - true[number]).mean())
            axes.set_xlabel(
                "" if pictures is next(iter(rows.values())) else f"off by {error:.1f}", fontsize=9, color=MUTED
            )
        line[0].set_ylabel(name, fontsize=10, color=INK)
    for axes, title in zip(panels[0], titles, strict=True):
        axes.set_title(title, fontsize=10, color=INK)
    return save_figure(figure, path)


# -- scalars ------------------------------------------------------------------------------------------------------


def plot_scalars(results: Sequence[CrossResult], path: Path) -> Path:
    """Plot predicted against true scalars, with the medians of model and ridge regression as lines, and the scores.

    Raises:
        ImportError: matplotlib is not installed.
    """
    num_rows = -(-(len(results) + 1) // _PER_ROW)
    figure = new_figure(4.1 * _PER_ROW, 3.9 * num_rows + 0.3)
    panels = figure.subplots(num_rows, _PER_ROW, squeeze=False).ravel()
    for axes in panels[len(results) + 1 :]:
        axes.axis("off")
    for axes, result in zip(panels, results, strict=False):
        _scalar_panel(axes, result)
    _score_panel(panels[len(results)], results)
    figure.legend(
        *panels[0].get_legend_handles_labels(), frameon=False, fontsize=10, ncols=4, loc="outside upper center"
    )
    return save_figure(figure, path)


def question_name(target: str, given: str | Sequence[str]) -> str:
    """Return the title of a prediction task: target field and given fields.

    Example:
        >>> question_name("sdss.redshift", ("sdss.r", "sdss.u-g"))
        'redshift from photometry'
        >>> question_name("mine.size", "image")
        'mine.size from image'
    """
    source = given if isinstance(given, str) else "photometry"
    return f"{NAMES.get(target, (target,))[0]} from {source}"


def _scalar_panel(axes: Axes, result: CrossResult) -> None:
    style_axes(axes)
    true, model, ridge = result.true, result.predicted["model"], result.predicted["ridge"]
    # A few outliers would squeeze all other points together.
    low, high = np.quantile(np.concatenate([true, model]), (0.005, 0.995))
    margin = 0.05 * float(high - low) or 1.0
    limits = (float(low) - margin, float(high) + margin)
    axes.plot(limits, limits, color=MUTED, linewidth=1, linestyle="--", label="predicted = true", zorder=1)
    size, alpha = (4, 0.3) if len(true) > _MANY else (10, 0.6)
    axes.scatter(true, model, s=size, color=BLUE, alpha=alpha, linewidth=0, zorder=2, label="model, one dot per object")
    for values, color, name in ((ridge, ORANGE, "ridge, median"), (model, BLUE, "model, median")):
        axes.plot(*_medians(true, values), color=color, marker="o", markersize=4, linewidth=1.6, label=name, zorder=3)
    axes.set(xlim=limits, ylim=limits)
    unit = NAMES.get(result.question.target, ("", result.question.target))[1]
    label_axes(
        axes, x=f"true {unit}", y="predicted", title=question_name(result.question.target, result.question.given)
    )  # fmt: skip
    axes.text(0.98, 0.03, f"{len(true):,} objects", fontsize=9, color=MUTED, ha="right", transform=axes.transAxes)


def _medians(true: Numbers, predicted: Numbers) -> tuple[list[float], list[float]]:
    """Return the medians of equally sized groups, in the order of the true values."""
    groups = [group for group in np.array_split(np.argsort(true, kind="stable"), _GROUPS) if len(group)]
    return [float(np.median(true[group])) for group in groups], [float(np.median(predicted[group])) for group in groups]


_METHODS = {
    "model": (BLUE, "model"), "ridge": (ORANGE, "ridge"), "boosted trees": ("#E69F00", "boosted trees"),
    "extra trees": ("#009E73", "extra trees"), "bins": (PALE, "true bin"),
}  # fmt: skip
"""Colour and name of the bars, in the order of the table's columns."""


def _score_panel(axes: Axes, results: Sequence[CrossResult]) -> None:
    style_axes(axes)
    names = [question_name(result.question.target, result.question.given) for result in results]
    scores = [result.scores() for result in results]
    places = np.arange(len(results))
    methods = [method for method in _METHODS if all(method in score for score in scores)]
    height = 0.84 / len(methods)
    for number, method in enumerate(methods):
        values = [score[method]["explained"] for score in scores]
        color, name = _METHODS[method]
        shift = (number - (len(methods) - 1) / 2) * height
        axes.barh(places + shift, np.maximum(values, 0), height=0.92 * height, color=color, label=name)
        for place, value in zip(places, values, strict=True):
            text = f"{value:.2f}".replace("-", _MINUS)
            axes.annotate(text, (max(value, 0), place + shift), xytext=(3, 0), textcoords="offset points",
                          va="center", fontsize=7, color=INK)  # fmt: skip
    axes.set_yticks(places, [name.replace(" from ", "\nfrom ") for name in names])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12)
    label_axes(axes, x="variance explained, test objects", title="0 is the mean, 1 is exact")
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.4, -0.14), ncols=3)


# -- training -----------------------------------------------------------------------------------------------------

_TERMS = {
    "ce": ("cross-entropy", "nats per token"),
    "img": ("images", "squared error, scaled pixels"),
    "sca": ("scalars", "squared error, standard deviations²"),
    "spec": ("spectra", "squared error, scaled arcsinh flux"),
}


def plot_terms(history: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Plot each loss term by epoch, for training and validation objects; a disabled term has no curve.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(11.0, 6.2)
    panels = figure.subplots(2, 2).ravel()
    epochs = [record["epoch"] for record in history]
    for axes, (term, (title, unit)) in zip(panels, _TERMS.items(), strict=True):
        style_axes(axes)
        epoch_axis(axes, epochs)
        for part, color, name in (("train", BLUE, "training, some scalars hidden"), ("val", ORANGE, "validation")):
            losses = [float("nan") if (v := record[f"{part}_loss_{term}"]) is None else v for record in history]
            axes.plot(epochs, losses, color=color, linewidth=1.8, marker="o", markersize=3.5, label=name)
        label_axes(axes, x="epoch" if term in ("sca", "spec") else "", y=unit, title=title)
    panels[0].legend(frameon=False, fontsize=9)
    return save_figure(figure, path)
