"""Plain-tree encoding of values of the standard library and NumPy, including iterators."""

from __future__ import annotations

import argparse
import array
import configparser
import contextlib
import contextvars
import copyreg
import ctypes
import datetime
import io
import itertools
import queue
import statistics
import threading
import types
import uuid
import warnings
from collections import ChainMap, UserDict, UserList
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.managers import DictProxy, ListProxy, ValueProxy
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

import numpy as np
import torch

from treadle.checkpoint.generators import new_bit_generator, set_state, state_of
from treadle.errors import CheckpointError

_QUEUES = (queue.Queue, queue.LifoQueue, queue.PriorityQueue)
NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_KINDS: tuple[type, ...] = (
    array.array, bytearray, uuid.UUID, datetime.time, datetime.timezone, statistics.NormalDist, ChainMap, UserDict,
    UserList, io.BytesIO, io.StringIO, itertools.count, slice, *NAMESPACES,
)  # fmt: skip
_SEQUENCES: tuple[Any, ...] = (
    [], (), "", "\u00e9", range(0), range(2**70), {}, {}.values(), {}.items(), set(), b"", bytearray(),
    array.array("b"), np.empty(0),
)  # fmt: skip
_MEMORIES = (ctypes.Array, ctypes.Structure, ctypes._SimpleCData)
_PROXIES = (DictProxy, ListProxy, ValueProxy)  # of a manager, which another process holds
_WITH_FORMS = (
    *_QUEUES, SynchronizedBase, memoryview, np.ma.MaskedArray, threading.local, contextvars.ContextVar,
    configparser.RawConfigParser, *_MEMORIES, *_PROXIES, np.random.SeedSequence, np.random.BitGenerator,
)  # fmt: skip
_ITERATORS: tuple[type, ...] = (
    itertools.chain, itertools.cycle, itertools.islice, itertools.repeat, itertools.accumulate, itertools.product,
    itertools.permutations, itertools.combinations, itertools.combinations_with_replacement, itertools.compress,
    itertools.zip_longest, enumerate, zip, type(reversed([])), *(type(iter(each)) for each in _SEQUENCES),
)  # fmt: skip
_MAKERS: dict[str, Callable[..., Any]] = {"iter": iter, "reversed": reversed}
_BY_PATH = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in (*_KINDS, *_ITERATORS)}
LIBRARY_VALUES = frozenset(
    (
        "reduced",
        "iterator",
        "elements",
        "objects",
        "masked",
        "memory",
        "local",
        "context",
        "queue",
        "shared",
        "sections",
        "proxy",
        "seeds",
        "bits",
    )
)


def is_library_value(value: Any) -> bool:
    """Return whether a value is of a supported type, or an iterator, which is saved or reported.

    Example:
        >>> is_library_value(array.array("i")), is_library_value(io)
        (True, False)
    """
    if isinstance(value, (*_KINDS, *_WITH_FORMS)):
        return True
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase)


def encode_library_value(value: Any, encode: Callable[[Any], Any], opaque: Any) -> Any:
    """Return a value as a tree, ``opaque`` if a part cannot be encoded, or None for other types.

    Args:
        value: any value.
        encode: encodes its parts.
        opaque: result of ``encode`` for a value that cannot be saved.

    Example:
        >>> encode_library_value(array.array("i", [1, 2]), lambda part: part, "opaque")["arguments"]
        ('i', [1, 2])
    """
    if type(value) is np.ndarray or isinstance(value, np.generic):
        return _encoded_array(np.asarray(value), encode, opaque, is_scalar=isinstance(value, np.generic))
    if type(value) is np.ma.MaskedArray:
        parts = [encode(value.data), encode(np.ma.getmaskarray(value))]
        return opaque if any(part is opaque for part in parts) else {"masked": parts}
    if isinstance(value, (threading.local, contextvars.ContextVar)):
        is_local = isinstance(value, threading.local)
        inside = encode(dict(vars(value)) if is_local else value.get(None))
        return opaque if inside is opaque else {"local" if is_local else "context": inside}
    if isinstance(value, np.random.BitGenerator):
        return {"bits": state_of(np.random.Generator(value)), "of": type(value).__name__}
    if isinstance(value, np.random.SeedSequence):
        seeds = encode(value.state)
        return opaque if seeds is opaque else {"seeds": seeds}
    if isinstance(value, _PROXIES):
        content = encode(value.value if isinstance(value, ValueProxy) else value._getvalue())
        return opaque if content is opaque else {"proxy": content}
    if isinstance(value, (SynchronizedBase, *_MEMORIES)):
        memory = value.get_obj() if isinstance(value, SynchronizedBase) else value
        is_raw = memory is value and hasattr(value, "_wrapper")  # memory that processes share without a lock
        return opaque if is_raw or _has_pointers(memory) else {"shared": bytes(memory).hex()}
    if isinstance(value, configparser.RawConfigParser):
        sections = {name: dict(value.items(name, raw=True)) for name in value.sections()}
        return {"sections": encode({value.default_section: dict(value.defaults()), **sections})}
    if type(value) in _QUEUES:
        waiting = encode(list(value.queue))
        return opaque if waiting is opaque else {"queue": waiting, "of": type(value).__name__, "most": value.maxsize}
    if isinstance(value, memoryview):
        return {"memory": value.tobytes().hex(), "format": value.format} if value.contiguous else opaque
    return _reduced(value, encode, opaque) if type(value) in (*_KINDS, *_ITERATORS) else None


