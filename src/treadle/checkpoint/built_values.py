"""Values with which objects were built, that no checkpoint holds and that another process may build differently."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler

from treadle.checkpoint.attributes import is_table
from treadle.checkpoint.introspection import Named, attributes_of, is_engine_or_trainer, is_user_object, offered

_MOST = 3  # values that a message names
_SAMPLED = 4096  # elements of which a mark is taken
_LARGE, _SAMPLED_OF_LARGE = 2**26, 256  # elements of a tensor that may be on a slow disk, and how many of it are read
_ITEMS, _SAMPLED_OF_ITEM = 32, 64  # items of a list of samples that are looked at, and elements of a tensor of these
_DEEPEST, _WIDEST = 4, 8  # containers of a sample within each other, and values of one
_TOLERANCE = 1e-4  # of the norm, since another processor may round sines and powers differently
_CLOCK = 1e8  # numbers from here on may be times, addresses or seeds
_NOW = 3600  # seconds since an object that is being built read a clock, at most
_NOT_A_CLOCK = 60  # seconds that a machine has been running when a script builds its objects, at least
_CLOCKS = (time.monotonic, time.perf_counter)
_COMPARED = frozenset((int, float, Tensor, np.ndarray, list, tuple))
_NUMBERS = (bool, int, float, np.number)
_OF_THE_HOST = frozenset((
    "cpu", "cpus", "cuda", "device", "devices", "duration", "elapsed", "gpu", "gpus", "memory", "node", "pid", "port",
    "rank", "seconds", "start", "thread", "threads", "time", "took", "worker", "workers", "world",
))  # fmt: skip
"""Words in the names of numbers that depend on the machine or the moment."""


class BuiltValues:
    """Numbers of objects, classes of samplers, and marks of tensors, arrays and lists of numbers, by name.

    A mark holds the shape and, of some elements, a digest, or the norm and two projections of floating-point numbers.

    Args:
        owners: returns the objects by path.
        lists: whether lists of numbers are compared, too.

    Example:
        >>> built = BuiltValues(lambda: {"model": nn.Dropout(0.1)})
        >>> built.unchanged(), built.differing({"model.p": 0.5})
        ({'model.p': 0.1}, ['model.p=0.5 (here 0.1)'])
    """

    def __init__(self, owners: Callable[[], Mapping[str, Any]], *, lists: bool = False):
        self._owners = owners
        self._lists = lists
        self._values = {name: BuiltValue(*held) for name, held in self._held().items()}

    def unchanged(self) -> dict[str, Any]:
        """Return the values that are as they were built."""
        return {name: value.mark for name, value in self._values.items() if value.is_unchanged()}

    def differing(self, saved: Mapping[str, Any]) -> list[str]:
        """Return in words which values were built, and still are, different from those of a checkpoint's run.

        The state of a checkpoint, or the epoch that is set on a data set, may have replaced what was built.
        """
        marks = {name: value.mark for name, value in self._values.items()}
        names = [name for name, mark in saved.items() if name in marks and _differ(mark, marks[name])]
        held = self._held() if names else {}
        now = {name: _mark_of(held[name][2]) for name in names if name in held}
        names = [name for name, mark in now.items() if _differ(saved[name], mark)]
        named = [f"{name}{_difference(saved[name], now[name])}" for name in names[:_MOST]]
        return [*named, f"{len(names) - _MOST} more"] if len(names) > _MOST else named

    def _held(self) -> dict[str, tuple[Any, str, Any]]:
        """Return the values that may be compared by name, each with its owner and its attribute."""
        found: dict[str, tuple[Any, str, Any]] = {}
        for path, owner in self._owners().items():
            if isinstance(owner, Sampler):
                found[f"the class of {path}"] = owner, "__class__", type(owner).__name__
            kinds = _kinds_of(owner, lists=self._lists)
            is_of_model = path.partition(".")[0] == "model"  # whose state dict is in every checkpoint
            for name, value in _attributes_of(owner, saved_buffers=not is_of_model):
                kind = type(value)
                if kind in kinds and name[:1] != "_" and (kind not in (int, float) or _is_setting(name, value)):
                    found[f"{path}.{name}"] = owner, name, value
        return found


class BuiltValue:
    """One attribute with its mark when it was built.

    Args:
        owner: its object.
        name: of the attribute.
        value: then.

    Attributes:
        mark: a number, the name of a class, or the mark of a tensor, an array or a list; None if it is not compared.

    Example:
        >>> layer = nn.Dropout(0.1)
        >>> value = BuiltValue(layer, "p", layer.p)
        >>> value.is_unchanged(), setattr(layer, "p", 0.2), value.is_unchanged()
        (True, None, False)
    """

    __slots__ = ("_holder", "_name", "mark")

    def __init__(self, owner: Any, name: str, value: Any):
        self.mark = _mark_of(value)
        self._name = name
        self._holder = owner
        if isinstance(owner, nn.Module):
            self._holder = vars(owner) if name in vars(owner) else owner._buffers

    def is_unchanged(self) -> bool:
        """Return whether the attribute is as it was built; always for a class, never without a mark."""
        if self.mark is None or isinstance(self.mark, str):
            return self.mark is not None
        held = self._holder if type(self._holder) is dict else dict(_attributes_of(self._holder))
        value = held.get(self._name)
        return type(value) in _COMPARED and bool(_mark_of(value) == self.mark)


def _attributes_of(owner: Any, *, saved_buffers: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object with their names, and the buffers of a module, also those that it saves."""
    if isinstance(owner, nn.Module):
        yield from vars(owner).items()
        yield from ((name, owner._buffers.get(name)) for name in (
            owner._buffers if saved_buffers else owner._non_persistent_buffers_set
        ))  # fmt: skip
        return
    for name, value in attributes_of(owner).items():
        if isinstance(value, functools.partial):
            yield from ((f"{name}.{key}", argument) for key, argument in attributes_of(value).items())
        else:
            yield name, _columns_of(value) if is_table(value) else value
    yield from _of_libraries(owner)


