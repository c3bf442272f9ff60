"""Values of attributes as plain trees: how they are written and restored, and whether two are equal to the bit."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from treadle.checkpoint.constants import (
    CONSTANTS,
    class_at,
    class_path,
    decode_constant,
    encode_constant,
    has_path,
)
from treadle.checkpoint.introspection import attributes_of, has_state, is_users, is_users_class
from treadle.checkpoint.library_values import LIBRARY_VALUES, decode_library_value, encode_library_value
from treadle.errors import CheckpointError

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
OPAQUE = object()  # what a value is encoded to that cannot be written
_AS_PYTHONS = (np.float64, np.int64, np.bool_, np.str_)  # which compute as Python's own numbers do
_LAYOUTS = (torch.strided, torch.sparse_coo)
_SCALARS = frozenset((bool, int, float, str, type(None)))
_DICTS = (dict, OrderedDict, defaultdict, Counter)
_DERIVED = (*_DICTS, list, set, deque, tuple, frozenset, int, float, str)  # what users derive classes from
_FACTORIES = {kind.__name__: kind for kind in (int, float, list, dict, set)}  # of a defaultdict
_WITHOUT_STATE = ("abc", "typing", "collections.abc")  # whose classes are bases that hold nothing
LONGEST = 1_000_000  # elements of all tensors of a value, or items of a flat list, that a state may hold
_DEEPEST = 32  # containers inside of containers; one that contains itself has no end
_SAMPLED_KEYS = 64  # of a dict, that are looked at for addresses
_MOST_NESTED = 20_000  # items inside containers of containers, each of which is visited at each save


def encode(
    value: Any,
    *,
    deep: bool = False,
    largest: int = LONGEST,
    known: Collection[int] = (),
    held: bool = False,
    alone: bool = False,
) -> Any:
    """Return a plain copy of a value that :func:`decode` understands, or ``OPAQUE`` where there is none.

    Args:
        value: any.
        deep: whether tensors, arrays, containers and objects of the user's classes have one.
        largest: elements of all tensors inside; more have none.
        known: ids of objects that are kept elsewhere and have none.
        held: whether an object of its class is there when it is decoded, so that its class need not be found by name.
        alone: whether nothing is there when it is decoded, from which the factory of a defaultdict could be taken.

    Example:
        >>> encode((1, "a"), deep=True)
        {'tuple': [1, 'a']}
    """
    if type(value) in _SCALARS:
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "biufU" and type(value.item()) in _SCALARS:
        return value.item() if isinstance(value, _AS_PYTHONS) else {"scalar": value.item(), "dtype": value.dtype.name}
    if isinstance(value, GENERATORS):
        return {"generator": _state_of(value)}
    if (constant := encode_constant(value)) is not None:
        return constant
    return _Encoder(largest, known, held=held, alone=alone).of(value) if deep else OPAQUE


class _Encoder:
    """Encoder of one value and what it contains, up to a number of items."""

    def __init__(self, largest: int, known: Collection[int], *, held: bool, alone: bool):
        self._alone = alone
        self._largest = largest
        self._known = known
        self._held = held
        self._left = _MOST_NESTED
        self._depth = 0

    def of(self, value: Any) -> Any:
        kind = type(value)
        if kind in _SCALARS or isinstance(value, GENERATORS):
            return encode(value)
        if isinstance(value, Tensor):
            is_models = isinstance(value, nn.Parameter) and not self._held  # it may be one that the model has
            return _encoded_tensor(value) if self._fits(value.numel()) and not is_models else OPAQUE
        if isinstance(value, np.generic) and (encoded := encode(value)) is not OPAQUE:
            return encoded
        if kind is np.ndarray:
            if not self._fits(value.size):
                return OPAQUE
            if value.dtype.kind in "biufc" and value.dtype.itemsize <= 8 * (1 + (value.dtype.kind == "c")):
                return {"array": torch.from_numpy(value.copy())}
        if kind in _DICTS:
            return self._inside(self._of_dict, value)
        if kind in (list, tuple, deque, set, frozenset):
            items = sorted(value, key=repr) if kind in (set, frozenset) else list(value)
            items = self._inside(self._of_items, items)
            if items is OPAQUE or kind is list:
                return items
            length = {"maxlen": value.maxlen} if kind is deque and value.maxlen is not None else {}
            return {kind.__name__: items, **length}
        if (constant := encode_constant(value)) is not None:
            return constant
        if (encoded := encode_library_value(value, self._part, OPAQUE)) is not None:
            return encoded
        if (base := _base_of(kind)) is not None:
            return self._of_derived(value, base)
        return self._of_object(value)

    def _part(self, value: Any) -> Any:
        return self._inside(self.of, value)

    def _of_derived(self, value: Any, base: Any) -> Any:
        """Return an object of a user's class that derives from a container or a number of Python."""
        kind = type(value)
        if id(value) in self._known or not (self._held or has_path(kind)):
            return OPAQUE
        inner = base.copy(value) if base in _DICTS else base(value)
        parts = [self._part(inner), self._part(dict(getattr(value, "__dict__", {})))]
        return OPAQUE if any(part is OPAQUE for part in parts) else {"derived": parts, "of": class_path(kind)}

    def _inside(self, encoded: Callable[[Any], Any], container: Any) -> Any:
        """Encode what a container holds, in whose place nothing of the same class need be later."""
        held, self._held = self._held, False
        found = encoded(container)
        self._held = held
        return found

    def _of_object(self, value: Any) -> Any:
        """Return a named tuple or an object of a user's class, by its class and its items."""
        kind = type(value)
        if id(value) in self._known or not is_plain_object(value) or not (self._held or has_path(kind)):
            return OPAQUE
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            items = self._of_items(list(value))
            return OPAQUE if items is OPAQUE else {"record": items, "of": class_path(kind)}
        held = attributes_of(value)
        items = self._of_items(list(held.values()))
        return OPAQUE if items is OPAQUE else {
            "object": dict(zip(held, items, strict=True)), "of": class_path(kind)
        }  # fmt: skip

    def _fits(self, count: int) -> bool:
        """Take elements from those that are left, so that a cache of samples does not go into every checkpoint."""
        self._largest -= count
        return self._largest >= 0

    def _of_items(self, items: list[Any]) -> Any:
        if len(items) <= LONGEST and _SCALARS.issuperset(map(type, items)):
            return items
        self._left -= len(items)
        if self._left < 0 or self._depth == _DEEPEST:
            return OPAQUE
        found = []
        self._depth += 1
        for item in items:
            found.append(self.of(item))
            if found[-1] is OPAQUE:
                return OPAQUE
        self._depth -= 1
        return found

    def _of_dict(self, value: Any) -> Any:
        factory = value.default_factory if isinstance(value, defaultdict) else None
        is_named = factory is None or factory in _FACTORIES.values()
        # A state that is kept inside the states that follow would grow with each of them.
        if (self._alone and not is_named) or _is_checkpoint(value) or _is_by_identity(value):
            return OPAQUE
        keys, items = self._of_items(list(value)), self._of_items(list(value.values()))
        if keys is OPAQUE or items is OPAQUE:
            return OPAQUE
        kind = {} if type(value) is dict else {"kind": type(value).__name__}
        if factory is not None:
            kind["factory"] = getattr(factory, "__name__", "") if is_named else "other"
        if {str, int}.issuperset(map(type, keys)):
            return {"dict": dict(zip(keys, items, strict=True)), **kind}
        return {"pairs": [list(pair) for pair in zip(keys, items, strict=True)], **kind}


