"""Convolutional image autoencoder, and a tokenizer that quantizes its latents.

Layers and parameter names match astromodal's, so its weights load.

Shapes: B = images, C = bands, H, W = height and width, h, w = H / 4, W / 4, D = latent channels,
K = codebook entries.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from treadle.astro.tokenizers import Standardised, Tokens, as_indices
from treadle.checkpoint.store import load_checkpoint, save_checkpoint
from treadle.device import get_device
from treadle.distributed.state_names import load_model_state
from treadle.errors import CheckpointError, ConfigError
from treadle.errors.arguments import check_least, checked

_KIND = "treadle.astro.CutoutTokenizer"


class ResBlock(nn.Module):
    """Residual block of two 3 x 3 convolutions with ReLU.

    Example:
        >>> ResBlock(4)(torch.zeros(2, 4, 8, 8)).shape
        torch.Size([2, 4, 8, 8])
    """

    @checked
    def __init__(self, channels: int):
        super().__init__()
        check_least(1, channels=channels)
        self.conv1 = nn.Conv2d(channels, channels, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, kernel_size=3, padding=1)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Transform (B, C, H, W)."""
        out: Tensor = self.act(self.conv2(self.act(self.conv1(x))) + x)
        return out


class Encoder(nn.Module):
    """Convolutional encoder; the latent has a quarter of the height and width.

    Args:
        in_channels: bands C.
        latent_dim: D.
        proj_channels: width of the first layer.

    Example:
        >>> Encoder(3, 2, 8)(torch.zeros(1, 3, 16, 16)).shape
        torch.Size([1, 2, 4, 4])
    """

    @checked
    def __init__(self, in_channels: int, latent_dim: int, proj_channels: int = 64):
        super().__init__()
        check_least(1, in_channels=in_channels, latent_dim=latent_dim, proj_channels=proj_channels)
        self.proj = nn.Conv2d(in_channels, proj_channels, kernel_size=1)
        self.enc_block1 = nn.Sequential(
            ResBlock(proj_channels), nn.Conv2d(proj_channels, 128, kernel_size=3, stride=2, padding=1), nn.ReLU()
        )
        self.enc_block2 = nn.Sequential(
            ResBlock(128), nn.Conv2d(128, 128, kernel_size=3, stride=2, padding=1), nn.ReLU(), ResBlock(128)
        )
        self.to_latent = nn.Conv2d(128, latent_dim, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        """Encode images (B, C, H, W) into (B, D, h, w)."""
        latent: Tensor = self.to_latent(self.enc_block2(self.enc_block1(self.proj(x))))
        return latent


class Decoder(nn.Module):
    """Decoder from latents to images, with transposed convolutions.

    Args:
        latent_dim: D.
        out_channels: bands C.
        proj_channels: width of the last layers.

    Example:
        >>> Decoder(2, 3, 8)(torch.zeros(1, 2, 4, 4)).shape
        torch.Size([1, 3, 16, 16])
    """

    @checked
    def __init__(self, latent_dim: int, out_channels: int, proj_channels: int = 64):
        super().__init__()
        check_least(1, latent_dim=latent_dim, out_channels=out_channels, proj_channels=proj_channels)
        self.from_latent = nn.Conv2d(latent_dim, 128, kernel_size=1)
        self.dec_block1 = nn.Sequential(
            ResBlock(128), nn.ConvTranspose2d(128, 64, kernel_size=4, stride=2, padding=1), nn.ReLU()
        )
        self.dec_block2 = nn.Sequential(
            ResBlock(64),
            nn.ConvTranspose2d(64, proj_channels, kernel_size=4, stride=2, padding=1),
            nn.ReLU(),
            ResBlock(proj_channels),
        )
        self.out_conv = nn.Conv2d(proj_channels, out_channels, kernel_size=3, padding=1)

    def forward(self, z_map: Tensor) -> Tensor:
        """Decode latents (B, D, h, w) into (B, C, H, W)."""
        pictures: Tensor = self.out_conv(self.dec_block2(self.dec_block1(self.from_latent(z_map))))
        return pictures


class AutoEncoder(nn.Module):
    """Convolutional image autoencoder.

    Args:
        in_channels: bands C.
        latent_dim: D.
        proj_channels: width of the first and last layers.
        cutout_size: side length in pixels, a multiple of 4; used only for ``latent_H`` and ``latent_W``.

    Attributes:
        latent_H, latent_W: latent height and width for images of ``cutout_size``.

    Raises:
        ConfigError: a size is below 1, or ``cutout_size`` is not a multiple of 4.

    Example:
        >>> pictures, latents = AutoEncoder(3, proj_channels=8)(torch.zeros(1, 3, 16, 16))
        >>> pictures.shape, latents.shape
        (torch.Size([1, 3, 16, 16]), torch.Size([1, 2, 4, 4]))
    """

    @checked
    def __init__(self, in_channels: int, latent_dim: int = 2, proj_channels: int = 64, *, cutout_size: int = 96):
        super().__init__()
        check_least(1, in_channels=in_channels, latent_dim=latent_dim, proj_channels=proj_channels)
        if cutout_size < 4 or cutout_size % 4:
            raise ConfigError("must be a multiple of 4", argument="cutout_size", value=cutout_size)
        self.in_channels, self.latent_dim, self.proj_channels = in_channels, latent_dim, proj_channels
        self.latent_H = self.latent_W = cutout_size // 4
        self.encoder = Encoder(in_channels, latent_dim, proj_channels)
        self.decoder = Decoder(latent_dim, in_channels, proj_channels)

    def encode(self, x: Tensor) -> Tensor:
        """Encode images (B, C, H, W) into (B, D, h, w)."""
        latents: Tensor = self.encoder(x)
        return latents

    def decode(self, z_map: Tensor) -> Tensor:
        """Decode latents (B, D, h, w) into (B, C, H, W)."""
        pictures: Tensor = self.decoder(z_map)
        return pictures

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the reconstruction (B, C, H, W) and the latent (B, D, h, w)."""
        z_map = self.encode(x)
        return self.decode(z_map), z_map


class BaseTokenizer(ABC):
    """Base class of trainable tokenizers that can be saved and loaded."""

    @abstractmethod
    def train(self, *args: Any, **kwargs: Any) -> None:
        """Fit the tokenizer."""

    @abstractmethod
    def encode(self, *args: Any, **kwargs: Any) -> Any:
        """Return the tokens of data."""

    @abstractmethod
    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the tokenizer to a file."""

    @classmethod
    @abstractmethod
    def load(cls, path: str | os.PathLike[str]) -> BaseTokenizer:
        """Load a tokenizer from a file."""


class CutoutTokenizer(BaseTokenizer):
    """Image tokenizer that quantizes the latent vectors of a trained :class:`AutoEncoder`.

    Args:
        autoencoder: trained; used in eval mode.
        codebook_size: K.
        device: None selects CUDA, then MPS, then the CPU.

    Attributes:
        codebook: (K, D) float32 centroids, for the losses; set by :meth:`train`.

    Example:
        >>> pictures = torch.randn(6, 3, 16, 16)
        >>> tokenizer = CutoutTokenizer(AutoEncoder(3, proj_channels=8), 5, device="cpu")
        >>> tokenizer.train(pictures); tokens = tokenizer.encode(pictures)
        >>> tokens.shape, tokenizer.decode(tokens).shape
        ((6, 4, 4), torch.Size([6, 3, 16, 16]))
    """

    @checked
    def __init__(
        self, autoencoder: AutoEncoder, codebook_size: int = 2048, *, device: torch.device | str | int | None = None
    ):
        check_least(1, codebook_size=codebook_size)
        self.device = get_device(device)
        self.autoencoder = autoencoder.to(self.device).eval()
        self.codebook_size = codebook_size
        self._book: Standardised | None = None

    @property
    def codebook(self) -> Any:
        """(K, D) centroids, float32.

        Raises:
            ConfigError: the tokenizer is not trained.
        """
        return self._trained().restore(self._trained().codebook)

    def train(self, images: Tensor, *, batch_size: int = 32, seed: int = 0, max_iter: int = 50) -> None:
        """Fit the codebook to the latents of images (N, C, H, W) by k-means.

        Raises:
            ConfigError: there are fewer latent vectors than codebook entries.
            ImportError: scikit-learn is not installed.
        """
        vectors = self._vectors(images, batch_size)[0]
        self._book = Standardised.fit(vectors, self.codebook_size, seed=seed, max_iter=max_iter)

    def encode(self, images: Tensor, *, batch_size: int = 32) -> Tokens:
        """Return the tokens (N, h, w) of images (N, C, H, W).

        Raises:
            ConfigError: the tokenizer is not trained.
        """
        book = self._trained()
        vectors, shape = self._vectors(images, batch_size)
        return book.encode(vectors).reshape(shape)

    @torch.no_grad()
    def decode(self, tokens: ArrayLike) -> Tensor:
        """Return the images (N, C, H, W) of tokens (N, h, w), on the CPU."""
        vectors = self._trained().decode(as_indices("tokens", tokens, self.codebook_size))
        latents = torch.from_numpy(vectors).permute(0, 3, 1, 2).to(self.device)
        return self.autoencoder.decode(latents).cpu()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the autoencoder and the codebook to one file, atomically."""
        book, model = self._trained(), self.autoencoder
        sizes = {"in_channels": model.in_channels, "latent_dim": model.latent_dim, "proj_channels": model.proj_channels}
        payload = {
            "kind": _KIND, "sizes": {**sizes, "cutout_size": 4 * model.latent_H}, "weights": model.state_dict(),
            "codebook": torch.from_numpy(book.codebook), "mean": book.mean, "scale": book.scale,
        }  # fmt: skip
        save_checkpoint(payload, Path(path))

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: torch.device | str | int | None = None) -> CutoutTokenizer:
        """Load a tokenizer written by :meth:`save`.

        Raises:
            CheckpointError: the file is missing, damaged or of another type.
        """
        payload = load_checkpoint(path)
        if payload.get("kind") != _KIND:
            raise CheckpointError(f"{os.fspath(path)!r} is not a CutoutTokenizer file")
        sizes = dict(payload["sizes"])
        model = AutoEncoder(sizes.pop("in_channels"), **sizes)
        load_model_state(model, payload["weights"])
        codebook = payload["codebook"].numpy()
        tokenizer = cls(model, len(codebook), device=device)
        tokenizer._book = Standardised(codebook, float(payload["mean"]), float(payload["scale"]))
        return tokenizer

    def _trained(self) -> Standardised:
        if self._book is None:
            raise ConfigError("the tokenizer has no codebook; call train(images) or use CutoutTokenizer.load(path)")
        return self._book

    @torch.no_grad()
    def _vectors(self, images: Tensor, batch_size: int) -> tuple[Any, tuple[int, int, int]]:
        parts = [self.autoencoder.encode(part.to(self.device)).cpu() for part in torch.split(images, batch_size)]
        latents = torch.cat(parts)
        count, depth, height, width = latents.shape
        vectors = np.ascontiguousarray(latents.permute(0, 2, 3, 1).reshape(-1, depth).float().numpy())
        return vectors, (count, height, width)
