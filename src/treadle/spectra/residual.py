"""ResidualMAE, a masked autoencoder that corrects a linear conditional mean and estimates its uncertainty.

Shapes: B = rows, L = channels (``seq_len``), R = factors, T = patches, P = channels of a patch, D = model width, Z =
latent width. ``visible_mask`` is True where a channel is visible.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from treadle.errors import ConfigError
from treadle.errors.arguments import check_least, checked
from treadle.spectra.arrays import check_complete
from treadle.spectra.encoder import EncoderLayer, check_input, sine_positions
from treadle.spectra.masks import (
    MaskedAutoencoder,
    check_blocks,
    check_mask_count,
    make_band_mask,
    make_block_mask,
)


class Uncertainty(NamedTuple):
    """Per-channel uncertainty of a reconstruction."""

    log_variance: Tensor
    """(B, L) logarithm of the expected squared error."""
    prior_variance: Tensor
    """(B, L) variance of the linear conditional mean that the model starts from; detached."""


class LinearGaussian(nn.Module):
    """Factor model of spectra: a Gaussian with a few factors and per-channel noise, fitted in closed form.

    Args:
        seq_len: channels L.
        rank: factors R, 1 to L.

    Example:
        >>> gaussian = LinearGaussian(4, 1)
        >>> gaussian.fit(torch.linspace(-1, 1, 9)[:, None] * torch.ones(4), shrinkage=1e-4)
        >>> seen = torch.tensor([[True, True, False, False]])
        >>> gaussian(torch.tensor([[0.5, 0.5, 9.0, 9.0]]), seen)[0].round(decimals=2).tolist()
        [[0.5, 0.5, 0.5, 0.5]]
    """

    mean: Tensor
    factors: Tensor
    noise: Tensor

    @checked
    def __init__(self, seq_len: int, rank: int) -> None:
        super().__init__()
        if not 1 <= rank <= seq_len:
            raise ConfigError(f"={rank} must be 1 to seq_len={seq_len}; it is a number of factors", argument="rank")
        self.register_buffer("mean", torch.zeros(seq_len))
        self.register_buffer("factors", torch.zeros(seq_len, rank))
        self.register_buffer("noise", torch.ones(seq_len))

    def fit(self, train: Tensor, *, shrinkage: float = 0.03) -> None:
        """Fit mean, factors and noise to complete spectra.

        The factors are the first principal components of the covariance, less the mean of the discarded variances. The
        noise is the residual variance of each channel plus white noise.

        Args:
            train: (N, L), at least two rows.
            shrinkage: white noise as a fraction of the mean channel variance.
        """
        rows = train.detach().to("cpu", torch.float64)
        if rows.dim() != 2 or len(rows) < 2 or rows.shape[1] != len(self.mean):
            raise ValueError(f"train has shape {tuple(train.shape)} but must be (N, {len(self.mean)}) with N >= 2")
        check_complete(int((~rows.isfinite().all(dim=1)).sum()), len(rows))
        covariance = torch.cov(rows.T).reshape(len(self.mean), len(self.mean))
        values, vectors = torch.linalg.eigh(covariance)
        rank = self.factors.shape[1]
        rest = values[:-rank].mean() if rank < len(values) else values.new_zeros(())
        factors = vectors[:, -rank:] * (values[-rank:] - rest).clamp(min=0).sqrt()
        left = (covariance.diagonal() - factors.square().sum(1)).clamp(min=0)
        with torch.no_grad():
            self.mean.copy_(rows.mean(0))
            self.factors.copy_(factors)
            self.noise.copy_(left + shrinkage * covariance.diagonal().mean())

    def forward(self, x: Tensor, visible_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and variance of every channel given the visible ones, each (B, L) float32.

        Values of ``x`` outside the mask are never read. The variance is that of a new measurement.
        """
        with torch.autocast(x.device.type, enabled=False), torch.no_grad():
            rank = self.factors.shape[1]
            off_BL = torch.where(visible_mask, x.to(self.mean.dtype) - self.mean, 0.0)
            weight_BL = visible_mask / self.noise
            pairs_LRR = self.factors[:, :, None] * self.factors[:, None, :]
            precision = (weight_BL @ pairs_LRR.flatten(1)).view(-1, rank, rank)
            precision = precision + torch.eye(rank, device=x.device, dtype=precision.dtype)
            right = ((weight_BL * off_BL) @ self.factors)[..., None]
            solved = _half_solved(precision, torch.cat([self.factors.T.expand(len(x), -1, -1), right], dim=2))
            spread_BRL, weights_BR1 = solved[..., :-1], solved[..., -1:]
            mean_BL = self.mean + (spread_BRL * weights_BR1).sum(1)
            return mean_BL, spread_BRL.square().sum(1) + self.noise


