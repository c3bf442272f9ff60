"""The data of ``treadle train spectra``: SNV-scaled SpeX spectra, split so that no object is in two parts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, TensorDataset

from treadle.cli.spectra_config import DataConfig
from treadle.datasets import load_spex
from treadle.errors import ConfigError
from treadle.spectra.preprocessing import SNVScaler

_Rows = npt.NDArray[np.intp]


@dataclass(frozen=True)
class SpectraData:
    """Scaled spectra with their labels and the rows of each part."""

    x: npt.NDArray[np.float32]
    """(N, L) spectra after SNV: mean 0 and deviation 1 in every row."""
    wavelengths: npt.NDArray[np.float32]
    wavelength_unit: str
    spt: npt.NDArray[np.str_]
    spectral_class: npt.NDArray[np.str_]
    j_minus_k: npt.NDArray[np.float32]
    name: npt.NDArray[np.str_]
    groups: npt.NDArray[np.intp]
    """(N,) rows of one number must stay together."""
    train: _Rows
    val: _Rows
    test: _Rows

    @property
    def num_groups(self) -> int:
        """How many objects there are."""
        return len(np.unique(self.groups))

    def loader(self, rows: _Rows, batch_size: int, *, shuffle: bool = False) -> DataLoader[tuple[torch.Tensor, ...]]:
        """Returns a loader over some rows."""
        dataset = TensorDataset(torch.from_numpy(self.x[rows]))
        return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle)


def prepare_data(config: DataConfig) -> SpectraData:
    """Loads SpeX, scales every spectrum by SNV and deals the objects out.

    Raises:
        ConfigError: a part would be empty.
    """
    spex = load_spex()
    rows = np.arange(len(spex.spectra))
    if config.max_rows is not None and config.max_rows < len(rows):
        rows = np.unique(np.linspace(0, len(rows) - 1, config.max_rows).round().astype(np.intp))
    spectra = spex.spectra[rows]
    groups = object_groups(spex.name[rows], spectra)
    train, val, test = split_by_group(groups, config)
    return SpectraData(
        x=np.asarray(SNVScaler().transform(spectra), dtype=np.float32),
        wavelengths=spex.wavelengths,
        wavelength_unit=spex.wavelength_unit,
        spt=spex.spt[rows],
        spectral_class=spex.spectral_class[rows],
        j_minus_k=spex.j_minus_k[rows],
        name=spex.name[rows],
        groups=groups,
        train=train,
        val=val,
        test=test,
    )


def object_groups(names: npt.NDArray[np.str_], spectra: npt.NDArray[np.float32]) -> npt.NDArray[np.intp]:
    """Numbers the objects: rows of one name are one object, and so are rows whose spectra are the same to the bit.

    A dozen spectra of the set appear under two names, and a copy in another part would leak.

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


def split_by_group(groups: npt.NDArray[np.intp], config: DataConfig) -> tuple[_Rows, _Rows, _Rows]:
    """Deals whole groups out to training, validation and test.

    Raises:
        ConfigError: there are too few groups for these fractions.
    """
    names = np.random.default_rng(config.split_seed).permutation(np.unique(groups))
    num_val = max(1, round(config.val_fraction * len(names)))
    num_test = max(1, round(config.test_fraction * len(names)))
    if num_val + num_test >= len(names):
        raise ConfigError(
            f"data.val_fraction={config.val_fraction} and data.test_fraction={config.test_fraction} of {len(names)} "
            "objects leave none to train on; lower them or raise data.max_rows"
        )
    val = np.isin(groups, names[:num_val])
    test = np.isin(groups, names[num_val : num_val + num_test])
    return np.flatnonzero(~(val | test)), np.flatnonzero(val), np.flatnonzero(test)
