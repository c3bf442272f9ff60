"""Conversion of spectra between NumPy arrays or tensors and float64 tensors.

Shapes: N = rows, L = channels.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treadle.errors import ConfigError

Spectra = TypeVar("Spectra", NDArray[Any], Tensor)


def unmasked(X: NDArray[Any]) -> NDArray[Any]:
    """Fill the masked entries of a masked array with NaN; return any other array unchanged."""
    if isinstance(X, np.ma.MaskedArray):
        return np.ma.filled(X.astype(np.float64), np.nan) if np.ma.is_masked(X) else X.data
    return X


def as_array(X: Any, name: str) -> Any:
    """Return a pandas or polars table, or an object with ``__array__``, as a NumPy array; anything else unchanged.

    Raises:
        TypeError: ``X`` is sparse.
    """
    if callable(getattr(X, "toarray", None)):
        raise TypeError(f"{name} is sparse ({type(X).__name__}); pass {name}.toarray()")
    if callable(getattr(X, "to_numpy", None)):
        return X.to_numpy()
    is_own = isinstance(X, np.ndarray | np.generic | Tensor) or not hasattr(X, "__array__")
    return X if is_own else np.asarray(X)


def as_float64(X: object, name: str) -> Tensor:
    """Return ``X`` as a float64 tensor; a tensor stays on its device if that supports float64."""
    X = as_array(X, name)
    if isinstance(X, Tensor):
        if X.is_complex():
            raise ValueError(f"{name} has dtype {X.dtype} but must hold real numbers; pass its modulus")
        # MPS has no float64.
        return (X.cpu() if X.device.type == "mps" else X).to(torch.float64)
    if isinstance(X, np.ndarray):
        if X.dtype.kind not in "fiub":
            raise ValueError(f"{name} has dtype {X.dtype} but must hold real numbers; convert it with astype")
        # A copy: torch supports neither read-only memory nor foreign byte order (FITS files have both).
        return torch.from_numpy(np.array(unmasked(X), dtype=np.float64))
    raise TypeError(
        f"{name} is a {type(X).__name__} but must be a NumPy array or a tensor; convert it with numpy.asarray"
    )


def like(values: Tensor, X: Spectra) -> Spectra:
    """Return ``values`` in the container, device and floating dtype of ``X``; float32 if ``X`` holds integers."""
    if isinstance(X, Tensor):
        return values.to(X.dtype if X.is_floating_point() else torch.float32).to(X.device)
    array: NDArray[Any] = values.numpy().astype(X.dtype if X.dtype.kind == "f" else np.float32)
    return array


def write_into(X: Spectra, values: Spectra) -> Spectra:
    """Overwrite ``X`` with ``values`` and return it."""
    if isinstance(X, Tensor):
        with torch.no_grad():
            return X.copy_(values)
    X[...] = values
    return X


def device_of(X: object) -> torch.device:
    """Return the device of a tensor; the CPU for anything else."""
    return X.device if isinstance(X, Tensor) else torch.device("cpu")


def take(X: NDArray[Any] | Tensor, indices_K: Tensor, *, as_numpy: bool) -> NDArray[Any] | Tensor:
    """Return the rows of ``X`` at ``indices_K``, as a NumPy array or a tensor."""
    if isinstance(X, Tensor):
        rows = X[indices_K]
        if not as_numpy:
            return rows
        rows = rows.detach().cpu()
        # NumPy has no bfloat16.
        return (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()
    array: NDArray[Any] = X[indices_K.numpy()]
    if as_numpy:
        return array
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))


def per_row(stat: Any, name: str, work: Tensor) -> Tensor:
    """Return a per-row statistic of ``work``, shaped to broadcast along the channels."""
    column = as_float64(stat if isinstance(stat, Tensor) else np.asarray(stat), name).to(work.device)
    if column.numel() == 1:
        return column.reshape(())
    if work.dim() == 2 and column.shape in ((work.shape[0],), (work.shape[0], 1)):
        return column.reshape(-1, 1)
    raise ValueError(
        f"{name} has shape {tuple(column.shape)} but must hold one number for each row of Y, whose shape is "
        f"{tuple(work.shape)}; pass it as transform() returned it"
    )


def centre(work: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Subtract the mean of each row; constant rows become exact zeros.

    Returns:
        The centred rows, the means with a last axis of length 1, and a bool tensor of that shape, True for constant
        rows.
    """
    low, high = work.aminmax(dim=-1, keepdim=True)
    constant = high - low == 0.0  # False for a row of infinities
    # The mean of L equal numbers can be off by one ulp, which a division by eps would amplify.
    mean = torch.where(constant, low, work.mean(dim=-1, keepdim=True))
    return work - mean, mean, constant


def check_complete(gaps: int, count: int) -> None:
    """Raise ConfigError if any training rows (``gaps`` of ``count``) have non-finite values."""
    if gaps:
        raise ConfigError(f"{gaps} of {count} rows are not finite; leave them out", argument="train")
