"""Atom contributions to the prediction of a molecule, and their plot.

The contribution of an atom is the prediction minus that of the same molecule with the features of this atom set to
zero, keeping its bonds and encodings. Riniker & Landrum 2013, "Similarity maps" (J. Cheminformatics 5:43), weight the
atoms of fingerprints in this way.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from treadle.errors import ConfigError
from treadle.errors.arguments import checked
from treadle.graphs.datasets.targets import import_rdkit
from treadle.runs.figures import INK, MUTED, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.cm import ScalarMappable

__all__ = ["atom_contributions", "plot_contributions", "typical_and_worst"]

_PER_ROW = 4
_COLOURS = ("#4d9dcc", "#ffffff", "#e68a4d")  # the blue and orange of all plots, paler, since letters are drawn on them
_BOUND = 0.95  # quantile of the contributions shown in full colour: otherwise a few outliers would make all others pale


@checked
@torch.no_grad()
def atom_contributions(model: nn.Module, graph: Any, *, batch_size: int = 64) -> Tensor:
    """Return the change of the outputs for a graph when the features of each node are removed.

    For a model that sums a linear function of the node features, each node gets exactly its own term. Otherwise the
    contributions need not add up to the prediction, since two atoms may carry the same information.

    Args:
        model: model with graph outputs; evaluated on its device, and its mode is restored.
        graph: graph of N nodes, with float ``x`` (N, F).
        batch_size: copies of the graph per batch.

    Returns:
        (N, T) float64 on the CPU, in the unit of the outputs: that of the target for regression, log-odds for labels.

    Raises:
        ConfigError: ``x`` holds integer types instead of columns, so no value represents an unknown atom.

    Example:
        >>> from treadle.graphs import get_model
        >>> from treadle.graphs.datasets.molecules import graph_from_smiles
        >>> model = get_model("mpnn", 40, num_classes=2, hidden_dim=8, num_layers=1, num_edge_features=6)
        >>> atom_contributions(model, graph_from_smiles("CCO")).shape
        torch.Size([3, 2])
    """
    from torch_geometric.data import Batch

    if graph.x.dim() != 2 or not graph.x.is_floating_point():
        raise ConfigError(
            f"has x of {graph.x.dtype} in shape {tuple(graph.x.shape)}, but must have floats of shape (N, F)",
            argument="graph",
        )
    copies = [graph]
    for node in range(graph.num_nodes):
        copy = graph.clone()
        copy.x[node] = 0
        copies.append(copy)
    place = next(model.parameters()).device
    training = model.training
    model.eval()
    try:
        batches = (Batch.from_data_list(copies[at : at + batch_size]) for at in range(0, len(copies), batch_size))
        outputs = torch.cat([model(batch.to(place)).double().cpu() for batch in batches])
    finally:
        model.train(training)
    return outputs[:1] - outputs[1:]


def typical_and_worst(error: npt.NDArray[np.float64]) -> dict[str, npt.NDArray[np.int64]]:
    """Return the samples with errors nearest to the median and those with the largest, at most four each.

    Args:
        error: (G,) absolute errors; NaN is ignored.

    Example:
        >>> {name: rows.tolist() for name, rows in typical_and_worst(np.array([0.0, 9.0, 1.0, np.nan])).items()}
        {'typical errors': [2, 0, 1], 'largest errors': [1, 2, 0]}
    """
    known = np.flatnonzero(~np.isnan(error))
    off = np.abs(error[known] - np.median(error[known])) if len(known) else error[known]
    return {
        "typical errors": known[np.argsort(off, kind="stable")][:_PER_ROW],
        "largest errors": known[np.argsort(-error[known], kind="stable")][:_PER_ROW],
    }


def plot_contributions(
    rows: Mapping[str, Sequence[tuple[str, str, npt.NDArray[Any]]]], path: Path, *, unit: str
) -> Path:
    """Plot molecules with atoms coloured by their contributions to the prediction, on one scale.

    Args:
        rows: row name -> molecules, each with SMILES, caption, and a value (N,) per atom.
        path: output file, ending in ``.png``.
        unit: unit of the values.

    Raises:
        ImportError: matplotlib or RDKit is not installed.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    every = np.abs(np.concatenate([values for row in rows.values() for _, _, values in row]))
    bound = float(np.quantile(every, _BOUND)) or 1.0
    colours = LinearSegmentedColormap.from_list("contributions", _COLOURS)
    scale = ScalarMappable(Normalize(-bound, bound), colours)
    figure = new_figure(3.1 * _PER_ROW, 3.1 * len(rows) + 0.4)
    panels = figure.subplots(len(rows), _PER_ROW, squeeze=False)
    for axes_row, (name, row) in zip(panels, rows.items(), strict=True):
        for axes in axes_row:
            axes.axis("off")
        for axes, (smiles, caption, values) in zip(axes_row, row, strict=False):
            axes.imshow(_draw(smiles, scale.to_rgba(values)), interpolation="antialiased")
            axes.set_title(caption.replace("-", "\N{MINUS SIGN}"), fontsize=11, color=INK)
        axes_row[0].text(
            -0.02, 0.5, name, rotation=90, ha="right", va="center", fontsize=11, color=MUTED,
            transform=axes_row[0].transAxes,
        )  # fmt: skip
    _colour_bar(figure, panels, scale, unit=unit, extended=bool((every > bound).any()))
    return save_figure(figure, path)


def _colour_bar(figure: Any, panels: Any, scale: ScalarMappable, *, unit: str, extended: bool) -> None:
    ends = "both" if extended else "neither"
    bar = figure.colorbar(scale, ax=list(panels.ravel()), location="bottom", shrink=0.5, aspect=40, extend=ends)
    bar.set_label(f"prediction less that without the features of the atom, {unit}", fontsize=12, color=INK)
    bar.ax.tick_params(labelsize=10, color=MUTED, labelcolor=INK, length=2)
    bar.outline.set_visible(False)


def _draw(smiles: str, colours: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    from matplotlib.image import imread

    draw = import_rdkit("Chem.Draw.rdMolDraw2D")
    molecule = import_rdkit("Chem").MolFromSmiles(smiles)
    canvas = draw.MolDraw2DCairo(560, 470)
    options = canvas.drawOptions()
    options.padding, options.minFontSize, options.fixedBondLength = 0.06, 14, 70
    options.useBWAtomPalette()  # element colours would be mistaken for contributions
    options.highlightRadius, options.fillHighlights = 0.42, True
    atoms = list(range(molecule.GetNumAtoms()))
    shown = {atom: tuple(map(float, colour[:3])) for atom, colour in zip(atoms, colours, strict=True)}
    draw.PrepareAndDrawMolecule(canvas, molecule, highlightAtoms=atoms, highlightAtomColors=shown, highlightBonds=[])
    canvas.FinishDrawing()
    return np.asarray(imread(io.BytesIO(canvas.GetDrawingText())))
