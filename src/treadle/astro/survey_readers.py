"""Readers of survey file formats that yield blocks of columns of one table.

Shapes: B = rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.errors import CheckpointError, ConfigError, MissingExtraError, nearest

Columns = dict[str, NDArray[Any]]
Blocks = Generator[Columns, None, None]
Reader = Callable[[Path, "list[str] | None", int, "str | int | None"], Blocks]
"""(file, columns or all, rows per block, table) -> blocks."""


def reader_of(file: Path) -> Reader:
    """Return the reader for a file's extension.

    Raises:
        ConfigError: there is no reader for it.
    """
    name = file.name.lower()
    readers: dict[tuple[str, ...], Reader] = {
        (".parquet", ".pq"): _parquet_blocks,
        (".h5", ".hdf5", ".hdf"): _hdf5_blocks,
        (".fits", ".fit", ".fits.gz"): _fits_blocks,
    }
    for endings, reader in readers.items():
        if name.endswith(endings):
            return reader
    raise ConfigError(f"{file}: survey files end in {', '.join(sum(readers, ()))}; convert it, or rename it")


def _parquet_blocks(file: Path, columns: list[str] | None, block_rows: int, table: str | int | None) -> Blocks:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise _needs("Parquet", "pyarrow", error) from error
    if table is not None:
        raise ConfigError("a Parquet file is one table; leave it out", argument="table", value=table)
    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            names = _chosen(file, columns, opened.schema_arrow.names)
            # Threads and read-ahead would hold several blocks at once.
            for batch in opened.iter_batches(block_rows, columns=names, use_threads=False):
                yield {name: _from_arrow(name, batch.column(name)) for name in names}
    except (pyarrow.ArrowException, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _from_arrow(name: str, array: Any) -> NDArray[Any]:
    """Convert a list column to (B, length), nested lists to (B, ..., length), nulls to NaN or empty strings."""
    import pyarrow
    import pyarrow.compute

    kinds = pyarrow.types
    kind = array.type
    if kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind):
        if array.null_count:
            raise ConfigError(f"column {name!r} has rows without a vector; leave these rows out of the file")
        values = _from_arrow(name, array.flatten())
        lengths = np.unique(pyarrow.compute.list_value_length(array).to_numpy(zero_copy_only=False))
        require_one_length(name, {(int(length),) for length in lengths})
        return values.reshape(len(array), -1, *values.shape[1:])
    if kinds.is_string(kind) or kinds.is_large_string(kind):
        return np.array(array.fill_null("").to_pylist(), dtype=np.str_)
    if not (kinds.is_integer(kind) or kinds.is_floating(kind) or kinds.is_boolean(kind)):
        raise ConfigError(f"column {name!r} is of the type {kind}; must hold numbers, text, or lists of numbers")
    if array.null_count:
        flags = kinds.is_boolean(kind)  # convertible to float64 only through integers
        try:
            array = (array.cast(pyarrow.uint8()) if flags else array).cast(pyarrow.float64())
        except pyarrow.ArrowInvalid as error:
            raise ConfigError(
                f"column {name!r} has missing numbers, which are NaN, and whole numbers beyond 2**53, which that would "
                "round; leave out these rows in the file, or write the column as text"
            ) from error
    return np.array(array.to_numpy(zero_copy_only=False))  # a writable copy


def _hdf5_blocks(file: Path, columns: list[str] | None, block_rows: int, table: str | int | None) -> Blocks:
    try:
        import h5py
    except ImportError as error:
        raise _needs("HDF5", "h5py", error) from error
    try:
        with h5py.File(file, "r") as opened:
            place = str(table or "/")
            if place not in opened:
                raise ConfigError(f"{file} has no such group; {nearest(place, opened)}", argument="table", value=table)
            node = opened[place]
            if isinstance(node, h5py.Dataset):
                names = _chosen(file, columns, node.dtype.names or ())
                length = len(node)
            else:
                present = [key for key, item in node.items() if isinstance(item, h5py.Dataset) and item.ndim]
                # A path such as "photometry/r" refers to a nested group.
                inner = [key for key in columns or () if isinstance(node.get(key), h5py.Dataset)]
                names = _chosen(file, columns, dict.fromkeys([*present, *inner]))
                lengths = {name: len(node[name]) for name in names}
                length = _same_rows(file, lengths)
            for start in range(0, length, block_rows):
                rows = slice(start, min(start + block_rows, length))
                block = node[rows] if isinstance(node, h5py.Dataset) else {name: node[name][rows] for name in names}
                yield {name: _plain(name, np.asarray(block[name])) for name in names}
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _fits_blocks(file: Path, columns: list[str] | None, block_rows: int, table: str | int | None) -> Blocks:
    try:
        from astropy.io import fits
    except ImportError as error:
        raise _needs("FITS", "astropy", error) from error
    try:
        with fits.open(file, memmap=not file.name.lower().endswith(".gz")) as opened:
            tables = [unit for unit in opened if isinstance(unit, fits.BinTableHDU)]
            if table is not None:
                tables = [unit for number, unit in enumerate(opened) if unit in tables and table in (number, unit.name)]
            if not tables:
                raise ConfigError(
                    f"{file} has no such binary table; it has {[unit.name for unit in opened]}",
                    argument="table",
                    value=table,
                )
            unit = tables[0]
            names = _chosen(file, columns, unit.columns.names)
            for start in range(0, len(unit.data), block_rows):
                rows = unit.data[start : start + block_rows]
                yield {name: _from_fits(rows, unit.columns[name]) for name in names}
    except (OSError, TypeError) as error:  # TypeError: astropy's, of a file that ends early
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _from_fits(rows: Any, column: Any) -> NDArray[Any]:
    values = _plain(column.name, np.asarray(rows[column.name]))
    if column.null is None:
        return values
    stored = rows.view(np.ndarray)[column.name]  # the null marker applies to the values before scaling
    return np.where(stored == column.null, np.nan, values.astype(np.float64))


def _plain(name: str, values: NDArray[Any]) -> NDArray[Any]:
    """Copy values in native byte order, since the file is closed afterwards; decode bytes to strings."""
    if values.dtype.kind == "O" and values.size and isinstance(values.flat[0], bytes):
        values = values.astype(np.bytes_)
    if values.dtype.kind == "S":
        return np.char.decode(values, "utf-8", "replace")
    if values.dtype.kind not in "fiubU":
        raise ConfigError(
            f"column {name!r} has dtype {values.dtype}; must hold numbers, text, or vectors of one length"
        )
    return np.array(values, dtype=values.dtype.newbyteorder("="))


def _chosen(file: Path, columns: list[str] | None, present: Any) -> list[str]:
    known = list(present)
    if columns is None:
        columns = known
    unknown = [name for name in columns if name not in known]
    if unknown or not columns:
        name = unknown[0] if unknown else ""
        raise ConfigError(f"{file} has no column {name!r}; {nearest(name, known) if known else 'it has no columns'}")
    return columns


def _same_rows(file: Path, lengths: dict[str, int]) -> int:
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"{file}: the columns have different numbers of rows, {lengths}; name those of one table")
    return next(iter(lengths.values()))


def require_one_length(name: str, shapes: set[tuple[int, ...]]) -> None:
    """Raise ConfigError if the rows of a column have different shapes."""
    if len(shapes) > 1:
        raise ConfigError(
            f"column {name!r} has vectors of the lengths {sorted(shape[0] for shape in shapes)}; bring them to one grid"
        )


def _needs(kind: str, package: str, error: ImportError) -> MissingExtraError:
    return MissingExtraError(f"{kind} files need {package} ({error}): pip install 'treadle[survey]'")
