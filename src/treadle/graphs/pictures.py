"""Plots of graph runs: errors, molecules, and the encodings of one molecule."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from treadle.graphs.datasets.targets import import_rdkit
from treadle.graphs.encodings import NodePEConfig, PEConfig, RelativePEConfig
from treadle.runs.figures import BLUE, INK, MUTED, ORANGE, PALE, label_axes, new_figure, save_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_Numbers = npt.NDArray[np.float64]
_Counts = npt.NDArray[np.int64]

_PER_ROW = 4
_SIZE_GROUPS = 8


# -- errors -------------------------------------------------------------------------------------------------------


def plot_predictions(true: _Numbers, predicted: _Numbers, num_nodes: _Counts, path: Path, *, what: str) -> Path:
    """Plot predicted against true targets, and the absolute error by graph size.

    Args:
        true: (G,) targets of the test set.
        predicted: (G,).
        num_nodes: (G,) sizes of the graphs.
        path: output file, ending in ``.png``.
        what: name of the target.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(11.0, 4.9)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.2))
    _scatter(left, true, predicted, what)
    _error_by_size(right, np.abs(predicted - true), num_nodes)
    return save_figure(figure, path)


def _scatter(axes: Axes, true: _Numbers, predicted: _Numbers, what: str) -> None:
    style_axes(axes)
    both = np.concatenate([true, predicted])
    margin = 0.03 * float(np.ptp(both)) or 1.0
    limits = (float(both.min()) - margin, float(both.max()) + margin)
    axes.plot(limits, limits, color=MUTED, linewidth=1, zorder=1)
    axes.scatter(true, predicted, s=14, color=BLUE, alpha=0.55, linewidth=0, zorder=2)
    axes.set(xlim=limits, ylim=limits, aspect="equal")
    label_axes(axes, x=f"true {what}", y=f"predicted {what}", title=f"{len(true):,} test graphs")
    _note(axes, f"mean absolute error {np.abs(predicted - true).mean():.3f}")


