"""Attributes of an object that no state dict holds: which of them changed, and how they are written and restored."""

from __future__ import annotations

import sys
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from functools import cache, partial
from typing import Any

import numpy as np
from torch import Tensor

from treadle.checkpoint.plain_values import LONGEST, OPAQUE, decode, encode, same

_CONTAINERS = (list, dict, set, deque, np.ndarray)  # what changes in place
_CachedFunction = type(cache(len))
_SAMPLED = 4096  # elements of an array that a glance compares
_LIBRARIES = frozenset({
    "treadle", "torch", "torchvision", "torchaudio", "torchdata", "torchmetrics", "torch_geometric", "numpy", "scipy",
    "pandas", "pyarrow", "sklearn", "datasets", "transformers", "tokenizers", "webdataset", "litdata", "h5py", "zarr",
    "lmdb", "PIL", "cv2", "tqdm", "rich", "tensorboard", "wandb", "mlflow", "_pytest", "pluggy",
})  # fmt: skip


class Attributes:
    """Attributes of an object as they are now, to be compared with what they become.

    Numbers, texts and random generators are kept; with ``deep`` also tensors, arrays and containers of them. Other
    attributes are compared by identity: where one appeared, as a file that is opened late does, the object cannot be
    put together again from its numbers, and nothing of it is written.

    Args:
        owner: any object; None of its attributes is read by its class's own methods. Of a function, the variables that
            it encloses are its attributes.
        deep: whether tensors, arrays and containers count.
        leave_out: names of attributes that do not count.
        stashes: whether tensors that belong to a graph may appear, as activations that a module remembers do.
        largest: elements of all tensors of an attribute that is written.

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
    ):
        self.owner = owner
        self._largest = largest
        self._deep = deep
        self._leave_out = frozenset(leave_out)
        self._stashes = stashes
        held = self._held()
        self._before = {name: self._encode(value) for name, value in held.items()}
        self._marks = {name: Mark(value) for name, value in held.items() if _may_change(value)}
        self._seen = {name: mark for name, mark in self._marks.items() if self._before[name] is OPAQUE}
        self._last: dict[str, Any] = {}

    def _held(self) -> dict[str, Any]:
        return {name: value for name, value in attributes_of(self.owner).items() if name not in self._leave_out}

    def _encode(self, value: Any) -> Any:
        return encode(value, deep=self._deep, largest=self._largest)

    def _now(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the attributes that can be written, encoded, and the others."""
        plain, others = {}, {}
        for name, value in self._held().items():
            mark = self._marks.get(name)
            known = mark is not None and mark.tells_all and mark.is_of(value)
            encoded = self._before[name] if known else self._encode(value)
            if encoded is OPAQUE:
                others[name] = value
            else:
                plain[name] = encoded
        return plain, others

    def _start_of(self, name: str) -> Any:
        return self._before[name] if name in self._before else encode(getattr(type(self.owner), name, None))

    def _differing(self, plain: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in plain.items() if not same(value, self._start_of(name))}

    def _writable(self, others: Mapping[str, Any]) -> bool:
        """Returns whether no attribute has appeared that a checkpoint cannot hold."""
        return all(self._before.get(name) is OPAQUE or self._is_harmless(value) for name, value in others.items())

    def _is_harmless(self, value: Any) -> bool:
        return callable(value) or (self._stashes and _is_stash(value))

    def changed(self) -> dict[str, Any]:
        """Returns what a checkpoint holds: the attributes that differ, or nothing where they are not all."""
        plain, others = self._now()
        return self._differing(plain) if self._writable(others) else {}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Sets the attributes to values that :meth:`changed` returned, and the others back to the start."""
        plain, others = self._now()
        wanted = dict(values)
        if self._writable(others):
            back = {name: start for name in self._differing(plain) if (start := self._start_of(name)) is not OPAQUE}
            wanted = back | wanted
        for name, value in wanted.items():
            _set(self.owner, name, decode(value, attributes_of(self.owner).get(name)))

    def lost(self) -> Iterator[str]:
        """Yields names of attributes that changed since this was last asked and that no checkpoint holds.

        Numbers beside something that was opened late are named when they change once more; containers, tensors and
        objects with state at once.
        """
        plain, others = self._now()
        for name, value in {} if self._writable(others) else self._differing(plain).items():
            if name in self._last and not same(self._last[name], value):
                yield name
            self._last[name] = value
        for name, value in others.items():
            mark = self._seen.get(name)
            if _may_change(value) and not (self._stashes and _is_stash(value)) and not (mark and mark.is_of(value)):
                yield name
            self._seen[name] = Mark(value)


class Mark:
    """Note of a value, by which to tell at little cost whether it was replaced or written to since.

    Attributes:
        tells_all: whether no change escapes it, as of a tensor, which counts what is written to it.

    Example:
        >>> values = [1, 2]
        >>> mark = Mark(values)
        >>> mark.is_of(values), values.append(3), mark.is_of(values)
        (True, None, False)
    """

    def __init__(self, value: Any):
        self.tells_all = type(value) is Tensor and not value.is_inference()
        self._glance = _glance(value)
        try:
            self._value: Any = weakref.ref(value)
        except TypeError:
            self._value = lambda: value

    def is_of(self, value: Any) -> bool:
        """Returns whether the value is that one, as it was."""
        return self._value() is value and self._glance == _glance(value)


def _glance(value: Any) -> Any:
    if isinstance(value, Tensor):
        return -1 if value.is_inference() else value._version
    if isinstance(value, np.ndarray):
        step = max(1, value.size // _SAMPLED)
        return value.shape, value.reshape(-1)[::step].tobytes() if value.dtype.kind in "biufc" else None
    if isinstance(value, _CachedFunction):
        return value.cache_info().currsize
    return len(value) if isinstance(value, _CONTAINERS) else None


def has_state(owner: Any) -> bool:
    """Returns whether an object offers ``state_dict()`` and ``load_state_dict()``; a class does not.

    Example:
        >>> from torch import nn
        >>> has_state(nn.Linear(1, 1)), has_state(nn.Linear)
        (True, False)
    """
    return not isinstance(owner, type) and all(
        callable(getattr(owner, name, None)) for name in ("state_dict", "load_state_dict")
    )


def _may_change(value: Any) -> bool:
    """Returns whether a value holds state by its type: a tensor, a container, a cache, an object with a state dict."""
    return isinstance(value, (Tensor, _CachedFunction, *_CONTAINERS)) or has_state(value)


def _is_stash(value: Any, depth: int = 8) -> bool:
    """Returns whether a value is a tensor that belongs to a graph, or a container of such."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple, deque)):
        return len(value) > 0 and depth > 0 and all(_is_stash(item, depth - 1) for item in value)
    return isinstance(value, Tensor) and value.grad_fn is not None


