"""Joint regression of scalars from raw images, spectra and other scalars.

`CausalTransformerLM` reads tokens and loses what quantization discards. This model reads pixels, fluxes and scalars,
and predicts a distribution of each hidden scalar, and the image or spectrum where it is hidden.

Shapes: B = objects, C = columns of a survey, K = mixture components, H, W = height and width of an image, L = points of
a spectrum, D = model width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from treadle.astro.layers import CausalLayer
from treadle.astro.surveys import Survey
from treadle.errors import ConfigError
from treadle.errors.arguments import checked

_PATCH, _SEGMENT, _QUANTILES = 8, 16, 129
_SPREAD = 0.03  # standard deviation of the first frequencies


@dataclass(frozen=True)
class Mixture:
    """Gaussian mixtures, one for each scalar.

    Attributes:
        log_weights: (..., K), logarithms of weights that sum to 1.
        means: (..., K).
        scales: (..., K) standard deviations.

    Example:
        >>> one = Mixture(torch.zeros(1, 1), torch.full((1, 1), 2.0), torch.ones(1, 1))
        >>> one.mean().item(), one.cdf(torch.tensor([2.0])).item()
        (2.0, 0.5)
    """

    log_weights: Tensor
    means: Tensor
    scales: Tensor

    def mean(self) -> Tensor:
        """Return the expected values (...)."""
        return (self.log_weights.exp() * self.means).sum(-1)

    def log_prob(self, values: Tensor) -> Tensor:
        """Return the log densities at ``values`` (...)."""
        off = (values[..., None] - self.means) / self.scales
        parts = self.log_weights - 0.5 * off.square() - self.scales.log() - 0.5 * math.log(2 * math.pi)
        return parts.logsumexp(-1)

    def cdf(self, values: Tensor) -> Tensor:
        """Return the probabilities (...) of being at most ``values``; for true values these are the PIT values."""
        off = (values[..., None] - self.means) / self.scales
        below: Tensor = (self.log_weights.exp() * torch.special.ndtr(off)).sum(-1)
        return below


@dataclass(frozen=True)
class Answer:
    """Model predictions for the objects of a survey.

    Attributes:
        numbers: a mixture for each column, standardised by the training objects.
        latent: (B, C, D) input of the mixture head.
        picture: (B, channels, H, W) expected pixels in [0, 1], if the survey has images.
        spectrum: (B, L) expected arcsinh fluxes, standardised, if the survey has spectra.
    """

    numbers: Mixture
    latent: Tensor
    picture: Tensor | None = None
    spectrum: Tensor | None = None


class _Waves(nn.Module):
    """Periodic embeddings of scalars (Gorishniy et al. 2022), with weights per column."""

    def __init__(self, columns: int, waves: int, d_model: int) -> None:
        super().__init__()
        bound = (4 * waves) ** -0.5
        self.frequencies = nn.Parameter(_SPREAD * torch.randn(columns, 2, waves))
        self.weight = nn.Parameter(torch.empty(columns, 4 * waves, d_model).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(columns, d_model).uniform_(-bound, bound))

    def forward(self, numbers: Tensor) -> Tensor:
        """Return the embeddings (B, C, D) of the value and the rank of each number (B, C, 2)."""
        angles = 2 * math.pi * numbers[..., None] * self.frequencies
        found = torch.cat([angles.sin(), angles.cos()], dim=-1).flatten(2)
        return torch.relu(torch.einsum("bcf,cfd->bcd", found, self.weight) + self.bias)


class SurveyInputs(nn.Module):
    """Input embedding of one survey: a token per column, image patch or spectrum segment."""

    mean: Tensor
    deviation: Tensor
    quantiles: Tensor
    flux_mean: Tensor
    flux_deviation: Tensor
    usual: Tensor

    def __init__(self, survey: Survey, d_model: int, waves: int) -> None:
        super().__init__()
        columns = len(survey.columns)
        self.columns = survey.columns
        self.register_buffer("mean", torch.zeros(columns))
        self.register_buffer("deviation", torch.ones(columns))
        self.register_buffer("quantiles", torch.zeros(columns, _QUANTILES))
        self.values = nn.Parameter(0.3 * torch.randn(columns, 2, d_model))
        self.waves: _Waves | None = _Waves(columns, waves, d_model) if waves else None
        self.names = nn.Parameter(0.02 * torch.randn(columns, d_model))
        self.missing = nn.Parameter(0.02 * torch.randn(columns, d_model))
        self.hidden = nn.Parameter(0.02 * torch.randn(d_model))
        self.kind = "none"
        self.shape: tuple[int, ...] = ()
        if survey.images is not None:
            self.kind, self.shape = "image", survey.images.shape[1:]
            self._build_pictures(d_model)
        elif survey.spectra is not None:
            self.kind, self.shape = "spectrum", survey.spectra.shape[1:]
            if self.shape[0] % _SEGMENT:
                raise ConfigError(f"survey {survey.name!r}: {self.shape[0]} points are not a multiple of {_SEGMENT}")
            self.register_buffer("flux_mean", torch.zeros(self.shape))
            self.register_buffer("flux_deviation", torch.ones(self.shape))
            self.places = nn.Parameter(0.02 * torch.randn(self.shape[0] // _SEGMENT, d_model))
            self.segments = nn.Linear(2 * _SEGMENT, d_model)
            self.back = nn.Linear(d_model, _SEGMENT)
        if self.kind != "none":
            nn.init.zeros_(self.back.weight)
            nn.init.zeros_(self.back.bias)

    def _build_pictures(self, d_model: int) -> None:
        channels, height, width = self.shape
        if height % _PATCH or width % _PATCH:
            raise ConfigError(f"images of {height} x {width} pixels cannot be cut into patches of {_PATCH}")
        patches = height * width // _PATCH**2
        self.places = nn.Parameter(0.02 * torch.randn(patches + 1, d_model))
        self.stem = nn.Sequential(
            nn.Conv2d(channels, 32, 3, padding=1), nn.GELU(), nn.Conv2d(32, 64, 4, stride=2, padding=1), nn.GELU(),
            nn.Conv2d(64, d_model, _PATCH // 2, stride=_PATCH // 2),
        )  # fmt: skip
        self.sums = nn.Linear(2 * channels, d_model)
        self.back = nn.Linear(d_model, channels * _PATCH**2)
        self.register_buffer("usual", torch.zeros(self.shape))

    def fit(self, survey: Survey) -> None:
        """Fit the scales to training objects; non-finite values are missing."""
        table = _known(survey.scalars)
        with torch.no_grad():
            self.mean.copy_(torch.from_numpy(np.nanmean(table, axis=0)))
            self.deviation.copy_(torch.from_numpy(np.maximum(np.nanstd(table, axis=0), 1e-12)))
            shares = np.linspace(0, 1, _QUANTILES)
            self.quantiles.copy_(torch.from_numpy(np.nanquantile(table, shares, axis=0).T))
            if self.kind == "spectrum" and survey.spectra is not None:
                flux = np.arcsinh(_known(survey.spectra) / 0.5)
                self.flux_mean.copy_(torch.from_numpy(np.nanmean(flux, axis=0)))
                self.flux_deviation.copy_(torch.from_numpy(np.maximum(np.nanstd(flux, axis=0, ddof=1), 1e-6)))
            if survey.images is not None:
                mean = np.asarray(survey.images, dtype=np.float64).mean(axis=0) / 255
                self.usual.copy_(torch.from_numpy(mean).logit(1e-3))

    def standardised(self, scalars: Tensor) -> Tensor:
        """Return scalars (B, C) standardised by the training objects; NaN is kept."""
        return (scalars - self.mean) / self.deviation

    def fluxes(self, spectra: Tensor) -> Tensor:
        """Return arcsinh fluxes (B, L), standardised per point and clipped at 5; 0 where a flux is not finite."""
        found = (torch.asinh(spectra / 0.5) - self.flux_mean) / self.flux_deviation
        return torch.where(spectra.isfinite(), found, 0.0).clamp(-5, 5)

    def tokens(self, scalars: Tensor, seen: Tensor, data: Tensor | None, hide_data: Tensor | None) -> Tensor:
        """Return the tokens (B, C + others, D), columns first; columns that are not ``seen`` (B, C) are not read."""
        plain = self.standardised(scalars).clamp(-6, 6)
        rank = (scalars.nan_to_num()[..., None] >= self.quantiles).float().mean(-1)
        both = torch.stack([plain, torch.special.ndtri(rank.clamp(0.004, 0.996))], dim=-1)
        both = torch.where(seen[..., None], both, 0.0)
        numbers = torch.einsum("bci,cid->bcd", both, self.values)
        if self.waves is not None:
            numbers = numbers + self.waves(both)
        numbers = torch.where(seen[..., None], numbers, self.missing) + self.names
        if self.kind == "none":
            return numbers
        assert data is not None
        found = self._pictures(data) if self.kind == "image" else self._spectra(data)
        if hide_data is not None:
            found = torch.where(hide_data[:, None, None], self.hidden, found)
        return torch.cat([numbers, found + self.places], dim=1)

    def _pictures(self, images: Tensor) -> Tensor:
        patches = self.stem(4 * images - 1).flatten(2).mT
        quarter = images.shape[-1] // 4
        center = images[:, :, quarter:-quarter, quarter:-quarter]
        sums = [torch.log(255 * part.flatten(2).sum(2) + 1) - 9 for part in (images, center)]
        return torch.cat([patches, self.sums(torch.cat(sums, dim=1))[:, None]], dim=1)

    def _spectra(self, spectra: Tensor) -> Tensor:
        spectra = torch.where(spectra.isfinite(), spectra, 0.5 * self.flux_mean.sinh())
        level = spectra.abs().mean(dim=1, keepdim=True).clamp(min=1e-6)
        both = torch.stack([self.fluxes(spectra), torch.asinh(spectra / level)], dim=2)
        tokens: Tensor = self.segments(both.view(len(spectra), -1, 2 * _SEGMENT))
        return tokens

    def given_back(self, hidden: Tensor) -> Tensor:
        """Return the expected image or spectrum from the final hidden states (B, C + others, D).

        The last layer is initialised to zero, so predictions start at the mean of the training objects.
        """
        out: Tensor = self.back(hidden[:, len(self.columns) :])
        if self.kind == "spectrum":
            return out.flatten(1)
        channels, height, width = self.shape
        rows, across = height // _PATCH, width // _PATCH
        grid = out[:, : rows * across].view(-1, rows, across, channels, _PATCH, _PATCH)
        return torch.sigmoid(self.usual + grid.permute(0, 3, 1, 4, 2, 5).reshape(-1, channels, height, width))


def _known(table: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    """Replace non-finite values (N, C) by NaN, or by 0 in columns without a finite value."""
    rows = np.asarray(table, dtype=np.float64)
    rows = np.where(np.isfinite(rows), rows, np.nan)
    rows[:, np.isnan(rows).all(axis=0)] = 0.0
    return rows


class JointRegressor(nn.Module):
    """Transformer over all surveys that predicts distributions of unknown values from known ones.

    Args:
        surveys: by name; they determine the sizes of columns, images and spectra.
        d_model: width; a multiple of ``n_heads``.
        n_layers: layers, shared by the surveys.
        n_heads: attention heads.
        d_ff: width of the feed-forward layers.
        dropout: in [0, 1).
        parts: Gaussians per mixture.
        waves: learned frequencies per column of the periodic embedding of value and rank; 0 = no such embedding.

    Example:
        >>> table = Survey("a", ("a.x", "a.y"), np.random.default_rng(0).normal(size=(30, 2)), np.arange(30))
        >>> model = JointRegressor({"a": table}, d_model=8, n_layers=1, n_heads=2, d_ff=16)
        >>> model.fit({"a": table})
        >>> answer = model("a", torch.from_numpy(table.scalars).float(), hide=torch.tensor([[False, True]]))
        >>> answer.numbers.mean().shape
        torch.Size([30, 2])
    """

    @checked
    def __init__(
        self,
        surveys: Mapping[str, Survey],
        *,
        d_model: int = 128,
        n_layers: int = 3,
        n_heads: int = 4,
        d_ff: int = 256,
        dropout: float = 0.1,
        parts: int = 5,
        waves: int = 16,
    ) -> None:
        super().__init__()
        if d_model % n_heads:
            raise ConfigError(f"={d_model} must be a multiple of n_heads={n_heads}", argument="d_model")
        if waves < 0:
            raise ConfigError(f"={waves} must be 0 or more; 0 disables the waves", argument="waves")
        self.inputs = nn.ModuleDict({name: SurveyInputs(survey, d_model, waves) for name, survey in surveys.items()})
        self.layers = nn.ModuleList(
            CausalLayer(d_model, n_heads=n_heads, d_ff=d_ff, dropout=dropout, causal=False) for _ in range(n_layers)
        )
        self.norm = nn.LayerNorm(d_model)
        self.parts = parts
        self.heads = nn.ParameterDict()
        self.biases = nn.ParameterDict()
        for name, survey in surveys.items():
            bias = torch.zeros(len(survey.columns), 3, parts)
            bias[:, 1] = torch.linspace(-1.5, 1.5, parts)
            self.heads[name] = nn.Parameter(0.02 * torch.randn(len(survey.columns), d_model, 3 * parts))
            self.biases[name] = nn.Parameter(bias.flatten(1))

    def fit(self, surveys: Mapping[str, Survey]) -> None:
        """Fit the scales of all inputs to training objects."""
        for name, survey in surveys.items():
            self.survey(name).fit(survey)

    def survey(self, name: str) -> SurveyInputs:
        """Return the input embedding of a survey."""
        found = self.inputs[name]
        assert isinstance(found, SurveyInputs)
        return found

    def forward(
        self,
        name: str,
        scalars: Tensor,
        *,
        hide: Tensor,
        data: Tensor | None = None,
        hide_data: Tensor | None = None,
        give_back: bool = False,
    ) -> Answer:
        """Predict the hidden values of objects of one survey.

        Args:
            name: name of the survey.
            scalars: (B, C) values in their units; NaN is missing.
            hide: (B, C) or (1, C) bool, True = hidden.
            data: images (B, channels, H, W) in [0, 1], or spectra (B, L), if the survey has them. A non-finite flux is
                replaced by the mean of the training objects.
            hide_data: (B,) bool, True = the image or spectrum is hidden; None hides none.
            give_back: predict the image or spectrum as well.
        """
        inputs = self.survey(name)
        seen = scalars.isfinite() & ~hide
        hidden = inputs.tokens(scalars, seen, data, hide_data)
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = self.norm(hidden)
        latent = hidden[:, : scalars.shape[1]]
        out = torch.einsum("bcd,cdk->bck", latent, self.heads[name]) + self.biases[name]
        weights, means, scales = out.split(self.parts, dim=-1)
        numbers = Mixture(weights.log_softmax(-1), means, (scales.clamp(-4, 2) - 0.5).exp())
        back = inputs.given_back(hidden) if give_back and inputs.kind != "none" else None
        pictures, spectra = (back if inputs.kind == kind else None for kind in ("image", "spectrum"))
        return Answer(numbers, latent, pictures, spectra)


def joint_loss(
    answer: Answer, target: Tensor, counted: Tensor, *, likelihood: float = 1.0, squared: float = 1.0
) -> Tensor:
    """Return weighted negative log likelihood plus squared error of the expected value, averaged over counted values.

    Args:
        answer: predictions with mixtures (B, C).
        target: (B, C), standardised; not read where it is not counted.
        counted: (B, C) bool, True = contributes to the loss.
        likelihood: weight of the likelihood.
        squared: weight of the squared error.
    """
    wanted = torch.where(counted, target, 0.0)
    each = -likelihood * answer.numbers.log_prob(wanted) + squared * (answer.numbers.mean() - wanted).square()
    return torch.where(counted, each, 0.0).sum() / counted.sum().clamp(min=1)
