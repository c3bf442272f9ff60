"""Gradients of a step as a whole: divided, measured and clipped, also where they are spread over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from treadle.distributed import is_dtensor, local


@torch.no_grad()
def divide_(grads: Sequence[Tensor], divisor: float | Tensor | None) -> None:
    """Divides gradients in place, all in one call; None leaves them alone."""
    if divisor is None or not grads:
        return
    if isinstance(divisor, Tensor):
        divisor = divisor.to(device=grads[0].device, dtype=torch.float32)
    torch._foreach_div_([local(grad) for grad in grads], divisor)


@torch.no_grad()
def total_norm(grads: Sequence[Tensor]) -> Tensor:
    """Returns the 2-norm over all gradients: of those that are spread over ranks, over all their parts.

    With such gradients it is a collective, and the same number on every rank.

    Example:
        >>> total_norm([torch.tensor([3.0]), torch.tensor([4.0])])
        tensor(5.)
    """
    by_mesh: dict[Any, list[Tensor]] = {}
    for grad in grads:
        by_mesh.setdefault(grad.device_mesh if is_dtensor(grad) else None, []).append(grad)  # type: ignore[attr-defined]
    norms = [get_total_norm(some) for some in by_mesh.values()]
    whole = [norm.full_tensor() if is_dtensor(norm) else norm for norm in norms]  # type: ignore[attr-defined]
    return whole[0] if len(whole) == 1 else get_total_norm(whole)


@dataclass(frozen=True)
class _Part:
    grad: Tensor


@torch.no_grad()
def clip_(grads: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scales gradients in place to a total norm of at most ``max_norm``, by torch's rule.

    Args:
        grads: whole or spread over ranks.
        max_norm: > 0.
        norm: what :func:`total_norm` returned.

    Example:
        >>> grad = torch.tensor([3.0, 4.0])
        >>> clip_([grad], 1.0, total_norm([grad])); grad
        tensor([0.6000, 0.8000])
    """
    parts: Any = [_Part(local(grad)) for grad in grads]  # torch's function asks parameters for their gradients
    clip_grads_with_norm_(parts, max_norm, norm)
