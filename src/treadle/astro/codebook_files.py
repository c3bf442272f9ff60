"""Codebook and bin-centre files, read without executing code from them.

Shapes: K = entries of a codebook, D = dimensions of one, V = bins.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from treadle.astro.codebooks import as_array
from treadle.checkpoint.store import write_bytes
from treadle.errors import CheckpointError, ConfigError, MissingExtraError
from treadle.errors.arguments import checked
from treadle.exchange.tensor_files import read_tree, write_safetensors

CODEBOOK_KEYS = ("centroids", "codebook", "centers", "cluster_centers_", "clusters")
CENTER_KEYS = ("bin_centers", "centers", "quantile_centers", "centroids")
_PICKLED = (".joblib", ".pkl", ".pickle")


@checked
def load_codebook(
    path: str | os.PathLike[str], key_candidates: Sequence[str] = CODEBOOK_KEYS, *, allow_pickle: bool = False
) -> NDArray[np.float32]:
    """Load a codebook.

    Args:
        path: an ``.npz`` or ``.safetensors`` file, from which the first key in ``key_candidates`` is read; an ``.npy``
            file holding the codebook; or, with ``allow_pickle``, a ``.joblib``, ``.pkl`` or ``.pickle`` file holding an
            array, a mapping, or a fitted k-means.
        key_candidates: keys, or attributes of a pickled object; the first one present is read.
        allow_pickle: allow unpickling. This **runs code** from the file: only for files that you trust.

    Returns:
        (K, D) float32.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: the file needs unpickling, or its type is unsupported.
        KeyError: none of the keys is present; those present are listed.
        ValueError: the array is not (K, D) or not finite.
        CheckpointError: the file is damaged.
        ImportError: the package that reads this file type is not installed.

    Example:
        >>> import pathlib, tempfile
        >>> file = save_codebook(pathlib.Path(tempfile.mkdtemp()) / "image.npz", [[0.0, 0.0], [2.0, 4.0]])
        >>> load_codebook(file).tolist()
        [[0.0, 0.0], [2.0, 4.0]]
    """
    file = _existing(path)
    pickled = file.suffix.lower() in _PICKLED
    content = _unpickled(file, allow_pickle) if pickled else _read(file, key_candidates)
    codebook_KD = _finite(_picked(content, key_candidates, file), file)
    if codebook_KD.ndim != 2:
        raise ConfigError(f"{file}: the codebook has shape {codebook_KD.shape}; it must be (entries, dimensions)")
    return codebook_KD


def load_npz_key(path: str | os.PathLike[str], key_candidates: Sequence[str]) -> NDArray[Any]:
    """Load the first of several keys from an ``.npz`` or ``.safetensors`` file, unchanged.

    Raises:
        FileNotFoundError, ConfigError, KeyError, CheckpointError, ImportError: as :func:`load_codebook`.

    Example:
        >>> import pathlib, tempfile
        >>> file = save_codebook(pathlib.Path(tempfile.mkdtemp()) / "j_h.npz", [0.1, 0.4], key="bin_centers")
        >>> load_npz_key(file, ("centers", "bin_centers")).shape
        (2,)
    """
    file = _existing(path)
    return as_array(_picked(_read(file, key_candidates), key_candidates, file), str(file))


@checked
def load_scalar_centers(
    path: str | os.PathLike[str], key_candidates: Sequence[str] = CENTER_KEYS
) -> NDArray[np.float32]:
    """Load the centres of all scalar bins, column by column in the order of `VocabSpec.scalar_id`.

    Args:
        path: an ``.npz``, ``.safetensors`` or ``.npy`` file with (V,) or (columns, bins) numbers.
        key_candidates: keys; the first one present is read.

    Returns:
        (V,) float32.

    Raises:
        FileNotFoundError, ConfigError, KeyError, CheckpointError, ImportError: as :func:`load_codebook`.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> file = save_codebook(folder / "scalars.npz", [[1.0, 3.0], [10.0, 30.0]], key="bin_centers")
        >>> load_scalar_centers(file).tolist()
        [1.0, 3.0, 10.0, 30.0]
    """
    file = _existing(path)
    centers = _finite(_picked(_read(file, key_candidates), key_candidates, file), file)
    if centers.ndim not in (1, 2):
        raise ConfigError(f"{file}: the centres have shape {centers.shape}; they must be (bins,) or (columns, bins)")
    return centers.reshape(-1)


@checked
def save_codebook(path: str | os.PathLike[str], array: ArrayLike | Tensor, *, key: str = CODEBOOK_KEYS[0]) -> Path:
    """Write a codebook or bin centres as float32, atomically.

    Args:
        path: an ``.npz`` or ``.safetensors`` file; its folder is created.
        array: finite values.
        key: name of the array in the file.

    Returns:
        The path.

    Raises:
        ConfigError: the values are not finite in float32, or the file type is unsupported.
        CheckpointError: the file cannot be written; the previous file is intact.
        ImportError: the file is a safetensors file and safetensors is not installed.

    Example:
        >>> import pathlib, tempfile
        >>> save_codebook(pathlib.Path(tempfile.mkdtemp()) / "bp.npz", [[0.0], [4.0]]).name
        'bp.npz'
    """
    file = Path(path)
    numbers = _finite(array, file)
    suffix = file.suffix.lower()
    if suffix == ".npz":
        named: dict[str, Any] = {key: numbers}
        return write_bytes(lambda opened: np.savez(opened, **named), file)
    if suffix == ".safetensors":
        write_safetensors({key: torch.from_numpy(numbers)}, file, metadata={}, drop={})
        return file
    raise ConfigError(f"{file}: codebooks are written as .npz or .safetensors; change the ending")


def _existing(path: str | os.PathLike[str]) -> Path:
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such codebook file")
    return file


def _read(file: Path, key_candidates: Sequence[str]) -> Any:
    """Return the array of an .npy file, or the mapping from keys to arrays of any other.

    Of an .npz file only the first candidate is read, so that pickled arrays under other keys do not matter; those are
    None.
    """
    suffix = file.suffix.lower()
    if suffix == ".safetensors":
        return read_tree(file)[0]
    if suffix not in (".npz", ".npy"):
        hint = "load_codebook with allow_pickle=True reads it" if suffix in _PICKLED else "convert it"
        raise ConfigError(f"{file}: the file must end in .npz, .npy or .safetensors; {hint}")
    try:
        with open(file, "rb") as opened:  # NumPy leaves a damaged archive open
            loaded = np.load(opened, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return loaded
            wanted = next((key for key in _names(key_candidates) if key in loaded.files), None)
            return {key: loaded[key] if key == wanted else None for key in loaded.files}
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    except ValueError as error:  # a damaged header, or objects that only unpickling could create
        raise ConfigError(f"{file} does not hold plain numbers ({error}); save it with save_codebook") from error


def _unpickled(file: Path, allow_pickle: bool) -> Any:
    if not allow_pickle:
        raise ConfigError(
            f"{file}: reading a {file.suffix} file means unpickling, which runs code from it. If you trust "
            "the file, pass allow_pickle=True, or convert it once: "
            f"save_codebook({file.with_suffix('.npz').name!r}, load_codebook({file.name!r}, allow_pickle=True))"
        )
    try:
        import joblib
    except ImportError as error:
        raise MissingExtraError(
            f"{file}: pickled codebooks need joblib ({error}): pip install 'treadle[astro]'"
        ) from error
    return joblib.load(file)  # reads plain pickles too


def _picked(content: Any, key_candidates: Sequence[str], file: Path) -> Any:
    if isinstance(content, (np.ndarray, Tensor)):
        return content
    keys = _names(key_candidates)
    named = content if isinstance(content, Mapping) else _attributes(content)
    for key in keys:
        if key in named:
            return named[key]
    raise KeyError(f"{file}: none of the keys {', '.join(keys)}; it has {', '.join(map(str, named)) or 'no key'}")


def _names(key_candidates: Sequence[str]) -> tuple[str, ...]:
    return (key_candidates,) if isinstance(key_candidates, str) else tuple(key_candidates)


def _attributes(fitted: Any) -> Mapping[str, Any]:
    attributes: Mapping[str, Any] = getattr(fitted, "__dict__", {})
    return attributes


def _finite(values: ArrayLike | Tensor, file: Path) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # values too large for float32 become infinite and are rejected below
        numbers = as_array(values, str(file)).astype(np.float32)
    if not np.isfinite(numbers).all():
        raise ConfigError(f"{file}: {np.count_nonzero(~np.isfinite(numbers))} numbers are not finite in float32")
    return numbers
