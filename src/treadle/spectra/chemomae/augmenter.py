"""Augmentation of chemomae 0.2: random shifts and noise along the sphere, each for a fraction of the rows.

The operations and random draws follow chemomae's order, so that a seed reproduces its spectra on the CPU.

Shapes: B = rows, L = channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from treadle.errors import ConfigError
from treadle.errors.arguments import check_within, checked

Range = tuple[float, float]


@checked
@dataclass(frozen=True)
class SpectraAugmenterConfig:
    """Settings of :class:`SpectraAugmenter`.

    Raises:
        ConfigError: a probability is outside [0, 1], or a range is empty or not finite.

    Example:
        >>> SpectraAugmenterConfig(noise_prob=0.0).shift_delta_range
        (-2.0, 2.0)
    """

    shift_prob: float = 0.5
    """Probability that a row is shifted."""
    shift_delta_range: Range = (-2.0, 2.0)
    """In channels; a positive shift moves features to higher channels."""
    noise_prob: float = 0.5
    """Probability that a row is rotated towards a random direction."""
    noise_angle_deg_range: Range = (0.5, 3.0)
    """In degrees, within [0, 180]."""
    shuffle_order_per_batch: bool = True
    """Draw the order of the two operations once per batch."""
    recenter_after_each_op: bool = True
    """Subtract the mean of each row after each operation."""
    renorm_to_input_norm: bool = True
    """Restore the norm of each row after each operation."""
    eps: float = 1e-8
    """Norms up to this value count as zero."""

    def __post_init__(self) -> None:
        check_within("[0, 1]", shift_prob=self.shift_prob, noise_prob=self.noise_prob)
        for name in ("shift_delta_range", "noise_angle_deg_range"):
            ends = getattr(self, name)
            if len(ends) != 2 or not all(map(math.isfinite, ends)) or ends[0] > ends[1]:
                raise ConfigError("must be two finite numbers, the lower first", argument=name, value=ends)
        low, high = self.noise_angle_deg_range
        if low < 0.0 or high > 180.0:
            raise ConfigError("must lie in [0, 180]", argument="noise_angle_deg_range", value=(low, high))
        check_within("(0, inf)", eps=self.eps)


class SpectraAugmenter(nn.Module):
    """Random shifts and rotations of rows in training mode; in eval mode the input is returned unchanged.

    Args:
        config: settings; None uses the defaults.
        generator: generator for sampling, on the device of the spectra; None uses torch's global one.

    Raises:
        TypeError: ``generator`` is of another type.

    Example:
        >>> augment = SpectraAugmenter(SpectraAugmenterConfig(shift_prob=1.0))
        >>> augment(torch.randn(4, 16)).shape
        torch.Size([4, 16])
    """

    @checked
    def __init__(
        self, config: SpectraAugmenterConfig | None = None, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.config = SpectraAugmenterConfig() if config is None else config
        self.generator = generator

    def forward(self, x: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Augment the rows of ``x``, (B, L) floating with B of at least 1 and L of at least 2 in training mode.

        Raises:
            TypeError: ``x`` is not a floating tensor.
            ValueError: its shape is wrong, or the generator is on another device.
        """
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError("x must be a floating tensor (B, L)")
        if x.dim() != 2:
            raise ValueError(f"x has shape {tuple(x.shape)} but must be (B, L)")
        if not self.training:
            return x
        if len(x) < 1 or x.shape[1] < 2:
            raise ValueError(f"x has shape {tuple(x.shape)} but needs a row and 2 channels")
        draws = self.generator if generator is None else generator
        if draws is not None and torch.device(draws.device).type != x.device.type:
            raise ValueError(f"generator is on {draws.device}, x on {x.device}; they must be together")
        steps = [self._shift, self._noise]
        if self.config.shuffle_order_per_batch:
            order = torch.randperm(2, device=x.device, generator=draws).tolist()
            steps = [steps[number] for number in order]
        for step in steps:
            x = step(x, draws)
        return x

    def _shift(self, x_BL: Tensor, draws: torch.Generator | None) -> Tensor:
        rows, kind = len(x_BL), torch.promote_types(x_BL.dtype, torch.float32)
        chosen_B = torch.rand(rows, device=x_BL.device, generator=draws) < self.config.shift_prob
        if not bool(chosen_B.any()):
            return x_BL
        delta_B = torch.empty(rows, device=x_BL.device, dtype=kind)
        delta_B.uniform_(*self.config.shift_delta_range, generator=draws)
        before = x_BL[chosen_B]
        after = self._back_on_sphere(_shifted(before, delta_B[chosen_B]), before)
        return x_BL.masked_scatter(chosen_B[:, None].expand_as(x_BL), after)

    def _noise(self, x_BL: Tensor, draws: torch.Generator | None) -> Tensor:
        chosen_B = torch.rand(len(x_BL), device=x_BL.device, generator=draws) < self.config.noise_prob
        if not bool(chosen_B.any()):
            return x_BL
        towards_BL = torch.randn(x_BL.shape, device=x_BL.device, dtype=x_BL.dtype, generator=draws)
        after = self._turned(x_BL[chosen_B], towards_BL[chosen_B], draws)
        return x_BL.masked_scatter(chosen_B[:, None].expand_as(x_BL), after)

    def _turned(self, base_BL: Tensor, towards_BL: Tensor, draws: torch.Generator | None) -> Tensor:
        eps = self.config.eps
        tangent = towards_BL - towards_BL.mean(dim=1, keepdim=True)
        along = (tangent * base_BL).sum(dim=1, keepdim=True) / base_BL.square().sum(dim=1, keepdim=True).clamp_min(eps)
        tangent = tangent - along * base_BL
        length_B1 = torch.linalg.vector_norm(tangent, dim=1, keepdim=True)
        turns_B1 = length_B1 > eps
        if not bool(turns_B1.any()):
            return base_BL
        norm_B1 = torch.linalg.vector_norm(base_BL, dim=1, keepdim=True).clamp_min(eps)
        angle_B = torch.empty(len(base_BL), device=base_BL.device, dtype=base_BL.dtype)
        angle_B.uniform_(*self.config.noise_angle_deg_range, generator=draws)
        angle_B1 = (angle_B * (math.pi / 180.0))[:, None]
        unit = base_BL / norm_B1
        turned = norm_B1 * (angle_B1.cos() * unit + angle_B1.sin() * tangent / length_B1.clamp_min(eps))
        return self._back_on_sphere(torch.where(turns_B1, turned, base_BL), base_BL)

    def _back_on_sphere(self, x_BL: Tensor, before_BL: Tensor) -> Tensor:
        if self.config.recenter_after_each_op:
            x_BL = x_BL - x_BL.mean(dim=1, keepdim=True)
        if not self.config.renorm_to_input_norm:
            return x_BL
        eps = self.config.eps
        wanted_B1 = torch.linalg.vector_norm(before_BL, dim=1, keepdim=True).clamp_min(eps)
        norm_B1 = torch.linalg.vector_norm(x_BL, dim=1, keepdim=True)
        return torch.where(norm_B1 <= eps, before_BL, x_BL * (wanted_B1 / norm_B1.clamp_min(eps)))


def _shifted(x_BL: Tensor, delta_B: Tensor) -> Tensor:
    """Return the value at channel i - delta for each channel i, interpolated linearly and clamped at the edges."""
    last = x_BL.shape[1] - 1
    place_BL = torch.arange(last + 1, device=x_BL.device, dtype=delta_B.dtype) - delta_B[:, None]
    floor_BL = place_BL.floor()
    left, right = (floor_BL.long() + offset for offset in (0, 1))
    share = (place_BL - floor_BL).clamp(0.0, 1.0)
    mixed = (1.0 - share) * x_BL.gather(1, left.clamp(0, last)) + share * x_BL.gather(1, right.clamp(0, last))
    return mixed.to(x_BL.dtype)
