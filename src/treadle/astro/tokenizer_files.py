"""Fitted tokenizers in one safetensors file, whose codebooks `load_codebook` can also read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treadle.astro.scalar_tokenizer import ScalarTokenizer
from treadle.astro.survey_tokens import SurveyTokenizers
from treadle.astro.tokenizers import ImageTokenizer, SpectrumTokenizer, Standardised
from treadle.errors import CheckpointError, ConfigError
from treadle.errors.arguments import checked
from treadle.exchange.tensor_files import read_tree, write_safetensors

_HEADER = "tokenizers"
_SCALAR_PARTS = ("edges", "centers", "mean", "scale")


@checked
def save_tokenizers(path: str | os.PathLike[str], tokenizers: SurveyTokenizers) -> Path:
    """Write tokenizers to one file, atomically.

    The codebooks are stored as ``image``, ``spectrum.<group>`` and ``scalar.codebook`` (columns, bins), in the units
    of the losses.

    Args:
        path: a ``.safetensors`` file; its folder is created.
        tokenizers: from `fit_tokenizers`.

    Returns:
        The path.

    Raises:
        ConfigError: the extension is unsupported.
        CheckpointError: the file cannot be written; the previous file is intact.
        ImportError: safetensors is not installed.
    """
    file = Path(path)
    if file.suffix.lower() != ".safetensors":
        raise ConfigError(f"{file}: tokenizers are written as .safetensors; change the ending")
    image, spectrum, scalar = tokenizers.image, tokenizers.spectrum, tokenizers.scalar
    arrays = {"image": image.codebook, "scalar.codebook": scalar.codebook}
    arrays |= {f"spectrum.{name}": book.codebook for name, book in spectrum.groups.items()}
    arrays |= {f"scalar.{part}": getattr(scalar, part) for part in _SCALAR_PARTS}
    header = {
        "image": {"patch_size": image.patch_size, "shape": image.shape, **_units(image.patches)},
        "spectrum": {
            "points": spectrum.points,
            "softening": spectrum.softening,
            "groups": {name: _units(book) for name, book in spectrum.groups.items()},
        },
        "columns": scalar.columns,
    }
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    write_safetensors(tensors, file, metadata={_HEADER: json.dumps(header)}, drop={})
    return file


@checked
def load_tokenizers(path: str | os.PathLike[str]) -> SurveyTokenizers:
    """Load tokenizers written by `save_tokenizers`; they produce the same tokens to the bit.

    Raises:
        CheckpointError: the file is missing or damaged, or does not hold tokenizers.
        ImportError: safetensors is not installed.
    """
    tensors, metadata = read_tree(path)
    try:
        header = json.loads((metadata or {})[_HEADER])
        image, spectrum = header["image"], header["spectrum"]
        books = {name: _book(tensors[f"spectrum.{name}"], units) for name, units in spectrum["groups"].items()}
        scalar: dict[str, Any] = {part: tensors[f"scalar.{part}"].numpy() for part in _SCALAR_PARTS}
        channels, height, width = image["shape"]
        return SurveyTokenizers(
            scalar=ScalarTokenizer(tuple(header["columns"]), **scalar),
            image=ImageTokenizer(_book(tensors["image"], image), image["patch_size"], (channels, height, width)),
            spectrum=SpectrumTokenizer(books, spectrum["points"], spectrum["softening"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{os.fspath(path)!r} does not hold tokenizers ({type(error).__name__}: {error}); write it with "
            "save_tokenizers"
        ) from error


def _units(book: Standardised) -> dict[str, float]:
    return {"mean": book.mean, "scale": book.scale}


def _book(codebook: Tensor, units: dict[str, Any]) -> Standardised:
    return Standardised(codebook.numpy(), float(units["mean"]), float(units["scale"]))