def _columns_of(table: Any) -> list[Any]:
    """Return some rows of the first columns of a pandas table."""
    rows = table.iloc[:: max(1, len(table) // _SAMPLED_OF_ITEM)]
    return [rows.iloc[:, number].to_numpy() for number in range(min(_WIDEST, rows.shape[1] if rows.ndim > 1 else 0))]


def _of_libraries(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the row numbers of data sets of datasets and torch_geometric, and the samples of the latter."""
    indices, data = offered(owner, "_indices"), offered(owner, "_data")
    if callable(offered(indices, "column")):
        yield "indices", indices.column(0).to_numpy()
    elif type(indices) in _COMPARED:
        yield "indices", indices
    if isinstance(owner, Dataset) and callable(offered(data, "to_dict")):
        yield "data", [data]


def _kinds_of(owner: Any, *, lists: bool) -> frozenset[type]:
    """Return the types of attributes that are compared.

    Whole numbers of users' modules, and of other objects, may as well be sizes, intervals or lengths of a run.
    """
    if isinstance(owner, (Named, torch.jit.ScriptModule)):
        return frozenset()
    kinds = {Tensor, np.ndarray, *((list, tuple) if lists else ())}
    if isinstance(owner, nn.Module):
        kinds |= {float} if is_user_object(owner) else {float, int}
    elif _has_settings(owner):
        kinds.add(float)
    return frozenset(kinds)


def _has_settings(owner: Any) -> bool:
    if isinstance(owner, functools.partial):
        return True
    if type(owner).__module__.startswith("treadle."):
        return not dataclasses.is_dataclass(owner)  # the front ends compare these
    return is_user_object(owner) and not is_engine_or_trainer(owner)


def _is_setting(name: str, value: float) -> bool:
    """Return whether a number may be an argument: no time, address or seed, and no property of the machine."""
    if not math.isfinite(value) or abs(value) >= _CLOCK or _is_of_the_host(name):
        return False
    return value <= _NOT_A_CLOCK or not any(0 <= clock() - value <= _NOW for clock in _CLOCKS)


@functools.lru_cache(maxsize=1024)
def _is_of_the_host(name: str) -> bool:
    return not _OF_THE_HOST.isdisjoint(name.lower().split("_"))


def _differ(before: Any, now: Any) -> bool:
    if isinstance(before, list) and isinstance(now, list):
        if before[0] != now[0]:
            return False  # of another dtype or device, which is named elsewhere
        return before[1] != now[1] or not _are_close(before[2:], now[2:])
    return type(before) is type(now) and bool(before != now)


def _are_close(before: list[float], now: list[float]) -> bool:
    within = _TOLERANCE * max([*before[:1], *now[:1]], default=0.0)  # the norm is first
    return all(abs(one - other) <= within for one, other in zip(before, now, strict=True))


def _difference(before: Any, now: Any) -> str:
    """Return both values in words, where they are no marks."""
    if isinstance(before, float):
        return f"={before:.8g} (here {now:.8g})"
    return f"={before} (here {now})" if isinstance(before, str) else ""


def _mark_of(value: Any) -> Any:
    """Return a number or a name; else a list of kind and digest, and of floating-point numbers their projections."""
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)) and value and all(type(item) is Tensor for item in value):  # of a TensorDataset
        return _joined([_mark_of(item) for item in value[:_SAMPLED_OF_LARGE]], len(value))
    kind, shape, elements = _described(value)
    if elements is None or elements.dtype.kind not in "biufc":
        return None
    if elements.dtype.kind in "fc":
        return [kind, _digest(repr(shape).encode()), *_projections(elements)]
    return [kind, _digest(repr(shape).encode() + elements.tobytes())]


def _described(value: Any) -> tuple[str, tuple[int, ...], np.ndarray[Any, Any] | None]:
    """Return the kind and the shape of a tensor, an array or a list, and some elements."""
    if type(value) is Tensor:
        return f"{value.dtype} {value.device.type}", tuple(value.shape), _of_tensor(value)
    if type(value) is np.ndarray:
        return str(value.dtype), value.shape, _of_array(value)
    some = value[:: max(1, len(value) // _SAMPLED)]
    if value and all(isinstance(item, _NUMBERS) for item in some):
        return type(value).__name__, (len(value),), np.asarray(some)
    parts = [part for item in value[:: max(1, len(value) // _ITEMS)] for part in _numbers_in(item, _DEEPEST)]
    return type(value).__name__, (len(value),), np.concatenate(parts) if parts else None


def _numbers_in(item: Any, depth: int) -> Iterator[np.ndarray[Any, Any]]:
    """Yield some numbers of a sample: a tensor, an array, or a container or object of these."""
    elements = None
    if isinstance(item, _NUMBERS):
        elements = np.asarray([item]) if -_CLOCK < item < _CLOCK else None
    elif type(item) is Tensor:
        elements = _of_tensor(item, _SAMPLED_OF_ITEM)
    elif type(item) is np.ndarray:
        elements = _of_array(item, _SAMPLED_OF_ITEM)
    elif depth and not isinstance(item, (nn.Module, type)):
        held = item if isinstance(item, (list, tuple, Mapping)) else offered(item, "__dict__")
        values = held.values() if isinstance(held, Mapping) else held or ()
        for value in itertools.islice(values, _WIDEST):
            yield from _numbers_in(value, depth - 1)
    if elements is not None:
        yield np.abs(elements).astype(np.float64) if elements.dtype.kind == "c" else elements.astype(np.float64)


def _joined(marks: list[list[Any] | None], count: int) -> list[Any] | None:
    """Return the mark of several tensors, with sums of their norms and projections."""
    known = [mark for mark in marks if mark is not None]
    if len(known) < len(marks):
        return None
    numbers = [sum(parts) for parts in zip(*(mark[2:] for mark in known if len(mark) > 2), strict=True)]
    return [" ".join(mark[0] for mark in known), _digest(repr((count, [mark[1] for mark in known])).encode()), *numbers]


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _projections(elements: np.ndarray[Any, Any]) -> list[float]:
    """Return the norm and two projections, which are finite."""
    values = np.arcsinh(np.abs(elements) if elements.dtype.kind == "c" else elements.astype(np.float64))
    values = np.nan_to_num(values, posinf=1e6, neginf=-1e6)
    angles = np.arange(1, values.size + 1) * 1.37
    return [float(np.sqrt(values @ values)), float(values @ np.sin(angles)), float(values @ np.cos(angles))]


def _of_tensor(tensor: Tensor, most: int | None = None) -> np.ndarray[Any, Any] | None:
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or tensor.grad_fn is not None:
        return None
    if not tensor.numel():
        return None
    step = _step_of(tensor.numel(), most)
    elements = tensor.detach().reshape(-1)[::step].resolve_conj().resolve_neg()
    if elements.is_floating_point():
        elements = elements.double()
    return elements.cpu().numpy()


def _of_array(array: np.ndarray[Any, Any], most: int | None = None) -> np.ndarray[Any, Any] | None:
    if not array.size or array.dtype.kind not in "biufc":
        return None
    step = _step_of(array.size, most)
    return array.reshape(-1)[::step] if array.flags.c_contiguous else array.flat[::step]


def _step_of(size: int, most: int | None) -> int:
    return max(1, size // (most or (_SAMPLED if size < _LARGE else _SAMPLED_OF_LARGE)))
