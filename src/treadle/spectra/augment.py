"""Augmentation of SNV-scaled spectra that stays on their sphere.

Shapes: B = rows, L = channels. After SNV every row has mean 0 and norm sqrt(L - 1).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from treadle.errors import ConfigError
from treadle.errors.arguments import check_within, checked
from treadle.spectra.arrays import centre


class SpectraAugmenter:
    """Augmentation that slightly shifts and rotates spectra on the sphere of SNV-scaled rows.

    Each row is shifted by a uniform fraction of channels (linear interpolation, edge values repeated; a positive shift
    moves features to higher channels), rotated by a uniform angle towards a random direction of the tangent space, then
    centred and rescaled to norm sqrt(L - 1). Constant rows become zeros. Use the augmented rows as the model's input
    and the original rows as its target.

    Args:
        max_shift: Maximum shift in channels in either direction, at least 0.
        max_angle: Maximum rotation in radians, 0 to pi.
        generator: CPU generator for sampling; None uses torch's global CPU generator, whose state a checkpoint stores.
            Sampling runs on the CPU, so a seed gives the same rows on every device.

    Raises:
        ValueError: When an argument is out of range.

    Example:
        >>> import torch
        >>> augment = SpectraAugmenter(max_shift=0.5, max_angle=0.1)
        >>> round(augment(torch.randn(4, 17)).norm(dim=1).mean().item(), 4)
        4.0
    """

    @checked
    def __init__(
        self, *, max_shift: float = 0.0, max_angle: float = 0.0, generator: torch.Generator | None = None
    ) -> None:
        check_within("[0, inf)", max_shift=max_shift)
        if not 0.0 <= max_angle <= math.pi:
            raise ConfigError(
                f"={max_angle} must lie between 0 and pi; it is an angle in radians", argument="max_angle"
            )
        if generator is not None and generator.device.type != "cpu":
            raise ValueError(
                f"generator is on {generator.device}, but draws are made on the CPU so that one seed "
                "gives the same rows on every device; pass torch.Generator() (a CPU generator) or None"
            )
        self.max_shift = max_shift
        self.max_angle = max_angle
        self.generator = generator

    def __call__(self, x: Tensor) -> Tensor:
        """Augment each row independently.

        Args:
            x: (B, L) floating, L of at least 2 (3 with rotation); not modified.

        Returns:
            (B, L) of the dtype and device of ``x``.

        Raises:
            ValueError: When the shape or dtype of ``x`` is wrong.
        """
        least = 3 if self.max_angle > 0.0 else 2
        if x.dim() != 2 or x.shape[1] < least or not x.is_floating_point():
            raise ValueError(
                f"x has shape {tuple(x.shape)} and dtype {x.dtype} but must be floating (B, L) with L of at "
                f"least {least}; shorter rows have no room for the change asked for"
            )
        work_BL = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.max_shift > 0.0:
            shift_B1 = self._uniform(work_BL, low=-self.max_shift, high=self.max_shift)
            work_BL = _shift_channels(work_BL, shift_B1)
        unit_BL = _unit(centre(work_BL)[0])
        if self.max_angle > 0.0:
            unit_BL = self._rotate(unit_BL)
        # Centred again: rounding in the rotation would otherwise leave a mean of about 1e-8.
        return (_unit(centre(unit_BL)[0]) * math.sqrt(x.shape[1] - 1)).to(x.dtype)

    def _rotate(self, unit_BL: Tensor) -> Tensor:
        noise_BL = torch.randn(unit_BL.shape, generator=self.generator, dtype=unit_BL.dtype).to(unit_BL.device)
        tangent_BL = noise_BL - noise_BL.mean(dim=1, keepdim=True)
        tangent_BL = _unit(tangent_BL - (tangent_BL * unit_BL).sum(dim=1, keepdim=True) * unit_BL)
        angle_B1 = self._uniform(unit_BL, low=0.0, high=self.max_angle)
        turned_BL = angle_B1.cos() * unit_BL + angle_B1.sin() * tangent_BL
        # A constant row has no direction to rotate from: it stays zero.
        return torch.where((unit_BL != 0).any(dim=1, keepdim=True), turned_BL, unit_BL)

    def _uniform(self, like_BL: Tensor, *, low: float, high: float) -> Tensor:
        draw_B1 = torch.rand(like_BL.shape[0], 1, generator=self.generator, dtype=like_BL.dtype)
        return (low + (high - low) * draw_B1).to(like_BL.device)


def _unit(x_BL: Tensor) -> Tensor:
    """Scale rows to norm 1; zero rows stay zero."""
    norm_B1 = torch.linalg.vector_norm(x_BL, dim=1, keepdim=True)
    unit_BL: Tensor = x_BL / norm_B1.clamp(min=torch.finfo(x_BL.dtype).tiny)
    return unit_BL


def _shift_channels(x_BL: Tensor, shift_B1: Tensor) -> Tensor:
    """Replace the value at channel i by that at i - shift; positions beyond an edge use the edge value."""
    last = x_BL.shape[1] - 1
    channels_L = torch.arange(last + 1, device=x_BL.device, dtype=x_BL.dtype)
    position_BL = (channels_L - shift_B1).clamp(0, last)
    left_BL = position_BL.long().clamp(max=last - 1)
    # lerp, since it returns a constant row bit-identical.
    shifted_BL: Tensor = torch.lerp(x_BL.gather(1, left_BL), x_BL.gather(1, left_BL + 1), position_BL - left_BL)
    return shifted_BL
