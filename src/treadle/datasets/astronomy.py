"""Two small data sets of real galaxies: a catalogue of magnitudes, and cut-outs of a deep-field image."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from treadle.datasets._files import read_arrays


@dataclass(frozen=True, eq=False)
class SdssCatalog:
    """Magnitudes, redshift and position of 9,988 galaxies.

    Example:
        >>> sdss = load_sdss()
        >>> sdss.table[:, sdss.columns.index("redshift")].shape
        (9988,)
    """

    table: npt.NDArray[np.float32]
    """(9988, 10) one row per galaxy in the order of `columns` and `units`; NaN where J or K is unknown."""
    columns: tuple[str, ...]
    """u, g, r, i, z_band, redshift, ra, dec, J, K."""
    units: tuple[str, ...] = ("mag",) * 5 + ("", "deg", "deg", "mag", "mag")
    citation: str = "SDSS and 2MASS, through kcorrect: Blanton and Roweis (2007), Astronomical Journal 133, 734"
    licence: str = "BSD-3-Clause (licenses/kcorrect-BSD3.txt)"


@dataclass(frozen=True, eq=False)
class XdfCutouts:
    """Colour cut-outs of 986 galaxies of the Hubble eXtreme Deep Field, with scalars measured on them.

    The image was made for display: its pixel values, and hence mag and blue-red, are not calibrated.

    Example:
        >>> load_xdf().images.shape
        (986, 3, 32, 32)
    """

    images: npt.NDArray[np.uint8]
    """(986, 3, 32, 32) red, green, blue; 0 to 255."""
    scalars: npt.NDArray[np.float32]
    """(986, 7) one row per galaxy in the order of `scalar_columns` and `scalar_units`."""
    scalar_columns: tuple[str, ...] = ("mag", "blue-red", "radius", "ellipticity", "area", "y", "x")
    scalar_units: tuple[str, ...] = ("mag (relative)", "mag (relative)", "px", "", "px²", "px", "px")
    citation: str = "Hubble eXtreme Deep Field: NASA, ESA, G. Illingworth, D. Magee, P. Oesch, R. Bouwens and others"
    licence: str = "public domain (NASA/ESA)"


def load_sdss() -> SdssCatalog:
    """Load the catalogue of SDSS galaxies.

    Returns:
        9,988 rows and 10 columns, float32, newly created by every call. In the file an unmeasured J or K is 0; here it
        is NaN, since 0 is a valid magnitude.

    Raises:
        FileNotFoundError: the data file is not in the package.
        ValueError: the data file is damaged.

    Example:
        >>> load_sdss().columns[:5]
        ('u', 'g', 'r', 'i', 'z_band')
    """
    arrays = read_arrays("sdss_catalog.npz", {"T": (9988, 10), "names": (10,)})
    table, columns = arrays["T"], tuple(str(name) for name in arrays["names"])
    for name in ("J", "K"):
        column = table[:, columns.index(name)]
        column[column == 0] = np.nan
    return SdssCatalog(table=table, columns=columns)


def load_xdf() -> XdfCutouts:
    """Load the cut-outs of the Hubble eXtreme Deep Field.

    Returns:
        986 images (uint8) with 7 scalars (float32) each, newly created by every call.

    Raises:
        FileNotFoundError: the data file is not in the package.
        ValueError: the data file is damaged.

    Example:
        >>> load_xdf().scalar_columns[2]
        'radius'
    """
    arrays = read_arrays("xdf_cutouts.npz", {"images": (986, 3, 32, 32), "scalars": (986, 7)})
    return XdfCutouts(images=arrays["images"], scalars=arrays["scalars"])
