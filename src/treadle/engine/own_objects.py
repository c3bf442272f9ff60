"""Objects that a user keeps on the trainer or the task: what offers a state dict, and attributes that change."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from treadle.checkpoint.attributes import Attributes, Mark, beside
from treadle.checkpoint.base_fingerprints import fingerprint
from treadle.checkpoint.introspection import (
    LIBRARIES,
    Named,
    attributes_of,
    behind,
    has_state,
    is_of_a_run,
    is_users,
    is_users_class,
)
from treadle.checkpoint.module_state import ModuleState
from treadle.checkpoint.plain_values import OPAQUE, encode, is_plain_object, unequal
from treadle.checkpoint.schema import from_plain, to_plain
from treadle.checkpoint.variables import Variables
from treadle.distributed.state_names import clean_name
from treadle.engine.hook import BaseHook
from treadle.engine.state_part import Difference, Notice, Saved, StatePart
from treadle.errors import CheckpointError
from treadle.optim.schedules import schedulers_in

if TYPE_CHECKING:
    from treadle.engine.loop import Engine

OF_OPTIMIZERS = (
    "_opt_called", "_step_count", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured", "state",
    "param_groups", "defaults",
)  # fmt: skip
"""Attributes of every optimizer, which its state dict holds or which are no state."""
_DEEPEST = 6
_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # where a tensor keeps its hooks
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_WITHOUT_OBJECTS = ("builtins", "logging", "pathlib", "collections", "functools")  # of the standard library
_SCALARS = (bool, int, float, str, type(None))
_MOST = 256  # items of a container that are looked at
_OF_MODULES = ("tensors", "attributes")  # what is written of their state beyond the state dict
_LARGE = 64 * 2**20  # bytes of a frozen module above which its fingerprint is kept and not its weights


class OwnObjects:
    """Objects of the user that a checkpoint holds under their paths.

    They are found from some roots on: what offers a state dict, and the attributes of plain objects and of functions,
    also in containers, behind methods and partials. What was built by treadle or belongs to the engine is left out:
    model, optimizer, schedule, hooks and loaders have parts of their own.

    Args:
        roots: where to look, by path.
        known: ids of objects that are left out.
        whole: paths of roots that are looked into though they have state dicts.
        hidden: further roots, whose attributes are kept elsewhere: what offers a state dict in them counts alone.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        *,
        known: Collection[int] = (),
        whole: Collection[str] = (),
        hidden: Mapping[str, Any] | None = None,
    ):
        self._kept = set(known)  # ids of objects that live as long as this one
        self._whole = frozenset(whole)
        self.owners: dict[str, Any] = {}
        self._attributes: dict[str, Attributes] = {}
        self._marks: dict[str, list[Mark]] = {}
        self._modules: dict[str, ModuleState] = {}
        self._carried: set[str] = set()
        self._late: set[str] = set()
        self._loaded: Mapping[str, Any] = {}
        self._roots = dict(roots)
        self.functions: list[types.FunctionType] = []  # of the user, for the variables that they use
        self._look(self._roots)
        self._look(hidden or {}, plain_too=False)

    def add(self, path: str, owner: Any) -> None:
        """Look into one more root, and restore it from the checkpoint that was loaded before it came."""
        self._roots[path] = owner
        self.functions.clear()
        self._restore_found(self._look({path: owner}))
        self.add_variables(f"{path}.variables", [owner, *self.functions])

    def leave_out(self, loader: Any) -> None:
        """Leave out a loader that a cursor reads, which keeps its place; states of it in older checkpoints too."""
        for path in [path for path, owner in self.owners.items() if owner is loader]:
            del self.owners[path]
            self._attributes.pop(path, None)
            self._carried.add(path)

    def add_variables(self, path: str, roots: Iterable[Any]) -> None:
        """Add the variables that the code of some objects uses, and what has state among them."""
        known = [name for bag in self._roots.values() if isinstance(bag, Variables) for name in bag.values()]
        variables = Variables(roots, known=known)
        for name, owner in {path: variables, **variables.stateful}.items():
            self._roots[name] = owner
            self._restore_found(self._look({name: owner}))

    def look_again(self) -> None:
        """Look for objects that were made since, in hooks before training; what a checkpoint holds of them is loaded.

        Raises:
            CheckpointError: it holds the state of one that was not made.
        """
        found = self._look(self._roots, plain_too=False)
        self._late |= found & self.owners.keys()
        self._restore_found(found)
        for path, entry in self._loaded.items():
            if entry.get("late") and path not in self.owners:
                raise _missing(path)

    def _look(self, roots: Mapping[str, Any], *, plain_too: bool = True) -> set[str]:
        """Return the paths of what was found in some roots and was not known.

        Args:
            roots: where to look.
            plain_too: whether objects without a state dict count; those made later are written as parts of others.
        """
        owners: dict[str, Any] = {}
        plain: dict[str, Any] = {}
        seen: set[int] = set()
        for path, owner in roots.items():
            self._walk(path, owner, _DEEPEST, (owners, plain, seen))
        if not plain_too:
            plain.clear()
        self._kept |= {id(owner) for owner in (*owners.values(), *plain.values())}
        for path, owner in owners.items():
            self.owners[path] = owner
            if isinstance(owner, nn.Module):
                self._marks[path] = [Mark(value) for value in _tensors_of(owner)]
                self._modules[path] = ModuleState(owner)
            elif is_users(owner):
                left_out = OF_OPTIMIZERS if isinstance(owner, Optimizer) else ()
                self._attributes[path] = self._attributes_of(owner, left_out)
        for path, owner in plain.items():
            self._attributes[path] = self._attributes_of(owner, _OF_TRAINERS if path in self._whole else ())
        return {*owners, *plain}

    def _attributes_of(self, owner: Any, left_out: Collection[str]) -> Attributes:
        return Attributes(owner, deep=True, leave_out=left_out, stashes=True, known=self._kept)

    def _walk(self, path: str, owner: Any, depth: int, found: tuple[dict[str, Any], dict[str, Any], set[int]]) -> None:
        owners, plain, seen = found
        if depth == 0 or id(owner) in seen:
            return
        is_new = id(owner) not in self._kept
        if isinstance(owner, types.FunctionType) and is_users(owner):
            self.functions.append(owner)
        if isinstance(owner, (list, tuple)):
            for number, item in enumerate(owner[:_MOST]):
                if path in self._roots or not _is_written_whole(item):
                    self._walk(f"{path}[{number}]", item, depth - 1, found)
        elif isinstance(owner, dict) and len(owner) <= _MOST:
            for key, item in owner.items():
                if not _is_written_whole(item):
                    self._walk(f"{path}.{key}", item, depth - 1, found)
        elif isinstance(owner, (types.MethodType, functools.partial)):
            for name, item in behind(owner):
                self._walk(f"{path}.{name}", item, depth, found)
        elif has_state(owner) and path not in self._whole:
            if is_of_a_run(owner):
                return
            if is_new and path not in self.owners and (not is_ours(owner) or isinstance(owner, nn.Module)):
                owners[path] = owner
                seen.add(id(owner))
        elif (is_new or path in self._roots or path in self._attributes) and _is_looked_into(owner):
            seen.add(id(owner))
            left_out = _OF_TRAINERS if path in self._whole else ()
            if is_new and (isinstance(owner, Named) or not is_ours(owner)) and path not in self._attributes:
                plain[path] = owner
            for name, value in attributes_of(owner).items():
                if name not in left_out:
                    self._walk(f"{path}.{name}".lstrip("."), value, depth - 1, found)

    @property
    def plain(self) -> dict[str, Any]:
        """Objects whose attributes are kept, by path."""
        return {path: attributes.owner for path, attributes in self._attributes.items()}

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers among them, which the user's own code steps."""
        return [owner for owner in self.owners.values() if isinstance(owner, Optimizer)]

    def collect(self) -> dict[str, Any]:
        """Return the states by path; of a module nothing where it has not changed and cannot be trained."""
        found: dict[str, Any] = {}
        for path, owner in self.owners.items():
            if isinstance(owner, nn.Module):
                found |= self._of_module(path, owner)
            elif state := owner.state_dict():
                found[path] = {"state": to_plain(state, f"objects.{path}", encoding="exact")}
        for path, entry in self.attributes().items():
            known = found.get(path, {})
            if other := beside(known.get("state"), entry["attributes"]):
                found[path] = {**known, "attributes": other}
        return {
            path: {**entry, "late": True} if path in self._late else entry for path, entry in found.items() if entry
        }

    def _of_module(self, path: str, module: nn.Module) -> dict[str, Any]:
        state = module.state_dict()
        other = {key: value for key, value in self._modules[path].collect(module).items() if key in _OF_MODULES}
        tensors, built = _tensors_of(module), self._marks[path]
        unchanged = len(tensors) == len(built) and all(one.is_of(now) for one, now in zip(built, tensors, strict=True))
        parameters = list(module.parameters())
        if other:
            return {path: {"state": state, "modules": other}}
        if not state or (unchanged and not parameters):
            return {}
        is_large = sum(value.numel() * value.element_size() for value in tensors) > _LARGE
        if unchanged and is_large and not any(parameter.requires_grad for parameter in parameters):
            return {path: {"fingerprints": _fingerprints(state)}}
        return {path: {"state": state}}

    def check(self, saved: Mapping[str, Any]) -> None:
        """Raise for a state that no object of this run takes.

        Raises:
            CheckpointError: there is none under its path, or it is another frozen module.
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
                        f"{path}: its frozen weights differ from those of the run that wrote the checkpoint, first "
                        f"{wrong[0]}; build it from the same weights"
                    )

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Load states that :meth:`collect` returned.

        Raises:
            CheckpointError: an object refuses its own state.
        """
        self._loaded = saved
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
                        f"{path}: {type(owner).__name__}.load_state_dict does not take the state of the checkpoint: "
                        f"{error}"
                    ) from error
        if path in self._modules:
            self._modules[path].restore(owner, entry.get("modules", {}), ready=False)

    def _restore_found(self, found: Collection[str]) -> None:
        """Restore what came after a checkpoint was loaded."""
        for path in found:
            entry = self._loaded.get(path)
            if entry is not None and path in self.owners:
                self._restore_owner(path, entry)
            elif entry is not None:
                self._attributes[path].restore(entry.get("attributes", {}))

    def restore_attributes(self, saved: Mapping[str, Any]) -> None:
        """Set attributes as in an entry of :meth:`collect`, and the others as they were at the start."""
        for path, attributes in self._attributes.items():
            if path not in self.owners:
                attributes.restore(saved.get(path, {}).get("attributes", {}))

    def attributes(self) -> dict[str, Any]:
        """Return the attributes that changed, by path; of objects with a state of their own too."""
        return {path: {"attributes": now} for path, one in self._attributes.items() if (now := one.changed())}

    def without_entry(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the paths of objects that have state and of which a checkpoint holds none."""
        loaders = {path for path, owner in self.owners.items() if isinstance(owner, DataLoader)}  # a cursor may read it
        return [path for path in self.collect() if path in self.owners.keys() - loaders and path not in saved]

    def differences(self, saved: Mapping[str, Any]) -> Iterator[Difference]:
        """Yield where a state, once loaded, is not what the checkpoint holds."""
        for path, entry in saved.items():
            if "state" in entry and path in self.owners:
                now = to_plain(self.owners[path].state_dict(), f"objects.{path}", encoding="odd")
                yield from unequal(to_plain(from_plain(entry["state"]), encoding="odd"), now, f"objects.{path}")

    def lost(self) -> Iterator[str]:
        """Yield the names of attributes that changed since this was last asked and that no checkpoint holds."""
        for path, attributes in self._attributes.items():
            if path not in self.owners:  # else its own state may hold them
                yield from (f"{path}.{name}".lstrip(".") for name in attributes.lost())
        for path, modules in self._modules.items():
            yield from (f"{path}.{name}" for name in modules.lost())


def _missing(path: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: the checkpoint holds the state of this object, and this run has none there when it loads; make it in "
        "__init__ or in build_model(), before training, or start a new run from load_weights(...)"
    )


def objects_of(engine: Engine) -> OwnObjects:
    """Return the objects on the trainer and the task, behind the schedule, and behind hooks of the model's modules."""
    roots = _roots(engine)
    known = {id(part) for part in _parts_of(engine)}
    found = OwnObjects(
        {**roots, **_callables_of(engine)}, known=known, whole=tuple(roots), hidden=_hidden_in(engine.model)
    )
    parts = (*engine.model.modules(), engine.optimizer, engine.lr_scheduler, *engine.hooks, *roots.values())
    found.add_variables("variables", [*parts, *found.owners.values(), *found.plain.values(), *found.functions])
    return found


def objects_of_hook(engine: Engine, hook: BaseHook) -> OwnObjects | None:
    """Return what a user's hook holds, or None where it keeps its state itself."""
    if _keeps_itself(hook) or is_ours(hook) or has_state(hook):
        return None
    known = {id(part) for part in _parts_of(engine)} - {id(hook)} | {id(engine), id(engine.task)}
    known |= {id(owner) for owner in engine.state.objects.owners.values()}
    return OwnObjects({"": hook}, known=known)


def attributes_of_hook(hook: BaseHook) -> Attributes | None:
    """Return the attributes of a user's hook that keeps its state itself, or None: it may leave some out."""
    kinds = [kind for kind in type(hook).__mro__ if kind not in (BaseHook, object)]
    if not _keeps_itself(hook) or not all(map(is_users_class, kinds)):
        return None
    return Attributes(hook, deep=True)


def _keeps_itself(hook: BaseHook) -> bool:
    methods = ("on_state_dict", "on_load_state_dict")
    return any(getattr(type(hook), name) is not getattr(BaseHook, name) for name in methods)


def _callables_of(engine: Engine) -> dict[str, Any]:
    """Return what a schedule, the modules and the optimizer call: no state dict of theirs holds its state."""
    found: dict[str, Any] = {}
    for path, scheduler in schedulers_in(engine.lr_scheduler):
        for number, factor in enumerate(getattr(scheduler, "lr_lambdas", ())):
            found[f"{path}.lr_lambdas[{number}]"] = factor
        if is_users(scheduler):
            found |= {f"{path}.{name}": value for name, value in attributes_of(scheduler).items()
                      if name not in ("optimizer", "lr_lambdas")}  # fmt: skip
    model = engine.model
    owners = {f"model.{clean_name(name)}".rstrip("."): module for name, module in model.named_modules()}
    parameters = {f"model.{clean_name(name)}": one for name, one in model.named_parameters()}
    for path, owner in {**owners, **parameters, "optimizer": engine.optimizer}.items():
        held = vars(owner) if path not in parameters else {name: getattr(owner, name, None) for name in _OF_TENSORS}
        for name, value in held.items():
            if name.endswith("_hooks") and isinstance(value, Mapping):
                found |= {f"{path}.{name}[{number}]": hook for number, hook in enumerate(value.values())}
    return {path: owner for path, owner in found.items() if not is_ours(owner)}


def _hidden_in(model: nn.Module) -> dict[str, Any]:
    """Return the attributes of the user's modules that may hold a module which is not registered, as in a list."""
    return {
        f"model.{clean_name(f'{path}.{name}'.lstrip('.'))}": value
        for path, module in model.named_modules()
        if is_users(module)
        for name, value in vars(module).items()
        if name not in _OF_EVERY_MODULE and not isinstance(value, (Tensor, *_SCALARS))
    }


def _parts_of(engine: Engine) -> Iterator[Any]:
    yield from (engine.optimizer, engine.precision, engine.precision.scaler, engine.hooks)
    yield from (scheduler for _, scheduler in schedulers_in(engine.lr_scheduler) if scheduler is engine.lr_scheduler)
    yield from (engine.cursor, engine.eval_cursor, engine.progress, engine.state, *engine.hooks, *engine.state.drivers)
    yield from (engine.cursor.loader, getattr(engine, "data_loader", None))  # whose place the cursor keeps
    yield from engine.model.modules()


def _roots(engine: Engine) -> dict[str, Any]:
    task = engine.task
    trainer = getattr(task, "trainer", None)
    found = {"trainer": trainer} if trainer is not None else {}
    if not is_ours(engine) and trainer is not engine:
        found["trainer"] = engine
    return {**found, "task": task}


def is_ours(owner: Any) -> bool:
    """Return whether the class of an object is treadle's.

    Example:
        >>> is_ours(nn.Linear(1, 1))
        False
    """
    kind = owner if isinstance(owner, types.FunctionType) else type(owner)
    return str(kind.__module__).partition(".")[0] == "treadle"


def _is_written_whole(item: Any) -> bool:
    """Return whether an item of a container is a user's plain object that is written as part of the container."""
    return is_plain_object(item) and encode(item, deep=True) is not OPAQUE


def _is_looked_into(owner: Any) -> bool:
    """Return whether an object is a user's, whose attributes may hold others."""
    if isinstance(owner, types.FunctionType):
        return bool(owner.__closure__) and (is_users(owner) or is_ours(owner))
    if isinstance(owner, Named):
        return True
    foreign = (type, types.ModuleType, types.MethodType, Tensor, Dataset, Sampler, DataLoader, Optimizer, dict)
    if isinstance(owner, foreign) or not hasattr(owner, "__dict__"):
        return False
    root = type(owner).__module__.partition(".")[0]
    return is_ours(owner) or root not in (*LIBRARIES, *_WITHOUT_OBJECTS)


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _fingerprints(state: Mapping[str, Any]) -> dict[str, str]:
    return {name: fingerprint(value) for name, value in state.items() if isinstance(value, Tensor)}


def _trainer_names() -> frozenset[str]:
    return frozenset({
        "model", "optimizer", "lr_scheduler", "scheduler", "task", "precision", "settings", "logger", "config", "hooks",
        "workspace", "should_stop", "target", "cursor", "eval_cursor", "progress", "attempt", "state", "num_ranks",
        "declared", "events", "signals", "exchange", "guard", "steps", "stray_parameters", "max_steps", "trackers",
        "compile_setting", "state_dict_options", "grad_scaler", "data_loader", "_given_hooks", "_engine", "_epochs",
        "_folder", "_history_file", "device",
    })  # fmt: skip


_OF_TRAINERS = _trainer_names()


def warn_of_lost(engine: Engine) -> None:
    """Warn of what has changed in the user's objects and of iterators on them, which no checkpoint holds, once."""
    for name in engine.state.objects.lost():
        engine.state.warn_once(
            engine,
            f"{name} has changed, or moves, and no checkpoint holds it: a resume is exact only if nothing depends on "
            "it. Keep it in an object with state_dict and load_state_dict; an iterator over data, in the __iter__ of "
            "the loader",
        )


class ObjectsPart(StatePart):
    """State of the user's own objects on the trainer and the task."""

    def collect(self, engine: Engine, tree: dict[str, Any]) -> None:
        if states := engine.state.objects.collect():
            tree["objects"] = states
        warn_of_lost(engine)

    def check(self, engine: Engine, saved: Saved) -> None:
        if engine.state.options.strict:
            engine.state.objects.check(saved.part("objects"))

    def notices(self, engine: Engine, saved: Saved) -> Iterator[Notice]:
        missing = engine.state.objects.without_entry(saved.part("objects"))
        if missing:
            yield Notice(
                f"the checkpoint has no state of {', '.join(missing)}: these start fresh and the resume is not exact"
            )

    def load(self, engine: Engine, saved: Saved) -> None:
        engine.state.objects.restore(saved.part("objects"))

    def differences(self, engine: Engine, saved: Saved) -> Iterator[Difference]:
        yield from engine.state.objects.differences(saved.part("objects"))
