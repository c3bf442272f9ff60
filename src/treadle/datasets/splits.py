"""Splits that keep the rows of an object together."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from treadle.errors import ConfigError
from treadle.errors.arguments import check_within, checked

Rows = npt.NDArray[np.intp]


def object_groups(names: npt.NDArray[np.str_], spectra: npt.NDArray[np.float32]) -> Rows:
    """Number the objects: rows with the same name, or with bit-identical spectra, are one object.

    A dozen SpeX spectra appear under two names, and a duplicate in another split would leak.

    Args:
        names: (N,) designations.
        spectra: (N, L) values.

    Returns:
        (N,) object numbers from 0.

    Example:
        >>> object_groups(np.array(["a", "b", "a", "c"]), np.array([[1.0], [2.0], [3.0], [2.0]])).tolist()
        [0, 1, 0, 1]
    """
    by_name = np.unique(names, return_inverse=True)[1].ravel()
    by_value = np.unique(spectra, axis=0, return_inverse=True)[1].ravel()
    groups = np.arange(len(names))
    while True:
        merged = groups
        for labels in (by_name, by_value):
            least = np.full(labels.max() + 1, len(names))
            np.minimum.at(least, labels, merged)
            merged = least[labels]
        if np.array_equal(merged, groups):
            return np.unique(groups, return_inverse=True)[1].ravel().astype(np.intp)
        groups = merged


@checked
def split_by_group(
    groups: Rows, *, val_fraction: float = 0.1, test_fraction: float = 0.1, seed: int = 0
) -> tuple[Rows, Rows, Rows]:
    """Split whole groups into training, validation and test.

    Args:
        groups: (N,) group numbers; rows of one group stay together.
        val_fraction: fraction of the groups for validation; at least one group.
        test_fraction: fraction of the groups for the test; at least one group.
        seed: seed of the split.

    Returns:
        The row indices of the three splits, ascending.

    Raises:
        ConfigError: there are too few groups for these fractions.

    Example:
        >>> [len(part) for part in split_by_group(np.arange(20), val_fraction=0.1, test_fraction=0.2)]
        [14, 2, 4]
    """
    check_within("[0, 1)", val_fraction=val_fraction, test_fraction=test_fraction)
    names = np.random.default_rng(seed).permutation(np.unique(groups))
    num_val = max(1, round(val_fraction * len(names)))
    num_test = max(1, round(test_fraction * len(names)))
    if num_val + num_test >= len(names):
        raise ConfigError(
            f"={val_fraction} and test_fraction={test_fraction} of {len(names)} objects leave none to "
            "train on; lower them or give more rows",
            argument="val_fraction",
        )
    val = np.isin(groups, names[:num_val])
    test = np.isin(groups, names[num_val : num_val + num_test])
    return np.flatnonzero(~(val | test)), np.flatnonzero(val), np.flatnonzero(test)
