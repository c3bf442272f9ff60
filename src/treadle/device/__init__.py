"""Resolution of devices without silent fallback, and moving of batches."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import inspect
import os
from collections.abc import Hashable, Mapping
from typing import Any, cast

import torch

from treadle.errors import ConfigError
from treadle.nested import map_nested_tensor


def get_device(device: torch.device | str | int | None = None) -> torch.device:
    """Return the device to train on.

    Args:
        device: None takes CUDA, then MPS, then the CPU. ``"cuda"``, ``"cuda:0"``, ``0`` and
            ``torch.device("cuda", 0)`` are equal spellings.

    Returns:
        The device; an accelerator always carries its index, except MPS; the CPU never does.

    Raises:
        ConfigError: an explicit device is not available, or the name is unknown.

    Example:
        >>> get_device("cpu")
        device(type='cpu')
    """
    resolved = _resolved(device)
    if resolved.type == "cuda":
        keep_garbage_from_forks()
    return resolved


def _resolved(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        resolved = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f" is not a device name; available: {_available()}", argument="device", value=device
        ) from error
    if resolved.type in ("cpu", "meta"):
        return torch.device(resolved.type)  # "cpu" and "cpu:0" would compare as different
    if not _is_there(resolved):
        raise ConfigError(
            f" is not available here; available: {_available()}. Pass one of these, or None to choose automatically",
            argument="device",
            value=device,
        )
    if resolved.index is None and resolved.type != "mps":
        index = torch.get_device_module(resolved.type).current_device()
        return torch.device(resolved.type, index)
    return resolved


@functools.cache
def keep_garbage_from_forks() -> None:
    """Keep forked data workers from garbage-collecting CUDA objects, which would crash them.

    A graph or a pinned batch of an earlier run may be uncollected garbage.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=gc.freeze)


def _is_there(device: torch.device) -> bool:
    if device.type == "mps":
        return torch.backends.mps.is_available()
    try:
        module: Any = torch.get_device_module(device.type)
    except RuntimeError:
        return False
    if not module.is_available():
        return False
    return device.index is None or bool(device.index < module.device_count())


def _available() -> str:
    names = ["cpu"]
    names += [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    names += ["mps"] if torch.backends.mps.is_available() else []
    return ", ".join(names)


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Move a tensor to a device, without waiting for copies from pinned memory.

    Copies to the CPU are synchronous: the host could read them too early otherwise.

    Example:
        >>> moved(torch.ones(1), torch.device("cpu"))
        tensor([1.])
    """
    return tensor.to(device, non_blocking=device.type != "cpu")


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor of a batch to ``device`` in new containers, without changing the batch.

    Copies from pinned memory are asynchronous, those to the CPU are not. Objects with their own ``to``, such as a graph
    batch or a PackedSequence, are moved by it, through a copy if it would change them in place.

    Example:
        >>> to_device([torch.zeros(1)], torch.device("cpu"))
        [tensor([0.])]
    """
    if isinstance(batch, torch.Tensor):
        return moved(batch, device)

    def moved_object(value: Any) -> Any:
        if not moves_itself(value):
            return NotImplemented
        mutable = not isinstance(value, tuple)
        own = copy.copy(value) if mutable else value
        willing = _takes_non_blocking(cast("Hashable", type(value)))
        return own.to(device, non_blocking=device.type != "cpu") if willing else own.to(device)

    return map_nested_tensor(lambda tensor: moved(tensor, device), batch, special=moved_object)


@functools.cache
def _takes_non_blocking(kind: Any) -> bool:
    try:
        parameters = inspect.signature(kind.to).parameters
    except (TypeError, ValueError):
        return False
    return "non_blocking" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def moves_itself(value: Any) -> bool:
    """Return whether a value has its own ``to`` and is neither a tensor nor a plain container.

    Example:
        >>> moves_itself(torch.nn.utils.rnn.pack_sequence([torch.zeros(2)])), moves_itself({"x": 1})
        (True, False)
    """
    if not callable(getattr(value, "to", None)):
        return False
    return not (isinstance(value, (torch.Tensor, Mapping, list, type)) or dataclasses.is_dataclass(value))
