"""Search for users' objects with state, starting from given roots."""

from __future__ import annotations

import enum
import functools
import itertools
import random
import types
import weakref
from collections import deque
from collections.abc import Collection
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from treadle.checkpoint.introspection import (
    LIBRARIES,
    Named,
    attributes_of,
    behind,
    has_state,
    is_engine_or_trainer,
    is_user_object,
)
from treadle.checkpoint.library_values import NAMESPACES, is_library_value
from treadle.checkpoint.plain_values import OPAQUE, encode, is_of_a_library_of_values, is_plain_object
from treadle.distributed.state_names import clean_name

_DEEPEST = 6
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_SCALARS = (bool, int, float, str, type(None))
_MOST = 256  # items of a container that are searched
_WITHOUT_OBJECTS = ("builtins", "logging", "pathlib", "collections", "functools")  # modules of the standard library

OF_TRAINERS = frozenset({
    "model", "optimizer", "lr_scheduler", "task", "precision", "settings", "logger", "hooks",
    "workspace", "should_stop", "target", "cursor", "eval_cursor", "progress", "attempt", "state", "num_ranks",
    "declared", "events", "signals", "exchange", "guard", "steps", "stray_parameters", "max_steps", "trackers",
    "compile_setting", "state_dict_options", "grad_scaler", "data_loader", "_given_hooks", "_engine", "_epochs",
    "_folder", "_history_file", "device", "_own_config",
})  # fmt: skip
"""Attributes of trainers that are parts of a run, or say how it is run."""


class Search:
    """Search from given roots through attributes, containers, methods, partials and closures.

    Args:
        roots: paths of the roots, which are searched each time.
        known: ids of objects that are left out or already found.
        before: paths of objects found before: those with state dicts, and the others.
        whole: paths of roots that are searched although they have state dicts.

    Attributes:
        owners: objects found with state dicts, by path.
        plain: other objects of the user, whose attributes are their state.
        functions: functions of the user, for the variables that they use.
    """

    def __init__(
        self,
        roots: Collection[str],
        *,
        known: Collection[int],
        before: tuple[Collection[str], Collection[str]],
        whole: Collection[str],
    ):
        self.owners: dict[str, Any] = {}
        self.plain: dict[str, Any] = {}
        self.functions: list[types.FunctionType] = []
        self._roots = roots
        self._known = known
        self._owners_before, self._plain_before = before
        self._whole = whole
        self._seen: set[int] = set()

    def walk(self, path: str, owner: Any, depth: int = _DEEPEST) -> None:
        """Search an object and everything it holds."""
        if depth == 0 or id(owner) in self._seen:
            return
        if isinstance(owner, types.FunctionType) and is_user_object(owner):
            self.functions.append(owner)
        if isinstance(owner, (list, tuple, deque)):
            for number, item in enumerate(itertools.islice(owner, _MOST)):
                if path in self._roots or not _is_encodable(item):
                    self.walk(f"{path}[{number}]", item, depth - 1)
        elif isinstance(owner, dict) and len(owner) <= _MOST:
            for key, item in owner.items():
                if not _is_encodable(item):
                    self.walk(f"{path}.{key}", item, depth - 1)
        elif isinstance(owner, (types.MethodType, functools.partial, weakref.ref)):
            if isinstance(owner, functools.partial) and id(owner) not in self._known and path not in self._plain_before:
                self.plain[path] = owner
            for name, item in behind(owner):
                self.walk(f"{path}.{name}", item, depth)
        elif has_state(owner) and path not in self._whole:
            self._add(path, owner)
        else:
            self._look_into(path, owner, depth)

    def _add(self, path: str, owner: Any) -> None:
        is_new = id(owner) not in self._known and path not in self._owners_before
        if (
            is_new
            and not is_engine_or_trainer(owner)
            and (not is_treadle_object(owner) or isinstance(owner, nn.Module))
        ):
            self.owners[path] = owner
            self._seen.add(id(owner))

    def _look_into(self, path: str, owner: Any, depth: int) -> None:
        is_new = id(owner) not in self._known
        if not (is_new or path in self._roots or path in self._plain_before) or not _is_searched(owner):
            return
        self._seen.add(id(owner))
        left_out = OF_TRAINERS if path in self._whole else ()
        if is_new and (isinstance(owner, Named) or not is_treadle_object(owner)) and path not in self._plain_before:
            self.plain[path] = owner
        for name, value in attributes_of(owner).items():
            if name not in left_out:
                self.walk(f"{path}.{name}".lstrip("."), value, depth - 1)


def unregistered_in(path: str, model: nn.Module) -> dict[str, Any]:
    """Return attributes of users' modules that may hold unregistered objects with state, as in a list.

    Args:
        path: path of the model.
        model: model whose modules are searched.
    """
    return {
        f"{path}.{clean_name(f'{inner}.{name}'.lstrip('.'))}": value
        for inner, module in model.named_modules()
        if is_user_object(module)
        for name, value in vars(module).items()
        if name not in _OF_EVERY_MODULE and not isinstance(value, (Tensor, *_SCALARS))
    }


def is_treadle_object(owner: Any) -> bool:
    """Return whether the class of an object is treadle's.

    Example:
        >>> is_treadle_object(nn.Linear(1, 1))
        False
    """
    kind = owner if isinstance(owner, types.FunctionType) else type(owner)
    return str(kind.__module__).partition(".")[0] == "treadle"


def _is_encodable(item: Any) -> bool:
    """Return whether a container's item is a user's plain object that is written as part of the container."""
    return is_plain_object(item) and encode(item, deep=True) is not OPAQUE


def _is_searched(owner: Any) -> bool:
    """Return whether an object is the user's, so that its attributes are searched."""
    if isinstance(owner, types.FunctionType):
        return bool(owner.__closure__) and (is_user_object(owner) or is_treadle_object(owner))
    if isinstance(owner, Named):
        return True
    if isinstance(owner, NAMESPACES):
        return encode(owner, deep=True) is OPAQUE  # else it is written as part of its holder
    if is_library_value(owner):
        return False
    if isinstance(owner, (Dataset, Sampler)):
        return is_user_object(owner)
    foreign = (
        type, enum.Enum, types.ModuleType, types.MethodType, Tensor, DataLoader, Optimizer, dict, random.SystemRandom,
    )  # fmt: skip
    has_slots = is_user_object(owner) and hasattr(type(owner), "__slots__")
    if isinstance(owner, foreign) or not (has_slots or hasattr(owner, "__dict__")):
        return False
    if is_of_a_library_of_values(type(owner)):
        return is_plain_object(owner) and encode(owner, deep=True) is OPAQUE  # else its holder's attributes have it
    root = type(owner).__module__.partition(".")[0]
    return is_treadle_object(owner) or root not in (*LIBRARIES, *_WITHOUT_OBJECTS)
