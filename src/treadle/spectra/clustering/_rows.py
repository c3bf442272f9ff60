"""Block-wise unit rows: validation, normalisation and device transfer of X.

Shape suffixes: N rows, D columns, K centroids or parameters, B rows of one block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from treadle.errors import ConfigError
from treadle.errors.arguments import check_whole
from treadle.spectra.arrays import as_array, unmasked

DeviceLike: TypeAlias = str | int | torch.device | None
RowsLike: TypeAlias = Tensor | np.ndarray[Any, Any]


def resolve_device(device: DeviceLike) -> torch.device:
    """Return the requested device; None selects the first available of CUDA, MPS and CPU.

    Same as :func:`treadle.device.get_device`, which numerical modules like this must not import.

    Raises:
        ConfigError: it is not a device, or not available; the available ones are named.
    """
    if device is not None:
        try:
            found = device if isinstance(device, torch.device) else torch.device(device)
            torch.empty(0, device=found)
        except (RuntimeError, AssertionError, TypeError) as error:  # torch's message for MPS is a page long
            names = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
            names += ["mps"] if torch.backends.mps.is_available() else []
            raise ConfigError(
                f" is not available here; available: {', '.join(names)}. "
                "Pass one of these, or None to choose automatically",
                argument="device",
                value=device,
            ) from error
        return found
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def as_tensor(values: Any) -> Tensor:
    """Return numbers as a tensor, for any array layout and byte order; masked entries become NaN.

    Raises:
        TypeError: the values are sparse, or strings.
    """
    values = as_array(values, "X")
    if isinstance(values, np.ndarray) and values.dtype.kind in "OUS":
        try:
            values = values.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise TypeError(f"X has dtype {values.dtype}, but must hold real numbers: {error}") from None
    if isinstance(values, np.ndarray):
        values = unmasked(values)
        native = values.dtype.newbyteorder("=")
        # torch supports neither negative strides nor foreign byte order, and warns about read-only memory.
        if not values.flags.writeable or values.dtype != native or min(values.strides, default=0) < 0:
            values = np.array(values, dtype=native, order="C")
    return torch.as_tensor(values)


def compute_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def make_generator(random_state: Any) -> torch.Generator:
    """Return a CPU generator seeded with `random_state`; None seeds it from the operating system.

    A NumPy RandomState or Generator provides the seed as its next number.
    """
    generator = torch.Generator(device="cpu")
    if random_state is None:
        generator.seed()
        return generator
    if isinstance(random_state, (np.random.RandomState, np.random.Generator)):
        draw = random_state.integers if isinstance(random_state, np.random.Generator) else random_state.randint
        random_state = draw(2**31)
    if isinstance(random_state, bool) or not isinstance(random_state, int | np.integer):
        raise ConfigError(
            " must be a whole number, a random state of NumPy, or None", argument="random_state", value=random_state
        )
    return generator.manual_seed(int(random_state))


def check_count(name: str, value: int, *, least: int = 1) -> int:
    """Return `value` if it is an integer of at least `least`; otherwise raise ValueError."""
    check_whole(least, **{name: value})
    return int(value)


class UnitRows:
    """Rows of X scaled to unit length, served in blocks of at most `chunk` rows on one device.

    Arithmetic is float64 (float32 on MPS) regardless of the dtype of X, so the block size affects sums only by
    rounding. Results are returned in `out_dtype` (the dtype of X, at least float32) on `home`.
    """

    def __init__(self, X: RowsLike, *, device: torch.device, chunk: int | None) -> None:
        self._rows_ND = as_tensor(X).detach()
        shape, dtype = tuple(self._rows_ND.shape), self._rows_ND.dtype
        if self._rows_ND.ndim != 2:
            raise ValueError(f"X has shape {shape}, but must be (N, D). Reshape your data to rows.")
        if 0 in shape:
            missing = f"0 sample(s) (shape={shape})" if shape[0] == 0 else f"0 feature(s) (shape={shape})"
            raise ValueError(f"X has {missing} while a minimum of 1 is required.")
        if dtype.is_complex:
            raise ValueError(f"X has dtype {dtype}: Complex data not supported; pass its modulus, X.abs().")
        if dtype == torch.bool:
            raise ValueError(f"X has dtype {dtype}, but must hold real numbers; convert it with X.float().")
        self.n, self.d = self._rows_ND.shape
        self.device = device
        self.dtype = compute_dtype(device)
        self.home = self._rows_ND.device
        self.out_dtype = self.dtype if dtype == torch.float64 else torch.float32
        self._size = self.n if chunk is None else min(check_count("chunk", chunk), self.n)
        self._whole_ND: Tensor | None = None  # one block: normalise once, not once per pass

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (slice into N, unit rows (B, D)) in order; raise ValueError for a zero or non-finite row."""
        if self._size == self.n:
            yield slice(0, self.n), self._whole()
            return
        for start in range(0, self.n, self._size):
            part = slice(start, min(start + self._size, self.n))
            yield part, self._unit(self._rows_ND[part], numbers=range(start, self.n))

    def take(self, indices: Tensor) -> Tensor:
        """Return the unit rows at `indices` (a 1-D integer tensor) on the device."""
        if self._size == self.n:
            return self._whole()[indices.to(self.device)]
        return self._unit(self._rows_ND[indices.to(self.home)], numbers=indices.tolist())

    def _whole(self) -> Tensor:
        if self._whole_ND is None:
            self._whole_ND = self._unit(self._rows_ND, numbers=range(self.n))
        return self._whole_ND

    def _unit(self, rows_BD: Tensor, *, numbers: Sequence[int]) -> Tensor:
        if self.dtype == torch.float32:
            rows_BD = rows_BD.float()  # MPS cannot even receive float64
        rows_BD = rows_BD.to(self.device).to(self.dtype)
        # Dividing by the largest entry first avoids overflow and underflow of squares.
        scale_B1 = rows_BD.abs().amax(dim=1, keepdim=True)
        bad_B = ~(torch.isfinite(scale_B1) & (scale_B1 > 0)).squeeze(1)
        if bool(bad_B.any()):
            index = int(bad_B.nonzero()[0, 0])
            what = "is zero" if float(scale_B1[index]) == 0.0 else "holds NaN or infinity"
            raise ConfigError(
                f"row {numbers[index]} {what}, so it has no direction; every row must be finite and non-zero. "
                "Drop such rows before clustering.",
                argument="X",
            )
        return normalised(rows_BD / scale_B1)


