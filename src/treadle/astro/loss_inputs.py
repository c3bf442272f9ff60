"""Inputs of the losses besides logits and targets: settings and validated codebooks.

Shapes: G = groups of one modality, K = ids of one group, D = dimensions of a codebook's values.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Mapping
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treadle.astro.vocab import VocabSpec
from treadle.errors import ConfigError, refuse_unknown
from treadle.errors.arguments import check_within, checked

logger = logging.getLogger("treadle.astro")


@checked
@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Weights and sampling of the reconstruction terms.

    Attributes:
        enabled: whether there are reconstruction terms.
        sample_k: maximum number of positions per modality and term; spectrum groups share it.
        weight_image: weight of the image term; a term with weight 0 is not computed.
        weight_scalar: weight of the scalar term.
        weight_spectrum: weight of the spectrum term.

    Raises:
        ConfigError: a value is outside its range.

    Example:
        >>> LossConfig.read({"sample_k_per_modality": 64, "weight_image": 0.5}).sample_k
        64
    """

    enabled: bool = True
    sample_k: int = 4096
    weight_image: float = 0.1
    weight_scalar: float = 0.1
    weight_spectrum: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "sample_k", check_sample_k(self.sample_k))  # NumPy scalars become plain numbers
        for name in ("weight_image", "weight_scalar", "weight_spectrum"):
            check_within("[0, inf)", **{name: getattr(self, name)})
            object.__setattr__(self, name, float(getattr(self, name)))

    @classmethod
    def read(cls, config: Any) -> LossConfig:
        """Build settings from a mapping or dataclass with these fields; ``sample_k_per_modality`` aliases ``sample_k``.

        Raises:
            ConfigError: a key is unknown, ``sample_k`` is given twice with different values, or a value is out of
                range.
        """
        if config is None or isinstance(config, LossConfig):
            return config or cls()
        if dataclasses.is_dataclass(config) and not isinstance(config, type):
            config = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        if not isinstance(config, Mapping):
            raise ConfigError(
                f"a {type(config).__name__} is not a mapping; give a dict of loss settings or None", argument="config"
            )
        fields = [field.name for field in dataclasses.fields(cls)]
        refuse_unknown("loss config", config, [*fields, "sample_k_per_modality"])
        settings = dict(config)
        if "sample_k_per_modality" in settings:
            same = settings.pop("sample_k_per_modality")
            if settings.setdefault("sample_k", same) != same:
                raise ConfigError(
                    f" and sample_k_per_modality={same!r} are one setting; give one",
                    argument="sample_k",
                    value=settings["sample_k"],
                )
        return cls(**settings)

    def term_weights(self, vocab: VocabSpec) -> dict[str, float]:
        """Return the weights of ``img``, ``sca`` and ``spec``; 0 for a term that is disabled or has no ids."""
        spectrum = self.weight_spectrum if vocab.spectrum_groups else 0.0
        weights = {"img": self.weight_image, "sca": self.weight_scalar, "spec": spectrum}
        return {term: float(weight) if self.enabled else 0.0 for term, weight in weights.items()}


