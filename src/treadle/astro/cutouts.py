"""S-PLUS cut-outs: multi-band images of objects, normalised per band, with masks.

Shapes: C = bands, H, W = height and width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from treadle.errors import ConfigError
from treadle.errors.arguments import checked

CUTOUT_BANDS = ("F378", "F395", "F410", "F430", "F515", "F660", "F861", "U", "G", "R", "I", "Z")

_FEW = 10  # with fewer valid pixels, all pixels of the band are used


def to_image_torch(flat: Any) -> Tensor:
    """Reshape a flat row of pixels to a square (H, W) float32 image; accept an (H, W) image as well.

    Raises:
        ValueError: the number of pixels is not a square.

    Example:
        >>> to_image_torch([0, 1, 2, 3]).tolist()
        [[0.0, 1.0], [2.0, 3.0]]
    """
    pixels = torch.tensor(np.asarray(flat, dtype=np.float32))
    if pixels.dim() == 2:
        return pixels
    side = math.isqrt(pixels.numel())
    if pixels.dim() != 1 or side * side != pixels.numel():
        raise ValueError(f"an image of shape {tuple(pixels.shape)}: must be (H, W), or a square number of pixels")
    return pixels.view(side, side)


def elliptical_mask(
    H: int, W: int, x0: float, y0: float, a: float, b: float, theta: float, *, expand_factor: float = 4.0
) -> Tensor:
    """Return a mask (H, W) float32, 1 inside an ellipse.

    Args:
        H: height in pixels.
        W: width in pixels.
        x0: centre, in pixels.
        y0: centre, in pixels.
        a: semi-major axis, in pixels.
        b: semi-minor axis, in pixels.
        theta: angle of the major axis, in radians.
        expand_factor: scale of both axes.

    Example:
        >>> elliptical_mask(3, 3, 1, 1, 0.25, 0.25, 0.0).tolist()
        [[0.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 0.0]]
    """
    y_HW, x_HW = torch.meshgrid(torch.arange(H) - float(y0), torch.arange(W) - float(x0), indexing="ij")
    along = x_HW * math.cos(theta) + y_HW * math.sin(theta)
    across = y_HW * math.cos(theta) - x_HW * math.sin(theta)
    return ((along / (a * expand_factor)) ** 2 + (across / (b * expand_factor)) ** 2 <= 1.0).float()


class SplusDataset(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Data set of images from a table of cut-outs.

    An item is ``(picture, object_mask, valid_mask)``, each (C, H, W) float32. A band is arcsinh((x - median) / scale)
    with scale = 3 MAD + 1e-6, over its valid pixels, those that are finite and non-zero. The object mask is the
    detection ellipse with its axes scaled by four.

    Args:
        df: a table, such as a polars frame or a dict of columns, whose columns are read as ``df[name][row]``:
            ``splus_cut_{band}`` (pixels), ``a_pixel_det``, ``b_pixel_det`` (pixels) and ``theta_det`` (degrees).
        bands: band names; None uses the twelve of S-PLUS.
        img_size: side length in pixels.

    Raises:
        ConfigError: a column is missing.

    Example:
        >>> table = {"splus_cut_R": [range(16)], "a_pixel_det": [1.0], "b_pixel_det": [1.0], "theta_det": [0.0]}
        >>> picture, inside, valid = SplusDataset(table, ["R"], img_size=4)[0]
        >>> picture.shape, int(valid.sum())
        (torch.Size([1, 4, 4]), 15)
    """

    DEFAULT_BANDS = list(CUTOUT_BANDS)

    @checked
    def __init__(self, df: Any, bands: Sequence[str] | None = None, img_size: int = 96):
        self.df = df
        self.bands = list(CUTOUT_BANDS) if bands is None else list(bands)
        self.img_size = img_size
        columns = set(df.columns if hasattr(df, "columns") else df)
        needed = [*(f"splus_cut_{band}" for band in self.bands), "a_pixel_det", "b_pixel_det", "theta_det"]
        if missing := [name for name in needed if name not in columns]:
            raise ConfigError(f"has no column {', '.join(missing[:5])}", argument="df")

    def __len__(self) -> int:
        """Number of objects."""
        return len(self.df["theta_det"])

    def __getitem__(self, idx: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the image, object mask and valid mask of an object.

        Raises:
            ValueError: an image is not ``img_size`` x ``img_size``.
        """
        size = self.img_size
        pictures = [to_image_torch(self.df[f"splus_cut_{band}"][idx]) for band in self.bands]
        for band, picture in zip(self.bands, pictures, strict=True):
            if picture.shape != (size, size):
                raise ValueError(f"splus_cut_{band} of row {idx} is {tuple(picture.shape)}, not {size} x {size}")
        x_CHW = torch.stack(pictures)
        valid_CHW = (torch.isfinite(x_CHW) & (x_CHW != 0)).float()
        x_CHW = torch.where(torch.isfinite(x_CHW), x_CHW, 0.0)
        major, minor = (float(self.df[f"{axis}_pixel_det"][idx]) for axis in "ab")
        theta = math.radians(float(self.df["theta_det"][idx]))
        inside_HW = elliptical_mask(size, size, size // 2, size // 2, major, minor, theta)
        return self.arcsinh_norm_per_band(x_CHW, valid_CHW), valid_CHW * inside_HW, valid_CHW

    @staticmethod
    def arcsinh_norm_per_band(x: Tensor, mask_valid: Tensor, eps: float = 1e-6) -> Tensor:
        """Normalise an image (C, H, W) by its background, band by band.

        Args:
            x: (C, H, W).
            mask_valid: (C, H, W), above 0.5 where a pixel is valid; a band with fewer than ten valid pixels uses all.
            eps: added to the scale.
        """
        bands = []
        for band_HW, valid_HW in zip(x, mask_valid > 0.5, strict=True):
            values = band_HW[valid_HW]
            if values.numel() < _FEW:
                values = band_HW.reshape(-1)
            middle = values.median()
            scale = (values - middle).abs().median() * 3.0 + eps
            bands.append(torch.asinh((band_HW - middle) / scale))
        return torch.stack(bands)
