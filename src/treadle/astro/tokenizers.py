"""Vector quantization of images and spectra: encoding to codebook indices and decoding.

A vector (a patch of an image, a segment of a spectrum) becomes the index of the nearest k-means centroid in its own
units, so the expected value over a codebook is an expected patch or segment and needs no decoder.

Shapes: N = objects, C = channels, H, W = height and width of an image, L = points of a spectrum, T = tokens,
K = ids of a codebook, D = values behind one id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treadle.astro.codebooks import kmeans_codebook, unmasked
from treadle.errors import ConfigError, refuse_unknown
from treadle.errors.arguments import check_above

Tokens = NDArray[np.int64]
Floats = NDArray[np.float32]

_ROWS_AT_ONCE = 4096  # rows of the distance matrix


@dataclass(frozen=True, eq=False)
class Standardised:
    """Codebook of vectors that were standardised over all their values before fitting.

    This puts the squared-error losses of different modalities on the same scale.

    Attributes:
        codebook: (K, D) float32.
        mean: subtracted from the values.
        scale: divisor of the centred values.
    """

    codebook: Floats
    mean: float
    scale: float

    @classmethod
    def fit(cls, vectors: Floats, k: int, *, seed: int = 0, max_iter: int = 50) -> Standardised:
        """Fit k centroids to vectors (T, D)."""
        mean, scale = float(vectors.mean(dtype=np.float64)), float(vectors.std(dtype=np.float64))
        if not np.isfinite(scale) or scale == 0:
            raise ConfigError(f"the values have the standard deviation {scale}: they must be finite and differ")
        return cls(kmeans_codebook((vectors - mean) / scale, k, seed=seed, max_iter=max_iter), mean, scale)

    def encode(self, vectors: Floats) -> Tokens:
        """Return the index of the nearest centroid of each vector (T, D), as (T,)."""
        codes = self.codebook.astype(np.float64)
        half_norms = 0.5 * np.square(codes).sum(axis=1)
        parts = np.array_split(vectors, max(1, -(-len(vectors) // _ROWS_AT_ONCE)))
        scaled = ((part.astype(np.float64) - self.mean) / self.scale for part in parts)
        return np.concatenate([(half_norms - part @ codes.T).argmin(axis=1) for part in scaled]).astype(np.int64)

    def decode(self, tokens: ArrayLike) -> Floats:
        """Return the vectors (..., D) of tokens of any shape, in their original units."""
        return self.restore(self.codebook[as_indices("tokens", tokens, len(self.codebook))])

    def restore(self, vectors: ArrayLike) -> Floats:
        """Convert codebook values, such as expected ones, to their original units."""
        return (np.asarray(vectors, dtype=np.float32) * self.scale + self.mean).astype(np.float32)


@dataclass(frozen=True, eq=False)
class ImageTokenizer:
    """Image tokenizer over square patches in row-major order.

    Attributes:
        patches: the codebook; D is channels x patch_size x patch_size.
        patch_size: patch size in pixels.
        shape: (C, H, W) of the images.

    Example:
        >>> pictures = np.random.default_rng(0).integers(0, 256, (4, 3, 8, 8))
        >>> tokenizer = ImageTokenizer.fit(pictures, 5, patch_size=4)
        >>> tokens = tokenizer.encode(pictures)
        >>> tokens.shape, tokenizer.decode(tokens).shape, tokenizer.codebook.shape
        ((4, 4), (4, 3, 8, 8), (5, 48))
    """

    patches: Standardised
    patch_size: int
    shape: tuple[int, int, int]

    @classmethod
    def fit(
        cls, images: ArrayLike, k: int = 256, *, patch_size: int = 4, seed: int = 0, max_iter: int = 20
    ) -> ImageTokenizer:
        """Fit a codebook of k patches.

        Args:
            images: (N, C, H, W) numbers in any unit, such as 0 to 255.
            k: codebook entries.
            patch_size: patch size in pixels; must divide H and W.
            seed: seed of k-means.
            max_iter: maximum number of k-means iterations.

        Raises:
            ConfigError: the shape or the values are invalid.
            ImportError: scikit-learn is not installed.
        """
        pictures = np.asarray(unmasked(images))
        if pictures.ndim != 4 or pictures.size == 0:
            raise ConfigError(f"images of shape {pictures.shape}: must be (N, channels, height, width)")
        channels, height, width = pictures.shape[1:]
        if patch_size < 1 or height % patch_size or width % patch_size:
            raise ConfigError(
                f"={patch_size}: must divide the height {height} and the width {width}", argument="patch_size"
            )
        vectors = _patches(pictures, patch_size).reshape(-1, channels * patch_size**2)
        return cls(Standardised.fit(vectors, k, seed=seed, max_iter=max_iter), patch_size, (channels, height, width))

    @property
    def codebook(self) -> Floats:
        """(K, D) codebook for the losses."""
        return self.patches.codebook

    def encode(self, images: ArrayLike) -> Tokens:
        """Return the tokens (N, T) of images (N, C, H, W).

        Raises:
            ConfigError: the images have a different shape or are not finite.
        """
        pictures = np.asarray(unmasked(images))
        if pictures.shape[1:] != self.shape:
            raise ConfigError(f"images of shape {pictures.shape}: the tokenizer was fitted to (N, {self.shape})")
        vectors = _patches(pictures, self.patch_size)
        return self.patches.encode(vectors.reshape(-1, vectors.shape[-1])).reshape(vectors.shape[:2])

    def decode(self, tokens: ArrayLike) -> Floats:
        """Return the images (N, C, H, W) of tokens (N, T), in the units of the fitted images."""
        return self.assemble(self.patches.decode(tokens))

    def assemble(self, vectors: ArrayLike) -> Floats:
        """Assemble patches (N, T, D), in the units of the images, into images (N, C, H, W)."""
        (channels, height, width), size = self.shape, self.patch_size
        parts = np.asarray(vectors, dtype=np.float32).reshape(-1, height // size, width // size, channels, size, size)
        return np.ascontiguousarray(parts.transpose(0, 3, 1, 4, 2, 5)).reshape(-1, channels, height, width)


def _patches(pictures: NDArray[np.generic], size: int) -> Floats:
    """Cut images (N, C, H, W) into patches (N, T, C x size x size), float32 and checked to be finite."""
    count, channels, height, width = pictures.shape
    parts = pictures.reshape(count, channels, height // size, size, width // size, size).transpose(0, 2, 4, 1, 3, 5)
    vectors = np.ascontiguousarray(parts, dtype=np.float32).reshape(count, -1, channels * size * size)
    if not np.isfinite(vectors).all():  # the nearest patch to NaN would be the first
        raise ConfigError(f"images of shape {pictures.shape}: must be finite; fill or drop those with gaps")
    return vectors


@dataclass(frozen=True, eq=False)
class SpectrumTokenizer:
    """Spectrum tokenizer with one codebook per group of adjacent segments.

    Flux is transformed to arcsinh(flux / softening), linear when faint and logarithmic when bright (Lupton, Gunn &
    Szalay 1999): otherwise a few bright or noisy spectra would use most of the codes.

    Attributes:
        groups: codebook of each group, in order of wavelength; D is the number of points of a segment.
        points: L, the length of the spectra.
        softening: in the unit of the flux.

    Example:
        >>> spectra = np.random.default_rng(0).random((9, 16))
        >>> tokenizer = SpectrumTokenizer.fit(spectra, ["blue", "red"], 4, segment=4)
        >>> tokens = tokenizer.encode(spectra)
        >>> tokens["red"].shape, tokenizer.decode(tokens).shape
        ((9, 2), (9, 16))
    """

    groups: dict[str, Standardised]
    points: int
    softening: float

    @classmethod
    def fit(
        cls,
        spectra: ArrayLike,
        groups: Sequence[str],
        k: int = 128,
        *,
        segment: int = 8,
        softening: float = 0.5,
        seed: int = 0,
        max_iter: int = 50,
    ) -> SpectrumTokenizer:
        """Cut spectra into equal groups and these into segments, and fit a codebook of k segments per group.

        Args:
            spectra: (N, L) finite fluxes.
            groups: group names, in order of wavelength.
            k: entries per codebook.
            segment: points per segment; a group must be a whole number of segments.
            softening: flux at which the scale changes from linear to logarithmic.
            seed: seed of k-means.
            max_iter: maximum number of k-means iterations.

        Raises:
            ConfigError: the shape, the names or the values are invalid.
            ImportError: scikit-learn is not installed.
        """
        flux = _matrix("spectra", spectra)
        points, names = flux.shape[1], list(groups)
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"={names}: give at least one name, and each once", argument="groups")
        if segment < 1 or points % (len(names) * segment):
            raise ConfigError(
                f"={segment}: {points} points cannot be cut into {len(names)} equal groups of whole segments",
                argument="segment",
            )
        check_above(0, softening=softening)
        parts = np.arcsinh(flux / softening).reshape(len(flux), len(names), -1).swapaxes(0, 1)
        books = {
            name: Standardised.fit(part.reshape(-1, segment), k, seed=seed, max_iter=max_iter)
            for name, part in zip(names, parts, strict=True)
        }
        return cls(books, points, softening)

    @property
    def codebooks(self) -> dict[str, Floats]:
        """(K, D) codebook of each group, for the losses."""
        return {name: book.codebook for name, book in self.groups.items()}

    def encode(self, spectra: ArrayLike) -> dict[str, Tokens]:
        """Return the tokens (N, T) of each group for spectra (N, L).

        Raises:
            ConfigError: the spectra have a different length or are not finite.
        """
        flux = _matrix("spectra", spectra)
        if flux.shape[1] != self.points:
            raise ConfigError(f"spectra of shape {flux.shape}: the tokenizer was fitted to {self.points} points")
        parts = np.arcsinh(flux / self.softening).reshape(len(flux), len(self.groups), -1).swapaxes(0, 1)
        return {
            name: book.encode(part.reshape(-1, book.codebook.shape[1])).reshape(len(flux), -1)
            for (name, book), part in zip(self.groups.items(), parts, strict=True)
        }

    def decode(self, tokens: Mapping[str, ArrayLike]) -> Floats:
        """Return the spectra (N, L) of the tokens of all groups, in the unit of the flux."""
        refuse_unknown("tokens", tokens, self.groups)
        return self.assemble({name: book.decode(tokens[name]) for name, book in self.groups.items()})

    def assemble(self, segments: Mapping[str, ArrayLike]) -> Floats:
        """Assemble segments (N, T, D) of each group, in arcsinh flux, into spectra (N, L) in the unit of the flux."""
        parts = [np.asarray(segments[name], dtype=np.float32) for name in self.groups]
        joined = np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)
        return np.asarray(self.softening * np.sinh(joined), dtype=np.float32)


def as_indices(name: str, tokens: ArrayLike, size: int) -> Tokens:
    """Return tokens as integers in [0, size).

    Raises:
        ConfigError: the tokens are not integers in that range.
    """
    indices = np.asarray(tokens)
    if indices.dtype.kind not in "iu" or (indices.size and not 0 <= indices.min() <= indices.max() < size):
        raise ConfigError(f"must be whole numbers in [0, {size})", argument=name)
    return indices.astype(np.int64)


def _matrix(name: str, values: ArrayLike) -> Floats:
    matrix = np.asarray(unmasked(values), dtype=np.float32)
    if matrix.ndim != 2 or matrix.size == 0:
        raise ConfigError(f"{name} of shape {matrix.shape}: must be (N, points) and not empty")
    if not (finite := np.isfinite(matrix)).all():
        row, point = np.argwhere(~finite)[0]
        raise ConfigError(
            f"{name} must be finite, but {int((~finite).any(1).sum())} of {len(matrix)} rows are not, first row {row}, "
            f"which is {matrix[row, point]} at point {point}; fill these points, or leave the rows out with take()"
        )
    return matrix
