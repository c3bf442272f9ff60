"""Random masks over spectral channels (blocks, patches and bands), and base classes of masked autoencoders.

Shapes: B = rows, L = channels, N = blocks of L/N channels each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from treadle.errors import ConfigError
from treadle.spectra.encoder import check_input


def make_block_mask(
    batch_size: int,
    seq_len: int,
    n_blocks: int,
    n_mask: int,
    *,
    device: torch.device | str | int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a mask that hides ``n_mask`` of ``n_blocks`` equal blocks in every row.

    The mask is drawn on the CPU and then moved, so a seed gives the same mask on every device.

    Args:
        batch_size: Number of rows B, at least 0.
        seq_len: Number of channels L, a multiple of ``n_blocks``.
        n_blocks: Number of equal blocks, at least 1.
        n_mask: Blocks to hide in each row, 0 to ``n_blocks``.
        device: Device of the result; None means the CPU.
        generator: A CPU generator; None uses torch's global CPU generator.

    Returns:
        (B, L) bool, **True = hidden**. Each row has exactly ``n_mask * L / n_blocks`` True entries; the hidden blocks
        are drawn uniformly without replacement, independently for each row.

    Raises:
        ValueError: When a size is out of range, or the generator is not on the CPU.

    Example:
        >>> mask = make_block_mask(2, 12, 4, 1)
        >>> mask.shape, mask.sum(dim=1).tolist()
        (torch.Size([2, 12]), [3, 3])
    """
    if batch_size < 0:
        raise ConfigError(f"={batch_size} must be 0 or more; pass the number of rows", argument="batch_size")
    check_blocks(seq_len, n_blocks)
    check_mask_count(n_mask, n_blocks)
    if generator is not None and generator.device.type != "cpu":
        raise ValueError(
            f"generator is on {generator.device}, but masks are drawn on the CPU so that one seed gives "
            "the same mask on every device; pass torch.Generator() (a CPU generator) or None"
        )
    # float64: equal draws within a row, which would bias the choice, are practically impossible.
    draw_BN = torch.rand(batch_size, n_blocks, generator=generator, dtype=torch.float64)
    hidden_BN = _first_by_draw(draw_BN, n_mask)
    if device is None or torch.device(device).type == "cpu":
        return torch.from_numpy(np.repeat(hidden_BN, seq_len // n_blocks, axis=1))
    # Only the block choice is copied: 1/block-length of the bytes of the mask.
    return torch.from_numpy(hidden_BN).to(device, non_blocking=True).repeat_interleave(seq_len // n_blocks, dim=1)


def _first_by_draw(draw_BN: Tensor, count: int) -> NDArray[np.bool_]:
    """Return the mask of the smallest draws of each row.

    NumPy needs a third of the calls during which torch lets other threads of the process run Python.
    """
    values_BN = draw_BN.numpy()
    mask_BN = np.zeros(values_BN.shape, dtype=np.bool_)
    if count and len(mask_BN):
        mask_BN = values_BN <= np.partition(values_BN, count - 1, axis=1)[:, count - 1 : count]
        if np.count_nonzero(mask_BN) != len(mask_BN) * count:  # equal draws
            mask_BN[:] = False
            mask_BN[np.arange(len(mask_BN))[:, None], values_BN.argsort(axis=1)[:, :count]] = True
    return mask_BN


def make_patch_mask(
    batch_size: int,
    seq_len: int,
    n_patches: int,
    n_mask: int,
    *,
    device: torch.device | str | int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a mask that hides ``n_mask`` of ``n_patches`` equal patches in every row.

    The mask is drawn on the CPU and then moved. On the CPU a seed reproduces the masks of chemomae 0.2.

    Args:
        batch_size: Number of rows B.
        seq_len: Number of channels L, a multiple of ``n_patches``.
        n_patches: Number of equal patches.
        n_mask: Patches to hide in each row, 0 to ``n_patches``; 0 draws nothing.
        device: Device of the result; None means the CPU.
        generator: A CPU generator; None uses torch's global CPU generator.

    Returns:
        (B, L) bool, **True = hidden**.

    Raises:
        ValueError: When a size is out of range, or the generator is not on the CPU.

    Example:
        >>> make_patch_mask(2, 12, 4, 1).sum(dim=1).tolist()
        [3, 3]
    """
    check_patches(seq_len, n_patches, n_mask)
    if generator is not None and generator.device.type != "cpu":
        raise ValueError(f"generator is on {generator.device}, but masks are drawn on the CPU; pass torch.Generator()")
    hidden_BP = torch.zeros(batch_size, n_patches, dtype=torch.bool)
    if n_mask > 0:
        draw_BP = torch.rand(batch_size, n_patches, generator=generator)
        hidden_BP.scatter_(1, draw_BP.argsort(dim=1)[:, :n_mask], True)
    if device is not None:
        hidden_BP = hidden_BP.to(device, non_blocking=True)
    return hidden_BP.repeat_interleave(seq_len // n_patches, dim=1)


def check_blocks(seq_len: int, n_blocks: int) -> None:
    """Raise ValueError unless ``seq_len`` channels can be cut into ``n_blocks`` equal blocks."""
    if seq_len < 1:
        raise ConfigError(
            f"={seq_len} must be 1 or more; pass the number of channels of a spectrum", argument="seq_len"
        )
    if n_blocks < 1:
        raise ConfigError(f"={n_blocks} must be 1 or more; pass the number of equal blocks", argument="n_blocks")
    if seq_len % n_blocks != 0:
        raise ConfigError(
            f"={seq_len} must be a multiple of n_blocks={n_blocks}, as all blocks are equally long; "
            f"choose n_blocks among the divisors of {seq_len}",
            argument="seq_len",
        )


def check_mask_count(n_mask: int, n_blocks: int) -> None:
    """Raise ValueError unless ``n_mask`` of ``n_blocks`` blocks can be hidden."""
    if not 0 <= n_mask <= n_blocks:
        raise ConfigError(
            f"={n_mask} must lie between 0 and n_blocks={n_blocks}; it is a number of blocks, "
            "not of channels or a fraction",
            argument="n_mask",
        )


def make_band_mask(batch_size: int, seq_len: int, n_blocks: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Draw masks from one narrow band to all but one band.

    40 % of the rows hide an eighth to nearly all of the blocks; 30 % hide a band of 1/32 to 7/16 of the spectrum, half
    of them also a second one of up to 1/5; and 30 % hide all but a band of 3/32 to 7/16.

    Args:
        batch_size: Number of rows B, at least 0.
        seq_len: Number of channels L, a multiple of ``n_blocks``.
        n_blocks: Number of equal blocks, at least 1.
        generator: A CPU generator; None uses torch's global CPU generator.

    Returns:
        (B, L) bool on the CPU, **True = hidden**.

    Raises:
        ValueError: When a size is out of range, or the generator is not on the CPU.

    Example:
        >>> mask = make_band_mask(3, 64, 8, generator=torch.Generator().manual_seed(0))
        >>> mask.shape, mask.any(dim=1).all().item(), mask.all().item()
        (torch.Size([3, 64]), True, False)
    """
    make_block_mask(0, seq_len, n_blocks, 0, generator=generator)  # checks the arguments
    draw = torch.rand(batch_size, 8, generator=generator)
    order_BN = torch.rand(batch_size, n_blocks, generator=generator, dtype=torch.float64).argsort(dim=1).argsort(dim=1)
    count_B1 = (n_blocks * (0.125 + 0.8125 * draw[:, :1])).floor().clamp(min=1)
    blocks_BL = (order_BN < count_B1).repeat_interleave(seq_len // n_blocks, dim=1)

    def band(low: float, high: float, width_B: Tensor, place_B: Tensor) -> Tensor:
        channels_B1 = (seq_len * (low + (high - low) * width_B)).floor().clamp(min=1)[:, None]
        start_B1 = (place_B[:, None] * (seq_len - channels_B1 + 1)).floor()
        ordinal_L = torch.arange(seq_len)
        return (ordinal_L >= start_B1) & (ordinal_L < start_B1 + channels_B1)

    second_BL = band(0.03125, 0.2, draw[:, 3], draw[:, 4]) & (draw[:, 5:6] < 0.5)
    bands_BL = band(0.03125, 0.4375, draw[:, 1], draw[:, 2]) | second_BL
    all_but_BL = ~band(0.09375, 0.4375, draw[:, 1], draw[:, 2])
    kind_B1 = draw[:, 6:7]
    return torch.where(kind_B1 < 0.4, blocks_BL, torch.where(kind_B1 < 0.7, bands_BL, all_but_BL))


def check_patches(seq_len: int, n_patches: int, n_mask: int) -> None:
    """Raise ValueError unless ``n_mask`` of ``n_patches`` equal patches of ``seq_len`` channels can be hidden."""
    if n_patches < 1 or seq_len < 1 or seq_len % n_patches:
        raise ConfigError(
            f"={seq_len} must be a multiple of n_patches={n_patches}, as all patches are equally long; choose "
            f"n_patches among the divisors of {seq_len}",
            argument="seq_len",
        )
    if not 0 <= n_mask <= n_patches:
        raise ConfigError(
            f"={n_mask} must lie between 0 and n_patches={n_patches}; it is a number of patches", argument="n_mask"
        )


class MaskedAutoencoder(nn.Module):
    """Base class of masked autoencoders of spectra, with masks drawn on the CPU."""

    seq_len: int
    n_mask: int
    _make_mask: ClassVar[Callable[..., Tensor]]
    _parts: ClassVar[str]  # attribute with the number of blocks or patches
    _mixes_masks: ClassVar[bool] = False  # whether ``n_mask=None`` means a mixture of mask types

    def reconstruct(
        self,
        x: Tensor,
        visible_mask: Tensor | None = None,
        *,
        n_mask: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return only ``x_recon`` (B, L) of the forward pass; arguments and errors as for ``forward``."""
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
        """Draw a mask of visible channels.

        Args:
            batch_size: Number of rows B.
            n_mask: Blocks or patches to hide, 0 to all; None means the model's ``n_mask``, and for
                :class:`treadle.spectra.ResidualMAE` a mixture of blocks, bands, and all but a band.
            device: Device of the mask; None means the device of the model.
            generator: CPU generator for the mask; None uses torch's global CPU generator.

        Returns:
            (B, L) bool, **True = visible**.

        Raises:
            ValueError: When ``n_mask`` is out of range or the generator is not on the CPU.
        """
        return ~self._make_mask(
            batch_size,
            self.seq_len,
            getattr(self, self._parts),
            self.n_mask if n_mask is None and not self._mixes_masks else n_mask,
            device=next(self.parameters()).device if device is None else device,
            generator=generator,
        )


class CountedMasksAutoencoder(MaskedAutoencoder):
    """Base class of autoencoders that hide equally many equal parts in every row, so that the host knows their count.

    The encoder of a subclass accepts ``visible_count``.
    """

    takes_counted_mask = True

    encoder: nn.Module
    decoder: nn.Module

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
            visible_mask: (B, L) bool, True = visible; a row may be all False. None draws one without device
                synchronisation; a given mask is counted once. Each patch must be all True or all False.
            n_mask: Blocks or patches to hide in the drawn mask, 0 to all; None means the model's ``n_mask``. Ignored if
                ``visible_mask`` is given.
            generator: CPU generator for the mask; None uses torch's global CPU generator.
            visible_count: The number of True entries in every row of a given mask, if known; it is trusted.

        Returns:
            ``x_recon`` (B, L), ``z`` (B, Z), and the ``visible_mask`` (B, L) that was used. Under autocast ``x_recon``
            has the autocast dtype.

        Raises:
            ValueError: When a shape, the mask's dtype or ``n_mask`` is wrong.
        """
        check_input(x, visible_mask, self.seq_len)
        if visible_mask is None:
            visible_mask = self.make_visible(x.shape[0], n_mask=n_mask, device=x.device, generator=generator)
            visible_count = self.visible_count(n_mask)
        z = self.encoder(x, visible_mask, visible_count=visible_count)
        x_recon = self.decoder(z.to(next(self.decoder.parameters()).dtype))
        return x_recon, z, visible_mask

    def visible_count(self, n_mask: int | None = None) -> int | None:
        """Return the number of visible channels per row of a drawn mask; ``n_mask`` as in :meth:`make_visible`.

        None if a subclass draws its masks differently.
        """
        if type(self).make_visible is not MaskedAutoencoder.make_visible:
            return None
        parts: int = getattr(self, self._parts)
        return (parts - (self.n_mask if n_mask is None else n_mask)) * (self.seq_len // parts)
