"""Attributes of an object that no state dict holds: which of them changed, and how they are written and restored."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_SCALARS = (bool, int, float, str, type(None))
_LONGEST = 1_000_000  # items of a list that a state may hold
_OPAQUE = object()  # the value of an attribute that cannot be written


class Attributes:
    """Attributes of an object as they are now, to be compared with what they become.

    Numbers, texts and random generators are kept; with ``deep`` also tensors, arrays and containers of numbers and
    texts. Other attributes are compared by identity: where one appeared, as a file that is opened late does, the object
    cannot be put together again from its numbers, and nothing of it is written.

    Args:
        owner: any object; None of its attributes is read by its class's own methods.
        deep: whether tensors, arrays and containers count.
        leave_out: names of attributes that do not count.
        stashes: whether tensors that belong to a graph may appear, as activations that a module remembers do.

    Example:
        >>> class Counter: calls = 0
        >>> counter = Counter()
        >>> attributes = Attributes(counter)
        >>> counter.calls += 2
        >>> attributes.changed()
        {'calls': 2}
        >>> attributes.restore({}); counter.calls
        0
    """

    def __init__(self, owner: Any, *, deep: bool = False, leave_out: Collection[str] = (), stashes: bool = False):
        self.owner = owner
        self._deep = deep
        self._leave_out = leave_out
        self._stashes = stashes
        self._before = self._values()
        self._others = self._identities()

    def _values(self) -> dict[str, Any]:
        return {
            name: encoded
            for name, value in attributes_of(self.owner).items()
            if name not in self._leave_out and (encoded := encode(value, deep=self._deep)) is not _OPAQUE
        }

    def _identities(self) -> dict[str, int]:
        return {
            name: id(value)
            for name, value in attributes_of(self.owner).items()
            if name not in self._leave_out and encode(value, deep=self._deep) is _OPAQUE
        }

    def _start_of(self, name: str) -> Any:
        return self._before[name] if name in self._before else encode(getattr(type(self.owner), name, None))

    def differing(self) -> dict[str, Any]:
        """Returns the attributes that differ from the start, as plain values."""
        return {name: value for name, value in self._values().items() if not same(value, self._start_of(name))}

    @property
    def can_be_written(self) -> bool:
        """Whether no attribute has appeared that a checkpoint cannot hold."""
        held = attributes_of(self.owner)
        return all(name in self._others or self._is_harmless(held[name]) for name in self._identities())

    def _is_harmless(self, value: Any) -> bool:
        return callable(value) or (self._stashes and isinstance(value, Tensor) and value.grad_fn is not None)

    def changed(self) -> dict[str, Any]:
        """Returns what a checkpoint holds: the attributes that differ, or nothing where they are not all."""
        return self.differing() if self.can_be_written else {}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Sets the attributes to values that :meth:`changed` returned, and the others back to the start."""
        wanted = dict(values)
        if self.can_be_written:
            wanted = {name: self._start_of(name) for name in self.differing()} | wanted
        for name, value in wanted.items():
            decode_into(self.owner, name, value)


def attributes_of(owner: Any) -> dict[str, Any]:
    """Returns the attributes of an object by name, those in ``__slots__`` too."""
    slots = [name for kind in type(owner).__mro__ for name in _as_names(kind.__dict__.get("__slots__", ()))]
    found = {
        name: getattr(owner, name) for name in slots if name not in ("__dict__", "__weakref__") and hasattr(owner, name)
    }
    return {**found, **getattr(owner, "__dict__", {})}


def _as_names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def encode(value: Any, *, deep: bool = False) -> Any:
    """Returns a plain copy of a value that :func:`decode_into` understands, or a marker where there is none.

    Example:
        >>> encode((1, "a"), deep=True)
        {'tuple': [1, 'a']}
    """
    if type(value) in _SCALARS:
        return value
    if isinstance(value, np.generic) and type(value.item()) in _SCALARS:
        return value.item()
    if isinstance(value, GENERATORS):
        return {"generator": _state_of(value)}
    return _encoded_container(value) if deep else _OPAQUE


