"""Comparison of plain trees and tensors: bitwise, described in words, and by digest."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

SCALARS = frozenset((bool, int, float, str, type(None)))
_SAMPLED = 4096  # elements of a tensor in a sample


def same(one: Any, other: Any) -> bool:
    """Return whether two plain trees are bitwise equal: types, keys, tensors with their dtypes; NaN equals NaN.

    Example:
        >>> same({"a": [1.0, torch.ones(1)]}, {"a": [1.0, torch.ones(1)]}), same(1, 1.0)
        (True, False)
    """
    return next(unequal(one, other), None) is None


def unequal(one: Any, other: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the paths at which two plain trees differ, each with a description of the difference."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.dtype != other.dtype:
            yield path, f"{one.dtype} and {other.dtype}"
        elif one.shape != other.shape:
            yield path, f"shape {tuple(one.shape)} and {tuple(other.shape)}"
        elif not same_bits(one, other):
            yield path, "different values"
    elif isinstance(one, Mapping) and isinstance(other, Mapping):
        if one is other or _equal_dicts_of_scalars(one, other):
            return
        for key in one:
            if key not in other:
                yield f"{path}.{key}".lstrip("."), "missing after loading"
        for key, value in other.items():
            if key in one:
                yield from unequal(one[key], value, f"{path}.{key}".lstrip("."))
            else:
                yield f"{path}.{key}".lstrip("."), "missing in the file"
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            yield path, f"{len(one)} and {len(other)} items"
        elif one is not other and not _equal_scalars(one, other):
            for number, (left, right) in enumerate(zip(one, other, strict=True)):
                yield from unequal(left, right, f"{path}[{number}]")
    elif type(one) is not type(other := _plain_number(other)) or not (one == other or (one != one and other != other)):
        yield path, f"{one!r} and {other!r}"


def same_items(one: Any, other: Any) -> bool:
    """Return whether two lists hold the same objects, at C speed.

    Example:
        >>> same_items([1, None], [1, None]), same_items([1], [1, 2])
        (True, False)
    """
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _equal_scalars(one: Any, other: Any) -> bool:
    """Return True if two lists have the same items, or equal scalars, at C speed; False is inconclusive."""
    if same_items(one, other):
        return True
    kinds = list(map(type, one))
    return SCALARS.issuperset(kinds) and kinds == list(map(type, other)) and list(one) == list(other)


def _equal_dicts_of_scalars(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    """Return True if two dicts have equal scalars in the same order, at C speed; False is inconclusive."""
    return list(one) == list(other) and _equal_scalars(list(one.values()), list(other.values()))


def _plain_number(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def digest(tree: Any) -> str:
    """Return a digest of a plain tree, for comparison between processes.

    Example:
        >>> digest({"a": [1, torch.ones(1)]}) == digest({"a": [1, torch.zeros(1)]})
        False
    """
    found = hashlib.blake2b(digest_size=8)
    waiting = [tree]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            value = value.to_dense() if value.is_sparse else value
            found.update(f"{value.dtype}{tuple(value.shape)}".encode())
            found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, Mapping):
            waiting += [part for pair in value.items() for part in pair]
        elif isinstance(value, list) and not SCALARS.issuperset(map(type, value)):
            waiting += value
        else:
            found.update(f"{type(value).__name__}{value!r};".encode())
    return found.hexdigest()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of the same dtype and shape are equal, on any devices; NaN equals NaN."""
    one, other = one.detach(), other.detach().to(one.device)
    if one.is_sparse or other.is_sparse:
        one, other = one.to_dense(), other.to_dense()
    if torch.equal(one, other):
        return True
    nan = one.is_floating_point() or one.is_complex()
    return nan and bool(((one == other) | (one.isnan() & other.isnan())).all())


def sample(tensor: Tensor, count: int = _SAMPLED) -> Any:
    """Return the bytes of some elements of a tensor, or of all of a small one; None if it has no data.

    Writes through ``.data`` change them, but not the tensor's version counter.

    Example:
        >>> sample(torch.ones(2)) == sample(torch.ones(2)), sample(torch.ones(1, device="meta"))
        (True, None)
    """
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
        return None
    if tensor.is_quantized or not tensor.numel():
        return None
    elements = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // count)]
    elements = elements.resolve_conj().resolve_neg().contiguous().cpu()
    return elements.view(torch.uint8).numpy().tobytes()