def unit_rows(matrix_KD: Tensor, *, device: torch.device) -> Tensor:
    """Return a (K, D) parameter matrix on the device, in the arithmetic dtype, with unit rows."""
    return normalised(matrix_KD.to(device).to(compute_dtype(device)))


def normalised(rows_ND: Tensor) -> Tensor:
    """Divide rows by their norm; no row may be zero."""
    length_N1: Tensor = torch.linalg.vector_norm(rows_ND, dim=1, keepdim=True)
    return rows_ND / length_N1


def assign_and_sum(rows: UnitRows, centroids_KD: Tensor) -> tuple[float, Tensor, Tensor]:
    """Assign each row to its nearest centroid; return mean(1 - cos), the sums (K, D) and the sizes (K,)."""
    sums_KD = torch.zeros_like(centroids_KD)
    counts_K = torch.zeros(len(centroids_KD), dtype=rows.dtype, device=rows.device)
    total = 0.0
    for _, block_BD in rows.blocks():
        best_B, labels_B = (block_BD @ centroids_KD.T).max(dim=1)
        member_BK = one_hot(labels_B, len(centroids_KD), dtype=rows.dtype)
        sums_KD += member_BK.T @ block_BD
        counts_K += member_BK.sum(dim=0)
        total += float((1.0 - best_B).clamp(min=0.0).sum())
    return total / rows.n, sums_KD, counts_K


def one_hot(labels_B: Tensor, n_classes: int, *, dtype: torch.dtype) -> Tensor:
    """Return (B, K) membership; unlike index_add_ on CUDA, products with it sum in a fixed order."""
    member_BK = torch.zeros(len(labels_B), n_classes, dtype=dtype, device=labels_B.device)
    return member_BK.scatter_(1, labels_B[:, None], 1.0)