def _encoded_container(value: Any) -> Any:
    if isinstance(value, Tensor):
        plain = type(value) is Tensor and value.grad_fn is None and value.layout is torch.strided
        plain = plain and value.device.type != "meta" and value.numel() <= _LONGEST
        return value.detach().to("cpu", copy=True) if plain else _OPAQUE
    if isinstance(value, np.ndarray):
        return (
            {"array": torch.from_numpy(value.copy())}
            if value.dtype.kind in "biuf" and value.size <= _LONGEST
            else _OPAQUE
        )
    if type(value) in (list, tuple, deque) and len(value) <= _LONGEST:
        return _tagged(type(value).__name__, [encode(item, deep=True) for item in value])
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        items = {key: encode(item, deep=True) for key, item in value.items()}
        return _OPAQUE if any(item is _OPAQUE for item in items.values()) else {"dict": items}
    return _OPAQUE


def _tagged(kind: str, items: list[Any]) -> Any:
    if any(item is _OPAQUE for item in items):
        return _OPAQUE
    return items if kind == "list" else {kind: items}


def decode_into(owner: Any, name: str, value: Any) -> None:
    """Sets an attribute to what :func:`encode` made of it; a generator that is there keeps its identity."""
    if isinstance(value, Mapping) and "generator" in value:
        held = getattr(owner, name, None)
        if isinstance(held, GENERATORS):
            _set_state(held, value["generator"])
        return
    setattr(owner, name, decode(value))


def decode(value: Any) -> Any:
    """Returns the value that :func:`encode` was given, but for generators.

    Example:
        >>> decode({"tuple": [1, "a"]})
        (1, 'a')
    """
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    (kind, inner), *_ = value.items()
    if kind == "array":
        return inner.numpy().copy()
    if kind == "dict":
        return {key: decode(item) for key, item in inner.items()}
    return {"tuple": tuple, "deque": deque}[kind]([decode(item) for item in inner])


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        version, state, gauss = generator.getstate()
        return [version, list(state), gauss]
    state = generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state(False)
    return _without_arrays(state)


def _without_arrays(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _without_arrays(value) for key, value in state.items()}
    return {"array": torch.from_numpy(state.astype(np.int64))} if isinstance(state, np.ndarray) else state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate((state[0], tuple(state[1]), state[2]))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _with_arrays(state)
    else:
        generator.set_state(_with_arrays(state))


def _with_arrays(state: Any) -> Any:
    if not isinstance(state, Mapping):
        return state
    if "array" in state:
        array = state["array"].numpy()
        return (
            array.astype(np.uint64)
            if array.max(initial=0) >= 2**32 or array.min(initial=0) < 0
            else array.astype(np.uint32)
        )
    return {key: _with_arrays(value) for key, value in state.items()}


def same(one: Any, other: Any) -> bool:
    """Returns whether two plain trees are equal to the bit: kinds, keys, and tensors with their dtypes; NaN is NaN.

    Example:
        >>> same({"a": [1.0, torch.ones(1)]}, {"a": [1.0, torch.ones(1)]}), same(1, 1.0)
        (True, False)
    """
    return next(unequal(one, other), None) is None


def unequal(one: Any, other: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yields the paths at which two plain trees differ, each with the difference in words."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.dtype != other.dtype:
            yield path, f"{one.dtype} and {other.dtype}"
        elif one.shape != other.shape:
            yield path, f"shape {tuple(one.shape)} and {tuple(other.shape)}"
        elif not same_bits(one, other):
            yield path, "other values"
    elif isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in one:
            if key not in other:
                yield f"{path}.{key}".lstrip("."), "nothing there after loading"
        for key, value in other.items():
            if key in one:
                yield from unequal(one[key], value, f"{path}.{key}".lstrip("."))
            else:
                yield f"{path}.{key}".lstrip("."), "nothing there in the file"
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            yield path, f"{len(one)} and {len(other)} items"
        elif one is not other:
            for number, (left, right) in enumerate(zip(one, other, strict=True)):
                yield from unequal(left, right, f"{path}[{number}]")
    elif type(one) is not type(other := _plain_number(other)) or not (one == other or (one != one and other != other)):
        yield path, f"{one!r} and {other!r}"


def _plain_number(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors of one dtype and shape hold the same numbers, on any device; NaN equals NaN."""
    one, other = one.detach(), other.detach().to(one.device)
    if one.is_sparse or other.is_sparse:
        one, other = one.to_dense(), other.to_dense()
    if torch.equal(one, other):
        return True
    nan = one.is_floating_point() or one.is_complex()
    return nan and bool(((one == other) | (one.isnan() & other.isnan())).all())
