"""Plain-tree encoding and decoding of attribute values."""

from __future__ import annotations

import enum
import itertools
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from treadle.checkpoint.comparison import SCALARS
from treadle.checkpoint.constants import (
    CONSTANTS,
    class_at,
    class_path,
    decode_constant,
    encode_constant,
    has_path,
)
from treadle.checkpoint.generators import GENERATORS, generator_like, is_generator, set_state, state_of
from treadle.checkpoint.introspection import attributes_of, has_state, is_user_class
from treadle.checkpoint.library_values import LIBRARY_VALUES, decode_library_value, encode_library_value
from treadle.checkpoint.references import Reference, References
from treadle.errors import CheckpointError

OPAQUE = object()  # encoding of a value that cannot be saved
_LAYOUTS = (torch.strided, torch.sparse_coo)
_DICTS = (dict, OrderedDict, defaultdict, Counter)
_DERIVED = (*_DICTS, list, set, deque, tuple, frozenset, int, float, str)  # bases of users' classes
_FACTORIES = {kind.__name__: kind for kind in (int, float, list, dict, set)}  # factories of a defaultdict
_WITHOUT_STATE = ("abc", "typing", "collections.abc")  # modules whose classes are stateless bases
LONGEST = 1_000_000  # largest number of tensor elements of a value, or of items of a flat list
_LIBRARIES_OF_VALUES = (
    "sklearn", "scipy", "torch_geometric", "numpy", "torch.distributions", "torch.quasirandom",
    "transformers.cache_utils",
)  # fmt: skip
_OF_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_DEEPEST = 32  # nesting depth of containers; self-referencing ones are infinite
_SAMPLED_KEYS = 64  # keys of a dict that are checked for addresses
_MOST_NESTED = 20_000  # items in nested containers, which are visited at each save


def encode(
    value: Any,
    *,
    deep: bool = False,
    largest: int = LONGEST,
    known: Collection[int] = (),
    held: bool = False,
    alone: bool = False,
    references: References | None = None,
) -> Any:
    """Return a plain copy of a value for :func:`decode`, or ``OPAQUE`` if it cannot be encoded.

    Args:
        value: any value.
        deep: whether to encode tensors, arrays, containers and objects of the user's classes.
        largest: largest total number of tensor elements to encode.
        known: ids of objects saved elsewhere, which are not encoded.
        held: whether an object of the same class exists at decoding, so that its class need not be found by name.
        alone: whether no object exists at decoding that could supply the factory of a defaultdict.
        references: objects that are saved by name; without it, parameters in containers are not saved.

    Example:
        >>> encode((1, "a"), deep=True)
        {'tuple': [1, 'a']}
    """
    if type(value) in SCALARS:
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "biufU" and type(value.item()) in SCALARS:
        return str(value) if isinstance(value, np.str_) else {"scalar": value.item(), "dtype": value.dtype.name}
    if is_generator(value):
        return {"generator": state_of(value)}
    if (constant := encode_constant(value)) is not None:
        return constant
    return _Encoder(largest, known, held=held, alone=alone, references=references).of(value) if deep else OPAQUE


class _Encoder:
    """Encoder of one value and its contents, up to a number of items."""

    def __init__(self, largest: int, known: Collection[int], *, held: bool, alone: bool, references: References | None):
        self._references = references
        self._alone = alone
        self._largest = largest
        self._known = known
        self._held = held
        self._left = _MOST_NESTED
        self._depth = 0

    def of(self, value: Any) -> Any:
        kind = type(value)
        if kind in SCALARS or is_generator(value):
            return encode(value)
        if self._references is not None and (encoded := self._references.encode(value)) is not None:
            return encoded
        if isinstance(value, Tensor):
            # Without known parts, any parameter in a container may be one of them.
            may_be_part = self._references is None and isinstance(value, nn.Parameter) and not self._held
            return _encoded_tensor(value) if self._fits(value.numel()) and not may_be_part else OPAQUE
        if isinstance(value, np.generic) and (encoded := encode(value)) is not OPAQUE:
            return encoded
        if kind is np.ndarray:
            if not self._fits(value.size):
                return OPAQUE
            if value.dtype.kind in "biufc" and value.dtype.itemsize <= 8 * (1 + (value.dtype.kind == "c")):
                native = value.astype(value.dtype.newbyteorder("="))  # a copy; FITS files are big-endian
                swapped = {} if value.dtype.isnative else {"order": value.dtype.byteorder}
                return {"array": torch.from_numpy(native), **swapped}
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
        """Encode an object of a user's subclass of a built-in container or number."""
        kind = type(value)
        if id(value) in self._known or not (self._held or has_path(kind)):
            return OPAQUE
        inner = base.copy(value) if base in _DICTS else base(value)
        parts = [self._part(inner), self._part(dict(getattr(value, "__dict__", {})))]
        return OPAQUE if any(part is OPAQUE for part in parts) else {"derived": parts, "of": class_path(kind)}

    def _inside(self, encoded: Callable[[Any], Any], container: Any) -> Any:
        """Encode the content of a container, for which no object of the same class need exist later."""
        held, self._held = self._held, False
        found = encoded(container)
        self._held = held
        return found

    def _of_object(self, value: Any) -> Any:
        """Encode a named tuple or an object of a user's class by its class and items."""
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
        """Deduct elements from the budget, so that a cache of samples does not go into every checkpoint."""
        self._largest -= count
        return self._largest >= 0

    def _of_items(self, items: list[Any]) -> Any:
        if len(items) <= LONGEST and SCALARS.issuperset(map(type, items)):
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
        # A state stored inside later states would grow with each of them.
        if (self._alone and not is_named) or _is_checkpoint(value) or _is_by_identity(value, self._references):
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
    """Return the built-in container or number that a user's class derives from, or None."""
    if not is_user_class(kind) or "_fields" in vars(kind) or issubclass(kind, Tensor):
        return None
    return next((base for base in kind.__mro__ if base in _DERIVED), None)


