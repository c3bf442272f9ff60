"""Training helpers: parameter counts, durations, gradient statistics, and fast GPU kernels."""

from __future__ import annotations

import logging
import math

import torch
from torch import nn

from treadle.errors.arguments import check_within, checked

logger = logging.getLogger("treadle.astro")


@checked
def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return the numbers of parameters and of trainable parameters of a model; shared ones are counted once.

    Example:
        >>> count_parameters(nn.Linear(10, 5))
        (55, 55)
    """
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def format_time(seconds: float) -> str:
    """Format a duration in hours, minutes and whole seconds, without leading zero units.

    Raises:
        ConfigError: the duration is negative or not finite.

    Example:
        >>> format_time(45), format_time(125), format_time(3665)
        ('45s', '2m 5s', '1h 1m 5s')
    """
    check_within("[0, inf)", seconds=seconds)
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes}m {rest}s"
    return f"{minutes}m {rest}s" if minutes else f"{rest}s"


def log_gradient_stats(model: nn.Module) -> dict[str, float]:
    """Log and return gradient statistics after a backward pass, with one device synchronisation.

    Returns:
        ``grad_norm``, the total 2-norm, and ``grad_mean``, ``grad_max``, ``grad_min`` over all entries. For a model
        without gradients the norm is 0 and the others are NaN.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> model(torch.tensor([[3.0, -4.0]])).sum().backward()
        >>> log_gradient_stats(model)
        {'grad_norm': 5.0, 'grad_mean': -0.5, 'grad_max': 3.0, 'grad_min': -4.0}
    """
    gradients = [p.grad.detach().float() for p in model.parameters() if p.grad is not None and p.grad.numel()]
    names = ("grad_norm", "grad_mean", "grad_max", "grad_min")
    values = [0.0, math.nan, math.nan, math.nan]
    if gradients:
        count = sum(gradient.numel() for gradient in gradients)
        values = torch.stack([
            torch.nn.utils.get_total_norm(gradients),
            torch.stack([gradient.sum() for gradient in gradients]).sum() / count,
            torch.stack([gradient.max() for gradient in gradients]).max(),
            torch.stack([gradient.min() for gradient in gradients]).min(),
        ]).tolist()  # fmt: skip
    stats = dict(zip(names, values, strict=True))
    logger.info("gradients: %s", ", ".join(f"{name} {value:.4g}" for name, value in stats.items()))
    return stats


def configure_cuda_performance() -> None:
    """Enable TF32 matrix products and the flash and memory-efficient attention kernels for the whole process.

    The math attention kernel stays enabled for inputs that the others do not support. A no-op without CUDA.

    Example:
        >>> configure_cuda_performance()
    """
    if not torch.cuda.is_available():
        return
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    torch.backends.cuda.enable_math_sdp(True)
