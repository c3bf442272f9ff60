"""Spectral types of cool dwarfs on a numeric scale."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

CLASS_START = {"M": 0.0, "L": 10.0, "T": 20.0}
"""Start of each class on the numeric scale."""

_TYPE = re.compile(r"([MLT])\s*(\d(?:\.\d+)?)(?!\d)")


def spectral_type_number(spt: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Convert spectral types to numbers: M0 is 0, L0 is 10, T0 is 20, and T8.5 is 28.5.

    Args:
        spt: (N,) strings such as `"L5.0"`, `"T2"` or `"M7.0:"` (anything after the number is ignored).

    Returns:
        (N,) float32; NaN unless it is a class M, L or T with a subtype of 0 to 9.9.

    Raises:
        Nothing; a string that is not a spectral type gives NaN.

    Example:
        >>> spectral_type_number(["M8.0", "L5", ""]).tolist()
        [8.0, 15.0, nan]
    """
    numbers = []
    for text in np.asarray(spt).astype(str).ravel():
        found = _TYPE.match(text.strip())
        numbers.append(CLASS_START[found[1]] + float(found[2]) if found else np.nan)
    return np.asarray(numbers, dtype=np.float32)


def spectral_class_letter(spt: npt.ArrayLike) -> npt.NDArray[np.str_]:
    """Return the class of each spectral type.

    Args:
        spt: (N,) strings such as `"L5.0"` or `"M"`.

    Returns:
        (N,) "M", "L" or "T"; "" for anything else.

    Raises:
        Nothing; a string that is not a spectral type gives "".

    Example:
        >>> spectral_class_letter(["M8.0", "", "T2"]).tolist()
        ['M', '', 'T']
    """
    letters = np.char.strip(np.asarray(spt).astype(str).ravel()).astype("U1")
    return np.where(np.isin(letters, list(CLASS_START)), letters, np.str_(""))
