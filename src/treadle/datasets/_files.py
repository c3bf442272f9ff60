"""Reader of the array files bundled with the package."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

_PACKAGE = "treadle.datasets"
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, OSError, KeyError)


def read_arrays(file_name: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, npt.NDArray[Any]]:
    """Load the named arrays of an `.npz` file in the package.

    Args:
        file_name: name of the file, such as `"tecator.npz"`.
        shapes: array name -> required shape.

    Returns:
        New, writable arrays; float16 becomes float32, other dtypes are kept.

    Raises:
        FileNotFoundError: the file is not in the package.
        ValueError: the file is damaged, or an array is missing or has the wrong shape.

    Example:
        >>> read_arrays("tecator.npz", {"wl": (100,)})["wl"].shape
        (100,)
    """
    resource = resources.files(_PACKAGE).joinpath(file_name)
    if not resource.is_file():
        raise FileNotFoundError(
            f"data file {file_name!r} is not in the package {_PACKAGE!r}, which should contain it: "
            "the installation is incomplete, reinstall treadle"
        )
    # Read at once: the package may be in a zip archive, and the files are below 3 MB.
    content = resource.read_bytes()
    arrays: dict[str, npt.NDArray[Any]] = {}
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            for name in shapes:
                arrays[name] = archive[name]
    except _DAMAGED as error:
        # NumPy's message for a truncated file mentions pickles, so the cause is stated here.
        raise ValueError(
            f"data file {file_name!r} of the package {_PACKAGE!r} is damaged "
            f"({type(error).__name__}: {error}): it must be an .npz archive with the arrays "
            f"{sorted(shapes)}, reinstall treadle"
        ) from error
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise ValueError(
                f"array {name!r} of data file {file_name!r} has shape {arrays[name].shape}, but must have "
                f"{shape}: the file belongs to another version, reinstall treadle"
            )
        if arrays[name].dtype == np.float16:
            arrays[name] = arrays[name].astype(np.float32)
    return arrays
