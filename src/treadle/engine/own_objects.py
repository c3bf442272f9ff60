"""State of users' own objects: those with a state dict, and attributes that change."""

from __future__ import annotations

import contextlib
import time
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from treadle.checkpoint.attributes import Attributes, Mark, missing_from_state
from treadle.checkpoint.base_fingerprints import fingerprint
from treadle.checkpoint.comparison import same, unequal
from treadle.checkpoint.constants import CONSTANTS
from treadle.checkpoint.introspection import attributes_of, has_state, is_user_object
from treadle.checkpoint.module_state import ModuleState
from treadle.checkpoint.plain_values import OPAQUE, encode
from treadle.checkpoint.references import References
from treadle.checkpoint.schema import from_plain, to_plain
from treadle.checkpoint.variables import Variables
from treadle.data.own_state import owners_of
from treadle.engine.search import OF_TRAINERS, Search, unregistered_in
from treadle.engine.state_part import Difference
from treadle.errors import CheckpointError

OF_OPTIMIZERS = (
    "_opt_called", "_step_count", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured", "state",
    "param_groups", "defaults",
)  # fmt: skip
"""Attributes of every optimizer, which its state dict holds or which are no state."""
_OF_MODULES = ("tensors", "attributes")  # keys of their state beyond the state dict
_CLOCKS = (time.time, time.monotonic, time.perf_counter)
_NOW = 60  # seconds since a hook that has just begun read a clock, at most
_LARGE = 64 * 2**20  # bytes of a frozen module above which only its fingerprint is kept


