"""Small real data sets bundled with the package, each with its citation and licence."""

from __future__ import annotations

from treadle.datasets.astronomy import SdssCatalog, XdfCutouts, load_sdss, load_xdf
from treadle.datasets.spectra import SpexSpectra, Tecator, load_spex, load_tecator

__all__ = [
    "SdssCatalog",
    "SpexSpectra",
    "Tecator",
    "XdfCutouts",
    "load_sdss",
    "load_spex",
    "load_tecator",
    "load_xdf",
]
