"""Values with which objects were built, that no checkpoint holds and that another process may build differently."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Sampler

from treadle.checkpoint.introspection import Named, attributes_of

_MOST = 3  # values that a message names
_SAMPLED = 4096  # elements of which a mark is taken
_LARGE, _SAMPLED_OF_LARGE = 2**26, 256  # elements of a tensor that may be on a slow disk, and how many of it are read
_TOLERANCE = 1e-4  # of the norm, since another processor may round sines and powers differently
_CLOCK = 1e8  # numbers from here on may be times, addresses or seeds
_NOW = 3600  # seconds since an object that is being built read a clock, at most
_KINDS = frozenset((int, float, Tensor, np.ndarray, list, tuple))
_NUMBERS = (bool, int, float, np.number)
_OF_THE_HOST = frozenset((
    "cpu", "cpus", "cuda", "device", "devices", "elapsed", "gpu", "gpus", "memory", "node", "pid", "port", "rank",
    "seconds", "start", "thread", "threads", "time", "took", "worker", "workers", "world",
))  # fmt: skip
"""Words in the names of numbers that depend on the machine or the moment."""

RULE = (
    "no checkpoint holds them, so from here on the run differs. A resume is exact only if the script builds the same: "
    "call treadle.set_seed before anything is drawn at random, or keep the argument"
)
"""End of a warning about other values."""


class BuiltValues:
    """Numbers of modules, classes of samplers, and marks of tensors, arrays and lists of numbers, by name.

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
        self._start = self._now()

    def unchanged(self) -> dict[str, Any]:
        """Return the values that are as they were built."""
        now = self._now(self._start)
        return {name: value for name, value in self._start.items() if now.get(name) == value}

    def differing(self, saved: Mapping[str, Any]) -> list[str]:
        """Return in words which values were built, and still are, different from those of a checkpoint's run.

        The state of a checkpoint, or the epoch that is set on a data set, may have replaced what was built.
        """
        names = [name for name, value in saved.items() if name in self._start and _differ(value, self._start[name])]
        now = self._now(names) if names else {}
        names = [name for name in names if name in now and _differ(saved[name], now[name])]
        named = [f"{name}{_difference(saved[name], now[name])}" for name in names[:_MOST]]
        return [*named, f"{len(names) - _MOST} more"] if len(names) > _MOST else named

    def _now(self, names: Collection[str] | None = None) -> dict[str, Any]:
        found = {}
        for path, owner in self._owners().items():
            if isinstance(owner, Sampler):
                found[f"the class of {path}"] = type(owner).__name__
            for name, value in _attributes_of(owner):
                full = f"{path}.{name}"
                is_of_interest = names is None or full in names
                if is_of_interest and (mark := self._mark_of(owner, name, value)) is not None:
                    found[full] = mark
        return found

    def _mark_of(self, owner: Any, name: str, value: Any) -> Any:
        """Return a number, or the mark of a tensor, an array or a list; None if it is not compared."""
        if type(value) in (int, float):
            return float(value) if isinstance(owner, nn.Module) and _is_setting(name, value) else None
        if isinstance(value, (list, tuple)) and not self._lists:
            return None
        return _mark_of(value)


def _attributes_of(owner: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(owner, (Named, torch.jit.ScriptModule)):
        return
    held = vars(owner) if isinstance(owner, nn.Module) else attributes_of(owner)
    for name, value in held.items():
        if type(value) in _KINDS and not name.startswith("_"):
            yield name, value
    if isinstance(owner, nn.Module):
        yield from ((name, owner._buffers.get(name)) for name in owner._non_persistent_buffers_set)


def _is_setting(name: str, value: float) -> bool:
    """Return whether a number may be an argument: no time, address or seed, and nothing of the machine."""
    if not math.isfinite(value) or abs(value) >= _CLOCK or not _OF_THE_HOST.isdisjoint(name.lower().split("_")):
        return False
    return isinstance(value, int) or not any(0 <= clock() - value <= _NOW < value for clock in _CLOCKS)


_CLOCKS = (time.monotonic, time.perf_counter)


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


def _mark_of(value: Any) -> list[Any] | None:
    """Return the kind of a value, a digest, and the norm and two projections of floating-point numbers."""
    if type(value) is Tensor:
        elements = _of_tensor(value)
        kind, shape = f"{value.dtype} {value.device.type}", tuple(value.shape)
    elif type(value) is np.ndarray:
        elements = _of_array(value)
        kind, shape = str(value.dtype), value.shape
    elif value and all(type(item) is Tensor for item in value[:_MOST]):  # of a TensorDataset
        marks = [_mark_of(item) for item in value[:_SAMPLED_OF_LARGE] if type(item) is Tensor]
        return _joined(marks, len(value))
    else:
        some = value[:: max(1, len(value) // _SAMPLED)]
        elements = np.asarray(some) if value and all(isinstance(item, _NUMBERS) for item in some) else None
        kind, shape = type(value).__name__, (len(value),)
    if elements is None or elements.dtype.kind not in "biufc":
        return None
    if elements.dtype.kind in "fc":
        return [kind, _digest(repr(shape).encode()), *_projections(elements)]
    return [kind, _digest(repr(shape).encode() + elements.tobytes())]


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
    values = np.nan_to_num(np.abs(elements) if elements.dtype.kind == "c" else elements.astype(np.float64), posinf=1e6)
    values = np.clip(values, -1e150, 1e150)
    angles = np.arange(1, values.size + 1) * 1.37
    return [float(np.sqrt(values @ values)), float(values @ np.sin(angles)), float(values @ np.cos(angles))]


def _of_tensor(tensor: Tensor) -> np.ndarray[Any, Any] | None:
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or tensor.grad_fn is not None:
        return None
    if not tensor.numel():
        return None
    step = _step_of(tensor.numel())
    elements = tensor.detach().reshape(-1)[::step].resolve_conj().resolve_neg()
    if elements.is_floating_point():
        elements = elements.double()
    return elements.cpu().numpy()


def _of_array(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    if not array.size or array.dtype.kind not in "biufc":
        return None
    step = _step_of(array.size)
    return array.reshape(-1)[::step] if array.flags.c_contiguous else array.flat[::step]


def _step_of(size: int) -> int:
    return max(1, size // (_SAMPLED if size < _LARGE else _SAMPLED_OF_LARGE))
