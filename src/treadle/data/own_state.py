"""State of samplers, data sets and collate functions: from ``state_dict``, or plain attributes."""

from __future__ import annotations

import contextlib
import functools
import logging
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from treadle.checkpoint.attributes import Attributes, missing_from_state
from treadle.checkpoint.comparison import same
from treadle.checkpoint.generators import GENERATORS
from treadle.checkpoint.introspection import (
    attributes_of,
    behind,
    has_state,
    is_engine_or_trainer,
    is_user_object,
    offered,
)
from treadle.checkpoint.module_state import ModuleState
from treadle.checkpoint.schema import from_plain, to_plain
from treadle.checkpoint.variables import Variables, code_behind
from treadle.data.rows import RowLoader
from treadle.data.samplers import generators_of, samplers_of_nodes
from treadle.data.transfer import TransferLoader
from treadle.errors import ConfigError

_log = logging.getLogger("treadle.data")
_WATCHED_READS = 3  # reads of a worker after which its copies are assumed to be stateless
_DEEPEST = 8
_MOST = 256  # items of a container that may be parts; more of them are samples, which what holds them saves
_PARTS_OF_DATA = (
    "dataset", "datasets", "pipeline", "data_source", "source", "sampler", "samplers", "batch_sampler", "transform",
    "transforms", "target_transform",
)  # fmt: skip


def owners_of(loader: Any) -> dict[str, Any]:
    """Return the parts of a loader by path: samplers, data sets, collate functions, and what they wrap.

    Example:
        >>> list(owners_of(DataLoader([1.0, 2.0])))
        ['batch_sampler', 'batch_sampler.sampler']
    """
    if isinstance(loader, TransferLoader):
        return owners_of(loader.loader)
    found: dict[str, Any] = {}
    seen: set[int] = set()
    if isinstance(loader, RowLoader) or (has_state(loader) and not isinstance(loader, DataLoader)):
        for number, sampler in enumerate(samplers_of_nodes(loader)):
            _walk(f"sampler{number}", sampler, found, seen, _DEEPEST)
        return found  # its own state holds the others
    if not isinstance(loader, DataLoader):
        _walk("loader", loader, found, seen, _DEEPEST)
    for name in ("dataset", "collate_fn", "batch_sampler", "sampler"):  # data sets first, for objects that several hold
        _walk(name, getattr(loader, name, None), found, seen, _DEEPEST)
    return found


def _walk(path: str, owner: Any, found: dict[str, Any], seen: set[int], depth: int) -> None:
    if owner is None or depth == 0 or isinstance(owner, type) or id(owner) in seen or is_engine_or_trainer(owner):
        return  # the last is an engine or a trainer known to the user's data set: its state holds that of the data
    if isinstance(owner, (list, tuple)):
        for number, item in enumerate(owner if len(owner) <= _MOST else ()):
            if _is_part(item):
                _walk(f"{path}[{number}]", item, found, seen, depth - 1)
        return
    if isinstance(owner, dict):
        for key, item in owner.items() if len(owner) <= _MOST else ():
            if _is_part(item):
                _walk(f"{path}.{key}", item, found, seen, depth - 1)
        return
    if isinstance(owner, (types.MethodType, functools.partial)):
        for name, item in behind(owner):
            _walk(f"{path}.{name}", item, found, seen, depth - 1)
        return
    held = attributes_of(owner)
    if not (held or has_state(owner) or is_user_object(owner)):
        return
    seen.add(id(owner))
    found[path] = owner
    if isinstance(owner, nn.Module) or (isinstance(owner, IterableDataset) and has_state(owner)):
        return  # the state of a stream includes that of its parts
    for name, value in held.items():
        if name in _PARTS_OF_DATA or any(_is_part(item) for item in _items_of(value)):
            _walk(f"{path}.{name}", value, found, seen, depth - 1)