def is_plain_object(value: Any) -> bool:
    """Return whether a value consists of its attributes only: of a user's class or an estimator, not part of a run."""
    if not _is_of_values(type(value)) or has_state(value) or isinstance(value, enum.Enum):
        return False
    if isinstance(value, tuple):
        return hasattr(value, "_fields")
    kinds = type(value).__mro__
    return all(kind is object or kind.__module__ in _WITHOUT_STATE or _is_of_values(kind) for kind in kinds)


def _is_of_values(kind: type) -> bool:
    """Return whether a class is the user's, or a pure-Python class of a library whose objects are values."""
    return is_user_class(kind) or (bool(kind.__flags__ & _OF_PYTHON) and is_of_a_library_of_values(kind))


def is_of_a_library_of_values(kind: type) -> bool:
    """Return whether a class is of a library whose objects are values, such as an estimator or a distribution.

    Example:
        >>> is_of_a_library_of_values(torch.distributions.Normal), is_of_a_library_of_values(nn.Linear)
        (True, False)
    """
    return f"{kind.__module__}.".startswith(tuple(f"{name}." for name in _LIBRARIES_OF_VALUES))


def _is_by_identity(value: Mapping[Any, Any], references: References | None) -> bool:
    """Return whether the keys of a dict are tensors or memory addresses, which differ in another process."""
    keys = list(itertools.islice(value, _SAMPLED_KEYS))
    addresses = all(type(key) is int and 2**40 < key < 2**48 and key % 16 == 0 for key in keys)
    unknown = any(isinstance(key, Tensor) and (references is None or key not in references) for key in keys)
    return bool(keys) and (addresses or unknown)


def _is_checkpoint(value: Mapping[Any, Any]) -> bool:
    described = value.get("format")
    return isinstance(described, Mapping) and described.get("name") == "treadle"


def _encoded_tensor(value: Tensor) -> Any:
    plain = type(value) in (Tensor, nn.Parameter) and value.layout in _LAYOUTS
    if not plain or value.device.type == "meta":
        return OPAQUE
    copied = value.detach().to("cpu", copy=True)
    if type(value) is nn.Parameter:
        return {"parameter": copied}
    return copied if value.device.type == "cpu" else {"tensor": copied, "device": value.device.type}


def decode(value: Any, held: Any = None) -> Any:
    """Invert :func:`encode`.

    Args:
        value: the encoded tree.
        held: current value: a generator, container or tensor of the same form keeps its identity.

    Example:
        >>> decode({"tuple": [1, "a"]})
        (1, 'a')
    """
    if isinstance(value, Tensor):
        return _decoded_tensor(value, held)
    if isinstance(value, list):
        return _in_place(held, list, _decoded_items(value, held))
    if isinstance(value, Reference):
        return value.part
    if not isinstance(value, Mapping):
        return value
    return _DECODERS[next(iter(value))](value, held)


def _decoded_generator(value: Mapping[str, Any], held: Any) -> Any:
    generator = held if isinstance(held, GENERATORS) else generator_like(value["generator"])
    set_state(generator, value["generator"])
    return generator