def _reduced(value: Any, encode: Callable[[Any], Any], opaque: Any) -> Any:
    """Return a value as a tree of the arguments and the state by which it can be made again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from itertools, which Python 3.14 can no longer pickle
        try:
            function, given, state = (*value.__reduce_ex__(2), None)[:3]
        except TypeError:
            return opaque
    is_new = function is copyreg.__newobj__  # type: ignore[attr-defined]
    given = tuple(given[1:] if is_new else given)
    if any(callable(argument) for argument in given):
        return opaque
    arguments, state = encode(given), encode(state)
    maker = next((name for name, made in _MAKERS.items() if made is function), None)
    if arguments is opaque or state is opaque or not (is_new or maker or function is type(value)):
        return opaque
    if maker:
        return {"iterator": maker, "arguments": arguments, "state": state}
    path = f"{type(value).__module__}.{type(value).__qualname__}"
    return {"reduced": path, "made": "new" if is_new else "called", "arguments": arguments, "state": state}


def _encoded_array(value: Any, encode: Callable[[Any], Any], opaque: Any, *, is_scalar: bool) -> Any:
    shape = list(value.shape)
    if value.dtype == object:
        items = encode(value.reshape(-1).tolist())
        return opaque if items is opaque else {"objects": items, "shape": shape}
    if value.dtype.hasobject:
        return opaque
    elements = torch.from_numpy(np.frombuffer(value.tobytes(), dtype=np.uint8).copy())
    counted = encode(elements)
    form = encode(np.lib.format.dtype_to_descr(value.dtype))
    if counted is opaque or form is opaque:
        return opaque
    return {"elements": elements, "dtype": form, "shape": shape, "scalar": is_scalar}


def decode_library_value(value: Mapping[str, Any], decode: Callable[[Any], Any], held: Any) -> Any:
    """Invert :func:`encode_library_value`.

    Args:
        value: what it returned.
        decode: decodes its parts.
        held: current value; an array of the same form is filled in place.
    """
    (kind, inner), *_ = value.items()
    if kind == "masked":
        return np.ma.MaskedArray(*(decode(part) for part in inner))
    if kind == "local":
        local = held if isinstance(held, threading.local) else threading.local()
        vars(local).update(decode(inner))
        return local
    if kind == "context":
        if isinstance(held, contextvars.ContextVar):
            held.set(decode(inner))
        return held
    if kind == "bits":
        generator = held if isinstance(held, np.random.BitGenerator) else new_bit_generator(value["of"])
        set_state(np.random.Generator(generator), inner)
        return generator
    if kind == "seeds":
        return np.random.SeedSequence(**decode(inner))
    if kind == "proxy":
        return _filled_proxy(held, decode(inner))
    if kind == "shared":
        return _shared(bytes.fromhex(inner), held)
    if kind == "sections":
        sections = held if isinstance(held, configparser.RawConfigParser) else configparser.ConfigParser()
        sections.clear()
        sections.read_dict(decode(inner))
        return sections
    if kind == "queue":
        waits = held if type(held) in _QUEUES else getattr(queue, value["of"])(value["most"])
        waits.queue.clear()
        waits.queue.extend(decode(inner))
        return waits
    if kind == "memory":
        return _viewed(bytes.fromhex(inner), value["format"], held)
    if kind == "iterator":
        made, state = _MAKERS[inner](*_without_classes(decode(value["arguments"]))), decode(value["state"])
        if state is not None:
            made.__setstate__(state)
        return made
    if kind == "reduced":
        return _filled(held, _rebuilt(_BY_PATH[inner], value, decode))
    if kind == "objects":
        made = np.empty(len(inner), dtype=object)
        made[:] = decode(inner)
    else:
        made = np.frombuffer(inner.numpy().tobytes(), dtype=np.lib.format.descr_to_dtype(decode(value["dtype"])))
    made = made.reshape(value["shape"])
    return made[()] if value.get("scalar") else _filled(held, made.copy())


def _rebuilt(kind: Any, value: Mapping[str, Any], decode: Callable[[Any], Any]) -> Any:
    arguments, state = _without_classes(decode(value["arguments"])), decode(value["state"])
    made = kind.__new__(kind, *arguments) if value["made"] == "new" else kind(*arguments)
    if state and hasattr(made, "__setstate__"):
        made.__setstate__(state)
    elif state:
        plain, slots = state if isinstance(state, tuple) else (state, None)
        for name, item in {**(plain or {}), **(slots or {})}.items():
            object.__setattr__(made, name, item)
    return made


def _without_classes(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of an iterator, which would call a class among them: a file must not choose it.

    Raises:
        CheckpointError: one is a class.
    """
    if any(isinstance(argument, type) for argument in arguments):
        raise CheckpointError("the checkpoint holds an iterator that calls a class, which treadle does not write")
    return arguments


