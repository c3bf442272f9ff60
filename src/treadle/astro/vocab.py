"""Vocabulary of image, scalar and spectrum ids, and the type of every id."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from treadle.errors import ConfigError, nearest
from treadle.errors.arguments import check_whole, checked

logger = logging.getLogger("treadle.astro")

SPECTRUM_GROUPS = ("gaiaxp_bp", "gaiaxp_rp", "desi_b", "desi_r", "desi_z")
NUM_SPECIAL = 5
IMAGE_TYPE, FIRST_SPECTRUM_TYPE = 5, 7


@checked
@dataclass(frozen=True)
class VocabSpec:
    """Vocabulary of five special ids, the image ids, the scalar ids by column, and the ids of each spectrum group.

    Immutable, and compares by value. `build_vocab_spec` provides the defaults.

    Attributes:
        v_image: size of the image codebook.
        v_scalar: number of ids of all scalar columns together.
        v_spectra: number of ids per spectrum group.
        spectrum_groups: group names, in the order of their ids and types.
        scalar_bins: number of ids per scalar column.

    Raises:
        ConfigError: a size is below 1, a group is named twice, or the columns do not fill ``v_scalar``.

    Example:
        >>> vocab = VocabSpec(2, 4, 2, ("a", "b"), 2)
        >>> vocab.base_image, vocab.base_scalar, vocab.base_spectrum, vocab.vocab_size
        (5, 7, {'a': 11, 'b': 13}, 15)
    """

    pad_id: ClassVar[int] = 0  # padding; never a target
    bos_id: ClassVar[int] = 1  # begins a sequence
    eos_id: ClassVar[int] = 2  # ends a sequence
    sep_id: ClassVar[int] = 3  # ends a modality
    miss_id: ClassVar[int] = 4  # stands in for an absent modality, spectrum group or scalar column

    v_image: int
    v_scalar: int
    v_spectra: int
    spectrum_groups: tuple[str, ...]
    scalar_bins: int

    def __post_init__(self) -> None:
        check_whole(
            1, v_image=self.v_image, v_scalar=self.v_scalar, v_spectra=self.v_spectra, scalar_bins=self.scalar_bins
        )
        if self.v_scalar % self.scalar_bins:
            raise ConfigError(
                f"={self.scalar_bins} does not divide v_scalar={self.v_scalar}: "
                "every scalar column has the same number of bins; give columns x bins as v_scalar",
                argument="scalar_bins",
            )
        if isinstance(self.spectrum_groups, str):
            raise ConfigError(
                "must be a list of names, not one string", argument="spectrum_groups", value=self.spectrum_groups
            )
        object.__setattr__(self, "spectrum_groups", tuple(self.spectrum_groups))  # a list would be mutable
        groups = self.spectrum_groups
        twice = sorted({group for group in groups if groups.count(group) > 1})
        if twice:
            raise ConfigError(
                f"={list(groups)}: {', '.join(twice)} occurs more than once; name each once", argument="spectrum_groups"
            )

    @property
    def base_image(self) -> int:
        """The first image id."""
        return NUM_SPECIAL

    @property
    def base_scalar(self) -> int:
        """The first scalar id."""
        return self.base_image + self.v_image

    @property
    def first_spectrum_id(self) -> int:
        """The first id of the first spectrum group."""
        return self.base_scalar + self.v_scalar

    @property
    def base_spectrum(self) -> dict[str, int]:
        """The first id of each spectrum group; a new dict each time."""
        return {
            group: self.first_spectrum_id + number * self.v_spectra for number, group in enumerate(self.spectrum_groups)
        }

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return self.first_spectrum_id + len(self.spectrum_groups) * self.v_spectra

    @property
    def n_columns(self) -> int:
        """Number of scalar columns."""
        return self.v_scalar // self.scalar_bins

    @property
    def n_types(self) -> int:
        """Minimum number of types: 7 plus one per spectrum group."""
        return FIRST_SPECTRUM_TYPE + len(self.spectrum_groups)

    def image_token_to_id(self, token: int) -> int:
        """Return the id of an index into the image codebook.

        Raises:
            ValueError: the index is not in [0, v_image).
        """
        return self.base_image + _inside("image token", token, self.v_image)

    def scalar_token_to_id(self, token: int) -> int:
        """Return the id of an index into all scalar bins, column after column.

        Raises:
            ValueError: the index is not in [0, v_scalar).
        """
        return self.base_scalar + _inside("scalar token", token, self.v_scalar)

    def scalar_id(self, column: int, bin: int) -> int:
        """Return the id of a bin of a scalar column.

        Raises:
            ValueError: the column or the bin is out of range.

        Example:
            >>> VocabSpec(2, 4, 2, ("a", "b"), 2).scalar_id(1, 0)
            9
        """
        _inside("column", column, self.n_columns)
        return self.base_scalar + column * self.scalar_bins + _inside("bin", bin, self.scalar_bins)

    def spectrum_token_to_id(self, group: str, token: int) -> int:
        """Return the id of an index into the codebook of a spectrum group.

        Raises:
            ValueError: the group is unknown or the index is not in [0, v_spectra).
        """
        if group not in self.spectrum_groups:
            raise ConfigError(
                f" is not a spectrum group; {nearest(group, self.spectrum_groups)}", argument="group", value=group
            )
        return self.base_spectrum[group] + _inside(f"token of {group}", token, self.v_spectra)

    def type_of(self, id: int) -> int:
        """Return the type of an id: a special id is its own type, 5 image, 6 scalar, 7 + the group's index.

        Raises:
            ValueError: the id is not in [0, vocab_size).

        Example:
            >>> vocab = build_vocab_spec()
            >>> [vocab.type_of(id) for id in (0, 4, 5, 2053, 3077, 13316)]
            [0, 4, 5, 6, 7, 11]
        """
        return int(self.types_of(torch.tensor(_inside("id", id, self.vocab_size))))

    def types_of(self, ids: Tensor) -> Tensor:
        """Return the types of ids as a long tensor of the same shape and device.

        Ids outside the vocabulary are not checked for, since that would synchronise with the device.
        """
        special_or_image = ids.clamp(max=IMAGE_TYPE)
        group = torch.div(ids - self.first_spectrum_id, self.v_spectra, rounding_mode="floor")
        return special_or_image + (ids >= self.base_scalar) + (group + 1).clamp(min=0)


@checked
def build_vocab_spec(
    v_image: int = 2048,
    v_scalar: int = 1024,
    v_spectra: int = 2048,
    spectrum_groups: Sequence[str] | None = None,
    *,
    scalar_bins: int | None = None,
) -> VocabSpec:
    """Build the vocabulary of images, scalars and spectra, and log the layout of the scalar ids.

    Args:
        v_image: size of the image codebook.
        v_scalar: number of ids of all scalar columns together.
        v_spectra: number of ids per spectrum group.
        spectrum_groups: group names, in the order of their ids; None uses Gaia XP (BP, RP) and DESI (B, R, Z).
        scalar_bins: number of ids per column; None uses 1024 if that divides ``v_scalar``, else a single column.

    Raises:
        ConfigError: a size is below 1, a group is named twice, or the columns do not fill ``v_scalar``.

    Example:
        >>> vocab = build_vocab_spec()
        >>> vocab.vocab_size, vocab.base_spectrum["desi_z"]
        (13317, 11269)
        >>> build_vocab_spec(v_scalar=56320).n_columns
        55
    """
    groups: Any = SPECTRUM_GROUPS if spectrum_groups is None else spectrum_groups
    if scalar_bins is None:
        scalar_bins = 1024 if isinstance(v_scalar, int) and v_scalar % 1024 == 0 and v_scalar > 0 else v_scalar
    vocab = VocabSpec(v_image, v_scalar, v_spectra, groups, scalar_bins)
    logger.info(
        "vocabulary of %d ids: %d image, %d scalar (%d columns of %d bins), %d spectrum groups of %d",
        vocab.vocab_size, v_image, v_scalar, vocab.n_columns, scalar_bins, len(groups), v_spectra,
    )  # fmt: skip
    return vocab


def _inside(what: str, value: int, size: int) -> int:
    if isinstance(value, bool) or not 0 <= value < size:
        raise ConfigError(f"{what} {value!r} is out of range: it must lie in [0, {size})")
    if value != int(value):
        raise ConfigError(f"{what} {value!r} is not an integer; give the index of a codebook entry")
    return int(value)
