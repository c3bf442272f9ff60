"""Conversion of records, settings and images to plain values for trackers, and errors for missing packages."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treadle.device.host_transfer import read_scalars
from treadle.errors import MissingExtraError
from treadle.nested import flatten_nested_dict


def hours(seconds: float) -> str:
    """Format a duration as ``H:MM:SS``, even if longer than a day.

    Example:
        >>> hours(21600.4), hours(100_000)
        ('6:00:00', '27:46:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def require(module: str, needed_by: str, *, extra: str = "track") -> Any:
    """Import an optional module.

    Args:
        module: dotted name.
        needed_by: name of the feature that needs it, for the message.
        extra: extra of treadle that installs it.

    Raises:
        ImportError: it is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise MissingExtraError(
            f"{needed_by} needs {module}, which cannot be imported ({error}); run: pip install 'treadle[{extra}]'",
            name=package,
        ) from error


def flat_values(records: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten records to ``a/b`` keys and read all their 0-d tensors, with one transfer per device.

    Example:
        >>> flat_values({"train": {"loss": torch.tensor(0.5, dtype=torch.bfloat16), "epoch": 3}, "note": "x"})
        {'train/loss': 0.5, 'train/epoch': 3, 'note': 'x'}
    """
    flat = {"/".join(path): value for path, value in flatten_nested_dict(records).items()}
    scalars = {key: value for key, value in flat.items() if isinstance(value, Tensor) and value.numel() == 1}
    flat.update(zip(scalars, read_scalars(scalars.values()).tolist(), strict=True))
    return {key: value.item() if isinstance(value, np.generic) else value for key, value in flat.items()}


def as_image(value: Any) -> Any:
    """Convert a PIL image, an (H, W), (H, W, 1), (H, W, 3) or (H, W, 4) uint8 array, or a CHW tensor to a PIL image.

    Float tensors must be in [0, 1].

    Raises:
        TypeError: it has another type.
    """
    if hasattr(value, "save") and hasattr(value, "size"):
        return value
    pixels = _chw_pixels(value) if isinstance(value, Tensor) else value
    if isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8:
        if pixels.ndim == 3 and pixels.shape[2] == 1:
            pixels = pixels[:, :, 0]
        if pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4)):
            return require("PIL.Image", "an image of pixels").fromarray(np.ascontiguousarray(pixels))
    shape = f" of {value.dtype} and shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    raise TypeError(
        f"an image is a PIL image, a uint8 array (H, W, 3) or a tensor (C, H, W); got a {type(value).__name__}{shape}"
    )


def _chw_pixels(tensor: Tensor) -> np.ndarray[Any, Any] | None:
    if tensor.dim() not in (2, 3):
        return None
    tensor = tensor.detach()
    if tensor.is_floating_point():
        tensor = tensor.float().nan_to_num(0.0).clamp(0, 1).mul(255).round().to(torch.uint8)
    array: np.ndarray[Any, Any] = (tensor if tensor.dim() == 2 else tensor.permute(1, 2, 0)).cpu().numpy()
    return array


def plain_settings(config: Any) -> dict[str, Any]:
    """Return settings as nested plain values, other types converted to strings; {} if not a mapping.

    Example:
        >>> plain_settings({"lr": 0.1, "model": {"act": torch.nn.ReLU(), "widths": (8, 8)}})
        {'lr': 0.1, 'model': {'act': 'ReLU()', 'widths': '(8, 8)'}}
    """
    if not isinstance(config, Mapping):
        return {}
    return {str(key): _plain(value) for key, value in config.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return plain_settings(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def flat_settings(config: Any) -> dict[str, Any]:
    """Return settings as plain values under ``a/b`` keys.

    Example:
        >>> flat_settings({"lr": 0.1, "model": {"width": 8}})
        {'lr': 0.1, 'model/width': 8}
    """
    return {"/".join(path): value for path, value in flatten_nested_dict(plain_settings(config)).items()}
