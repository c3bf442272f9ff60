"""Digests of values: short strings that are equal if, and only if, the values are equal to the bit."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_LONGEST_TEXT = 48
_LONGEST_LIST = 16
_DEEPEST = 8
_DURATIONS = ("time", "seconds", "duration", "memory", "per_second")


def leaves_of(value: Any, path: str = "", *, depth: int = 0) -> dict[str, str]:
    """Return ``path -> string`` of every leaf of nested values: numbers as they are, tensors as digests.

    Args:
        value: nesting of mappings, sequences, tensors, arrays, generators and plain values; for other objects, their
            attributes.
        path: the path of the value.
        depth: the recursion depth.

    Example:
        >>> leaves_of({"lr": 0.1, "steps": [1, 2]})
        {'lr': '0.1', 'steps.0': '1', 'steps.1': '2'}
    """
    text = leaf_text(value)
    if text is not None:
        return {path: text}
    if depth >= _DEEPEST:
        return {path: f"a {type(value).__name__}"}
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(str(index), item) for index, item in enumerate(value)]
    elif isinstance(value, (set, frozenset)):
        items = [("items", sorted(repr(item) for item in value))]
    else:
        items = list(getattr(value, "__dict__", {}).items())
    if not items:
        return {path: f"an empty {type(value).__name__}"}
    texts = {}
    for key, item in items:
        texts.update(leaves_of(item, f"{path}.{key}" if path else key, depth=depth + 1))
    if isinstance(value, (list, tuple)) and len(value) > _LONGEST_LIST:
        return {path: f"{len(value)} items {_hashed(repr(texts).encode())}"}
    return texts


def leaf_text(value: Any) -> str | None:
    """Return the string of an atomic value, or None for a composite one.

    Example:
        >>> leaf_text(0.1), leaf_text({})
        ('0.1', None)
    """
    if value is None or isinstance(value, (bool, int, float, complex)):
        return repr(value)
    if isinstance(value, (str, bytes)):
        return repr(value) if len(value) <= _LONGEST_TEXT else _hashed(repr(value).encode())
    if isinstance(value, Tensor):
        return _tensor_text(value)
    if isinstance(value, np.generic):
        return repr(value.item())
    if isinstance(value, np.ndarray):
        kind = f"{value.dtype}{list(value.shape)}"
        data = repr(value.tolist()).encode() if value.dtype.hasobject else np.ascontiguousarray(value).tobytes()
        return f"{kind} {_hashed(data)}"
    return _generator_text(value)


def _generator_text(value: Any) -> str | None:
    if isinstance(value, torch.Generator):
        return f"generator {_hashed(value.get_state().numpy().tobytes())}"
    if isinstance(value, np.random.Generator):
        return f"generator {_hashed(repr(value.bit_generator.state).encode())}"
    if isinstance(value, np.random.RandomState):
        return f"generator {_hashed(repr(value.get_state(legacy=True)).encode())}"
    if isinstance(value, random.Random):
        return f"generator {_hashed(repr(value.getstate()).encode())}"
    return None


def _tensor_text(tensor: Tensor) -> str:
    tensor = tensor.detach()
    kind = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if tensor.device.type == "meta":
        return kind
    if tensor.layout is not torch.strided or tensor.is_quantized:
        dense = tensor.cpu().dequantize() if tensor.is_quantized else tensor.cpu().to_dense()
        return f"{kind} {_hashed(repr(dense.tolist()).encode())}"
    plain = tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if plain.numel() == 1 and not plain.is_complex():
        return repr(plain.item())  # a loss or a learning rate is more readable as a number
    return f"{kind} {_hashed(plain.view(torch.uint8).numpy().tobytes())}"


def _hashed(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def without_durations(texts: Mapping[str, str]) -> dict[str, str]:
    """Drop leaves that measure time or memory, which belong to this process and are not guaranteed.

    Example:
        >>> without_durations({"train.loss": "0.5", "train.step_time": "0.01"})
        {'train.loss': '0.5'}
    """
    return {path: text for path, text in texts.items() if not path.rsplit(".", 1)[-1].endswith(_DURATIONS)}
