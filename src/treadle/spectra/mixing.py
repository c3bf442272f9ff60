"""Augmentation by mixing neighbouring spectra, like unresolved pairs of stars."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from treadle.errors import ConfigError
from treadle.errors.arguments import check_least, check_within, checked


class MixedSpectra(Dataset[Tensor]):
    """Data set of spectra, some mixed with one of their nearest neighbours, which torch's generator draws.

    A mixture is ``x + a (neighbour - x)`` with ``a`` uniform in [0, 1], centred and rescaled to standard deviation 1.

    Args:
        spectra: (N, L) after SNV.
        share: Probability that a spectrum is mixed, 0 to 1.
        neighbours: Number of nearest neighbours to draw from, at most N - 1.
        repeats: Passes over the spectra per epoch.

    Example:
        >>> spectra = MixedSpectra(torch.randn(20, 8), share=0.5, neighbours=3, repeats=2)
        >>> len(spectra), spectra[39].shape, len(spectra.__getitems__([0, 20]))
        (40, torch.Size([8]), 2)
    """

    @checked
    def __init__(self, spectra: Tensor, *, share: float = 0.7, neighbours: int = 10, repeats: int = 1) -> None:
        check_within("[0, 1]", share=share)
        if not 1 <= neighbours < len(spectra):
            raise ConfigError(f"must be 1 to {len(spectra) - 1}", argument="neighbours", value=neighbours)
        check_least(1, repeats=repeats)
        self.spectra, self.share, self.repeats = spectra, share, repeats
        far = torch.cdist(spectra, spectra)
        far.fill_diagonal_(torch.inf)
        self.nearest = far.topk(neighbours, largest=False).indices

    def __len__(self) -> int:
        return self.repeats * len(self.spectra)

    def __getitem__(self, index: int) -> Tensor:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        """Return several spectra at once, as a DataLoader requests them."""
        rows_B = torch.tensor(indices) % len(self.spectra)
        draw = torch.rand(len(rows_B), 3)
        choice_B = (draw[:, 0] * self.nearest.shape[1]).long()
        other_BL = self.spectra[self.nearest[rows_B, choice_B]]
        part_B1 = torch.where(draw[:, 1:2] < self.share, draw[:, 2:], 0.0)
        mixed_BL = self.spectra[rows_B] + part_B1 * (other_BL - self.spectra[rows_B])
        centred_BL = mixed_BL - mixed_BL.mean(1, keepdim=True)
        deviation_B1 = centred_BL.square().mean(1, keepdim=True).sqrt()
        return list(torch.where(part_B1 > 0, centred_BL / deviation_B1.clamp(min=1e-6), mixed_BL))
