"""Surveys as tables of objects with scalars and, optionally, images or spectra.

Shapes: N = objects, C = scalar columns, L = points of a spectrum, H, W = height and width of an image.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from treadle.datasets import load_sdss, load_spex, load_xdf
from treadle.datasets.spectral_types import spectral_type_number
from treadle.datasets.splits import Rows, object_groups
from treadle.errors import ConfigError

_CUTOUT = 32  # pixels along a side of an XDF cut-out
_TILES = 4  # along each side of the XDF image


@dataclass(frozen=True, eq=False)
class Survey:
    """Objects of one survey, one row each; modalities that the survey lacks are None.

    Raises:
        ConfigError: the modalities have different numbers of rows, the table does not match the columns, or a column
            name is repeated.

    Example:
        >>> survey = Survey("mine", ("mine.mag",), np.array([[20.0], [21.0]]), np.array([0, 1]))
        >>> len(survey), len(survey.take(np.array([1])))
        (2, 1)
    """

    name: str
    columns: tuple[str, ...]
    """Names of the scalars; a name shared by two surveys denotes the same quantity in the same unit."""
    scalars: npt.NDArray[np.float64]
    """(N, C), NaN where a value is missing."""
    objects: Rows
    """(N,) object numbers; rows of the same object must stay in the same split."""
    images: npt.NDArray[np.generic] | None = None
    """(N, channels, H, W)."""
    spectra: npt.NDArray[np.float32] | None = None
    """(N, L)."""

    def __post_init__(self) -> None:
        if self.scalars.ndim != 2 or self.scalars.shape[1] != len(self.columns):
            raise ConfigError(
                f"survey {self.name!r}: scalars of shape {self.scalars.shape} for the {len(self.columns)} columns "
                f"{self.columns}; must be (N, columns)"
            )
        if twice := sorted({name for name in self.columns if self.columns.count(name) > 1}):
            raise ConfigError(f"survey {self.name!r}: two columns are named {', '.join(twice)}; rename one")
        for part in ("objects", "images", "spectra"):
            rows = getattr(self, part)
            if rows is not None and len(rows) != len(self.scalars):
                raise ConfigError(
                    f"survey {self.name!r}: {len(rows)} rows of {part} for {len(self.scalars)} of scalars"
                )

    def __len__(self) -> int:
        return len(self.scalars)

    def take(self, rows: npt.NDArray[np.integer] | npt.NDArray[np.bool_]) -> Survey:
        """Return a survey with the selected rows."""
        parts = {part.name: getattr(self, part.name) for part in fields(self)}
        cut = {
            name: value if value is None or name in ("name", "columns") else value[rows]
            for name, value in parts.items()
        }
        return Survey(**cut)

    def column(self, name: str) -> npt.NDArray[np.float64]:
        """Return one column of scalars (N,).

        Raises:
            ConfigError: there is no such column.
        """
        if name not in self.columns:
            raise ConfigError(f"survey {self.name!r} has no column {name!r}; it has {', '.join(self.columns)}")
        return self.scalars[:, self.columns.index(name)]


def load_surveys() -> dict[str, Survey]:
    """Load the three surveys bundled with the package, which have no object in common.

    Returns:
        ``xdf``: galaxies with image and scalars; ``spex``: cool dwarfs with spectrum and scalars (``spex.type`` is M0 =
            0, L0 = 10, T0 = 20); ``sdss``: galaxies with scalars only, redshift last, since a causal model predicts the
            last column from all others. An object is an SDSS galaxy, all spectra of one dwarf, or a tile of the XDF
            image: its cut-outs overlap, so those that cross the border of a tile are left out, and no pixel is in two
            tiles.

    Example:
        >>> {name: len(survey) for name, survey in load_surveys().items()}
        {'xdf': 773, 'spex': 1939, 'sdss': 9988}
    """
    return {survey.name: survey for survey in (_xdf(), _spex(), _sdss())}


def _xdf() -> Survey:
    xdf = load_xdf()
    kept = ["mag", "blue-red", "radius", "ellipticity", "area"]
    places = [xdf.scalar_columns.index(name) for name in kept]
    corners = xdf.scalars[:, [xdf.scalar_columns.index(name) for name in ("y", "x")]].round() - _CUTOUT / 2
    size = (corners.max(axis=0) + _CUTOUT) / _TILES
    first, last = corners // size, (corners + _CUTOUT - 1) // size
    inside = (first == last).all(axis=1)
    tiles = (first @ [_TILES, 1]).astype(np.intp)
    names = tuple(f"xdf.{name}" for name in kept)
    survey = Survey("xdf", names, xdf.scalars[:, places].astype(np.float64), tiles, images=xdf.images)
    return survey.take(inside)


def _spex() -> Survey:
    spex = load_spex()
    j, h, k = spex.jhk.astype(np.float64).T
    scalars = np.stack([spectral_type_number(spex.spt), j - h, h - k, j - k], axis=1)
    names = ("spex.type", "spex.J-H", "spex.H-Ks", "spex.J-Ks")
    return Survey("spex", names, scalars, object_groups(spex.name, spex.spectra), spectra=spex.spectra)


def _sdss() -> Survey:
    sdss = load_sdss()
    values = dict(zip(sdss.columns, sdss.table.T.astype(np.float64), strict=True))
    table = {
        "sdss.r": values["r"],
        "sdss.u-g": values["u"] - values["g"],
        "sdss.g-r": values["g"] - values["r"],
        "sdss.r-i": values["r"] - values["i"],
        "sdss.i-z": values["i"] - values["z_band"],
        "sdss.J-K": values["J"] - values["K"],
        "sdss.redshift": values["redshift"],
    }
    return Survey("sdss", tuple(table), np.stack(list(table.values()), axis=1), np.arange(len(sdss.table)))