def attributes_of(owner: Any) -> dict[str, Any]:
    """Returns the attributes of an object by name, those in ``__slots__`` too; of a function, what it encloses.

    Example:
        >>> def made(count): return lambda: count
        >>> attributes_of(made(3))
        {'count': 3}
    """
    if isinstance(owner, types.FunctionType):
        cells = zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True)
        return {name: cell.cell_contents for name, cell in cells if not _is_empty(cell)}
    slots = [name for kind in type(owner).__mro__ for name in _as_names(kind.__dict__.get("__slots__", ()))]
    found = {
        name: getattr(owner, name) for name in slots if name not in ("__dict__", "__weakref__") and hasattr(owner, name)
    }
    return {**found, **getattr(owner, "__dict__", {})}


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  (raises where the variable is not bound yet)
    except ValueError:
        return True
    return False


def _set(owner: Any, name: str, value: Any) -> None:
    if not isinstance(owner, types.FunctionType):
        setattr(owner, name, value)
    elif name in owner.__code__.co_freevars:
        cells = owner.__closure__ or ()
        cells[owner.__code__.co_freevars.index(name)].cell_contents = value


def _as_names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def behind(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the objects that something callable calls, with what leads to them: of methods, partials and functions.

    Example:
        >>> [name for name, _ in behind(partial(print, [1], end=[2]))]
        ['func', 'args[0]', 'end']
    """
    if isinstance(value, types.MethodType):
        yield "__self__", value.__self__
    elif isinstance(value, partial):
        yield "func", value.func
        yield from ((f"args[{number}]", item) for number, item in enumerate(value.args))
        yield from value.keywords.items()


def is_users(owner: Any) -> bool:
    """Returns whether an object is of a class, or is a function, that may be the user's: of no well-known library.

    Example:
        >>> is_users(3), is_users(print)
        (False, False)
    """
    of = owner if isinstance(owner, types.FunctionType) else type(owner)
    root = str(of.__module__).partition(".")[0]
    return root == "__main__" or not (root in _LIBRARIES or root in sys.stdlib_module_names)
