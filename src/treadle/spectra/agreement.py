"""Local label agreement: chance-corrected frequency of equal labels among neighbouring pixels of a label map.

Shapes: H, W = height and width of the map.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from treadle.errors import ConfigError
from treadle.errors.arguments import check_least, checked

LabelMap = Tensor | NDArray[Any]


@dataclass(frozen=True)
class LLAWindowResult:
    """Agreement within one window.

    Attributes:
        window: width in pixels, odd.
        score: (raw - chance) / (1 - chance); NaN if undefined.
        raw_agreement: matching pairs / pairs; NaN without pairs.
        matching_pairs: ordered pairs of a pixel and a neighbour with the same label.
        valid_pairs: ordered pairs of valid pixels.
        pixels_with_neighbors: pixels with at least one valid neighbour.
        neighbor_pixel_fraction: their fraction of the valid pixels.
        raw_undefined_reason: ``"no_valid_neighbor_pairs"`` or None.
        undefined_reasons: why ``score`` is NaN; empty if it is not.
    """

    window: int
    score: float
    raw_agreement: float
    matching_pairs: int
    valid_pairs: int
    pixels_with_neighbors: int
    neighbor_pixel_fraction: float
    raw_undefined_reason: str | None
    undefined_reasons: tuple[str, ...]


@dataclass(frozen=True)
class LLAResult:
    """Agreement of one label map.

    Attributes:
        valid_pixels: number of valid pixels.
        class_labels: labels in use, ascending.
        class_counts: number of pixels of each label.
        occupancy: fraction of pixels of each label.
        used_classes: number of labels in use.
        maximum_occupancy: fraction of the most frequent label.
        chance_agreement: probability that two different pixels have the same label; NaN for one pixel.
        windows: one result per window, in the requested order.
    """

    valid_pixels: int
    class_labels: tuple[int, ...]
    class_counts: tuple[int, ...]
    occupancy: tuple[float, ...]
    used_classes: int
    maximum_occupancy: float
    chance_agreement: float
    windows: tuple[LLAWindowResult, ...]


@checked
@torch.no_grad()
def local_label_agreement(
    labels: LabelMap,
    valid_mask: LabelMap,
    *,
    windows: Sequence[int] = (3, 5, 9),
    device: torch.device | str | None = None,
    class_chunk: int | None = 16,
) -> LLAResult:
    """Measure how often neighbours share a label, relative to chance agreement given the label frequencies.

    Args:
        labels: (H, W) integers.
        valid_mask: (H, W) bool, or 0 and 1; True = valid.
        windows: neighbourhood widths, odd and distinct; a pixel is not its own neighbour.
        device: device for the computation; None uses that of the tensors, else the CPU.
        class_chunk: labels processed at once; None processes all.

    Returns:
        The counts and a score for each window.

    Raises:
        TypeError: a map is neither a tensor nor an array.
        ValueError: a shape, dtype or window is wrong, or no pixel is valid.

    Example:
        >>> labels = np.array([[0, 0, 1, 1]] * 4)
        >>> result = local_label_agreement(labels, np.ones_like(labels), windows=[3])
        >>> result.used_classes, round(result.windows[0].raw_agreement, 3)
        (2, 0.762)
    """
    widths = _checked_windows(windows)
    check_least(1, class_chunk=class_chunk)
    tensors = [value.device for value in (labels, valid_mask) if isinstance(value, Tensor)]
    where = torch.device(device) if device is not None else next(iter(tensors), torch.device("cpu"))
    map_HW = _integers("labels", labels).to(where)
    valid_HW = _binary(valid_mask, map_HW.shape).to(where)
    values, codes, counts = torch.unique(map_HW[valid_HW], return_inverse=True, return_counts=True)
    n = int(codes.numel())
    if n == 0:
        raise ValueError("valid_mask has no valid pixel")
    codes_HW = torch.full_like(map_HW, -1)
    codes_HW[valid_HW] = codes
    numbers = tuple(int(count) for count in counts.tolist())
    same = sum(count * (count - 1) for count in numbers)
    with torch.autocast(where.type, enabled=False):
        found = [_pairs(codes_HW, valid_HW, width, len(numbers), class_chunk) for width in widths]
    return LLAResult(
        valid_pixels=n,
        class_labels=tuple(int(value) for value in values.tolist()),
        class_counts=numbers,
        occupancy=tuple(count / n for count in numbers),
        used_classes=len(numbers),
        maximum_occupancy=max(numbers) / n,
        chance_agreement=same / (n * (n - 1)) if n > 1 else math.nan,
        windows=tuple(_result(width, *pairs, numbers) for width, pairs in zip(widths, found, strict=True)),
    )


def _pairs(codes_HW: Tensor, valid_HW: Tensor, width: int, num_classes: int, chunk: int | None) -> tuple[int, int, int]:
    """Return the numbers of matching pairs, of all pairs, and of pixels with a neighbour."""
    around_HW = _neighbours(valid_HW[None], width)[0]
    pairs = int(around_HW[valid_HW].sum())
    covered = int(((around_HW > 0) & valid_HW).sum())
    matching = 0
    size = chunk or num_classes
    for start in range(0, num_classes, size):
        numbers = torch.arange(start, min(start + size, num_classes), device=codes_HW.device)
        maps_KHW = codes_HW[None] == numbers[:, None, None]
        matching += int(_neighbours(maps_KHW, width)[maps_KHW].sum())
    return matching, pairs, covered


def _neighbours(maps_KHW: Tensor, width: int) -> Tensor:
    """Return the number of other True pixels in each pixel's window; exact, since the counts fit into float32."""
    kernel = torch.ones(1, 1, width, width, device=maps_KHW.device)
    kernel[0, 0, width // 2, width // 2] = 0
    with torch.backends.cudnn.flags(allow_tf32=False):
        sums = F.conv2d(maps_KHW[:, None].float(), kernel, padding=width // 2)
    return sums[:, 0].round().long()


def _result(width: int, matching: int, pairs: int, covered: int, counts: tuple[int, ...]) -> LLAWindowResult:
    n = sum(counts)
    reasons = []
    if n < 2:
        reasons.append("fewer_than_two_valid_pixels")
    if pairs == 0:
        reasons.append("no_valid_neighbor_pairs")
    if len(counts) == 1:
        reasons.append("single_class")
    score = math.nan
    if not reasons:  # in integers: near chance 1 the difference of two quotients would be mostly rounding error
        same, total = sum(count * (count - 1) for count in counts), n * (n - 1)
        score = (matching * total - pairs * same) / (pairs * (total - same))
    return LLAWindowResult(
        window=width,
        score=score,
        raw_agreement=matching / pairs if pairs else math.nan,
        matching_pairs=matching,
        valid_pairs=pairs,
        pixels_with_neighbors=covered,
        neighbor_pixel_fraction=covered / n,
        raw_undefined_reason=None if pairs else "no_valid_neighbor_pairs",
        undefined_reasons=tuple(reasons),
    )


def _checked_windows(windows: Sequence[int]) -> tuple[int, ...]:
    rule = "must be odd whole numbers >= 1, each once, with window^2 - 1 <= 2^24"
    try:
        widths = tuple(windows)
    except TypeError as error:
        raise ConfigError(rule, argument="windows", value=windows) from error
    whole = all(isinstance(width, (int, np.integer)) and not isinstance(width, bool) for width in widths)
    if not widths or not whole or any(width < 1 or width % 2 == 0 or width**2 - 1 > 2**24 for width in widths):
        raise ConfigError(rule, argument="windows", value=windows)
    if len(set(widths)) != len(widths):
        raise ConfigError(rule, argument="windows", value=windows)
    return tuple(int(width) for width in widths)


def _as_map(name: str, value: LabelMap) -> Tensor:
    if isinstance(value, np.ndarray):
        value = torch.as_tensor(np.array(value, order="C"))
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__} but must be an array or a tensor (H, W)")
    if value.dim() != 2:
        raise ValueError(f"{name} has shape {tuple(value.shape)} but must be (H, W)")
    return value.detach()


def _integers(name: str, value: LabelMap) -> Tensor:
    found = _as_map(name, value)
    if found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        raise ValueError(f"{name} has dtype {found.dtype} but must hold whole numbers")
    return found.long()


def _binary(value: LabelMap, shape: torch.Size) -> Tensor:
    mask = _as_map("valid_mask", value)
    whole = not (mask.is_floating_point() or mask.is_complex())
    if mask.shape != shape or not whole or not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(f"valid_mask must be bool, or 0 and 1, of the shape {tuple(shape)} of labels")
    return mask.bool()
