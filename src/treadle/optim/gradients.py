"""Gradients of a step: division, norm and clipping, including sharded gradients."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from treadle.distributed import is_dtensor, local
from treadle.nested import elements

_WHOLE = {Tensor}
_GROUPED = ("cpu", "cuda")  # devices with multi-tensor (foreach) kernels
_kind_of = operator.attrgetter("dtype", "device", "layout", "requires_grad")


def are_whole(grads: Sequence[Tensor]) -> bool:
    """Return whether all gradients are plain tensors, neither sharded nor of another class.

    Example:
        >>> are_whole([torch.ones(1), torch.ones(2)])
        True
    """
    return _WHOLE.issuperset(map(type, grads))  # one check for all of them; a model has many


class Gradients(list[Tensor]):
    """Gradients of a step, inspected once for several functions.

    Attributes:
        alike: the result of :func:`are_alike`; None before.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> weight.grad = torch.zeros(2)
        >>> Gradients.of(torch.optim.SGD([weight], lr=1.0))
        [tensor([0., 0.])]
    """

    alike: bool | None = None

    @classmethod
    def of(cls, optimizer: Optimizer) -> Gradients:
        """Return the existing gradients of an optimizer's parameters, in order."""
        groups = optimizer.param_groups
        return cls([grad for group in groups for p in group["params"] if (grad := p.grad) is not None])


def are_alike(grads: Sequence[Tensor]) -> bool:
    """Return whether all gradients are plain, detached tensors of one dtype and device: torch makes one group.

    Then the computation takes three kernels; grouping the gradients would take half of the time of a small model.

    Example:
        >>> are_alike([torch.ones(1), torch.ones(2)]), are_alike([torch.ones(1), torch.ones(1).double()])
        (True, False)
    """
    known: bool | None = getattr(grads, "alike", None)
    if known is None:
        kinds = set(map(_kind_of, grads))
        known = len(kinds) == 1 and are_whole(grads)
        if known:
            _, device, layout, requires_grad = kinds.pop()
            known = device.type in _GROUPED and layout == torch.strided and not requires_grad
        if type(grads) is Gradients:
            grads.alike = known
    return known


class Inverse(NamedTuple):
    """Divisor given by its inverse: 0-d float32, on the device of the dividend."""

    factor: Tensor


def divide_(grads: Sequence[Tensor], divisor: float | Tensor | Inverse | None) -> None:
    """Divide gradients in place; None is a no-op."""
    if divisor is None or not grads:
        return
    owned = [local(grad) for grad in grads]
    with torch.no_grad():
        if isinstance(divisor, Inverse):
            torch._foreach_mul_(owned, divisor.factor)
        elif isinstance(divisor, Tensor):  # with one tensor for all, torch would multiply by the inverse on CUDA
            torch._foreach_div_(owned, [divisor.to(device=grads[0].device, dtype=torch.float32)] * len(grads))
        else:
            torch._foreach_div_(owned, divisor)


def total_norm(grads: list[Tensor]) -> Tensor:
    """Return the 2-norm over all gradients, including all shards of sharded ones.

    With sharded gradients it is a collective that returns the same number on every rank.

    Example:
        >>> total_norm([torch.tensor([3.0]), torch.tensor([4.0])])
        tensor(5.)
    """
    if are_alike(grads):
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2.0)), 2.0)
        return norm
    if not are_whole(grads):
        return _norm_over_ranks(grads)
    try:
        return get_total_norm(grads)
    except NotImplementedError:  # a sparse gradient, which is rare: no check in every step
        return get_total_norm([elements(grad) for grad in grads])


@torch.no_grad()
def _norm_over_ranks(grads: Sequence[Tensor]) -> Tensor:
    by_mesh: dict[Any, list[Tensor]] = {}
    for grad in grads:
        by_mesh.setdefault(grad.device_mesh if is_dtensor(grad) else None, []).append(grad)  # type: ignore[attr-defined]
    norms = [get_total_norm(some) for some in by_mesh.values()]
    whole = [norm.full_tensor() if is_dtensor(norm) else norm for norm in norms]  # type: ignore[attr-defined]
    return whole[0] if len(whole) == 1 else get_total_norm(whole)


class _Part(NamedTuple):
    grad: Tensor


def clip_(grads: list[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients in place to a total norm of at most ``max_norm``, as torch does.

    Args:
        grads: whole or sharded gradients.
        max_norm: maximal norm, > 0.
        norm: result of :func:`total_norm`.

    Example:
        >>> grads = [torch.tensor([3.0, 4.0])]
        >>> clip_(grads, 1.0, total_norm(grads)); grads[0]
        tensor([0.6000, 0.8000])
    """
    if are_alike(grads):
        inverse = torch.reciprocal(norm + 1e-6)  # torch multiplies by this
        torch._foreach_mul_(grads, torch.clamp(inverse if max_norm == 1 else inverse * max_norm, max=1.0))
        return
    with torch.no_grad():
        parts: Any = [_Part(local(grad)) for grad in grads]  # torch's function reads parameters' gradients
    clip_grads_with_norm_(parts, max_norm, norm)


@torch.no_grad()
def clip_values_(grads: Sequence[Tensor], limit: float) -> None:
    """Clamp every element of the gradients to [-limit, limit] in place, as torch does.

    Args:
        grads: whole or sharded gradients; each rank clamps its shards.
        limit: maximal absolute value, > 0.

    Example:
        >>> grads = [torch.tensor([3.0, -0.5])]
        >>> clip_values_(grads, 1.0); grads[0]
        tensor([ 1.0000, -0.5000])
    """
    owned = [elements(local(grad)) for grad in grads]
    torch._foreach_clamp_min_(owned, -limit)
    torch._foreach_clamp_max_(owned, limit)