def _half_solved(matrix_BRR: Tensor, right_BRN: Tensor) -> Tensor:
    """Return (B, R, N), the inverse of the lower Cholesky factor times ``right``."""
    if matrix_BRR.is_cuda:
        return _eliminated(matrix_BRR, right_BRN)
    lower_BRR, _ = torch.linalg.cholesky_ex(matrix_BRR)
    solved: Tensor = torch.linalg.solve_triangular(lower_BRR, right_BRN, upper=False)
    return solved


def _eliminated(matrix_BRR: Tensor, right_BRN: Tensor) -> Tensor:
    """Return the same result by elimination, column by column.

    The batched solvers used by torch allocate GPU memory in a way that a CUDA graph does not allow. The update is not a
    matrix product, since with one inner element cuBLAS takes twice as long.
    """
    rest, rows = torch.cat([matrix_BRR, right_BRN], dim=2), []
    for left in range(matrix_BRR.shape[1], 0, -1):
        row = rest[:, 0] * rest[:, 0, :1].rsqrt()
        rows.append(row[:, left:])
        rest = torch.addcmul(rest[:, 1:, 1:], row[:, 1:left, None], row[:, None, 1:], value=-1)
    return torch.stack(rows, dim=1)


class PatchEncoder(nn.Module):
    """Transformer encoder over patches of a spectrum with hidden channels replaced by the linear conditional mean."""

    def __init__(
        self,
        *,
        seq_len: int,
        patch: int,
        rank: int,
        d_model: int,
        nhead: int,
        num_layers: int,
        dim_feedforward: int,
        dropout: float,
        latent_dim: int,
    ) -> None:
        super().__init__()
        self.seq_len = seq_len
        self.patch = patch
        self.gaussian = LinearGaussian(seq_len, rank)
        self.embed = nn.Linear(3 * patch, d_model)
        self.pos_embed = nn.Parameter(0.02 * sine_positions(seq_len // patch, d_model))
        self.layers = nn.ModuleList(
            EncoderLayer(d_model, nhead=nhead, dim_feedforward=dim_feedforward, dropout=dropout)
            for _ in range(num_layers)
        )
        self.to_latent = nn.Linear(d_model, latent_dim, bias=False)

    def forward(self, x: Tensor, visible_mask: Tensor) -> Tensor:
        """Return the latent (B, Z), rows of norm 1; arguments as for ``ResidualMAE``."""
        return self.encode(x, visible_mask)[1]

    def encode(self, x: Tensor, visible_mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return tokens (B, T, D), latent (B, Z), and the mean and variance (B, L) of the linear model."""
        check_input(x, visible_mask, self.seq_len)
        mean_BL, variance_BL = self.gaussian(x, visible_mask)
        filled_BL = torch.where(visible_mask, x.to(mean_BL.dtype), mean_BL)
        parts = [
            part.view(len(x), -1, self.patch)
            for part in (filled_BL, visible_mask.to(mean_BL.dtype), variance_BL.sqrt())
        ]
        tokens_BTD = self.embed(torch.cat(parts, dim=2)) + self.pos_embed
        for layer in self.layers:
            tokens_BTD = layer(tokens_BTD, None)
        latent_BZ = self.to_latent(tokens_BTD.mean(1))
        unit_BZ = F.normalize(latent_BZ.to(torch.promote_types(latent_BZ.dtype, torch.float32)), dim=-1)
        return tokens_BTD, unit_BZ, mean_BL, variance_BL


def make_mixed_mask(
    batch_size: int,
    seq_len: int,
    n_blocks: int,
    n_mask: int | None,
    *,
    device: torch.device | str | int,
    generator: torch.Generator | None,
) -> Tensor:
    """Draw masks of ``n_mask`` blocks; None draws blocks, bands, and all but a band, like `make_band_mask`."""
    if n_mask is None:
        hidden = make_band_mask(batch_size, seq_len, n_blocks, generator=generator)
    else:
        hidden = make_block_mask(batch_size, seq_len, n_blocks, n_mask, generator=generator)
    return hidden.to(device, non_blocking=True)


class ResidualMAE(MaskedAutoencoder):
    """Masked autoencoder of spectra that predicts the residual of a linear conditional mean and its uncertainty.

    The linear model is fitted in closed form by :meth:`fit` and is part of the state. An untrained network returns its
    prediction unchanged, since the last layer is initialised to zero. Hidden values affect no output.

    Args:
        seq_len: Channels L of a spectrum, a multiple of ``patch`` and of ``n_blocks``.
        d_model: Width of the tokens, a multiple of ``nhead``.
        nhead: Attention heads.
        num_layers: Transformer layers before the latent, at least 1.
        decoder_layers: Transformer layers after the latent, at least 1.
        dim_feedforward: Width of the feed-forward part of a layer.
        dropout: Dropout probability, 0 to 1.
        latent_dim: Width Z of the latent.
        patch: Channels per token.
        rank: Factors of the linear model.
        n_blocks: Equal blocks that block masks are drawn over.
        n_mask: Blocks hidden when a number is required, 0 to ``n_blocks``.

    Attributes:
        takes_drawn_mask: The trainer draws masks with :meth:`make_visible` on the CPU, as a captured step needs.
        gives_uncertainty: ``forward`` accepts ``with_uncertainty``, and training weights errors by it.

    Raises:
        ValueError: When an argument is out of range.

    Example:
        >>> model = ResidualMAE(seq_len=64, d_model=16, num_layers=1, patch=8, rank=4, n_blocks=8, n_mask=6).eval()
        >>> model.fit(torch.randn(100, 64))
        >>> x = torch.randn(5, 64)
        >>> x_recon, z, visible_mask = model(x)
        >>> x_recon.shape, z.shape
        (torch.Size([5, 64]), torch.Size([5, 64]))
        >>> torch.equal(x_recon, model.encoder.gaussian(x, visible_mask)[0])  # it has learned nothing yet
        True
    """

    takes_drawn_mask = True
    gives_uncertainty = True
    _make_mask = staticmethod(make_mixed_mask)
    _parts = "n_blocks"
    _mixes_masks = True

    @checked
    def __init__(
        self,
        *,
        seq_len: int,
        d_model: int = 128,
        nhead: int = 4,
        num_layers: int = 3,
        decoder_layers: int = 2,
        dim_feedforward: int = 512,
        dropout: float = 0.1,
        latent_dim: int = 64,
        patch: int = 16,
        rank: int = 64,
        n_blocks: int = 32,
        n_mask: int = 24,
    ) -> None:
        super().__init__()
        check_blocks(seq_len, n_blocks)
        check_mask_count(n_mask, n_blocks)
        check_least(1, d_model=d_model, nhead=nhead, num_layers=num_layers, decoder_layers=decoder_layers)
        check_least(1, dim_feedforward=dim_feedforward, latent_dim=latent_dim, patch=patch)
        for name, whole, part in (("d_model", d_model, nhead), ("seq_len", seq_len, patch)):
            if whole % part:
                raise ConfigError(f"={whole} must be a multiple of {part}, the parts are equal", argument=name)
        self.seq_len, self.latent_dim = seq_len, latent_dim
        self.n_blocks, self.n_mask = n_blocks, n_mask
        sizes = {"nhead": nhead, "dim_feedforward": dim_feedforward}
        self.encoder = PatchEncoder(
            seq_len=seq_len, patch=patch, rank=rank, d_model=d_model, num_layers=num_layers, dropout=dropout,
            latent_dim=latent_dim, **sizes,
        )  # fmt: skip
        self.from_latent = nn.Linear(latent_dim, d_model)
        self.layers = nn.ModuleList(EncoderLayer(d_model, dropout=dropout, **sizes) for _ in range(decoder_layers))
        self.norm = nn.LayerNorm(d_model)
        self.decoder = nn.Linear(d_model, 2 * patch)
        nn.init.zeros_(self.decoder.weight)
        nn.init.zeros_(self.decoder.bias)

    def fit(self, train: Tensor, *, shrinkage: float = 0.03) -> None:
        """Fit the linear model to complete training spectra (N, L); see :meth:`LinearGaussian.fit`."""
        self.encoder.gaussian.fit(train, shrinkage=shrinkage)

    def forward(
        self,
        x: Tensor,
        visible_mask: Tensor | None = None,
        *,
        n_mask: int | None = None,
        generator: torch.Generator | None = None,
        with_uncertainty: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Uncertainty]:
        """Reconstruct all channels of ``x`` from the visible ones.

        Args:
            x: (B, L) spectra.
            visible_mask: (B, L) bool, True = visible; a row may be all False. None draws one with :meth:`make_visible`.
            n_mask: As in :meth:`make_visible`.
            generator: CPU generator for the mask; None uses torch's global CPU generator.
            with_uncertainty: Return an :class:`Uncertainty` as a fourth value.

        Returns:
            ``x_recon`` (B, L), ``z`` (B, Z) with rows of norm 1, and the ``visible_mask`` (B, L) that was used.

        Raises:
            ValueError: When a shape, the mask's dtype or ``n_mask`` is wrong.
        """
        check_input(x, visible_mask, self.seq_len)
        if visible_mask is None:
            visible_mask = self.make_visible(len(x), n_mask=n_mask, device=x.device, generator=generator)
        tokens_BTD, z, mean_BL, variance_BL = self.encoder.encode(x, visible_mask)
        tokens_BTD = tokens_BTD + self.from_latent(z.to(self.from_latent.weight.dtype))[:, None]
        for layer in self.layers:
            tokens_BTD = layer(tokens_BTD, None)
        change_BT2P = self.decoder(self.norm(tokens_BTD)).to(mean_BL.dtype).unflatten(2, (2, -1))
        x_recon = mean_BL + change_BT2P[:, :, 0].flatten(1) * variance_BL.sqrt()
        if not with_uncertainty:
            return x_recon, z, visible_mask
        log_variance_BL = variance_BL.log() + change_BT2P[:, :, 1].flatten(1).clamp(-8, 8)
        return x_recon, z, visible_mask, Uncertainty(log_variance_BL, variance_BL)
