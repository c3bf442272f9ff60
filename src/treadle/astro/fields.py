"""Survey fields: field names in file paths, and object ids."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from treadle.errors import ConfigError
from treadle.errors.arguments import checked

_PLACE = "{field}"


@checked
def discover_fields_from_template(
    tmpl: str | os.PathLike[str], prefix: str | None = None, suffix: str | None = None
) -> list[str]:
    """Return the sorted names of the fields that have files.

    Args:
        tmpl: path with ``{field}`` in its last component.
        prefix: the file name before the field; None infers it from the template.
        suffix: the file name after the field; None infers it from the template.

    Raises:
        ConfigError: the last component of the path has no ``{field}``.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> for name in ("HYDRA-0012", "HYDRA-0011"): (folder / f"cube_{name}.npz").touch()
        >>> discover_fields_from_template(folder / "cube_{field}.npz")
        ['HYDRA-0011', 'HYDRA-0012']
    """
    path = Path(tmpl)
    if _PLACE not in path.name:
        raise ConfigError(f"must have {_PLACE} in the last part of the path", argument="tmpl", value=os.fspath(tmpl))
    before, after = path.name.split(_PLACE, 1)
    prefix, suffix = before if prefix is None else prefix, after if suffix is None else suffix
    names = [file.name for file in path.parent.glob(f"{before}*{after}")] if path.parent.is_dir() else []
    least = len(prefix) + len(suffix)
    return sorted(
        name[len(prefix) : len(name) - len(suffix)]
        for name in names
        if name.startswith(prefix) and name.endswith(suffix) and len(name) > least
    )


@checked
def discover_fields_from_datacubes(tmpl: str | os.PathLike[str]) -> list[str]:
    """Return the sorted names of the fields that have tables; an alias of :func:`discover_fields_from_template`."""
    return discover_fields_from_template(tmpl)


def norm_splus_id(x: Any) -> str:
    """Return an S-PLUS id as a string; "" for None and NaN.

    Example:
        >>> norm_splus_id(b"iDR4_1"), norm_splus_id(None), norm_splus_id(7)
        ('iDR4_1', '', '7')
    """
    if x is None or (isinstance(x, float) and math.isnan(x)):
        return ""
    return x.decode("utf-8", errors="ignore") if isinstance(x, bytes) else str(x)


def norm_gaia_id(x: Any) -> int | None:
    """Return a Gaia source id as an int, or None if it is not a number.

    Example:
        >>> norm_gaia_id("5853498713190525696"), norm_gaia_id(float("nan")), norm_gaia_id("?")
        (5853498713190525696, None, None)
    """
    try:
        return None if x is None else int(x)
    except (TypeError, ValueError, OverflowError):  # includes int(nan) and int(inf)
        return None
