"""Attributes of an object outside its state dict: detecting, saving and restoring changes."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import random
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves

from treadle.checkpoint.comparison import same, same_items, sample
from treadle.checkpoint.introspection import attributes_of, delete_attribute, has_state, set_attribute
from treadle.checkpoint.plain_values import LONGEST, OPAQUE, decode, encode, is_of_a_library_of_values, is_plain_object
from treadle.checkpoint.references import References

_FIXED = frozenset({int, float, complex, bool, str, bytes, type(None)})
_CONTAINERS = (list, dict, set, deque, np.ndarray)  # types that change in place
CachedFunction = type(cache(len))
_SAMPLED = 4096  # elements of a tensor or an array that a quick check compares
_SAMPLED_ROWS = 64  # items of a container or rows of a table


class Attributes:
    """Snapshot of an object's attributes, to detect later changes.

    Numbers, strings and random generators are saved; with ``deep`` also tensors, arrays and containers of them. Other
    attributes are compared by identity. If one of these appears later, such as a file opened lazily, attributes set
    together with it may record that it is open, which is not true in another process: then only numbers and generators
    are saved, and attributes that change once more.

    Args:
        owner: any object, whose attributes are read without its class's methods. The attributes of a function are its
            closure variables.
        deep: whether to include tensors, arrays and containers.
        leave_out: names of attributes to ignore.
        stashes: whether tensors with a graph may appear, such as activations stored by a module.
        largest: largest total number of tensor elements in an attribute to save.
        known: ids of objects saved elsewhere, which are not saved as part of this one.
        tensors: whether to save attributes with tensors even if unchanged: copies of weights, which another process
            initializes differently.
        references: named objects that attributes may refer to.

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

    def __init__(
        self,
        owner: Any,
        *,
        deep: bool = False,
        leave_out: Collection[str] = (),
        stashes: bool = False,
        largest: int = LONGEST,
        known: Collection[int] = (),
        tensors: bool = False,
        references: References | None = None,
    ):
        self.owner = owner
        self._known = known
        self._references = references
        self._tensors = tensors
        self._largest = largest
        self._deep = deep
        self._leave_out = frozenset(leave_out)
        self._stashes = stashes
        held = self._held()
        self._kinds = {name: type(value) for name, value in held.items()}
        self._before = {name: self._encode(name, value) for name, value in held.items()}
        self._marks = {name: Mark(value) for name, value in held.items() if _may_change(value)}
        self._seen = {
            name: self._marks.get(name) or Mark(value) for name, value in held.items() if self._before[name] is OPAQUE
        }
        self._functions = {name: value for name, value in held.items() if value is None or callable(value)}
        self._fixed = self._all_fixed(held)
        self._opened: Mapping[str, Any] | None = None  # attributes when an unsavable one was first seen
        self._restored: set[str] = set()
        self._look: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._named: set[str] = set()

    def _held(self) -> dict[str, Any]:
        return {name: value for name, value in attributes_of(self.owner).items() if name not in self._leave_out}

    def _all_fixed(self, held: Mapping[str, Any]) -> tuple[set[str], list[tuple[str, Any]]] | None:
        """Return all attribute names, and the attributes that count, if all of these are immutable."""
        own = getattr(self.owner, "__dict__", None)
        if type(own) is not dict or attributes_of(self.owner).keys() != own.keys():
            return None
        return (set(own), list(held.items())) if all(is_fixed(value) for value in held.values()) else None

    def _is_unchanged(self) -> bool:
        """Return whether nothing has changed, by a quick check of immutable values; most modules hold numbers only."""
        if self._fixed is None:
            return False
        (names, held), now = self._fixed, self.owner.__dict__
        return now.keys() == names and all(now[name] is value for name, value in held)

    def _encode(self, name: str, value: Any) -> Any:
        held = self._kinds.get(name) is type(value)
        return encode(
            value, deep=self._deep, largest=self._largest, known=self._known, held=held, references=self._references
        )

    def _now(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the attributes that can be saved, encoded, and the others."""
        plain, others = {}, {}
        for name, value in self._held().items():
            mark = self._marks.get(name)
            known = mark is not None and mark.detects_every_change and mark.is_of(value)
            known = known and not _is_written_unseen(value, self._before[name])
            known = known or _is_flat_copy(self._before.get(name), value)
            encoded = self._before[name] if known else self._encode(name, value)
            if encoded is OPAQUE:
                others[name] = value
            else:
                plain[name] = encoded
        return plain, others

    def _start_of(self, name: str) -> Any:
        return self._before[name] if name in self._before else encode(getattr(type(self.owner), name, None))

    def initial_values(self, names: Iterable[str]) -> dict[str, Any]:
        """Return those of some attributes that there were at the start, as they were."""
        return {name: start for name in names if (start := self._before.get(name, OPAQUE)) is not OPAQUE}

    def _differing(self, plain: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
        """Return the attributes that differ from the start, except those that may record an open file."""
        changed = {name: value for name, value in plain.items() if not same(value, self._start_of(name))}
        if self._writable(others):
            return changed
        if self._opened is None:
            self._opened = plain
        return {name: value for name, value in changed.items() if self._counts(name, value)}

    def _counts(self, name: str, value: Any) -> bool:
        moved = self._opened is not None and not same(value, self._opened.get(name, value))
        return moved or name in self._restored or _is_count(self._start_of(name), value)

    def _writable(self, others: Mapping[str, Any]) -> bool:
        """Return whether no unsavable attribute has appeared."""
        return all(self._before.get(name) is OPAQUE or self._is_harmless(value) for name, value in others.items())

    def _is_harmless(self, value: Any) -> bool:
        is_kept = id(value) in self._known
        return is_kept or callable(value) or _is_iterator(value) or (self._stashes and _has_graph(value))

    def changed(self) -> dict[str, Any]:
        """Return the attributes to save: those that differ from the start."""
        if self._is_unchanged():
            return {}
        plain, others = self._look = self._now()
        kept = {name: value for name, value in plain.items() if _holds_tensor(value)} if self._tensors else {}
        return kept | self._differing(plain, others)

    def restore(self, values: Mapping[str, Any]) -> None:
        """Set the attributes to values from :meth:`changed`, and reset the others to the start."""
        moved = self._differing(*self._now())
        back = {name: start for name in moved if (start := self._start_of(name)) is not OPAQUE}
        self._restored |= values.keys()
        for name, value in (back | dict(values)).items():
            if name in values or name in self._before or not delete_attribute(self.owner, name):
                self._set(name, value)

    def put_back(self, values: Mapping[str, Any]) -> None:
        """Set some attributes to values that :meth:`changed` returned, and leave the others."""
        for name, value in values.items():
            self._set(name, value)

    def _set(self, name: str, value: Any) -> None:
        tree = value if self._references is None else self._references.resolved(value)
        held = attributes_of(self.owner).get(name)
        if isinstance(tree, Mapping) and "object" in tree and id(held) in self._known and is_plain_object(held):
            held = object.__new__(type(held))  # the original is saved elsewhere and was replaced here
        set_attribute(self.owner, name, decode(tree, held))

    @contextlib.contextmanager
    def completing(self, values: Mapping[str, Any]) -> Iterator[None]:
        """Set, after a block that loads the object's own state, the attributes that the block did not touch.

        Those that it changed may be pending on purpose, to be used later.
        """
        before, _ = self._now()
        yield
        now, _ = self._now()
        for name, value in values.items():
            if same(before.get(name), now.get(name)):
                self._set(name, value)

    def lost(self) -> Iterator[str]:
        """Yield names of attributes that changed since the last call and that no checkpoint holds.

        What :meth:`changed` has just found is used once, since containers are slow to encode.

        They are containers, tensors, objects with state, iterators, and replaced functions.
        """
        if self._is_unchanged():
            return
        (plain, others), self._look = self._look or self._now(), None
        written = self._differing(plain, others)
        for name, value in plain.items():
            differs = name not in written and isinstance(value, (list, dict, Tensor))
            if differs and name not in self._named and not same(value, self._start_of(name)):
                self._named.add(name)
                yield name
        for name, value in others.items():
            mark = self._seen.get(name)
            is_new = mark is None and self._before.get(name) is None  # a value of a library may be made when needed
            counts = _may_change(value) or (_is_of_a_library(value) and not is_new)
            counts = counts and id(value) not in self._known and not (is_new and _is_read_only(value))
            if counts and not (self._stashes and _has_graph(value)) and not (mark and mark.is_of(value)):
                yield f"{name} (an lru_cache)" if isinstance(value, CachedFunction) else name
            self._seen[name] = Mark(value)
            if _moves(value) or self._is_another_function(name, value):
                yield name

    def _is_another_function(self, name: str, value: Any) -> bool:
        """Return whether a callable replaced an attribute or a method of the class."""
        if not callable(value) or has_state(value):
            return False
        if name in self._functions:
            before = self._functions[name]  # a bound method is a new object on each access
            return before is not value and not (isinstance(value, types.MethodType) and before == value)
        return name not in self._before and callable(getattr(type(self.owner), name, None))


def is_fixed(value: Any) -> bool:
    """Return whether a value is immutable."""
    return type(value) in _FIXED or (type(value) is tuple and all(type(item) in _FIXED for item in value))


def _is_count(before: Any, now: Any) -> bool:
    """Return whether a value is and was a number, a generator or a non-empty container."""
    if type(before) is not type(now) or isinstance(now, bool):
        return False
    if isinstance(now, int):
        return now != os.getpid()
    content = next(iter(before.values())) if isinstance(before, dict) else before
    is_empty = content is None or (isinstance(content, (list, dict)) and not content)
    return isinstance(now, (float, Tensor)) or (isinstance(now, (list, dict)) and not is_empty)


def _holds_tensor(encoded: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(encoded))


def _is_iterator(value: Any) -> bool:
    """Return whether a value is an iterator, whose position cannot be read; files do not count."""
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase)


def _moves(value: Any) -> bool:
    """Return whether a value moves in a way that cannot be read: an iterator, a generator without a state."""
    return _is_iterator(value) or isinstance(value, random.SystemRandom)


def missing_from_state(state: Any, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes that an object's own state lacks.

    Example:
        >>> missing_from_state({"calls": 2}, {"calls": 2, "rate": 0.1})
        {'rate': 0.1}
    """
    held = state if isinstance(state, Mapping) else {}
    return {name: value for name, value in attributes.items() if not (name in held and same(held[name], value))}


class Mark:
    """Cheap mark of a value, to detect whether it was replaced or modified.

    Attributes:
        detects_every_change: whether every change is detected, as for a tensor, which counts its writes; sampled
            elements reveal writes through ``.data``.

    Example:
        >>> values = [1, 2]
        >>> mark = Mark(values)
        >>> mark.is_of(values), values.append(3), mark.is_of(values)
        (True, None, False)
    """

    def __init__(self, value: Any):
        self.detects_every_change = type(value) is Tensor and not value.is_inference()
        self._fingerprint = _fingerprint_of(value)
        try:
            self._value: Any = weakref.ref(value)
        except TypeError:
            self._value = lambda: value

    def is_of(self, value: Any) -> bool:
        """Return whether a value is the marked one, unchanged."""
        return self._value() is value and self._fingerprint == _fingerprint_of(value)


def _fingerprint_of(value: Any, rows: int = _SAMPLED_ROWS) -> Any:
    if is_table(value):
        return len(value), value.iloc[:: max(1, len(value) // _SAMPLED_ROWS)].to_numpy().tolist()
    if isinstance(value, Tensor):
        return _version_of(value), sample(value)
    if isinstance(value, np.ndarray):
        step = max(1, value.size // _SAMPLED)
        return value.shape, value.reshape(-1)[::step].tobytes() if value.dtype.kind in "biufc" else None
    if isinstance(value, CachedFunction):
        return value.cache_info().currsize
    if _is_of_a_library(value):
        return tuple((name, id(part), _version_of(part)) for name, part in attributes_of(value).items())
    if isinstance(value, _CONTAINERS):
        items = value.values() if isinstance(value, dict) else value
        some = itertools.islice(items, 0, None, max(1, len(value) // rows)) if rows else ()
        return len(value), *((id(item), _version_of(item), _fingerprint_inside(item, rows // 4)) for item in some)
    return None


def _fingerprint_inside(item: Any, rows: int) -> Any:
    return sample(item, _SAMPLED_ROWS) if isinstance(item, Tensor) else _fingerprint_of(item, rows)


def _is_written_unseen(value: Tensor, before: Any) -> bool:
    """Return whether a tensor on the CPU differs from its copy: a write through NumPy may miss the sampled elements."""
    return value.numel() > _SAMPLED and isinstance(before, Tensor) and not same(value, before)


def _is_flat_copy(encoded: Any, value: Any) -> bool:
    """Return whether an encoded list or dict of scalars holds the items of the live one, so that it is unchanged."""
    if type(value) is dict and type(encoded) is dict and encoded.keys() == {"dict"}:
        inner = encoded["dict"]
        return same_items(inner, value) and same_items(inner.values(), value.values())
    return type(value) is list and type(encoded) is list and same_items(encoded, value)


def _version_of(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else -1


def is_table(value: Any) -> bool:
    """Return whether a value is a pandas DataFrame or Series."""
    root = type(value).__module__.partition(".")[0]  # pandas 3 dropped the submodule
    return root == "pandas" and type(value).__name__ in ("DataFrame", "Series")


def _may_change(value: Any) -> bool:
    """Return whether a value's type can hold state: a tensor, a container, a cache, an object with a state dict."""
    return isinstance(value, (Tensor, CachedFunction, *_CONTAINERS)) or is_table(value) or has_state(value)


def _is_of_a_library(value: Any) -> bool:
    """Return whether a value is an object of a library whose objects are values, neither callable nor a class."""
    return is_of_a_library_of_values(type(value)) and not callable(value)


def _is_read_only(value: Any) -> bool:
    """Return whether a value is an array that cannot be written to, such as a memory map of a file."""
    return isinstance(value, np.ndarray) and not value.flags.writeable


def _has_graph(value: Any, depth: int = 8) -> bool:
    """Return whether a value is a tensor with a graph, or a container of such tensors."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple, deque)):
        return len(value) > 0 and depth > 0 and all(_has_graph(item, depth - 1) for item in value)
    return isinstance(value, Tensor) and value.grad_fn is not None
