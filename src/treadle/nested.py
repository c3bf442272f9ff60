"""Nested containers of tensors and numbers: map, flatten, average."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")
_LEAVES = (float, int, tuple, Tensor)  # the usual ones: checking for a Mapping is slow
_SHOWN = 6  # parts of a container that a description shows


def map_nested_tensor(fn: Callable[[Tensor], Any], obj: T, *, special: Callable[[Any], Any] | None = None) -> T:
    """Apply ``fn`` to every tensor in dicts, lists, tuples, named tuples and dataclasses.

    Container types are kept, other values pass through, and the input is not changed.

    Args:
        fn: called with each tensor.
        obj: any nesting of containers.
        special: called with everything else, including containers, before recursion; its result is used unless it
            returns NotImplemented, which applies the rules above.

    Returns:
        A new nesting of the same types.

    Example:
        >>> import torch
        >>> map_nested_tensor(lambda t: t + 1, {"x": torch.zeros(1), "n": 3})
        {'x': tensor([1.]), 'n': 3}
    """
    return cast(T, _map(fn, obj, special))


def _map(fn: Callable[[Tensor], Any], obj: Any, special: Callable[[Any], Any] | None) -> Any:
    if isinstance(obj, Tensor):
        return fn(obj)
    if special is not None and (result := special(obj)) is not NotImplemented:
        return result
    if obj is None or isinstance(obj, (int, float, str)):
        return obj  # the usual leaves, before slower checks
    if isinstance(obj, tuple) and hasattr(obj, "_fields"):
        return type(obj)(*(_map(fn, value, special) for value in obj))
    if isinstance(obj, (list, tuple)):
        return type(obj)(_map(fn, value, special) for value in obj)
    if isinstance(obj, Mapping):
        items = {key: _map(fn, value, special) for key, value in obj.items()}
        return _like_mapping(obj, items)
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        # Neither the constructor nor the checks of the class run again; frozen classes and slots work too.
        clone = copy.copy(obj)
        for field in dataclasses.fields(obj):
            if hasattr(obj, field.name):
                object.__setattr__(clone, field.name, _map(fn, getattr(obj, field.name), special))
        return clone
    return obj


def _like_mapping(original: Any, items: dict[Any, Any]) -> Any:
    if type(original) is dict:
        return items
    try:
        return type(original)(items)
    except TypeError:  # a mapping with a different constructor, such as defaultdict
        clone = original.copy()
        clone.update(items)
        return clone


def flatten_nested_dict(d: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Flatten nested dicts into one dict keyed by the path.

    Example:
        >>> flatten_nested_dict({"a": {"b": 1}, "c": 2})
        {('a', 'b'): 1, ('c',): 2}
    """
    flat: dict[tuple[str, ...], Any] = {}
    _flatten(d, (), flat)
    return flat


def _flatten(d: Mapping[str, Any], above: tuple[str, ...], flat: dict[tuple[str, ...], Any]) -> None:
    for key, value in d.items():
        path = (*above, str(key))
        if not isinstance(value, _LEAVES) and isinstance(value, Mapping):
            _flatten(value, path, flat)
        else:
            flat[path] = value


