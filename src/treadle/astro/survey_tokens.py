"""Tokenization of surveys: a shared vocabulary, fitted tokenizers, and their reconstruction error.

Shapes: N = objects, C = scalar columns of all surveys together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.utils.data import Dataset

from treadle.astro.scalar_tokenizer import MISSING, ScalarTokenizer
from treadle.astro.sequences import encode_sequence, move_scalars_last
from treadle.astro.surveys import Survey
from treadle.astro.tokenizers import ImageTokenizer, SpectrumTokenizer
from treadle.astro.vocab import VocabSpec
from treadle.errors import ConfigError
from treadle.errors.arguments import check_within, checked

SPEX_GROUPS = ("spex_zj", "spex_jh", "spex_hk", "spex_k")
"""Quarters of the SpeX range: 0.90-1.27, 1.28-1.65, 1.65-2.02 and 2.03-2.40 µm."""

Sequences = list[dict[str, Tensor]]


@dataclass(frozen=True, eq=False)
class SurveyTokenizers:
    """Tokenizers of one vocabulary, shared by all surveys."""

    scalar: ScalarTokenizer
    image: ImageTokenizer
    spectrum: SpectrumTokenizer

    def vocab(self) -> VocabSpec:
        """Return the vocabulary of the codebooks."""
        first_group = next(iter(self.spectrum.codebooks.values()))
        return VocabSpec(
            len(self.image.codebook),
            self.scalar.centers.size,
            len(first_group),
            tuple(self.spectrum.groups),
            self.scalar.n_bins,
        )

    def encode(self, survey: Survey, *, max_len: int | None = None) -> Sequences:
        """Encode every object as a sequence, with MISS for absent values.

        Raises:
            ConfigError: a column of the survey has no bins, or a sequence is longer than ``max_len``.
        """
        vocab, bins = self.vocab(), self.bins(survey)
        images = None if survey.images is None else self.image.encode(survey.images)
        spectra = None if survey.spectra is None else self.spectrum.encode(survey.spectra)
        return [
            encode_sequence(
                vocab,
                image=None if images is None else images[row].tolist(),
                scalars=[None if bin == MISSING else int(bin) for bin in bins[row]],
                spectra=None if spectra is None else {name: part[row].tolist() for name, part in spectra.items()},
                max_len=max_len,
            )
            for row in range(len(survey))
        ]

    def bins(self, survey: Survey) -> NDArray[np.int64]:
        """Return the bins (N, C) of a survey in the columns of the vocabulary; -1 where a value is missing."""
        return self.scalar.encode(_wide(survey, self.scalar.columns))

    def quality(self, surveys: Iterable[Survey]) -> dict[str, dict[str, float | int]]:
        """Measure the reconstruction error and the code usage of each codebook.

        Args:
            surveys: objects not used for fitting, for meaningful figures.

        Returns:
            ``image``, each spectrum group (in arcsinh flux, as tokenized) and each column -> the fields of `code_use`
            and ``explained_variance``.
        """
        found: dict[str, dict[str, float | int]] = {}
        for survey in surveys:
            if survey.images is not None:
                tokens = self.image.encode(survey.images)
                decoded = self.image.decode(tokens)
                found["image"] = _measured(survey.images, decoded, tokens, len(self.image.codebook))
            if survey.spectra is not None:
                found.update(self._spectrum_quality(survey.spectra))
            bins = self.bins(survey)
            values, decoded_scalars = _wide(survey, self.scalar.columns), self.scalar.decode(bins)
            for number, name in enumerate(self.scalar.columns):
                known = bins[:, number] != MISSING
                if known.any():
                    columns = values[known, number], decoded_scalars[known, number], bins[known, number]
                    found[name] = _measured(*columns, self.scalar.n_bins)
        return found

    def _spectrum_quality(self, spectra: NDArray[np.float32]) -> dict[str, dict[str, float | int]]:
        parts = np.split(np.arcsinh(spectra / self.spectrum.softening), len(self.spectrum.groups), axis=1)
        tokens = self.spectrum.encode(spectra)
        return {
            name: _measured(part, book.decode(tokens[name]).reshape(part.shape), tokens[name], len(book.codebook))
            for (name, book), part in zip(self.spectrum.groups.items(), parts, strict=True)
        }


@checked
def fit_tokenizers(
    surveys: Sequence[Survey],
    *,
    v_image: int = 128,
    scalar_bins: int = 64,
    v_spectra: int = 64,
    groups: Sequence[str] = SPEX_GROUPS,
    patch_size: int = 8,
    segment: int = 16,
    seed: int = 0,
) -> SurveyTokenizers:
    """Fit the tokenizers to the training split of surveys.

    Args:
        surveys: training objects only; one survey with images and one with spectra.
        v_image: patches in the image codebook.
        scalar_bins: bins per column. The centre of the true bin explains 0.85 of the variance of J-Ks on validation
            objects with 32 bins and 0.92 with 64, since the outer bins are wide.
        v_spectra: segments in each group's codebook.
        groups: names of the spectrum groups, in order of wavelength.
        patch_size: patch size in pixels.
        segment: spectrum points per token.
        seed: seed of k-means.

    Raises:
        ConfigError: no survey or several surveys have images or spectra, or the sizes do not match the data.
        ImportError: scikit-learn is not installed.

    Example:
        >>> from treadle.astro.surveys import load_surveys
        >>> surveys = [survey.take(np.arange(60)) for survey in load_surveys().values()]
        >>> tokenizers = fit_tokenizers(surveys, v_image=8, scalar_bins=4, v_spectra=8, patch_size=8)
        >>> vocab = tokenizers.vocab()
        >>> vocab.n_columns, vocab.vocab_size, len(tokenizers.encode(surveys[2])[0]["tokens"])
        (16, 109, 29)
    """
    columns = list(dict.fromkeys(name for survey in surveys for name in survey.columns))
    table = np.concatenate([_wide(survey, columns) for survey in surveys])
    images = _only("images", [survey.images for survey in surveys])
    spectra = _only("spectra", [survey.spectra for survey in surveys])
    return SurveyTokenizers(
        scalar=ScalarTokenizer.fit(table, columns, scalar_bins),
        image=ImageTokenizer.fit(images, v_image, patch_size=patch_size, seed=seed),
        spectrum=SpectrumTokenizer.fit(spectra, groups, v_spectra, segment=segment, seed=seed),
    )


def explained_variance(values: ArrayLike, decoded: ArrayLike) -> float:
    """Return 1 - (summed squared error) / (summed squared distance from the elementwise mean over the objects).

    Args:
        values: (N, ...) true values.
        decoded: the same shape.

    Returns:
        At most 1; 0 for always predicting the mean; NaN if all values are equal.

    Example:
        >>> explained_variance([0.0, 2.0, 4.0], [0.0, 2.0, 3.0])
        0.875
    """
    true, found = np.asarray(values, dtype=np.float64), np.asarray(decoded, dtype=np.float64)
    total = float(np.square(true - true.mean(axis=0)).sum())
    return 1 - float(np.square(true - found).sum()) / total if total > 0 else float("nan")


def code_use(tokens: ArrayLike, size: int) -> dict[str, float | int]:
    """Measure how the codes of a codebook are used.

    Args:
        tokens: indices of any shape, at least one.
        size: size of the codebook.

    Returns:
        ``codes``, ``dead_codes`` (never used) and ``perplexity``, the exponential of the entropy of the codes: the size
        of a uniformly used codebook with the same entropy.

    Example:
        >>> code_use([0, 0, 1, 1], 4)
        {'codes': 4, 'dead_codes': 2, 'perplexity': 2.0}
    """
    counts = np.bincount(np.asarray(tokens).ravel(), minlength=size)
    shares = counts[counts > 0] / counts.sum()
    perplexity = float(np.exp(-(shares * np.log(shares)).sum()))
    return {"codes": size, "dead_codes": int((counts == 0).sum()), "perplexity": perplexity}


class ScalarDropout(Dataset[dict[str, Tensor]]):
    """Data set of sequences with a random subset of scalars replaced by MISS, redrawn each time.

    A model trained on them can predict a column from any of the others, or from the image or spectrum alone. In half of
    the sequences arbitrary scalars are hidden, in the others the first ones: with independent draws, all columns before
    a late one are rarely hidden together while it is shown, and it would never be learned from the rest. The hidden
    tokens are drawn with torch's global generator, which a resumed run restores.

    Args:
        sequences: from `SurveyTokenizers.encode`.
        vocab: the vocabulary.
        share: mean fraction of hidden scalars; the fraction of a sequence is drawn uniformly from [0, 2 share], so that
            some sequences show all and some few.
        scalars_last: probability that the scalars come after the spectra (`move_scalars_last`). Between 0 and 1 the
            model learns scalars from spectra as well as spectra from scalars.

    Raises:
        ConfigError: the share is not in [0, 0.5], or the probability not in [0, 1].

    Example:
        >>> vocab = VocabSpec(2, 4, 2, ("a",), 2)
        >>> hidden = ScalarDropout([encode_sequence(vocab, scalars=[1, 0])], vocab, share=0.5)
        >>> len(hidden), hidden[0]["tokens"].shape
        (1, torch.Size([9]))
    """

    @checked
    def __init__(
        self,
        sequences: Sequence[Mapping[str, Any]],
        vocab: VocabSpec,
        *,
        share: float = 0.25,
        scalars_last: float = 0.0,
    ):
        check_within("[0, 0.5]", share=share)
        check_within("[0, 1]", scalars_last=scalars_last)
        self.sequences = sequences
        self.vocab = vocab
        self.share = share
        self.scalars_last = scalars_last

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sequence = self.sequences[index]
        if self.scalars_last and torch.rand(()) < self.scalars_last:
            sequence = move_scalars_last(sequence, self.vocab)
        tokens, types = sequence["tokens"], sequence["types"]
        limit = 2 * self.share * torch.rand(())
        scalar = (tokens >= self.vocab.base_scalar) & (tokens < self.vocab.first_spectrum_id)
        if torch.rand(()) < 0.5:
            hidden = scalar & (torch.rand(tokens.shape) < limit)
        else:
            hidden = scalar & (scalar.cumsum(0) <= limit * scalar.sum())
        miss = self.vocab.miss_id  # its own type, like every special id
        return {"tokens": tokens.masked_fill(hidden, miss), "types": types.masked_fill(hidden, miss)}


def _wide(survey: Survey, columns: Sequence[str]) -> NDArray[np.float64]:
    unknown = [name for name in survey.columns if name not in columns]
    if unknown:
        raise ConfigError(f"survey {survey.name!r}: the tokenizers have no bins for {', '.join(unknown)}")
    table = np.full((len(survey), len(columns)), np.nan)
    table[:, [columns.index(name) for name in survey.columns]] = survey.scalars
    return table


def _only(what: str, parts: list[Any]) -> Any:
    present = [part for part in parts if part is not None]
    if not present:
        raise ConfigError(
            f"no survey has them, but the vocabulary needs a codebook for them; add a survey with {what}", argument=what
        )
    if len(present) > 1:
        raise ConfigError(
            f"{len(present)} surveys have them, but the vocabulary has a single codebook; give one survey",
            argument=what,
        )
    return present[0]


def _measured(values: ArrayLike, decoded: ArrayLike, tokens: ArrayLike, size: int) -> dict[str, float | int]:
    return {"explained_variance": explained_variance(values, decoded), **code_use(tokens, size)}
