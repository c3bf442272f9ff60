"""Two small data sets of real near-infrared spectra."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from treadle.datasets._files import read_arrays

_CLASSES = ("M", "L", "T")


@dataclass(frozen=True, eq=False)
class SpexSpectra:
    """Near-infrared spectra of 1,939 observations of M, L and T dwarfs, with their labels.

    One object may have several rows: 332 rows belong to 148 objects that were observed more than once, and 15 rows are
    exact duplicates. To avoid leakage, a split must keep the rows of one `name` together.

    Example:
        >>> spex = load_spex()
        >>> spex.spectra.shape, spex.wavelength_unit
        ((1939, 256), 'µm')
    """

    spectra: npt.NDArray[np.float32]
    """(1939, 256) flux density divided by the median over 1.2-1.3 µm; a few noisy values are negative."""
    wavelengths: npt.NDArray[np.float32]
    """(256,) 0.9 to 2.4, evenly spaced, in `wavelength_unit`."""
    spt: npt.NDArray[np.str_]
    """(1939,) spectral type such as `"L5.0"`; a trailing `":"` means uncertain, empty (139 rows) unknown."""
    jhk: npt.NDArray[np.float32]
    """(1939, 3) magnitudes in the order of `jhk_columns`; NaN where unknown."""
    name: npt.NDArray[np.str_]
    """(1939,) designation of the object; 1,755 distinct ones."""
    bibcode: npt.NDArray[np.str_]
    """(1939,) the paper to cite for the spectrum."""
    wavelength_unit: str = "µm"
    flux_unit: str = "flux density relative to its median at 1.2-1.3 µm"
    jhk_columns: tuple[str, ...] = ("J", "H", "Ks")
    jhk_unit: str = "mag"
    citation: str = (
        "SpeX Prism Library, through SPLAT: Burgasser, A. J., and the Splat Development Team (2017), "
        "Astronomical Society of India Conference Series 14, 7; and the paper of each spectrum, see bibcode"
    )
    licence: str = "MIT (licenses/splat-MIT.txt)"

    @property
    def spectral_class(self) -> npt.NDArray[np.str_]:
        """First letter of the spectral type: (1939,) of "M", "L", "T", or "" if unknown."""
        letters = self.spt.astype("U1")
        return np.where(np.isin(letters, _CLASSES), letters, np.str_(""))

    @property
    def j_minus_k(self) -> npt.NDArray[np.float32]:
        """J - Ks colour in magnitudes: (1939,) float32, NaN where either is unknown (29 rows)."""
        return self.jhk[:, 0] - self.jhk[:, 2]

    @property
    def synthetic_j_minus_k(self) -> npt.NDArray[np.float32]:
        """J - K colour in magnitudes, computed from the spectrum: (1939,) float32.

        Computed from the mean fluxes from 1.17 to 1.33 and from 2.03 to 2.35 µm, shifted by a constant to the median of
        `j_minus_k`. 85 colours of the catalogue differ by 0.5 to 2 mag. NaN where a mean flux is not positive.
        """
        j, k = (self._mean_flux(low, high) for low, high in ((1.17, 1.33), (2.03, 2.35)))
        positive = (j > 0) & (k > 0)
        colour = np.full(len(j), np.nan)
        colour[positive] = -2.5 * np.log10(j[positive] / k[positive])
        return np.asarray(colour + np.nanmedian(self.j_minus_k - colour), dtype=np.float32)

    def _mean_flux(self, low: float, high: float) -> npt.NDArray[np.float64]:
        inside = (self.wavelengths >= low) & (self.wavelengths <= high)
        means: npt.NDArray[np.float64] = self.spectra[:, inside].mean(axis=1, dtype=np.float64)
        return means


@dataclass(frozen=True, eq=False)
class Tecator:
    """Near-infrared absorbance spectra of 215 samples of finely chopped meat, with their composition.

    Example:
        >>> tecator = load_tecator()
        >>> fat = tecator.composition[:, tecator.composition_columns.index("fat")]
        >>> fat.shape
        (215,)
    """

    spectra: npt.NDArray[np.float32]
    """(215, 100) absorbance, -log10 of the transmittance; 2.06 to 5.47."""
    wavelengths: npt.NDArray[np.float32]
    """(100,) 850 to 1050, evenly spaced, in `wavelength_unit`."""
    composition: npt.NDArray[np.float32]
    """(215, 3) content by wet chemistry in the order of `composition_columns`, in `composition_unit`."""
    wavelength_unit: str = "nm"
    flux_unit: str = "absorbance"
    composition_columns: tuple[str, ...] = ("water", "fat", "protein")
    composition_unit: str = "%"
    citation: str = (
        "Thodberg, H. H. (1996), A review of Bayesian neural networks with an application to near infrared "
        "spectroscopy, IEEE Transactions on Neural Networks 7, 56-72; as the object meats of modeldata"
    )
    licence: str = (
        "MIT (licenses/modeldata-MIT.txt), with the note that must stay attached: These data are recorded on "
        "a Tecator Infratec Food and Feed Analyzer ... the data are in the public domain and can be "
        "redistributed as long as this permission note is attached (H. H. Thodberg, Danish Meat Research "
        "Institute)"
    )


def load_spex() -> SpexSpectra:
    """Load the SpeX near-infrared spectra of M, L and T dwarfs.

    Returns:
        1,939 spectra of 256 channels (float32, 0.9-2.4 µm) with spectral type, J, H, Ks, name and paper. The arrays are
        newly created by every call and may be modified. Spectra were stored with 11 significant bits.

    Raises:
        FileNotFoundError: the data file is not in the package.
        ValueError: the data file is damaged.

    Example:
        >>> load_spex().spectral_class[:3].tolist()
        ['L', 'L', 'T']
    """
    shapes = {
        "X": (1939, 256),
        "grid": (256,),
        "spt": (1939,),
        "jhk": (1939, 3),
        "name": (1939,),
        "bibcode": (1939,),
    }
    arrays = read_arrays("spex_spectra.npz", shapes)
    return SpexSpectra(
        spectra=arrays["X"],
        wavelengths=arrays["grid"],
        spt=arrays["spt"],
        jhk=arrays["jhk"],
        name=arrays["name"],
        bibcode=arrays["bibcode"],
    )


def load_tecator() -> Tecator:
    """Load the Tecator near-infrared spectra of meat.

    Returns:
        215 absorbance spectra of 100 channels (float32, 850-1050 nm) with water, fat and protein in per cent. The
        arrays are newly created by every call and may be modified.

    Raises:
        FileNotFoundError: the data file is not in the package.
        ValueError: the data file is damaged.

    Example:
        >>> load_tecator().composition.shape
        (215, 3)
    """
    arrays = read_arrays("tecator.npz", {"X": (215, 100), "wl": (100,), "y": (215, 3)})
    return Tecator(spectra=arrays["X"], wavelengths=arrays["wl"], composition=arrays["y"])
