"""Tokenizers of vectors: pictures and spectra as indices into codebooks, and back.

A vector (a patch of a picture, a segment of a spectrum) becomes the index of the nearest centroid of k-means in its own
units, so the expected value over a codebook is an expected patch or segment, and needs no decoder.

Shapes: N = objects, C = channels, H, W = height and width of a picture, L = points of a spectrum,
T = tokens, K = ids of a codebook, D = numbers behind one id.
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

_ROWS_AT_ONCE = 4096  # rows of the table of distances


@dataclass(frozen=True, eq=False)
class Standardised:
    """A codebook whose vectors had mean 0 and variance 1 over all their numbers when it was fitted.

    The losses are squared errors, so with it those of different modalities are of one size.

    Attributes:
        codebook: (K, D) float32.
        mean: subtracted from the numbers.
        scale: what they were then divided by.
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
        """Return the nearest centroid of each vector (T, D), as (T,)."""
        codes = self.codebook.astype(np.float64)
        half_norms = 0.5 * np.square(codes).sum(axis=1)
        parts = np.array_split(vectors, max(1, -(-len(vectors) // _ROWS_AT_ONCE)))
        scaled = ((part.astype(np.float64) - self.mean) / self.scale for part in parts)
        return np.concatenate([(half_norms - part @ codes.T).argmin(axis=1) for part in scaled]).astype(np.int64)

    def decode(self, tokens: ArrayLike) -> Floats:
        """Return the vectors of tokens of any shape, (..., D), in their own units."""
        return self.restore(self.codebook[as_indices("tokens", tokens, len(self.codebook))])

    def restore(self, vectors: ArrayLike) -> Floats:
        """Take values of the codebook, such as expected ones, to their own units."""
        return (np.asarray(vectors, dtype=np.float32) * self.scale + self.mean).astype(np.float32)


@dataclass(frozen=True, eq=False)
class ImageTokenizer:
    """Square patches of pictures as tokens, row after row.

    Attributes:
        patches: the codebook; D is channels x patch_size x patch_size.
        patch_size: pixels.
        shape: (C, H, W) of the pictures.

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
            k: entries of the codebook.
            patch_size: pixels; must divide H and W.
            seed: of k-means.
            max_iter: of k-means.

        Raises:
            ConfigError: the shape, or the numbers do not fit.
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
        """(K, D) for the losses."""
        return self.patches.codebook

    def encode(self, images: ArrayLike) -> Tokens:
        """Return the tokens (N, T) of pictures (N, C, H, W).

        Raises:
            ConfigError: pictures of another shape, or not finite.
        """
        pictures = np.asarray(unmasked(images))
        if pictures.shape[1:] != self.shape:
            raise ConfigError(f"images of shape {pictures.shape}: the tokenizer was fitted to (N, {self.shape})")
        vectors = _patches(pictures, self.patch_size)
        return self.patches.encode(vectors.reshape(-1, vectors.shape[-1])).reshape(vectors.shape[:2])

    def decode(self, tokens: ArrayLike) -> Floats:
        """Return the pictures (N, C, H, W) of tokens (N, T), in the units of the pictures that were fitted."""
        return self.assemble(self.patches.decode(tokens))

    def assemble(self, vectors: ArrayLike) -> Floats:
        """Put patches (N, T, D) in the pictures' units together to pictures (N, C, H, W)."""
        (channels, height, width), size = self.shape, self.patch_size
        parts = np.asarray(vectors, dtype=np.float32).reshape(-1, height // size, width // size, channels, size, size)
        return np.ascontiguousarray(parts.transpose(0, 3, 1, 4, 2, 5)).reshape(-1, channels, height, width)


def _patches(pictures: NDArray[np.generic], size: int) -> Floats:
    """(N, C, H, W) -> (N, T, C x size x size) float32, all of it finite."""
    count, channels, height, width = pictures.shape
    parts = pictures.reshape(count, channels, height // size, size, width // size, size).transpose(0, 2, 4, 1, 3, 5)
    vectors = np.ascontiguousarray(parts, dtype=np.float32).reshape(count, -1, channels * size * size)
    if not np.isfinite(vectors).all():  # the nearest patch to NaN would be the first
        raise ConfigError(f"images of shape {pictures.shape}: must be finite; fill or leave out those with holes")
    return vectors


@dataclass(frozen=True, eq=False)
class SpectrumTokenizer:
    """Segments of spectra as tokens, with one codebook for each group of neighbouring segments.

    Flux is taken as arcsinh(flux / softening), linear when faint and logarithmic when bright (Lupton, Gunn & Szalay
    1999): a few bright or noisy spectra would otherwise take most of the codes.

    Attributes:
        groups: codebook of each group, in the order of wavelength; D is the points of a segment.
        points: L of the spectra.
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
        """Cut spectra into equal groups, these into segments, and fit a codebook of k segments to each group.

        Args:
            spectra: (N, L) finite fluxes.
            groups: their names, in the order of wavelength.
            k: entries of each codebook.
            segment: points; a group must be a whole number of segments.
            softening: flux at which the scale turns from linear to logarithmic.
            seed: of k-means.
            max_iter: of k-means.

        Raises:
            ConfigError: the shape, the names or the numbers do not fit.
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
        """(K, D) of each group, for the losses."""
        return {name: book.codebook for name, book in self.groups.items()}

    def encode(self, spectra: ArrayLike) -> dict[str, Tokens]:
        """Return the tokens (N, T) of each group for spectra (N, L).

        Raises:
            ConfigError: spectra of another length, or not finite.
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
        """Put segments (N, T, D) of each group, still arcsinh, together to spectra (N, L) in the unit of the flux."""
        parts = [np.asarray(segments[name], dtype=np.float32) for name in self.groups]
        joined = np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)
        return np.asarray(self.softening * np.sinh(joined), dtype=np.float32)


def as_indices(name: str, tokens: ArrayLike, size: int) -> Tokens:
    """Return whole numbers in [0, size).

    Raises:
        ConfigError: they are something else.
    """
    indices = np.asarray(tokens)
    if indices.dtype.kind not in "iu" or (indices.size and not 0 <= indices.min() <= indices.max() < size):
        raise ConfigError(f"must be whole numbers in [0, {size})", argument=name)
    return indices.astype(np.int64)


def _matrix(name: str, values: ArrayLike) -> Floats:
    matrix = np.asarray(unmasked(values), dtype=np.float32)
    if matrix.ndim != 2 or matrix.size == 0 or not np.isfinite(matrix).all():
        raise ConfigError(f"{name} of shape {matrix.shape}: must be (N, points), finite and not empty")
    return matrix
