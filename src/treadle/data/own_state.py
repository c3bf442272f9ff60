"""State that samplers, data sets and collate functions keep: through ``state_dict``, or as plain attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from treadle.checkpoint.attributes import Attributes, attributes_of, same
from treadle.checkpoint.schema import to_plain
from treadle.data.indexed import has_state
from treadle.data.rows import RowLoader
from treadle.data.transfer import TransferLoader

_DEEPEST = 8
_PARTS_OF_DATA = (
    "dataset", "datasets", "data_source", "source", "sampler", "samplers", "batch_sampler", "transform", "transforms",
    "target_transform",
)  # fmt: skip


def owners_of(loader: Any) -> dict[str, Any]:
    """Returns what a loader is made of, by path: samplers, data sets, collate functions, and what they wrap.

    Example:
        >>> list(owners_of(DataLoader([1.0, 2.0])))
        ['batch_sampler', 'batch_sampler.sampler']
    """
    if isinstance(loader, TransferLoader):
        return owners_of(loader.loader)
    if isinstance(loader, RowLoader) or (has_state(loader) and not isinstance(loader, DataLoader)):
        return {}  # its own state holds them
    found: dict[str, Any] = {}
    seen: set[int] = set()
    if not isinstance(loader, DataLoader):
        _walk("loader", loader, found, seen, _DEEPEST)
    for name in ("dataset", "collate_fn", "batch_sampler", "sampler"):  # of what both hold, the data are told first
        _walk(name, getattr(loader, name, None), found, seen, _DEEPEST)
    return found


def _walk(path: str, owner: Any, found: dict[str, Any], seen: set[int], depth: int) -> None:
    if owner is None or depth == 0 or isinstance(owner, type) or id(owner) in seen:
        return
    if isinstance(owner, (list, tuple)):
        for number, item in enumerate(owner[:_DEEPEST]):
            if _is_part(item):
                _walk(f"{path}[{number}]", item, found, seen, depth - 1)
        return
    held = attributes_of(owner)
    if not held and not has_state(owner):
        return
    seen.add(id(owner))
    found[path] = owner
    if isinstance(owner, nn.Module) or (isinstance(owner, IterableDataset) and has_state(owner)):
        return  # the state of a stream is that of all that it is made of
    for name, value in held.items():
        items = value[:_DEEPEST] if isinstance(value, (list, tuple)) else [value]
        if name in _PARTS_OF_DATA or any(_is_part(item) for item in items):
            _walk(f"{path}.{name}", value, found, seen, depth - 1)


def _is_part(value: Any) -> bool:
    return isinstance(value, (Sampler, Dataset)) or callable(getattr(value, "set_epoch", None)) or has_state(value)


def set_epoch(loader: Any, epoch: int) -> bool:
    """Calls ``set_epoch`` of a loader and of all that it is made of; returns whether a data set has one."""
    of_data = False
    for path, owner in {"": loader, **owners_of(loader)}.items():
        method = getattr(owner, "set_epoch", None)
        if callable(method):
            method(epoch)
            of_data = of_data or path.startswith(("dataset", "collate_fn"))
    return of_data


class LoaderState:
    """State of what a loader is made of, taken at the start of an epoch and where a checkpoint is made.

    What offers ``state_dict`` and ``load_state_dict`` is carried by them; of the others, the attributes that changed
    since the loader was attached.

    Args:
        loader: the loader; nothing of it is iterated.

    Example:
        >>> LoaderState(DataLoader([1.0])).collect()
        {}
    """

    def __init__(self, loader: Any):
        self.owners = owners_of(loader)
        self._attributes = {
            path: Attributes(owner, deep=path.startswith(("batch_sampler", "sampler")))
            for path, owner in self.owners.items()
            if not has_state(owner) and not _is_known(owner)
        }
        self._last: dict[str, Any] = {}

    def collect(self) -> dict[str, Any]:
        """Returns the states by path, as plain copies; nothing for what is as it was built.

        Raises:
            CheckpointError: a state dict holds what no checkpoint can.
        """
        found: dict[str, Any] = {}
        for path, owner in self.owners.items():
            if path in self._attributes:
                if changed := self._attributes[path].changed():
                    found[path] = {"attributes": changed}
            elif has_state(owner) and (state := owner.state_dict()):
                found[path] = {"state": to_plain(state, f"data.objects.{path}")}
        return found

    def restore(self, states: Mapping[str, Any]) -> None:
        """Loads states that :meth:`collect` returned, where they differ; attributes without one go back to the start.

        A sampler that is being iterated and has come to the same state is left alone.
        """
        for path, owner in self.owners.items():
            entry = states.get(path, {})
            if path in self._attributes:
                self._attributes[path].restore(entry.get("attributes", {}))
            elif "state" in entry and not same(entry["state"], to_plain(owner.state_dict(), path)):
                owner.load_state_dict(to_plain(entry["state"], path))

    def lost(self) -> Iterator[str]:
        """Yields the names of attributes that changed since this was last asked and that no checkpoint holds."""
        for path, attributes in self._attributes.items():
            if attributes.can_be_written:
                continue
            for name, value in attributes.differing().items():
                key = f"{path}.{name}"
                if key in self._last and not same(self._last[key], value):
                    yield f"{type(attributes.owner).__name__}.{name}"
                self._last[key] = value

    def unknown(self, states: Mapping[str, Any]) -> list[str]:
        """Returns the paths of states for which this loader has no object."""
        return [path for path in states if path not in self.owners]


def _is_known(owner: Any) -> bool:
    known = type(owner).__module__.startswith(("torch.utils.data", "treadle."))
    return known or isinstance(owner, nn.Module)