def unflatten(flat: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """Invert :func:`flatten_nested_dict`.

    Example:
        >>> unflatten({("a", "b"): 1, ("c",): 2})
        {'a': {'b': 1}, 'c': 2}
    """
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        node = tree
        for depth, key in enumerate(path[:-1]):
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise TypeError(_both_kinds(path[: depth + 1]))
        if isinstance(node.get(path[-1]), dict):
            raise TypeError(_both_kinds(path))
        node[path[-1]] = value
    return tree


def _both_kinds(path: Sequence[str]) -> str:
    return f"record {'/'.join(path)!r} is a number in one record and a dict in another; use two names"


def key_average(
    records: Sequence[Mapping[str, Any]], *, skip_nan: bool = False, exclude_nan: bool = False
) -> dict[str, Any]:
    """Average nested dicts key by key, each key over the dicts that have it.

    Args:
        records: nested dicts of numbers or 0-d tensors.
        skip_nan: leave NaN values out of the mean; by default NaN propagates. A key that is always NaN stays NaN.
        exclude_nan: alias of ``skip_nan``, the name in mini and trainloop.

    Returns:
        A nested dict of floats; ``{}`` for no records.

    Raises:
        TypeError: a value is not a number, or a key is a number in one dict and a dict in another.

    Example:
        >>> key_average([{"loss": 1.0, "m": {"acc": 0.5}}, {"loss": 3.0, "m": {"acc": 1.0}}])
        {'loss': 2.0, 'm': {'acc': 0.75}}
    """
    sums: dict[tuple[str, ...], list[float]] = {}
    for record in records:
        for path, value in flatten_nested_dict(record).items():
            number = float(as_number(path, value))
            values = sums.setdefault(path, [])
            if not ((skip_nan or exclude_nan) and math.isnan(number)):
                values.append(number)
    return unflatten({path: _mean(values) for path, values in sums.items()})


def _mean(values: Sequence[float]) -> float:
    try:
        return math.fsum(values) / len(values) if values else math.nan
    except (OverflowError, ValueError):  # fsum raises for inf - inf and for overflow
        return sum(values) / len(values)


def as_number(path: Sequence[str], value: Any) -> float | Tensor:
    """Return a number or a detached 0-d tensor, or raise TypeError naming the record's path."""
    if type(value) is float:
        return value
    if isinstance(value, Tensor):
        if value.dim() == 0:
            return value.detach() if value.requires_grad else value
        if value.numel() == 1:
            return value.detach().reshape(())
    elif hasattr(value, "__float__") and getattr(value, "ndim", 0) == 0:
        return float(value)
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    raise TypeError(
        f"record {'/'.join(path)!r} is a {type(value).__name__}{shape}; records hold numbers or 0-d tensors: "
        "reduce it first, for example with .mean()"
    )


def elements(tensor: Tensor) -> Tensor:
    """Return a tensor unchanged, or the coalesced values of a sparse one.

    Example:
        >>> elements(torch.eye(3).to_sparse())
        tensor([1., 1., 1.])
    """
    if tensor.layout == torch.strided:
        return tensor
    return tensor.coalesce().values() if tensor.layout == torch.sparse_coo else tensor.values()


def shapes_of(value: Any) -> str:
    """Return a short description of the types and shapes in a batch.

    Example:
        >>> import torch
        >>> shapes_of((torch.ones(4, 3), {"label": torch.zeros(4, dtype=torch.int64), "name": "a"}))
        '(float32 (4, 3), {label: int64 (4,), name: str})'
    """
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        kind = "" if type(value).__module__.split(".")[0] == "torch" else f"{type(value).__name__} "
        return f"{kind}{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if not isinstance(value, Mapping) and callable(getattr(value, "to_dict", None)):  # as of a graph
        return f"{type(value).__name__} {shapes_of(dict(value.to_dict()))}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {shapes_of(part)}' for key, part in value.items())}}}"
    if isinstance(value, (list, tuple)):
        shown = ", ".join(shapes_of(part) for part in value[:_SHOWN])
        return f"({shown}{f', and {len(value) - _SHOWN} more' if len(value) > _SHOWN else ''})"
    return type(value).__name__


def non_finite_in(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the floating tensors of a batch that have values which are not finite, with their names.

    Example:
        >>> batch = (torch.tensor([1.0, torch.nan]), {"y": torch.zeros(2)})
        >>> [found for found, _ in non_finite_in(batch)]
        ['[0]']
    """
    if isinstance(value, Tensor):
        if value.is_floating_point() and not bool(value.isfinite().all()):
            yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from non_finite_in(part, f"{name}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            yield from non_finite_in(part, f"{name}[{number}]")
    elif callable(getattr(value, "to_dict", None)):  # as of a graph
        for key, part in dict(value.to_dict()).items():
            yield from non_finite_in(part, f"{name}.{key}")