class OwnObjects:
    """User's objects that a checkpoint holds by path.

    They are found by a search from some roots: objects with a state dict, and the attributes of plain objects and of
    functions, also in containers and behind methods and partials. What treadle built or the engine owns is left out:
    model, optimizer, schedule, hooks and loaders are stored separately.

    Args:
        roots: roots of the search, by path.
        known: ids of objects to leave out.
        model: model of the run, whose parts attributes may refer to.
        whole: paths of roots that are searched although they have state dicts.
        hidden: further roots, whose attributes are kept elsewhere: objects that can be written as parts of these, and
            have no state dict, are left out.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        *,
        known: Collection[int] = (),
        model: nn.Module | None = None,
        whole: Collection[str] = (),
        hidden: Mapping[str, Any] | None = None,
    ):
        self._references = References(model)
        self._kept = set(known)  # ids of objects that live at least as long as this one
        self._whole = frozenset(whole)
        self.owners: dict[str, Any] = {}
        self._attributes: dict[str, Attributes] = {}
        self._marks: dict[str, list[Mark]] = {}
        self._modules: dict[str, ModuleState] = {}
        self._carried: set[str] = set()
        self._left_out: list[Any] = []  # kept alive, since their ids are known
        self._late: set[str] = set()
        self._loaded: Mapping[str, Any] = {}
        self._is_new = False  # whether it was loaded since hooks began
        self._set: dict[str, dict[str, Any]] | None = None  # what hooks set before training, which may be settings
        self._roots = dict(roots)
        self.functions: list[types.FunctionType] = []  # the user's, for the variables that they use
        self._search(self._roots)
        self._search(hidden or {}, parts_too=False)

    def add(self, path: str, owner: Any) -> None:
        """Search one more root, and restore it from the checkpoint that was loaded before it was added."""
        self._roots[path] = owner
        self.functions.clear()
        self._restore_found(self._search({path: owner}, late=True))
        self.add_variables(f"{path}.variables", [owner, *self.functions])

    def leave_out(self, loader: Any) -> None:
        """Leave out a loader that a cursor reads, with its samplers and data sets, and their states in checkpoints."""
        parts = {id(part) for part in owners_of(loader).values() if isinstance(part, (Dataset, Sampler))} | {id(loader)}
        kept = {path: attributes.owner for path, attributes in self._attributes.items()} | self.owners
        for path in [path for path, owner in kept.items() if id(owner) in parts]:
            self._left_out.append(kept[path])
            self.owners.pop(path, None)
            self._attributes.pop(path, None)
            self._carried.add(path)

    def add_variables(self, path: str, roots: Iterable[Any]) -> None:
        """Add the variables that the code of some objects uses, and objects with state among them."""
        known = [name for bag in self._roots.values() if isinstance(bag, Variables) for name in bag.values()]
        variables = Variables(roots, known=known)
        for name, owner in {path: variables, **variables.stateful}.items():
            self._roots[name] = owner
            self._restore_found(self._search({name: owner}))

    def may_set(self, name: str) -> bool:
        """Return whether the user's code may set an attribute of this name while the run trains."""
        return any(bag.sets(name) for bag in self._roots.values() if isinstance(bag, Variables))

    def search_again(self) -> None:
        """Search for objects created since, by hooks before training, and load their states from the checkpoint.

        Raises:
            CheckpointError: it holds the state of one that was not created.
        """
        found = self._search(self._roots, late=True)
        self._late |= found & self.owners.keys()
        self._restore_found(found)
        for path, entry in self._loaded.items():
            if entry.get("late") and path not in self.owners:
                raise _missing(path)

    def _search(self, roots: Mapping[str, Any], *, parts_too: bool = True, late: bool = False) -> set[str]:
        """Return the paths of objects newly found from some roots.

        Args:
            roots: roots of the search.
            parts_too: whether to include plain objects that can be written as parts of what holds them.
            late: whether they may be created after a checkpoint is loaded, so that nothing in it can refer to them, and
                plain objects that are written as parts of others are left out.
        """
        search = Search(self._roots, known=self._kept, before=(self.owners, self._attributes), whole=self._whole)
        for path, owner in roots.items():
            search.walk(path, owner)
        self.functions += search.functions
        owners, plain = search.owners, search.plain
        is_again = late and roots is self._roots  # then what has appeared is a part of what held nothing there
        if is_again or not parts_too:
            kept = roots if is_again else ()
            plain = {path: owner for path, owner in plain.items() if path in kept or not self._is_part(owner)}
        self._kept |= {id(owner) for owner in (*owners.values(), *plain.values())}
        for path, owner in (owners | plain).items() if not late else ():
            self._references.add(f"object {path}", owner)
        for path, owner in owners.items():
            self.owners[path] = owner
            if isinstance(owner, nn.Module):
                self._marks[path] = [Mark(value) for value in _tensors_of(owner)]
                self._modules[path] = ModuleState(owner)
            elif is_user_object(owner):
                left_out = OF_OPTIMIZERS if isinstance(owner, Optimizer) else ()
                self._attributes[path] = self._attributes_of(owner, left_out)
        for path, owner in plain.items():
            self._attributes[path] = self._attributes_of(owner, OF_TRAINERS if path in self._whole else ())
        inside = [held for path, owner in owners.items() if (held := _left_out_of(path, owner))]
        deeper = [self._search(held, parts_too=False, late=late) for held in inside]
        return {*owners, *plain}.union(*deeper)

    def _is_part(self, owner: Any) -> bool:
        """Return whether an object is written whole, as a part of what holds it."""
        encoded = encode(owner, deep=True, known=self._kept, held=True, references=self._references)
        return encoded is not OPAQUE

    def _attributes_of(self, owner: Any, left_out: Collection[str]) -> Attributes:
        return Attributes(
            owner, deep=True, leave_out=left_out, stashes=True, known=self._kept, references=self._references
        )

    @property
    def plain(self) -> dict[str, Any]:
        """Plain objects whose attributes are kept, by path."""
        return {path: attributes.owner for path, attributes in self._attributes.items()}

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers among the objects, which the user's own code steps."""
        return [owner for owner in self.owners.values() if isinstance(owner, Optimizer)]

    def collect(self) -> dict[str, Any]:
        """Return the states by path; unchanged modules without trainable parameters are left out."""
        found: dict[str, Any] = {}
        for path, owner in self.owners.items():
            if isinstance(owner, nn.Module):
                found |= self._module_state(path, owner)
            elif state := owner.state_dict():
                found[path] = {"state": to_plain(state, f"objects.{path}", encoding="exact")}
        for path, entry in self.attributes().items():
            known = found.get(path, {})
            if other := missing_from_state(known.get("state"), entry["attributes"]):
                found[path] = {**known, "attributes": other}
        for path, entry in found.items():
            settings = [name for name, value in (self._set or {}).get(path, {}).items()
                        if name in entry.get("attributes", {}) and same(entry["attributes"][name], value)]  # fmt: skip
            found[path] = {**entry, "set": settings} if settings else entry
        return {
            path: {**entry, "late": True} if path in self._late else entry for path, entry in found.items() if entry
        }

    def loaded_states(self) -> dict[str, Any]:
        """Return copies of the values that checkpoints have set since the last call, before hooks begin."""
        is_new, self._is_new = self._is_new, False
        if not is_new:
            return {}
        states = {path: self._copy_of(path) for path in self.owners if path in self._loaded}
        return {"states": states, "attributes": self.attributes()}

    def _copy_of(self, path: str) -> dict[str, Any]:
        """Return a copy of the state of an object, including the attributes that a module leaves out of it."""
        owner = self.owners[path]
        modules = self._modules[path].collect(owner) if path in self._modules else {}
        other = {key: value for key, value in modules.items() if key in _OF_MODULES}
        return dict(to_plain({"state": owner.state_dict(), "modules": other}, path, encoding="exact"))

    def restore_loaded(self, before: Mapping[str, Any]) -> Iterator[str]:
        """Restore loaded values that hooks overwrote in ``on_before_train``, where they initialize for a new run.

        A value that the saved run had left as its own hooks set it stays overwritten if it is a string, a flag, a time
        or a constant: it cannot derive from the loaded state.

        Args:
            before: result of :meth:`loaded_states`.

        Yields:
            Descriptions of restored numbers that may have been set on purpose.
        """
        for path, state in before.get("states", {}).items():
            if not same(state, self._copy_of(path)):
                self._restore_owner(path, state)
        changed = self.attributes()
        for path, entry in before.get("attributes", {}).items():
            saved, held = self._loaded.get(path, {}), changed.get(path, {}).get("attributes", {})
            for name, value in entry["attributes"].items():
                left = name in saved.get("set", ())
                now = held.get(name)
                if name not in saved.get("attributes", {}) or same(now, value) or (left and not _is_derived(now)):
                    continue
                self._attributes[path].put_back({name: value})
                if left and isinstance(value, (int, float)):
                    yield f"{path}.{name}".lstrip(".") + f"={value!r} (on_before_train set {now!r})"
        known = {path: entry.get("set", ()) for path, entry in self._loaded.items()} if before else self._set
        self._set = {
            path: {name: value for name, value in entry["attributes"].items()
                   if known is None or name in known.get(path, ())}
            for path, entry in self.attributes().items()
        }  # fmt: skip

    def _module_state(self, path: str, module: nn.Module) -> dict[str, Any]:
        state = module.state_dict()
        other = {key: value for key, value in self._modules[path].collect(module).items() if key in _OF_MODULES}
        tensors, built = _tensors_of(module), self._marks[path]
        unchanged = len(tensors) == len(built) and all(one.is_of(now) for one, now in zip(built, tensors, strict=True))
        parameters = list(module.parameters())
        if any(value.is_meta for value in tensors):
            return {}  # such as the form of an ensemble, which has no values
        if other:
            return {path: {"state": state, "modules": other}}
        if not state or (unchanged and not parameters):
            return {}
        is_large = sum(value.numel() * value.element_size() for value in tensors) > _LARGE
        if unchanged and is_large and not any(parameter.requires_grad for parameter in parameters):
            return {path: {"fingerprints": _fingerprints(state)}}
        return {path: {"state": state}}

    def check(self, saved: Mapping[str, Any]) -> None:
        """Raise for a state that fits no object of this run.

        Raises:
            CheckpointError: there is no object under its path, or a frozen module differs.
        """
        for path, entry in saved.items():
            absent = path not in self.owners
            holds_state = "state" in entry or "fingerprints" in entry
            if not holds_state or path in self._carried or (absent and entry.get("late")):
                continue
            if absent:
                raise _missing(path)
            if "fingerprints" in entry:
                here = _fingerprints(self.owners[path].state_dict())
                wrong = [name for name, mark in entry["fingerprints"].items() if here.get(name) != mark]
                if wrong:
                    raise CheckpointError(
                        f"{path}: its frozen weights differ from those the checkpoint was written with (first: "
                        f"{wrong[0]}); build it from the same weights"
                    )

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Load states that :meth:`collect` returned.

        Raises:
            CheckpointError: an object refuses its own state.
        """
        self._loaded, self._is_new = saved, True
        for path in self.owners:
            self._restore_owner(path, saved.get(path, {}))
        self.restore_attributes(saved)

    def _restore_owner(self, path: str, entry: Mapping[str, Any]) -> None:
        owner, attributes = self.owners[path], self._attributes.get(path)
        with contextlib.nullcontext() if attributes is None else attributes.completing(entry.get("attributes", {})):
            if (state := entry.get("state")) is not None:
                try:
                    owner.load_state_dict(from_plain(to_plain(state, path)))
                except Exception as error:
                    raise CheckpointError(
                        f"{path}: {type(owner).__name__}.load_state_dict rejects the checkpoint's state: {error}"
                    ) from error
        if path in self._modules:
            self._modules[path].restore(owner, entry.get("modules", {}), ready=False)

    def _restore_found(self, found: Collection[str]) -> None:
        """Restore objects found after a checkpoint was loaded."""
        for path in found:
            entry = self._loaded.get(path)
            if entry is not None and path in self.owners:
                self._restore_owner(path, entry)
            elif entry is not None:
                self._attributes[path].restore(entry.get("attributes", {}))

    def restore_attributes(self, saved: Mapping[str, Any]) -> None:
        """Set attributes as in an entry of :meth:`collect`, and reset all others to their initial values.

        Attributes of an object are set before those of its holder, which may put another object in its place.
        """
        for path, attributes in reversed(self._attributes.items()):
            if path not in self.owners:
                attributes.restore(saved.get(path, {}).get("attributes", {}))

    def attributes(self) -> dict[str, Any]:
        """Return the attributes that changed, by path, including those of objects with a state dict."""
        return {path: {"attributes": now} for path, one in self._attributes.items() if (now := one.changed())}

    def without_entry(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the paths of objects whose state a checkpoint lacks."""
        loaders = {path for path, owner in self.owners.items() if isinstance(owner, DataLoader)}  # read by a cursor
        return [path for path in self.collect() if path in self.owners.keys() - loaders and path not in saved]

    def differences(self, saved: Mapping[str, Any]) -> Iterator[Difference]:
        """Yield where a state, once loaded, differs from the checkpoint."""
        for path, entry in saved.items():
            if "state" in entry and path in self.owners:
                now = to_plain(self.owners[path].state_dict(), f"objects.{path}", encoding="odd")
                yield from unequal(to_plain(from_plain(entry["state"]), encoding="odd"), now, f"objects.{path}")

    def lost(self) -> Iterator[str]:
        """Yield the names of attributes that changed since the last call and that no checkpoint holds."""
        for path, attributes in self._attributes.items():
            if path not in self.owners:  # else its own state may hold them
                prefix = "" if isinstance(attributes.owner, Variables) else path
                names = (f"{prefix}.{name}".lstrip(".") for name in attributes.lost())
                yield from (name for name in names if name not in self.owners)
        for path, modules in self._modules.items():
            yield from (f"{path}.{name}" for name in (*modules.lost(), *modules.replaced(self.owners[path])))


