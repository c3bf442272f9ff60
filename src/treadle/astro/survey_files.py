"""Block-wise reading of columns from Parquet, HDF5 and FITS survey files.

Nothing in a file is executed, and at most one block of the named columns is in memory at a time.

Shapes: N = rows of a file, B = rows of a block, C = scalar columns.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.astro.survey_readers import Columns, reader_of, require_one_length
from treadle.astro.surveys import Survey
from treadle.errors import ConfigError
from treadle.errors.arguments import check_least, checked

BLOCK_ROWS = 16384
_MARKERS = (-99.0, -999.0, -9999.0, 99.0, 999.0, 9999.0)
_log = logging.getLogger("treadle.astro")


@checked
def iter_columns(
    path: str | os.PathLike[str],
    columns: Sequence[str] | None = None,
    *,
    block_rows: int = BLOCK_ROWS,
    table: str | int | None = None,
) -> Generator[Columns, None, None]:
    """Read columns of a survey file block by block.

    Args:
        path: a ``.parquet`` or ``.pq`` file (pyarrow); an ``.h5``, ``.hdf5`` or ``.hdf`` file whose columns are
            datasets, or one compound dataset (h5py); a ``.fits``, ``.fit`` or ``.fits.gz`` file with a binary
            table (astropy; a ``.gz`` is unpacked in memory).
        columns: column names; None reads all.
        block_rows: B, rows per block.
        table: the group or compound dataset of an HDF5 file, or the name or index of a FITS extension; None uses the
            root, or the first table.

    Yields:
        The columns of the next rows, (B,) or (B, ...) for vectors, in the byte order of the machine. Numbers marked as
        missing become NaN, which makes their column float64; strings stay strings.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: the file type is unsupported, a column or table is unknown, columns differ in length, or vectors
            within a column differ in length.
        CheckpointError: the file is damaged.
        ImportError: the package that reads this file type is not installed.

    Example:
        >>> import pathlib, tempfile
        >>> import pyarrow, pyarrow.parquet
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "galaxies.parquet"
        >>> pyarrow.parquet.write_table(pyarrow.table({"z": [0.1, None, 0.3], "id": [7, 8, 9]}), file)
        >>> [block["z"].tolist() for block in iter_columns(file, ["z"], block_rows=2)]
        [[0.1, nan], [0.3]]
    """
    check_least(1, block_rows=block_rows)
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such survey file")
    with closing(reader_of(file)(file, None if columns is None else list(columns), block_rows, table)) as blocks:
        yield from blocks


@checked
def read_columns(
    path: str | os.PathLike[str],
    columns: Sequence[str] | None = None,
    *,
    max_rows: int | None = None,
    table: str | int | None = None,
) -> Columns:
    """Read columns of a survey file into memory.

    Args:
        path: as in `iter_columns`.
        columns: column names; None reads all.
        max_rows: read only this many rows from the start of the file.
        table: as in `iter_columns`.

    Returns:
        The columns, (N,) or (N, ...) each.

    Raises:
        FileNotFoundError, ConfigError, CheckpointError, ImportError: as :func:`iter_columns`.

    Example:
        >>> import pathlib, tempfile
        >>> import h5py
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "galaxies.h5"
        >>> with h5py.File(file, "w") as opened:
        ...     opened["photometry/r"] = [17.5, 18.0, 19.1]
        >>> read_columns(file, ["r"], table="photometry", max_rows=2)["r"].tolist()
        [17.5, 18.0]
    """
    check_least(1, max_rows=max_rows)
    blocks, rows = [], 0
    block_rows = BLOCK_ROWS if max_rows is None else min(BLOCK_ROWS, max_rows)
    with closing(iter_columns(path, columns, block_rows=block_rows, table=table)) as read:
        for block in read:
            blocks.append(block)
            rows += len(next(iter(block.values())))
            if max_rows is not None and rows >= max_rows:
                break
    if not blocks:
        raise ConfigError(f"{os.fspath(path)}: the table has no rows")
    shapes = {name: {block[name].shape[1:] for block in blocks} for name in blocks[0]}
    for name, found in shapes.items():
        require_one_length(name, found)
    return {name: np.concatenate([block[name] for block in blocks])[:max_rows] for name in blocks[0]}


@checked
def read_survey(
    path: str | os.PathLike[str],
    name: str,
    *,
    scalars: Sequence[str],
    image: str | None = None,
    image_shape: tuple[int, int, int] | None = None,
    spectrum: str | None = None,
    object_id: str | None = None,
    max_rows: int | None = None,
    table: str | int | None = None,
) -> Survey:
    """Read a file as a :class:`Survey`, ready for tokenizers.

    Args:
        path: as in `iter_columns`.
        name: name of the survey; its scalars become ``<name>.<column>``.
        scalars: numeric columns.
        image: column of images.
        image_shape: (channels, height, width), if images are flattened in the file; None leaves their shape unchanged.
        spectrum: column of spectra.
        object_id: column of strings or integers; rows with the same id are one object. None: each row is an object.
        max_rows: read only this many rows.
        table: as in `iter_columns`.

    Raises:
        FileNotFoundError, CheckpointError, ImportError: as :func:`iter_columns`.
        ConfigError: as :func:`iter_columns`, or a column does not hold the required type of data.

    Example:
        >>> import pathlib, tempfile
        >>> import pyarrow, pyarrow.parquet
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "stars.parquet"
        >>> flux = [[1.0, 2.0], [3.0, 4.0]]
        >>> pyarrow.parquet.write_table(pyarrow.table({"id": ["a", "a"], "g": [11.0, None], "flux": flux}), file)
        >>> survey = read_survey(file, "gaia", scalars=["g"], spectrum="flux", object_id="id")
        >>> survey.columns, survey.objects.tolist(), survey.spectra.shape
        (('gaia.g',), [0, 0], (2, 2))
    """
    wanted = [*scalars, *(column for column in (image, spectrum, object_id) if column is not None)]
    if not wanted:
        raise ConfigError("name at least one column, or an image or a spectrum", argument="scalars")
    read = read_columns(path, list(dict.fromkeys(wanted)), max_rows=max_rows, table=table)
    numbers = [_numbers(column, read[column], 1).astype(np.float64) for column in scalars]
    for column, values in zip(scalars, numbers, strict=True):
        _warn_of_marker(f"{os.fspath(path)}: {column!r}", values)
    rows = len(read[wanted[0]])
    objects = np.arange(rows, dtype=np.intp)
    if object_id is not None:
        objects = _objects(object_id, read[object_id])
    pictures = None if image is None else _pictures(image, read[image], image_shape)
    return Survey(
        name=name,
        columns=tuple(f"{name}.{column}" for column in scalars),
        scalars=np.stack(numbers, axis=1) if numbers else np.empty((rows, 0)),
        objects=objects,
        images=pictures,
        spectra=None if spectrum is None else _float32(spectrum, _numbers(spectrum, read[spectrum], 2)),
    )


def _warn_of_marker(column: str, values: NDArray[np.float64]) -> None:
    """Warn about a number that surveys write for a missing value, if it is far from all others."""
    for marker in _MARKERS:
        others = values[np.isfinite(values) & ~np.isin(values, _MARKERS)]
        count = int((values == marker).sum())
        if count and len(others) and np.abs(others - marker).min() > 3 * np.ptp(others):
            _log.warning(
                "%s is %g in %d of %d rows, far from all others; if that marks a missing value, write NaN instead",
                column, marker, count, len(values),
            )  # fmt: skip


def _float32(column: str, values: NDArray[Any]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        made = values.astype(np.float32)
    beyond = np.argwhere(np.isinf(made) & np.isfinite(values))
    if len(beyond):
        row = beyond[0]
        raise ConfigError(
            f"column {column!r} has {values[tuple(row)]:g} in row {row[0]}, beyond float32; rescale it in the file"
        )
    return made


def _objects(column: str, ids: NDArray[Any]) -> NDArray[np.intp]:
    """Number the objects; rows without an id are rejected, since they would all count as one object."""
    missing = ids.dtype.kind == "U" and bool((ids == "").any())
    if ids.dtype.kind not in "iuU" or ids.ndim != 1 or missing:
        found = "rows without one" if missing else f"the dtype {ids.dtype} and the shape {ids.shape}"
        raise ConfigError(
            f"must be one string or integer for each row, but has {found}; leave out or name "
            "the rows without an id in the file",
            argument="object_id",
            value=column,
        )
    return np.unique(ids, return_inverse=True)[1].ravel().astype(np.intp)


def _pictures(column: str, values: NDArray[Any], shape: tuple[int, int, int] | None) -> NDArray[Any]:
    if shape is not None:
        size = values[0].size
        if size != np.prod(shape):
            raise ConfigError(f"={shape}: the images in {column!r} have {size} numbers each", argument="image_shape")
        values = values.reshape(-1, *shape)
    return _numbers(column, values, 4)


def _numbers(column: str, values: NDArray[Any], dimensions: int) -> NDArray[Any]:
    if values.dtype.kind not in "fiub" or values.ndim != dimensions:
        kind = {1: "one number", 2: "one vector of numbers", 4: "an image (channels, height, width)"}[dimensions]
        raise ConfigError(
            f"column {column!r} has dtype {values.dtype} and shape {values.shape}: must be {kind} for each row"
        )
    return values