def check_sample_k(k: int) -> int:
    """Return k as an int if it is an integer >= 1.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(k, bool) or not isinstance(k, Integral) or k < 1:  # in each step: cheaper than check_whole
        raise ConfigError("at least one position must be drawn; give a whole number >= 1", argument="sample_k", value=k)
    return int(k)


@dataclasses.dataclass(frozen=True)
class Codebook:
    """Validated codebook of one modality, as returned by `prepare_codebooks`.

    Attributes:
        values_GKD: float32, each group centred: differences of expected and true values are unchanged, and more
            precise. Groups with fewer dimensions than the widest are zero-padded.
        num_dims: dimensions of each group before padding.
    """

    values_GKD: Tensor
    num_dims: tuple[int, ...]

    def to(self, device: torch.device | str) -> Codebook:
        """Return the codebook on a device."""
        return Codebook(self.values_GKD.to(device), self.num_dims)


class Codebooks(NamedTuple):
    """Codebooks of the three modalities, each possibly None."""

    image: Codebook | None = None
    spectrum: Codebook | None = None
    scalar: Codebook | None = None


@checked
def prepare_codebooks(
    vocab: VocabSpec,
    *,
    image: Any = None,
    spectrum: Any = None,
    scalar: Any = None,
    device: torch.device | str | None = None,
) -> Codebooks:
    """Validate codebooks against the vocabulary once, so that no step has to read their values again.

    The losses accept the result wherever they accept arrays.

    Args:
        vocab: the vocabulary.
        image: (v_image, D), a NumPy array or tensor.
        spectrum: a mapping from every group to (v_spectra, D of that group), or (groups, v_spectra, D) in the order of
            the vocabulary, or (v_spectra, D) for one group; several groups share it, with a warning.
        scalar: bin centres (v_scalar,) or (n_columns, n_bins).
        device: target device; None leaves them on the CPU or on their current device.

    Raises:
        ConfigError: the size of a codebook does not match its modality, its number of dimensions is wrong, or a value
            is not finite.

    Example:
        >>> from treadle.astro.vocab import build_vocab_spec
        >>> vocab = build_vocab_spec(2, 4, 2, ["a"], scalar_bins=2)
        >>> books = prepare_codebooks(vocab, image=[[0.0, 0.0], [2.0, 4.0]], scalar=[1.0, 3.0, 10.0, 30.0])
        >>> books.image.values_GKD.tolist(), books.scalar.values_GKD.shape
        ([[[-1.0, -2.0], [1.0, 2.0]]], torch.Size([2, 2, 1]))
    """

    codebooks = _prepared(vocab, (image, spectrum, scalar), device)
    if _is_shared(vocab, spectrum):
        _warn_shared(vocab.spectrum_groups)
    return codebooks


def needed_codebooks(
    vocab: VocabSpec,
    given: tuple[Any, Any, Any],
    weights: Mapping[str, float],
    device: torch.device,
    *,
    each_batch: bool = False,
) -> Codebooks:
    """Prepare the image, spectrum and scalar codebooks whose terms have a non-zero weight.

    With ``each_batch``, warn only once per vocabulary, since a loop passes the same one with every batch.
    """
    image, spectrum, scalar = (
        codebook if weights[term] else None for codebook, term in zip(given, ("img", "spec", "sca"), strict=True)
    )
    codebooks = _prepared(vocab, (image, spectrum, scalar), device)
    if _is_shared(vocab, spectrum) and not (each_batch and _was_checked(vocab)):
        _warn_shared(vocab.spectrum_groups)
    return codebooks


def _prepared(vocab: VocabSpec, given: tuple[Any, Any, Any], device: torch.device | str | None) -> Codebooks:
    def ready(given: Any, check: Any) -> Codebook | None:
        if given is None:
            return None
        codebook: Codebook = given if isinstance(given, Codebook) else check(vocab, given)
        return codebook if device is None else codebook.to(device)

    return Codebooks(*(ready(one, check) for one, check in zip(given, (_image, _spectrum, _scalar), strict=True)))


def _is_shared(vocab: VocabSpec, spectrum: Any) -> bool:
    """Return whether one table is shared by several groups."""
    if spectrum is None or isinstance(spectrum, (Mapping, Codebook)) or len(vocab.spectrum_groups) < 2:
        return False
    return np.ndim(spectrum) == 2


def _image(vocab: VocabSpec, given: Any) -> Codebook:
    return _codebook([_table("image_codebook", given, vocab.v_image)])


def _scalar(vocab: VocabSpec, given: Any) -> Codebook:
    centers = _finite("scalar_centers", given)
    layout = (vocab.n_columns, vocab.scalar_bins)
    if tuple(centers.shape) not in ((vocab.v_scalar,), layout):
        raise ConfigError(
            f"scalar_centers of shape {tuple(centers.shape)} disagrees with the vocabulary: give one centre for each "
            f"bin, ({vocab.v_scalar},) column after column, or {layout}"
        )
    return _codebook(list(centers.reshape(*layout, 1)))


def _spectrum(vocab: VocabSpec, given: Any) -> Codebook:
    groups = vocab.spectrum_groups
    if isinstance(given, Mapping):
        refuse_unknown("spectrum_codebook", given, groups)
        absent = [group for group in groups if group not in given]
        if absent:
            raise ConfigError(
                f"no codebook for {', '.join(absent)}; every group needs its own", argument="spectrum_codebook"
            )
        return _codebook([_table(f"spectrum_codebook[{group!r}]", given[group], vocab.v_spectra) for group in groups])
    tables = _finite("spectrum_codebook", given)
    if tables.dim() == 2:
        return _codebook([_table("spectrum_codebook", tables, vocab.v_spectra)] * len(groups))
    if tables.dim() != 3 or len(tables) != len(groups):
        raise ConfigError(
            f"spectrum_codebook of shape {tuple(tables.shape)}: give a mapping from each group to a table, or "
            f"(groups, ids, D) with the {len(groups)} groups of the vocabulary"
        )
    return _codebook(
        [
            _table(f"spectrum_codebook[{group!r}]", table, vocab.v_spectra)
            for group, table in zip(groups, tables, strict=True)
        ]
    )


_told: weakref.WeakValueDictionary[int, VocabSpec] = weakref.WeakValueDictionary()


def _was_checked(vocab: VocabSpec) -> bool:
    """Return whether this very object was checked before; an equal one may belong to another caller."""
    before = _told.get(id(vocab))
    _told[id(vocab)] = vocab
    return before is vocab


def _warn_shared(groups: tuple[str, ...]) -> None:
    logger.warning(
        "spectrum_codebook: one codebook is shared by the groups %s; expected spectra are only right if each group's "
        "tokens were made with it, else give one codebook for each group",
        ", ".join(groups),
    )


def _table(name: str, given: Any, num_ids: int) -> Tensor:
    values = _finite(name, given)
    if values.dim() != 2 or len(values) != num_ids or values.shape[1] == 0:
        raise ConfigError(f"{name} of shape {tuple(values.shape)}: it must be 2-D with the {num_ids} ids as rows")
    return values


def _finite(name: str, given: Any) -> Tensor:
    try:
        values = given if isinstance(given, Tensor) else torch.tensor(np.asarray(given))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"a {type(given).__name__} cannot be read as an array of numbers: {error}", argument=name
        ) from error
    if not (values.dtype.is_floating_point or values.dtype in (torch.int32, torch.int64)):
        raise ConfigError(f"{name} has dtype {values.dtype}; give floating-point values")
    if not bool(values.isfinite().all()):
        raise ConfigError(f"{name} has values that are not finite; refit or repair it before training")
    return values.detach()


def _codebook(tables_KD: list[Tensor]) -> Codebook:
    num_dims = tuple(table.shape[1] for table in tables_KD)
    values_GKD = torch.zeros(len(tables_KD), len(tables_KD[0]), max(num_dims), device=tables_KD[0].device)
    for values_KD, table_KD, width in zip(values_GKD, tables_KD, num_dims, strict=True):
        # In float64 where available: subtracting the mean of large values must not lose small differences.
        exact = table_KD if table_KD.device.type == "mps" else table_KD.double()
        values_KD[:, :width] = exact - exact.mean(0)
    return Codebook(values_GKD, num_dims)