def _left_out_of(path: str, owner: Any) -> dict[str, Any]:
    """Return objects with state held by an object with a state dict that may leave them out."""
    if isinstance(owner, nn.Module):
        return unregistered_in(path, owner)
    if not is_user_object(owner):
        return {}
    inner = {name: value for name, value in attributes_of(owner).items() if has_state(value)}
    if not inner:
        return {}
    held = list(_mappings_in(to_plain(owner.state_dict(), encoding="odd")))
    return {
        f"{path}.{name}": value
        for name, value in inner.items()
        if not any(same(to_plain(value.state_dict(), encoding="odd"), state) for state in held)
    }


def _mappings_in(tree: Any) -> Iterator[Mapping[Any, Any]]:
    if isinstance(tree, Mapping):
        yield tree
        tree = list(tree.values())
    for item in tree if isinstance(tree, list) else ():
        yield from _mappings_in(item)


def _missing(path: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: the checkpoint holds the state of this object, which does not exist when the run loads it; create "
        "it in __init__ or in build_model(), before training, or start a new run from load_weights(...)"
    )


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _fingerprints(state: Mapping[str, Any]) -> dict[str, str]:
    return {name: fingerprint(value) for name, value in state.items() if isinstance(value, Tensor)}


def _is_derived(value: Any) -> bool:
    """Return whether a value that a hook has just set may derive from the loaded state: no string, flag or time."""
    if isinstance(value, Mapping):
        return next(iter(value), None) not in CONSTANTS
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return isinstance(value, (Tensor, list))
    return not any(0 <= clock() - part <= _NOW for clock in _CLOCKS for part in (value, value / 1e9))
