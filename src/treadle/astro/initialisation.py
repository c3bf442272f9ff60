"""Embedding initialisation that places similar values close together.

Shapes: G = groups of one modality, K = ids of one group, F = features of an id, D = model width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from treadle.astro.loss_inputs import prepare_codebooks
from treadle.astro.model import CausalTransformerLM
from treadle.astro.vocab import VocabSpec
from treadle.errors import ConfigError
from treadle.errors.arguments import check_above, checked

_WAVES = 8  # cosines along the bins of a column


@checked
def initialise_from_codebooks(
    model: CausalTransformerLM,
    vocab: VocabSpec,
    *,
    image_codebook: Any = None,
    spectrum_codebook: Any = None,
    std: float = 0.05,
) -> None:
    """Initialise embedding and head rows from the values behind their ids, in place.

    Otherwise the model must learn from examples alone that two patches look alike or that two bins are adjacent. The
    values of each codebook and cosines along the bins of each column are projected at random, with separate projections
    for embedding, head, groups and columns. Special ids and ids without a given codebook are unchanged.

    Args:
        model: an untrained model.
        vocab: the vocabulary of the model.
        image_codebook: (v_image, values).
        spectrum_codebook: mapping from each group to (v_spectra, values), or (groups, v_spectra, values).
        std: root mean square of the new rows.

    Raises:
        ConfigError: the model or a codebook does not match the vocabulary, or ``std`` is not above 0.

    Example:
        >>> vocab = VocabSpec(3, 4, 2, ("a",), 2)
        >>> model = CausalTransformerLM(vocab.vocab_size, 8, 16, 1, 2, 32, 0.0, 32)
        >>> initialise_from_codebooks(model, vocab, image_codebook=[[0.0, 1.0], [0.1, 1.0], [9.0, 0.0]])
        >>> near, far = (model.head.weight[6:8] - model.head.weight[5]).norm(dim=1).tolist()
        >>> near < far
        True
    """
    if model.vocab_size != vocab.vocab_size:
        raise ConfigError(f"model has vocab_size={model.vocab_size} but the vocabulary has {vocab.vocab_size} ids")
    check_above(0, std=std)
    codebooks = prepare_codebooks(vocab, image=image_codebook, spectrum=spectrum_codebook)
    bins_KF = _cosines(vocab.scalar_bins)
    features = {vocab.scalar_id(column, 0): bins_KF for column in range(vocab.n_columns)}
    if codebooks.image is not None:
        features[vocab.base_image] = codebooks.image.values_GKD[0]
    if codebooks.spectrum is not None:
        features.update(zip(vocab.base_spectrum.values(), codebooks.spectrum.values_GKD, strict=True))
    with torch.no_grad():
        for weight in (model.token_embedding.weight, model.head.weight):
            for first, values_KF in features.items():
                scaled_KF = values_KF / values_KF.square().sum(1).mean().sqrt().clamp(min=1e-12)
                weight[first : first + len(values_KF)] = (
                    std * scaled_KF @ torch.randn(values_KF.shape[1], len(weight[0]))
                )


def _cosines(n_bins: int) -> Tensor:
    """Return features (K, F), weighted towards low frequencies so that nearby bins have similar rows."""
    waves_F = torch.arange(1, _WAVES + 1)
    places_K = (torch.arange(n_bins) + 0.5) / n_bins
    return torch.cos(math.pi * places_K[:, None] * waves_F) / waves_F.sqrt()
