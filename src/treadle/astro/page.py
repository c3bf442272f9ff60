"""Plots of ``treadle train astro`` and their captions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from treadle.astro.conditionals import expected_vectors
from treadle.astro.cross_modal import CrossResult
from treadle.astro.drawing import draw_spectra
from treadle.astro.pictures import ShownSpectra, plot_images, plot_scalars, plot_spectra, plot_terms
from treadle.astro.run_data import AstroData
from treadle.astro.surveys import Survey
from treadle.astro.trainer import AstroTrainer
from treadle.datasets import load_spex
from treadle.datasets.spectral_types import CLASS_START
from treadle.runs.curves import plot_training_curves
from treadle.runs.report import Picture

_PANELS = 6
_DRAWS = 64


def draw(data: AstroData, trainer: AstroTrainer, results: Sequence[CrossResult], folder: Path) -> list[Picture]:
    """Draw the plots of a run.

    Args:
        data: surveys and tokenizers.
        trainer: its model has the best weights.
        results: the results of the prediction tasks.
        folder: output folder.

    Returns:
        The plots with their captions.
    """
    scalars = plot_scalars(results, folder / "scalars.png")
    spectra = plot_spectra(_shown_spectra(data, trainer), folder / "spectra.png")
    images = plot_images(*_shown_images(data, trainer), folder / "images.png")
    terms = plot_terms(trainer.history, folder / "loss_terms.png")
    curves = plot_training_curves(_curves(trainer), folder / "training_curves.png")
    return [
        Picture(
            scalars, "Scalars from another modality",
            "Each dot is a test object. The lines join the medians of equally sized groups of objects, in the order of "
            "the true value: a flat line carries no information. The bars show the table above.",
        ),
        Picture(
            spectra, "Spectra from scalars",
            "Spectra of test dwarfs, evenly spaced in the order of types. Blue: reconstruction of a spectrum from its "
            "tokens. Orange: spectra that the model sampled given only the type and the colours.",
        ),
        Picture(
            images, "Galaxies patch by patch",
            "Test galaxies, evenly spaced in the order of magnitudes. Middle row: reconstructions from tokens. Last "
            "row: each patch is the model's expectation given the true patches before it, row by row from the top. "
            "Off by: root mean squared error on the scale from 0 to 255.",
        ),
        Picture(
            terms, "Loss terms",
            "In training, randomly chosen scalars are hidden and dropout is active; in validation neither.",
        ),
        Picture(curves, "Training", "Total loss by epoch, with the best epoch marked; below, the learning rate."),
    ]  # fmt: skip


def _curves(trainer: AstroTrainer) -> list[dict[str, Any]]:
    return [
        {
            "epoch": record["epoch"],
            "train_loss": record["train_loss_total"],
            "val_loss": record["val_loss_total"],
            "lr": record["lr"],
        }
        for record in trainer.history
    ]


def _spaced(values: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return rows with a finite value, evenly spaced in sorted order, none picked by hand."""
    order = np.argsort(values, kind="stable")[: int(np.isfinite(values).sum())]
    return np.asarray(order[np.unique(np.linspace(0, len(order) - 1, _PANELS).round().astype(np.intp))], dtype=np.intp)


def _shown_spectra(data: AstroData, trainer: AstroTrainer) -> ShownSpectra:
    spex = data.test["spex"].take(_spaced(data.test["spex"].column("spex.type")))
    assert spex.spectra is not None
    tokenizer, vocab = data.tokenizers.spectrum, data.tokenizers.vocab()
    generator = torch.Generator().manual_seed(0)
    drawn = [
        _fluxes(data, draw_spectra(trainer.model, [sequence], vocab, draws=_DRAWS, generator=generator)[0])
        for sequence in data.tokenizers.encode(spex)
    ]
    types = [_type_text(number) for number in spex.column("spex.type")]
    return ShownSpectra(
        wavelengths=load_spex().wavelengths,
        true=spex.spectra,
        codebook=tokenizer.decode(tokenizer.encode(spex.spectra)),
        drawn=np.stack(drawn),
        titles=types,
    )


def _fluxes(data: AstroData, tokens_RL: torch.Tensor) -> NDArray[np.float32]:
    """Decode the spectra of sequences with the same layout."""
    vocab = data.tokenizers.vocab()
    codes = {}
    for group, first in vocab.base_spectrum.items():
        inside = (tokens_RL[0] >= first) & (tokens_RL[0] < first + vocab.v_spectra)
        codes[group] = (tokens_RL[:, inside] - first).numpy()
    return data.tokenizers.spectrum.decode(codes)


def _type_text(number: float) -> str:
    letter, start = max((item for item in CLASS_START.items() if item[1] <= number), key=lambda item: item[1])
    return f"{letter}{number - start:g}"


def _shown_images(data: AstroData, trainer: AstroTrainer) -> tuple[dict[str, NDArray[Any]], list[str]]:
    xdf: Survey = data.test["xdf"].take(_spaced(data.test["xdf"].column("xdf.mag")))
    assert xdf.images is not None
    tokenizer, vocab = data.tokenizers.image, data.tokenizers.vocab()
    patches = tokenizer.patches.restore(tokenizer.codebook)
    expected = expected_vectors(trainer.model, data.tokenizers.encode(xdf), vocab.base_image, patches)
    rows = {
        "true": xdf.images,
        "its own tokens": tokenizer.decode(tokenizer.encode(xdf.images)),
        "from patches before": tokenizer.assemble(expected.numpy()),
    }
    return rows, [f"mag {value:.1f}".replace("-", "\N{MINUS SIGN}") for value in xdf.column("xdf.mag")]
