"""The part of every masked autoencoder that draws a mask where none is given."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MaskedAutoencoder(nn.Module):
    """Masked autoencoder of spectra; a subclass draws the hidden channels in ``_draw_hidden``."""

    def reconstruct(
        self,
        x: Tensor,
        visible_mask: Tensor | None = None,
        *,
        n_mask: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return only ``x_recon`` (B, L) of the forward pass; arguments and errors as there."""
        x_recon: Tensor = self(x, visible_mask, n_mask=n_mask, generator=generator)[0]
        return x_recon

    def make_visible(
        self,
        batch_size: int,
        *,
        n_mask: int | None = None,
        device: torch.device | str | int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw which channels are visible.

        Args:
            batch_size: Number of rows B.
            n_mask: Blocks or patches to hide, 0 to all; None means the model's ``n_mask``, and for
                :class:`treadle.spectra.ResidualMAE` a mixture of blocks, bands, and all but a band.
            device: Where the mask is put; None means the device of the model.
            generator: CPU generator of the draw; None takes torch's global CPU generator.

        Returns:
            (B, L) bool, **True = seen**.

        Raises:
            ValueError: When ``n_mask`` is out of range or the generator is not on the CPU.
        """
        where = next(self.parameters()).device if device is None else device
        return ~self._draw_hidden(batch_size, n_mask, where, generator)

    def _draw_hidden(
        self,
        batch_size: int,
        n_mask: int | None,
        device: torch.device | str | int,
        generator: torch.Generator | None,
    ) -> Tensor:
        raise NotImplementedError

    def _draws_own_masks(self) -> bool:
        """Return whether a subclass replaces :meth:`make_visible`, so that nothing is known of its masks."""
        return type(self).make_visible is not MaskedAutoencoder.make_visible