def plot_targets(true: _Numbers, predicted: _Numbers, path: Path, *, names: Sequence[str]) -> Path:
    """Plot predicted against true values of several targets, a panel for each; NaN is unknown and left out.

    Args:
        true: (G, T) targets of the test set.
        predicted: (G, T).
        path: output file, ending in ``.png``.
        names: of the targets.

    Raises:
        ImportError: matplotlib is not installed.
    """
    columns = 2 if len(names) in (2, 4) else min(_PER_ROW - 1, len(names))
    rows = -(-len(names) // columns)
    figure = new_figure(4.1 * columns, 4.3 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for target, name in enumerate(names):
        known = ~np.isnan(true[:, target])
        if known.any():
            _scatter(panels[target], true[known, target], predicted[known, target], name)
        else:
            label_axes(panels[target], title=f"{name}: no test graph has a value")
    for axes in panels[len(names) :]:
        axes.axis("off")
    return save_figure(figure, path)


def _error_by_size(axes: Axes, error: _Numbers, num_nodes: _Counts) -> None:
    style_axes(axes)
    axes.scatter(num_nodes, error, s=14, color=PALE, linewidth=0, zorder=1)
    groups = [group for group in np.array_split(np.argsort(num_nodes, kind="stable"), _SIZE_GROUPS) if len(group)]
    centres = [float(np.median(num_nodes[group])) for group in groups]
    low, middle, high = np.transpose([np.quantile(error[group], (0.25, 0.5, 0.75)) for group in groups])
    axes.fill_between(centres, low, high, color=ORANGE, alpha=0.25, linewidth=0, zorder=2)
    axes.plot(centres, middle, color=ORANGE, marker="o", markersize=5, zorder=3)
    # A few outliers would squeeze all others to the bottom; they are counted instead.
    top = float(np.quantile(error, 0.99)) * 1.15 or 1.0
    above = int((error > top).sum())
    axes.set_ylim(0, top)
    label_axes(axes, x="nodes of the graph", y="absolute error", title="Error by size")
    _note(axes, f"median and middle half of {len(groups)} groups" + (f"; {above} above" if above else ""))


def _note(axes: Axes, text: str) -> None:
    axes.set_title(text, fontsize=9, color=MUTED, loc="right")


# -- molecules ----------------------------------------------------------------------------------------------------


def plot_molecules(smiles: Sequence[str], true: _Numbers, predicted: _Numbers, path: Path) -> Path:
    """Plot the molecules with the best and the worst predictions, four each.

    Args:
        smiles: G molecules.
        true: (G,) targets.
        predicted: (G,).
        path: output file, ending in ``.png``.

    Raises:
        ImportError: matplotlib or RDKit is not installed.
    """
    order = np.argsort(np.abs(predicted - true), kind="stable")
    rows = {"smallest errors": order[:_PER_ROW], "largest errors": order[::-1][:_PER_ROW]}
    figure = new_figure(3.1 * _PER_ROW, 6.2)
    panels = figure.subplots(2, _PER_ROW, squeeze=False)
    for axes_row, (name, chosen) in zip(panels, rows.items(), strict=True):
        for axes in axes_row:
            axes.axis("off")
        for axes, index in zip(axes_row, chosen, strict=False):
            molecule = _read(smiles[index])
            if molecule is None:  # as for a few of QM9
                axes.text(0.5, 0.5, "RDKit cannot read it", ha="center", color=MUTED, transform=axes.transAxes)
            else:
                axes.imshow(_draw_molecule(molecule), interpolation="antialiased")
            error = abs(predicted[index] - true[index])
            axes.set_title(f"off by {error:.3f}", fontsize=10, color=INK, fontweight="bold")
            caption = f"true {true[index]:.2f}, predicted {predicted[index]:.2f}".replace("-", "\N{MINUS SIGN}")
            axes.text(0.5, 0.0, caption, ha="center", va="top", fontsize=9, color=MUTED, transform=axes.transAxes)
        axes_row[0].text(
            -0.02, 0.5, name, rotation=90, ha="right", va="center", fontsize=11, color=MUTED,
            transform=axes_row[0].transAxes,
        )  # fmt: skip
    return save_figure(figure, path)


def _draw_molecule(molecule: Any) -> npt.NDArray[np.float32]:
    from matplotlib.image import imread

    draw = import_rdkit("Chem.Draw.rdMolDraw2D")
    canvas = draw.MolDraw2DCairo(560, 470)
    options = canvas.drawOptions()
    options.padding, options.minFontSize, options.fixedBondLength = 0.03, 14, 70
    draw.PrepareAndDrawMolecule(canvas, molecule)
    canvas.FinishDrawing()
    return np.asarray(imread(io.BytesIO(canvas.GetDrawingText())))


# -- encodings ----------------------------------------------------------------------------------------------------


def plot_encodings(graph: Any, config: PEConfig, path: Path) -> Path:
    """Plot columns of a molecule's encodings on its atoms, as the model sees them.

    Args:
        graph: a molecule (:func:`is_molecule`) with ``node_pe`` or ``edge_pe``, or both.
        config: settings of the encodings.
        path: output file, ending in ``.png``.

    Raises:
        ImportError: matplotlib or RDKit is not installed.
    """
    from matplotlib.ticker import MaxNLocator

    limit = 2 * _PER_ROW - (config.relative is not None)
    shown = [] if config.node is None else _node_columns(graph.node_pe, config.node, limit)
    if config.relative is not None:
        shown.append(_relative_column(graph, config.relative))
    num_rows = -(-len(shown) // _PER_ROW)
    places, bonds = _layout(graph.smiles)
    figure = new_figure(3.1 * _PER_ROW, 2.5 * num_rows + 0.3)
    panels = figure.subplots(num_rows, _PER_ROW, squeeze=False).ravel()
    for axes in panels:
        axes.axis("off")
    for axes, (title, values) in zip(panels, shown, strict=False):
        for ends in bonds:
            axes.plot(*places[ends].T, color=MUTED, linewidth=1.6, zorder=1)
        dots = axes.scatter(*places.T, c=values, s=80, cmap="viridis", edgecolor=INK, linewidth=0.6, zorder=2)
        axes.set_aspect("equal", adjustable="datalim")
        axes.margins(0.08)
        axes.set_title(title, fontsize=10, color=INK, fontweight="bold")
        bar = figure.colorbar(dots, ax=axes, shrink=0.7, pad=0.01, aspect=18, ticks=MaxNLocator(4))
        bar.ax.tick_params(labelsize=8, color=MUTED, labelcolor=INK, length=2)
        bar.outline.set_visible(False)
    figure.suptitle(f"Encodings of the atoms of {graph.smiles}", fontsize=10, color=MUTED)
    return save_figure(figure, path)


def _node_columns(node_pe: torch.Tensor, config: NodePEConfig, limit: int) -> list[tuple[str, _Numbers]]:
    """Return names and values of up to ``limit`` non-constant columns, equally many per encoding."""
    sign = "|" if config.lap.sign_invariant == "abs" else ""
    names = {
        "lap": [f"{sign}eigenvector {i + 1}{sign}" for i in range(config.lap.k)],
        "rwse": [f"walk back after {t} steps" for t in config.rwse.scales],
        "hks": [f"heat kept until {t:g}" for t in config.hks.scales],
        "role": [{"degree": "log(1 + degree)", "kcore": "core number"}.get(f, f) for f in config.role.features],
    }
    blocks: list[list[tuple[str, _Numbers]]] = []
    start = 0
    for block, width in config.blocks.items():
        values = node_pe[:, start : start + width].double().numpy().T
        found = [(name, row) for name, row in zip(names[block], values, strict=True) if np.ptp(row) > 1e-6]
        blocks.append(found)
        start += width
    while sum(map(len, blocks)) > limit:  # drop from the longest block the column that separates atoms least
        fullest = max(reversed(blocks), key=len)
        fullest.pop(min(reversed(range(len(fullest))), key=lambda place: _spread(fullest[place])))
    return [column for block in blocks for column in block]


def _spread(column: tuple[str, _Numbers]) -> float:
    name, values = column
    return -1.0 if "eigenvector" in name else float(np.ptp(values))  # for eigenvectors, the last one


def _relative_column(graph: Any, config: RelativePEConfig) -> tuple[str, _Numbers]:
    """Return one value for every pair with the first atom: the distance of its bucket, or a column."""
    mine = graph.edge_pe_index[0] == 0
    rows = graph.edge_pe[mine]
    by_hops = config.type in ("spd", "bfs")
    hops = torch.ceil(rows.argmax(1) * config.max_distance / (config.num_buckets - 1))
    values = torch.full((graph.num_nodes,), torch.nan)
    values[graph.edge_pe_index[1][mine]] = hops if by_hops else rows[:, 0]
    return f"{'hops' if by_hops else config.type} from one atom", values.double().numpy()


def is_molecule(graph: Any) -> bool:
    """Return whether a graph is the molecule of its ``smiles``, atom by atom.

    False without ``smiles``, and for QM9, whose atoms are ordered differently than in its ``smiles``.
    """
    molecule = _read(graph.smiles) if "smiles" in graph else None
    if molecule is None or molecule.GetNumAtoms() != graph.num_nodes:
        return False
    bonds = {frozenset(ends) for ends in _bonds(molecule)}
    return bonds == {frozenset(ends) for ends in graph.edge_index.T.tolist()}


def _layout(smiles: str) -> tuple[_Numbers, list[list[int]]]:
    """Return the positions (N, 2) of the atoms in a drawing, and the two ends of every bond."""
    molecule = _read(smiles)
    import_rdkit("Chem.rdDepictor").Compute2DCoords(molecule)
    return np.asarray(molecule.GetConformer().GetPositions())[:, :2], _bonds(molecule)


def _read(smiles: str) -> Any:
    """Return RDKit's molecule, or None."""
    with import_rdkit("rdBase").BlockLogs():  # its messages go to stderr, bypassing logging
        return import_rdkit("Chem").MolFromSmiles(smiles)


def _bonds(molecule: Any) -> list[list[int]]:
    return [[bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()] for bond in molecule.GetBonds()]