def _base_of(kind: type) -> type | None:
    """Return the container or number of Python that a user's class derives from, or None."""
    if not is_users_class(kind) or "_fields" in vars(kind) or issubclass(kind, Tensor):
        return None
    return next((base for base in kind.__mro__ if base in _DERIVED), None)


def is_plain_object(value: Any) -> bool:
    """Return whether a value is made of its attributes alone: of a user's class, of no part of a run, no container."""
    if not is_users(value) or has_state(value):
        return False
    if isinstance(value, tuple):
        return hasattr(value, "_fields")
    kinds = type(value).__mro__
    return all(kind is object or kind.__module__ in _WITHOUT_STATE or is_users_class(kind) for kind in kinds)


def _is_by_identity(value: Mapping[Any, Any]) -> bool:
    """Return whether the keys of a dict are tensors or memory addresses, which another process does not have."""
    keys = list(itertools.islice(value, _SAMPLED_KEYS))
    addresses = all(type(key) is int and 2**40 < key < 2**48 and key % 16 == 0 for key in keys)
    return bool(keys) and (addresses or any(isinstance(key, Tensor) for key in keys))


def _is_checkpoint(value: Mapping[Any, Any]) -> bool:
    described = value.get("format")
    return isinstance(described, Mapping) and described.get("name") == "treadle"


