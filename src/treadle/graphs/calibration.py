"""Calibration of an ensemble's standard deviation on the validation molecules of its runs.

The spread of a few models is too small to serve as an error bar. It is multiplied by one factor per target: the
quantile of error over deviation on the validation molecules that makes one deviation hold 68.3 % of them, as in split
conformal prediction (Lei et al. 2018).

Shapes: M = molecules, T = targets, S = models.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.checkpoint.store import write_bytes
from treadle.errors import CheckpointError

_Numbers = npt.NDArray[np.float64]

FILE = "held_out.npz"
COVERAGE = math.erf(math.sqrt(0.5))
"""Share of a normal distribution within one standard deviation, 0.683."""
LEAST = 10
"""Fewest known validation values of a target that is calibrated."""


@dataclass(frozen=True)
class HeldOut:
    """Predictions and targets of one model for validation and test molecules; NaN targets are unknown.

    Attributes:
        val_prediction: (M, T).
        val_target: (M, T).
        test_prediction: (M, T).
        test_target: (M, T).
    """

    val_prediction: _Numbers
    val_target: _Numbers
    test_prediction: _Numbers
    test_target: _Numbers

    def write(self, path: Path, epoch: int) -> None:
        """Write the arrays, with the epoch of the weights."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        write_bytes(lambda file: np.savez(file, epoch=epoch, **arrays), path)

    @classmethod
    def read(cls, path: Path, epoch: int) -> HeldOut | None:
        """Return the arrays, or None if there are none for the weights of this epoch.

        Raises:
            CheckpointError: the file is damaged.
        """
        if not path.exists():
            return None
        try:
            with path.open("rb") as opened, np.load(opened) as file:  # NumPy leaves a damaged file open
                arrays = dict(file)
            if int(arrays.pop("epoch")) != epoch:
                return None
            return cls(**arrays)
        except (OSError, ValueError, EOFError, KeyError, TypeError, zipfile.BadZipFile) as error:
            raise CheckpointError(
                f"{path} is damaged ({type(error).__name__}); delete it to predict without calibration"
            ) from error


@dataclass(frozen=True)
class TargetCalibration:
    """Calibration of one target.

    Attributes:
        factor: of the standard deviation.
        num_val: number of known validation values.
        num_test: number of known test values.
        before: share of these within one standard deviation, uncalibrated; NaN if there are none.
        after: the same, calibrated.
    """

    factor: float
    num_val: int
    num_test: int
    before: float
    after: float


def calibrate(members: Sequence[HeldOut]) -> list[TargetCalibration | None] | None:
    """Return the calibration of each target, None for one with too few known values.

    Args:
        members: S models, at least two.

    Returns:
        None if the models have different validation or test molecules.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> target = rng.normal(size=(400, 1))
        >>> members = [HeldOut(target + rng.normal(size=(400, 1)), target, target, target) for _ in range(5)]
        >>> round(calibrate(members)[0].factor, 1)
        0.5
    """
    first = members[0]
    for member in members[1:]:
        for name in ("val_target", "test_target"):
            if not np.array_equal(getattr(member, name), getattr(first, name), equal_nan=True):
                return None
    val_MT = _ratio(np.stack([member.val_prediction for member in members]), first.val_target)
    test_MT = _ratio(np.stack([member.test_prediction for member in members]), first.test_target)
    return [
        _calibrated(val_M[~np.isnan(val_M)], test_M[~np.isnan(test_M)])
        for val_M, test_M in zip(val_MT.T, test_MT.T, strict=True)
    ]


def _ratio(predicted_SMT: _Numbers, target_MT: _Numbers) -> _Numbers:
    """Return the absolute error of the mean in standard deviations; NaN where the target is unknown."""
    error_MT = np.abs(predicted_SMT.mean(0) - target_MT)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio_MT = error_MT / predicted_SMT.std(0, ddof=1)
    return np.where((error_MT == 0), 0.0, ratio_MT)


def _calibrated(val_M: _Numbers, test_M: _Numbers) -> TargetCalibration | None:
    if len(val_M) < LEAST:
        return None
    level = min(1.0, math.ceil((len(val_M) + 1) * COVERAGE) / len(val_M))
    factor = float(np.quantile(val_M, level, method="inverted_cdf"))
    if not 0 < factor < math.inf:
        return None
    shares = [float((test_M <= width).mean()) if len(test_M) else math.nan for width in (1.0, factor)]
    return TargetCalibration(factor, len(val_M), len(test_M), *shares)


def held_out_of(path: Path, tree: Mapping[str, Any], folder: Path) -> HeldOut | None:
    """Return what a run stored next to a checkpoint; None unless its weights are the run's best ones."""
    return HeldOut.read(folder / FILE, int(tree["epoch"])) if path.name == "best.pt" else None
