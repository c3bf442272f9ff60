"""Data of ``treadle train spectra``: SNV-scaled SpeX spectra with disjoint splits by object."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from treadle.data import TensorLoader
from treadle.datasets import load_spex
from treadle.datasets.splits import Rows, object_groups, split_by_group
from treadle.runs.ranks import shared_rows
from treadle.runs.split import DataConfig
from treadle.spectra.preprocessing import SNVScaler


@dataclass(frozen=True)
class SpectraData:
    """Scaled spectra with their labels and the rows of each split."""

    x: npt.NDArray[np.float32]
    """(N, L) spectra after SNV: mean 0 and standard deviation 1 in every row."""
    wavelengths: npt.NDArray[np.float32]
    wavelength_unit: str
    spt: npt.NDArray[np.str_]
    spectral_class: npt.NDArray[np.str_]
    j_minus_k: npt.NDArray[np.float32]
    """(N,) colours computed from the spectra; those of the catalogue are wrong in some rows."""
    name: npt.NDArray[np.str_]
    groups: npt.NDArray[np.intp]
    """(N,) group numbers; rows of one group must stay in one split."""
    train: Rows
    val: Rows
    test: Rows

    @property
    def num_groups(self) -> int:
        """Number of objects."""
        return len(np.unique(self.groups))

    def loader(
        self,
        rows: Rows,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        device: torch.device | None = None,
    ) -> TensorLoader:
        """Return a loader over some rows, stored on ``device``; in distributed runs, this rank's part of a batch."""
        x = torch.from_numpy(self.x[rows])
        return shared_rows(x, batch_size, shuffle=shuffle, seed=seed, device=device)


def prepare_data(config: DataConfig) -> SpectraData:
    """Load SpeX, scale every spectrum by SNV and split by object.

    Raises:
        ConfigError: a split would be empty.
    """
    spex = load_spex()
    rows = config.rows_of(len(spex.spectra))
    spectra = spex.spectra[rows]
    groups = object_groups(spex.name[rows], spectra)
    train, val, test = split_by_group(
        groups, val_fraction=config.val_fraction, test_fraction=config.test_fraction, seed=config.split_seed
    )
    return SpectraData(
        x=np.asarray(SNVScaler().transform(spectra), dtype=np.float32),
        wavelengths=spex.wavelengths,
        wavelength_unit=spex.wavelength_unit,
        spt=spex.spt[rows],
        spectral_class=spex.spectral_class[rows],
        j_minus_k=spex.synthetic_j_minus_k[rows],
        name=spex.name[rows],
        groups=groups,
        train=train,
        val=val,
        test=test,
    )
