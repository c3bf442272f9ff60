"""Evidence for a difference: values outside every checkpoint, and calls that seed a generator."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from treadle.data.samplers import samplers_of
from treadle.distributed import unwrap
from treadle.engine import Engine
from treadle.engine.hook import BaseHook
from treadle.faces.step import BaseTrainer
from treadle.runs.verify.digests import leaf_text

_LARGEST = 100_000  # elements; a whole data set is not hashed at every step
_MOST = 300  # values in a record
_OF_MODULES = frozenset(vars(nn.Module()))
_OF_TRAINERS = frozenset(vars(BaseTrainer(0, device="cpu")))
_SEEDING = ((torch, "manual_seed"), (torch, "seed"), (np.random, "seed"), (random, "seed"))


def outside_values(engine: Engine, loader: Any) -> dict[str, str]:
    """Return values that user code keeps in its own objects and that no checkpoint holds.

    Args:
        engine: the running engine.
        loader: its loader, or None.

    Returns:
        ``"kind Class.attribute" -> string`` for data set, samplers, hooks, model and trainer.
    """
    found: dict[str, str] = {}
    for kind, owner, values in _owners(engine, loader):
        for name, value in values.items():
            text = _text(value)
            if text is not None and len(found) < _MOST:
                found[f"{kind} {owner}.{name}"] = text
    return found


def _owners(engine: Engine, loader: Any) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for dataset in _datasets(loader):
        yield "dataset", type(dataset).__name__, _attributes(dataset)
    for sampler in samplers_of(loader):
        if not _is_library(sampler):
            yield "sampler", type(sampler).__name__, _attributes(sampler)
    if not isinstance(loader, DataLoader) and not _is_library(loader):
        yield "loader", type(loader).__name__, _attributes(loader)
    for hook in engine.hooks:
        if not _is_library(hook) and type(hook).on_state_dict is BaseHook.on_state_dict:
            yield "hook", type(hook).__name__, _attributes(hook)
    for path, module in unwrap(engine.model).named_modules():
        yield "model", ".".join(part for part in (type(module).__name__, path) if part), _unregistered(module)
    own = {name: value for name, value in vars(engine).items() if name not in _OF_TRAINERS}
    yield "trainer", type(engine).__name__, own
    for module in dict.fromkeys(["__main__", type(engine).__module__]):
        if module in sys.modules and module.partition(".")[0] != "treadle":
            values = vars(sys.modules[module])
            yield "global", "", {name: value for name, value in values.items() if not name.startswith("_")}


def _datasets(loader: Any) -> Iterator[Any]:
    dataset = getattr(loader, "dataset", None)
    for _ in range(5):  # a Subset of a wrapper of ...
        if dataset is None:
            return
        yield dataset
        dataset = getattr(dataset, "dataset", None)


def _attributes(owner: Any) -> Mapping[str, Any]:
    return dict(getattr(owner, "__dict__", {}))


def _unregistered(module: nn.Module) -> dict[str, Any]:
    """Return the state of a module other than its parameters and persistent buffers."""
    kept = {name: module._buffers[name] for name in module._non_persistent_buffers_set}
    if _is_library(module):
        return kept
    return kept | {name: value for name, value in vars(module).items() if name not in _OF_MODULES}


def _is_library(owner: Any) -> bool:
    return type(owner).__module__.partition(".")[0] in ("torch", "treadle", "builtins")


def _text(value: Any) -> str | None:
    if isinstance(value, (Tensor, np.ndarray)):
        size = value.numel() if isinstance(value, Tensor) else value.size
        return leaf_text(value) if size <= _LARGEST else None
    if isinstance(value, (list, dict, set)):
        return f"{type(value).__name__} of {len(value)}"
    return None if isinstance(value, (str, bytes, bool)) else leaf_text(value)


class SeedWatch:
    """Record of calls that seed a global generator while it is active, with their lines.

    Example:
        >>> watch = SeedWatch()
        >>> watch.on, watch.calls
        (False, [])
    """

    def __init__(self) -> None:
        self.on = False
        self.calls: list[str] = []

    def start(self) -> None:
        """Record the calls from now on, and drop earlier ones."""
        self.calls, self.on = [], True

    def stop(self) -> None:
        """Record no more calls."""
        self.on = False

    def install(self) -> None:
        """Replace the seeding functions of this process permanently, since it runs one target and ends."""
        for module, name in _SEEDING:
            setattr(module, name, self._watched(getattr(module, name), f"{module.__name__}.{name}"))
        torch.random.manual_seed = torch.manual_seed

    def _watched(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def seeding(*args: Any, **kwargs: Any) -> Any:
            if self.on:
                shown = ", ".join(repr(argument) for argument in (*args, *kwargs.values()))
                self.calls.append(f"{name}({shown}) at {_caller()}")
            return function(*args, **kwargs)

        return seeding


def _caller() -> str:
    """Return file and line of the nearest frame outside the library."""
    frame = sys._getframe(2)
    own = str(Path(__file__).parents[2]) + os.sep
    while frame.f_back is not None and frame.f_code.co_filename.startswith(own):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