def _is_part(value: Any) -> bool:
    """Return whether an attribute of a data object may have state: data objects, and the user's objects."""
    if type(value).__module__.startswith("webdataset."):  # its stages hold generators and epoch counters
        return True
    if isinstance(value, (Sampler, Dataset, DataLoader)) or callable(offered(value, "set_epoch")) or has_state(value):
        return True
    if isinstance(value, (types.MethodType, functools.partial)):
        return True
    if isinstance(value, types.FunctionType):
        return value.__closure__ is not None and is_user_object(value)
    return is_user_object(value) and (hasattr(value, "__dict__") or hasattr(type(value), "__slots__"))


def set_epoch(loader: Any, epoch: int) -> bool:
    """Call ``set_epoch`` of a loader and all of its parts; return whether a data set has one."""
    of_data = False
    for path, owner in {"": loader, **owners_of(loader)}.items():
        method = offered(owner, "set_epoch")
        if callable(method):
            method(epoch)
            of_data = of_data or path.startswith(("dataset", "collate_fn"))
    return of_data


class LoaderState:
    """State of a loader's parts, at the start of an epoch and at checkpoints.

    Objects with ``state_dict`` and ``load_state_dict`` are saved through them; for others, attributes that changed
    since the loader was attached are saved.

    Args:
        loader: the loader, which is not iterated.
        owners: its parts, if known.

    Example:
        >>> LoaderState(DataLoader([1.0])).collect()
        {}
    """

    def __init__(self, loader: Any, *, owners: Mapping[str, Any] | None = None):
        self.owners = owners_of(loader) if owners is None else dict(owners)
        self.owners["variables"] = Variables(_code_of(loader, self.owners.values()))
        known = {id(owner) for owner in self.owners.values()}
        apart = generators_of(loader)
        self._attributes = {
            path: Attributes(owner, deep=True, leave_out=_kept_elsewhere(owner, apart), known=known)
            for path, owner in self.owners.items()
            if _has_attributes(owner)
        }
        modules = {path: owner for path, owner in self.owners.items() if isinstance(owner, nn.Module)}
        self._modules = {path: ModuleState(module) for path, module in modules.items()}

    def collect(self) -> dict[str, Any]:
        """Return the states by path, as plain copies, without unchanged ones.

        Raises:
            CheckpointError: a state dict holds a value that no checkpoint can hold.
        """
        found: dict[str, Any] = {}
        for path, owner in self.owners.items():
            states: dict[str, Any] = {}
            if has_state(owner):
                states = {"state": owner.state_dict(), "modules": self._beyond_state(path)}
            if path in self._attributes:
                states["attributes"] = missing_from_state(states.get("state"), self._attributes[path].changed())
            if kept := {name: state for name, state in states.items() if state}:
                found[path] = to_plain(kept, f"data.objects.{path}", encoding="exact")
        return found

    def completed(self, opening: Mapping[str, Any] | None, now: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the opening of an epoch, with the attributes that have moved since from where they started.

        Another process may find them moved when it first looks, where another object holds the same tensor or list.

        Args:
            opening: with what :meth:`collect` returned then under ``objects``; None if the epoch has not begun.
            now: what it returns now.
        """
        if opening is None:
            return None
        found = dict(opening.get("objects") or {})
        for path, entry in now.items():
            before = found.get(path, {})
            held, moved = before.get("attributes", {}), entry.get("attributes", {})
            is_kept = path in self._attributes and not has_state(self.owners[path])  # else its own state is compared
            starts = self._attributes[path].initial_values(moved.keys() - held.keys()) if is_kept else {}
            if starts:
                found[path] = {**before, "attributes": {**to_plain(starts, path, encoding="exact"), **held}}
        rest = {key: value for key, value in opening.items() if key != "objects"}
        return {**rest, "objects": found} if found else rest  # none where there are none, as in older checkpoints

    def _beyond_state(self, path: str) -> dict[str, Any]:
        if path not in self._modules:
            return {}
        entry = self._modules[path].collect(self.owners[path])
        return {name: entry[name] for name in ("tensors", "attributes") if name in entry}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Load states from :meth:`collect` where they differ; reset attributes without one.

        A sampler that is being iterated and already has the same state is not touched.
        """
        for path, owner in self.owners.items():
            entry = states.get(path, {})
            attributes = self._attributes.get(path)
            if attributes is not None and not has_state(owner):
                attributes.restore(entry.get("attributes", {}))
                continue
            with contextlib.nullcontext() if attributes is None else attributes.completing(entry.get("attributes", {})):
                if "state" in entry and not same(entry["state"], to_plain(owner.state_dict(), path, encoding="exact")):
                    owner.load_state_dict(from_plain(to_plain(entry["state"], path)))
            if path in self._modules:
                self._modules[path].restore(owner, entry.get("modules", {}), ready=False)

    def lost(self) -> Iterator[str]:
        """Yield the names of attributes that changed since the last call and that no checkpoint holds."""
        for attributes in self._attributes.values():
            if not has_state(attributes.owner):  # else its own state may hold them
                yield from (f"{_name_of(attributes.owner)}.{name}".lstrip(".") for name in attributes.lost())
        for path, modules in self._modules.items():
            yield from (f"{type(self.owners[path]).__name__}.{name}" for name in modules.lost())

    @property
    def depends_on_workers(self) -> bool:
        """Whether the code that reads the data depends on the worker."""
        return bool(self.owners["variables"].uses("get_worker_info"))

    def unknown(self, states: Mapping[str, Any]) -> list[str]:
        """Return the paths of states without an object in this loader."""
        return [path for path in states if path not in self.owners]


def _code_of(loader: Any, owners: Iterable[Any]) -> Iterator[Any]:
    """Yield the objects that read the data, and their functions and methods."""
    if isinstance(loader, TransferLoader):
        loader = loader.loader
    parts = [getattr(loader, name, None) for name in ("dataset", "collate_fn", "batch_sampler", "sampler")]
    for part in (loader, *parts, *owners):
        yield part
        values = attributes_of(part).values() if part is not None else ()
        for value in values:
            yield from code_behind(value)


def _has_attributes(owner: Any) -> bool:
    """Return whether attributes of a data object are saved: without a state dict, or of a user's class."""
    if has_state(owner):
        return is_user_object(owner) and not isinstance(owner, nn.Module)
    return isinstance(owner, Variables) or not type(owner).__module__.startswith("treadle.")


def _name_of(owner: Any) -> str:
    return "" if isinstance(owner, Variables) else type(owner).__name__


def _kept_elsewhere(owner: Any, generators: Iterable[torch.Generator]) -> list[str]:
    """Return the attributes of a class of torch that are saved separately, or set before each epoch."""
    if not type(owner).__module__.startswith(("torch.", "torchdata.")):
        return []
    held = getattr(owner, "generator", None)
    return ["epoch", "generator"] if held is None or any(held is one for one in generators) else ["epoch"]


def hidden_generators(loader: Any) -> list[str]:
    """Return warnings about random generators held by data sets and collate functions that workers read.

    Each worker has a copy that no checkpoint holds. Without workers they are part of every state.

    Args:
        loader: a DataLoader, or any other iterable.

    Example:
        >>> hidden_generators(DataLoader([1.0], num_workers=1))
        []
    """
    if not getattr(loader, "num_workers", 0):
        return []
    owners = [owner for path, owner in owners_of(loader).items() if path.startswith(("dataset", "collate_fn"))]
    owners += [
        part for owner in owners if isinstance(owner, nn.Module) for part in owner.modules() if part is not owner
    ]
    return [
        f"{type(owner).__name__}.{name} is a random generator that no checkpoint holds, since each worker has a copy: "
        "a resume is not exact if items draw from it. Use the global generators of torch, NumPy or Python, or use "
        "num_workers=0"
        for owner in owners
        for name, value in attributes_of(owner).items()
        if any(isinstance(item, GENERATORS) for item in _items_of(value))
    ]


def unrepeatable_shuffles(loader: Any) -> list[str]:
    """Return a warning if a stage of webdataset shuffles with a generator seeded from the clock.

    Example:
        >>> unrepeatable_shuffles(DataLoader([1.0]))
        []
    """
    for owner in owners_of(loader).values():
        function, given = getattr(owner, "f", None), getattr(owner, "kw", None)
        if not type(owner).__module__.startswith("webdataset.") or getattr(function, "__name__", "") != "_shuffle":
            continue
        if isinstance(given, dict) and given.get("rng") is None and given.get("seed") is None:
            return [
                "a shuffle of webdataset seeds its generator from the clock in each epoch, so no run can be repeated, "
                "resumed or not; pass shuffle(..., rng=random.Random(0)), which is kept, and shardshuffle=False or "
                "detshuffle=True to WebDataset"
            ]
    return []


def _items_of(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())[:_MOST]
    return list(value[:_MOST]) if isinstance(value, (list, tuple)) else [value]


class WatchedState:
    """Monitor of the state of a worker's copies of data set and collate function during reads.

    No checkpoint can hold this state, so changes of a state dict are refused and changes of attributes are reported; a
    file opened by the first read is neither. The copies are compared after the first three reads, and then each time
    the number of reads has doubled.

    Args:
        roots: the data set and the collate function.
    """

    def __init__(self, roots: Mapping[str, Any]):
        self._roots = dict(roots)
        self._named = {  # generators named in a warning before workers start
            (path, name)
            for path, owner in self._owners().items()
            for name, value in attributes_of(owner).items()
            if isinstance(value, GENERATORS)
        }
        self._reads = 0
        self._stopped = False
        self._looks = False  # whether reads are compared
        self._state: LoaderState | None = None
        self._before: dict[str, Any] = {}

    def _owners(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        seen: set[int] = set()
        for path, owner in self._roots.items():
            _walk(path, owner, found, seen, _DEEPEST)
        return found

    def stop(self) -> None:
        """Stop watching."""
        self._stopped = True

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Watch one read."""
        if self._stopped:
            yield
            return
        if self._state is None:
            self._state = LoaderState(None, owners=self._owners())
            self._before = self._state.collect()
        self._reads += 1
        self._looks = self._reads <= _WATCHED_READS or self._reads.bit_count() == 1
        yield
        self.compare()

    def compare(self) -> None:
        """Check for changes since the last call.

        Raises:
            ConfigError: a state dict changed.
        """
        if self._state is None or not self._looks:
            return
        before, self._before = self._before, self._state.collect()
        for path in self._before.keys() | before.keys():
            now, then = self._before.get(path, {}), before.get(path, {})
            name = type(self._state.owners[path]).__name__
            if not same(now.get("state"), then.get("state")) or not same(now.get("modules"), then.get("modules")):
                raise ConfigError(
                    f"the state_dict of {name} changes while items are read, and each worker has a copy of it whose "
                    "state no checkpoint can hold; use num_workers=0, or compute items from their index"
                )
            if self._reads > 1:
                self._name_changes(path, then.get("attributes", {}), now.get("attributes", {}))

    def _name_changes(self, path: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        for name, value in now.items():
            if (path, name) not in self._named and not same(value, before.get(name)):
                self._stopped, self._looks = True, False
                _log.warning(
                    "%s.%s changes while items are read, and each worker has a copy of it that no checkpoint holds: "
                    "a resume is exact only if no item depends on it. Use num_workers=0, or compute items from their "
                    "index",
                    _name_of(self._state.owners[path]) if self._state else path, name,
                )  # fmt: skip


@contextlib.contextmanager
def restored_generators(loader: Any) -> Iterator[None]:
    """Restore generators, samplers and data sets of a loader after the block, so that its next pass is the same."""
    states = [(generator, generator.get_state()) for generator in generators_of(loader)]
    objects = LoaderState(loader)
    before = objects.collect()
    try:
        yield
    finally:
        objects.restore(before)
        for generator, state in states:
            generator.set_state(state)