def _encoded_tensor(value: Tensor) -> Any:
    plain = type(value) in (Tensor, nn.Parameter) and value.grad_fn is None and value.layout in _LAYOUTS
    if not plain or value.device.type == "meta":
        return OPAQUE
    copied = value.detach().to("cpu", copy=True)
    if type(value) is nn.Parameter:
        return {"parameter": copied}
    return copied if value.device.type == "cpu" else {"tensor": copied, "device": value.device.type}


def decode(value: Any, held: Any = None) -> Any:
    """Return the value that :func:`encode` was given.

    Args:
        value: what it returned.
        held: the value now in its place: a generator, a container or a tensor of the same form keeps its identity.

    Example:
        >>> decode({"tuple": [1, "a"]})
        (1, 'a')
    """
    if isinstance(value, Tensor):
        return _decoded_tensor(value, held)
    if isinstance(value, list):
        return _in_place(held, list, _decoded_items(value, held))
    if not isinstance(value, Mapping):
        return value
    (kind, inner), *_ = value.items()
    if kind == "generator":
        generator = held if isinstance(held, GENERATORS) else _generator_like(inner)
        _set_state(generator, inner)
        return generator
    if kind == "tensor":
        beside = held.device if isinstance(held, Tensor) else torch.device(value["device"])
        return _decoded_tensor(inner.to(beside), held)
    if kind == "array":
        return _decoded_array(inner.numpy(), held)
    if kind == "scalar":
        return np.dtype(value["dtype"]).type(inner)
    if kind in ("dict", "pairs"):
        pairs = inner.items() if kind == "dict" else [(decode(key), item) for key, item in inner]
        known = held if isinstance(held, _DICTS) else {}
        decoded = {key: decode(item, known.get(key)) for key, item in pairs}
        return _in_place(held, _DICTS, decoded) if isinstance(held, _DICTS) else _dict_like(value, decoded)
    if kind in CONSTANTS:
        return decode_constant(value, held)
    if kind in LIBRARY_VALUES:
        return decode_library_value(value, decode, held)
    if kind == "parameter":
        made = nn.Parameter(_decoded_tensor(inner, held.data if isinstance(held, nn.Parameter) else None))
        return held if isinstance(held, nn.Parameter) and held.shape == made.shape else made
    if kind == "derived":
        return _decoded_derived(value, held)
    if kind in ("record", "object"):
        return _decoded_object(value, held)
    kinds: dict[str, Any] = {"tuple": tuple, "deque": deque, "set": set, "frozenset": frozenset}
    items = _decoded_items(inner, held)
    return _in_place(held, (deque, set), deque(items, value.get("maxlen")) if kind == "deque" else kinds[kind](items))


def _dict_like(value: Mapping[str, Any], decoded: dict[Any, Any]) -> Any:
    """Return a new dict of the kind that was encoded."""
    factory = value.get("factory")
    if factory is not None and factory not in _FACTORIES:
        raise CheckpointError(
            f"a defaultdict with the keys {list(decoded)[:3]} is not there when the checkpoint is loaded, and its "
            "default_factory is in no checkpoint; make it in __init__"
        )
    kind = value.get("kind")
    if kind == "defaultdict":
        return defaultdict(_FACTORIES.get(factory) if factory else None, decoded)
    return {"OrderedDict": OrderedDict, "Counter": Counter}.get(kind or "", dict)(decoded)


def _decoded_object(value: Mapping[str, Any], held: Any) -> Any:
    """Return an object of a user's class, made without its ``__init__`` where it is not there yet."""
    (kind, inner), *_ = value.items()
    if kind == "record":
        return class_at(value["of"], held)._make(_decoded_items(inner, held))
    of = class_at(value["of"], held)
    found = held if type(held) is of else object.__new__(of)
    before = attributes_of(found)
    for name, item in inner.items():
        object.__setattr__(found, name, decode(item, before.get(name)))  # a frozen dataclass has no other
    return found


