"""The part of every masked autoencoder that draws a mask where none is given."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from treadle.spectra.encoder import check_input


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


class CountedMasksAutoencoder(MaskedAutoencoder):
    """Masked autoencoder that hides the same number of equal parts in every row, so that the host knows their count.

    A subclass has an ``encoder`` that takes ``visible_count``, and decodes its latent in ``_decode``.
    """

    takes_counted_mask = True

    seq_len: int
    n_mask: int
    encoder: nn.Module

    def forward(
        self,
        x: Tensor,
        visible_mask: Tensor | None = None,
        *,
        n_mask: int | None = None,
        generator: torch.Generator | None = None,
        visible_count: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Encode the visible channels of ``x`` and reconstruct all of them.

        Args:
            x: (B, L) spectra.
            visible_mask: (B, L) bool, True = seen; a row may be all False. None draws one, which needs no read of the
                device by the host; a given mask is counted once. Of patches each is all True or all False.
            n_mask: Blocks or patches to hide in the drawn mask, 0 to all; None means the model's ``n_mask``. Not used
                when ``visible_mask`` is given.
            generator: CPU generator of the draw; None takes torch's global CPU generator.
            visible_count: The number of True in every row of a given mask, if the caller knows it; it is trusted.

        Returns:
            ``x_recon`` (B, L), ``z`` (B, Z), and the ``visible_mask`` (B, L) that was used. Under autocast ``x_recon``
            has the lower precision.

        Raises:
            ValueError: When a shape, the mask's dtype or ``n_mask`` is wrong.
        """
        check_input(x, visible_mask, self.seq_len)
        if visible_mask is None:
            visible_mask = self.make_visible(x.shape[0], n_mask=n_mask, device=x.device, generator=generator)
            visible_count = self.visible_count(n_mask)
        z = self.encoder(x, visible_mask, visible_count=visible_count)
        return self._decode(z), z, visible_mask

    def visible_count(self, n_mask: int | None = None) -> int | None:
        """Return how many channels of each row a drawn mask leaves visible; ``n_mask`` as in :meth:`make_visible`.

        None where a subclass draws its masks in another way.
        """
        if type(self).make_visible is not MaskedAutoencoder.make_visible:
            return None
        parts = self._num_parts()
        return (parts - (self.n_mask if n_mask is None else n_mask)) * (self.seq_len // parts)

    def _num_parts(self) -> int:
        raise NotImplementedError

    def _decode(self, z: Tensor) -> Tensor:
        raise NotImplementedError