def _shared(content: bytes, held: Any) -> Any:
    """Fill an existing value of ctypes, or one shared between processes, which only its own process can create."""
    with held.get_lock() if hasattr(held, "get_lock") else contextlib.nullcontext():
        memory = held.get_obj() if isinstance(held, SynchronizedBase) else held
        if isinstance(memory, _MEMORIES) and ctypes.sizeof(memory) == len(content):
            ctypes.memmove(ctypes.addressof(memory), content, len(content))
    return held


def _has_pointers(memory: Any) -> bool:
    """Return whether a value of ctypes is made of anything but numbers and characters: addresses are of one process."""
    waiting: list[Any] = [type(memory)]
    while waiting:
        kind = waiting.pop()
        if issubclass(kind, ctypes.Array):
            waiting.append(kind._type_)
        elif issubclass(kind, ctypes.Structure):
            waiting += [field[1] for base in kind.__mro__ for field in vars(base).get("_fields_", ())]
        elif not issubclass(kind, ctypes._SimpleCData) or kind._type_ in "PzZO":
            return True
    return False


def _filled_proxy(held: Any, content: Any) -> Any:
    """Fill the object of a manager, which only its own process can create."""
    if isinstance(held, DictProxy):
        held.clear()
        held.update(content)
    elif isinstance(held, ListProxy):
        held[:] = content
    elif isinstance(held, ValueProxy):
        held.value = content
    return held


def _viewed(content: bytes, form: str, held: Any) -> Any:
    """Fill the memory of an existing view; else return a view of new memory."""
    is_same = isinstance(held, memoryview) and held.contiguous and not held.readonly and held.nbytes == len(content)
    if is_same and held.format == form:
        held.cast("B")[:] = content
        return held
    return memoryview(bytearray(content)).cast(form)  # type: ignore[call-overload]


def _filled(held: Any, made: Any) -> Any:
    """Fill an existing array or namespace in place, since others may refer to it; else return the new value."""
    if type(held) is not type(made):
        return made
    if isinstance(made, NAMESPACES):
        vars(held).clear()
        vars(held).update(vars(made))
        return held
    if isinstance(made, (array.array, bytearray)):
        held[:] = made
        return held
    if type(made) is np.ndarray and held.shape == made.shape and held.dtype == made.dtype and held.flags.writeable:
        held[...] = made
        return held
    return made