def _decoded_elsewhere(value: Mapping[str, Any], held: Any) -> Any:
    """Return a tensor on a device other than the CPU."""
    device = held.device if isinstance(held, Tensor) else torch.device(value["device"])
    return _decoded_tensor(value["tensor"].to(device), held)


def _decoded_scalar(value: Mapping[str, Any], held: Any) -> Any:
    return np.dtype(value["dtype"]).type(value["scalar"])


def _decoded_dict(value: Mapping[str, Any], held: Any) -> Any:
    pairs = value["dict"].items() if "dict" in value else [(decode(key), item) for key, item in value["pairs"]]
    known = held if isinstance(held, _DICTS) else {}
    decoded = {key: decode(item, known.get(key)) for key, item in pairs}
    return _in_place(held, _DICTS, decoded) if isinstance(held, _DICTS) else _dict_like(value, decoded)


def _decoded_parameter(value: Mapping[str, Any], held: Any) -> Any:
    made = nn.Parameter(_decoded_tensor(value["parameter"], held.data if isinstance(held, nn.Parameter) else None))
    return held if isinstance(held, nn.Parameter) and held.shape == made.shape else made


def _decoded_container(value: Mapping[str, Any], held: Any) -> Any:
    """Return a tuple, a deque or a set."""
    kind, inner = next(iter(value.items()))
    items = _decoded_items(inner, held)
    if kind == "deque":
        return _in_place(held, (deque, set), deque(items, value.get("maxlen")))
    kinds: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}
    return _in_place(held, (deque, set), kinds[kind](items))


def _dict_like(value: Mapping[str, Any], decoded: dict[Any, Any]) -> Any:
    """Return a new dict of the encoded type."""
    factory = value.get("factory")
    if factory is not None and factory not in _FACTORIES:
        raise CheckpointError(
            f"a defaultdict with the keys {list(decoded)[:3]} does not exist when the checkpoint is loaded, and "
            "checkpoints do not hold its default_factory; create it in __init__"
        )
    kind = value.get("kind")
    if kind == "defaultdict":
        return defaultdict(_FACTORIES.get(factory) if factory else None, decoded)
    return {"OrderedDict": OrderedDict, "Counter": Counter}.get(kind or "", dict)(decoded)


def _decoded_object(value: Mapping[str, Any], held: Any) -> Any:
    """Return an object of a user's class, created without ``__init__`` if it does not exist yet."""
    (kind, inner), *_ = value.items()
    of = class_at(value["of"], held)
    if not _is_of_values(of):  # objects of other classes are never written
        raise CheckpointError(f"the checkpoint holds an object of {value['of']}, a class that checkpoints cannot hold")
    if kind == "record":
        return of._make(_decoded_items(inner, held))
    found = held if type(held) is of else object.__new__(of)
    before = attributes_of(found)
    for name, item in inner.items():
        object.__setattr__(found, name, decode(item, before.get(name)))  # the only way for a frozen dataclass
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


def _decoded_array(value: Mapping[str, Any], held: Any) -> Any:
    array = value["array"].numpy()
    if "order" in value:
        array = array.astype(array.dtype.newbyteorder(value["order"]))
    if type(held) is np.ndarray and held.shape == array.shape and held.dtype == array.dtype and held.flags.writeable:
        held[...] = array
        return held
    return array.copy()


@torch.no_grad()
def _decoded_tensor(value: Tensor, held: Any) -> Tensor:
    if type(held) is Tensor and held.shape == value.shape and held.dtype == value.dtype and not held.is_inference():
        return held.copy_(value)
    return value.clone()


def _in_place(held: Any, kinds: Any, value: Any) -> Any:
    """Fill an existing container in place, since others may refer to it; else return the new one."""
    if not isinstance(held, kinds) or (type(held) not in _DICTS and type(held) is not type(value)):
        return value
    held.clear()
    held.extend(value) if isinstance(held, (list, deque)) else held.update(value)
    return held


_DECODERS: dict[str, Callable[[Mapping[str, Any], Any], Any]] = {
    "generator": _decoded_generator, "tensor": _decoded_elsewhere, "array": _decoded_array, "scalar": _decoded_scalar,
    "dict": _decoded_dict, "pairs": _decoded_dict, "parameter": _decoded_parameter, "derived": _decoded_derived,
    "record": _decoded_object, "object": _decoded_object,
    **dict.fromkeys(("tuple", "deque", "set", "frozenset"), _decoded_container),
    **dict.fromkeys(CONSTANTS, decode_constant),
    **dict.fromkeys(LIBRARY_VALUES, lambda value, held: decode_library_value(value, decode, held)),
}  # fmt: skip
"""What returns a value of each kind, by the first key of its tree."""
