"""One-hot columns from integer codes of several properties."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from treadle.errors import ConfigError

__all__ = ["ATOM_CODES", "BOND_CODES", "check_codes", "one_hot_columns"]

ATOM_CODES = (119, 5, 12, 12, 10, 6, 6, 2, 2)
"""Numbers of values of OGB's nine atom properties: element, chirality, degree, charge, hydrogens, radicals,
hybridisation, aromatic, in a ring."""
BOND_CODES = (5, 6, 2)
"""Numbers of values of OGB's three bond properties: type, stereo, conjugated."""


def check_codes(what: str, codes: Tensor, sizes: Sequence[int]) -> None:
    """Raise ConfigError unless all codes are valid for their properties.

    Args:
        what: name of the codes for the error message.
        codes: (M, K) integers.
        sizes: number of values of each of the K properties.

    Example:
        >>> check_codes("x", torch.tensor([[1, 3]]), (2, 3))
        Traceback (most recent call last):
        treadle.errors.ConfigError: x: property 1 has codes from 3 to 3, but it has the values 0 to 2; the file is
        damaged or of another version
    """
    if codes.dim() != 2 or codes.shape[1] != len(sizes):
        raise ConfigError(
            f"{what} has shape {tuple(codes.shape)}, but there are {len(sizes)} properties, a column each"
        )
    if len(codes) == 0:
        return
    low, high = codes.amin(0).tolist(), codes.amax(0).tolist()
    for column, size in enumerate(sizes):
        if low[column] < 0 or high[column] >= size:
            raise ConfigError(
                f"property {column} has codes from {low[column]} to {high[column]}, but it has the values 0 to "
                f"{size - 1}; the file is damaged or of another version",
                argument=what,
            )


def one_hot_columns(codes: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return one column per value of each property; a linear map of them sums one vector per property.

    Args:
        codes: (M, K) integers, property k from 0 to ``sizes[k]`` - 1.
        sizes: number of values of each property.

    Returns:
        (M, sum of sizes) float32.

    Example:
        >>> one_hot_columns(torch.tensor([[1, 0], [0, 2]]), (2, 3)).tolist()
        [[0.0, 1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 1.0]]
    """
    ends = torch.tensor(sizes).cumsum(0)
    columns = codes.long() + (ends - torch.tensor(sizes))
    return torch.zeros(len(codes), int(ends[-1])).scatter_(1, columns, 1.0)