def _decoded_derived(value: Mapping[str, Any], held: Any) -> Any:
    of = class_at(value["of"], held)
    content, attributes = (decode(part) for part in value["derived"])
    base: Any = _base_of(of)
    if base in (list, set, deque, *_DICTS):
        found = held if type(held) is of else of.__new__(of)
        base.clear(found)
        (base.extend if base in (list, deque) else base.update)(found, content)
    else:
        found = base.__new__(of, content)
    for name, item in attributes.items():
        object.__setattr__(found, name, item)
    return found


def _decoded_items(values: list[Any], held: Any) -> list[Any]:
    known = list(held) if isinstance(held, (list, tuple, deque)) and len(held) == len(values) else [None] * len(values)
    return [decode(item, now) for item, now in zip(values, known, strict=True)]


def _decoded_array(value: Any, held: Any) -> Any:
    if type(held) is np.ndarray and held.shape == value.shape and held.dtype == value.dtype and held.flags.writeable:
        held[...] = value
        return held
    return value.copy()


@torch.no_grad()
def _decoded_tensor(value: Tensor, held: Any) -> Tensor:
    if type(held) is Tensor and held.shape == value.shape and held.dtype == value.dtype and not held.is_inference():
        return held.copy_(value)
    return value.clone()


def _in_place(held: Any, kinds: Any, value: Any) -> Any:
    """Fill a container that is there, which others may hold too; else returns the new one."""
    if not isinstance(held, kinds) or (type(held) not in _DICTS and type(held) is not type(value)):
        return value
    held.clear()
    held.extend(value) if isinstance(held, (list, deque)) else held.update(value)
    return held


def _generator_like(state: Any) -> Any:
    """Return a new generator of the kind that a state is of."""
    if isinstance(state, Tensor):
        return torch.Generator()
    if isinstance(state, list):
        return random.Random()
    if "has_gauss" in state:
        return np.random.RandomState()
    return np.random.Generator(getattr(np.random, state["bit_generator"])())


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
    """Return whether two plain trees are equal to the bit: kinds, keys, and tensors with their dtypes; NaN is NaN.

    Example:
        >>> same({"a": [1.0, torch.ones(1)]}, {"a": [1.0, torch.ones(1)]}), same(1, 1.0)
        (True, False)
    """
    return next(unequal(one, other), None) is None


def unequal(one: Any, other: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the paths at which two plain trees differ, each with the difference in words."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.dtype != other.dtype:
            yield path, f"{one.dtype} and {other.dtype}"
        elif one.shape != other.shape:
            yield path, f"shape {tuple(one.shape)} and {tuple(other.shape)}"
        elif not same_bits(one, other):
            yield path, "other values"
    elif isinstance(one, Mapping) and isinstance(other, Mapping):
        if one is other or _equal_dicts_of_scalars(one, other):
            return
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
        elif one is not other and not _equal_scalars(one, other):
            for number, (left, right) in enumerate(zip(one, other, strict=True)):
                yield from unequal(left, right, f"{path}[{number}]")
    elif type(one) is not type(other := _plain_number(other)) or not (one == other or (one != one and other != other)):
        yield path, f"{one!r} and {other!r}"


def _equal_scalars(one: Any, other: Any) -> bool:
    """Return True if two lists of scalars are equal, at the speed of C; False leaves it open."""
    kinds = list(map(type, one))
    return _SCALARS.issuperset(kinds) and kinds == list(map(type, other)) and list(one) == list(other)


def _equal_dicts_of_scalars(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    """Return True if two dicts have equal scalars in one order, at the speed of C; False leaves it open."""
    return list(one) == list(other) and _equal_scalars(list(one.values()), list(other.values()))


def _plain_number(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def digest(tree: Any) -> str:
    """Return a fingerprint of a plain tree, to compare it with those of other processes.

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
        elif isinstance(value, list) and not _SCALARS.issuperset(map(type, value)):
            waiting += value
        else:
            found.update(f"{type(value).__name__}{value!r};".encode())
    return found.hexdigest()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one dtype and shape hold the same numbers, on any device; NaN equals NaN."""
    one, other = one.detach(), other.detach().to(one.device)
    if one.is_sparse or other.is_sparse:
        one, other = one.to_dense(), other.to_dense()
    if torch.equal(one, other):
        return True
    nan = one.is_floating_point() or one.is_complex()
    return nan and bool(((one == other) | (one.isnan() & other.isnan())).all())
