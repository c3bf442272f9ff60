"""Checkpoint part with the user's own objects, and where to find them."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from treadle.checkpoint.introspection import attributes_of, is_engine_or_trainer, is_user_object, offered
from treadle.distributed.state_names import clean_name
from treadle.engine.own_objects import OwnObjects
from treadle.engine.search import is_treadle_object, unregistered_in
from treadle.engine.state_part import Difference, Notice, Saved, StatePart
from treadle.optim.schedules import schedulers_in

if TYPE_CHECKING:
    from treadle.engine.loop import Engine

_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # where a tensor keeps its hooks


def objects_of(engine: Engine) -> OwnObjects:
    """Return the objects on the trainer and the task, and those reached through the schedule and module hooks."""
    roots = _roots(engine)
    known = {id(part) for part in parts_of(engine)}
    found = OwnObjects(
        {**roots, **_callables_of(engine)}, known=known, whole=tuple(roots), model=engine.model,
        hidden=unregistered_in("model", engine.model),
    )  # fmt: skip
    parts = (*engine.model.modules(), engine.optimizer, engine.lr_scheduler, *engine.hooks, *roots.values())
    found.add_variables("variables", [*parts, *found.owners.values(), *found.plain.values(), *found.functions])
    return found


def _callables_of(engine: Engine) -> dict[str, Any]:
    """Return the callables of the schedule, the modules and the optimizer, whose state is in no state dict."""
    found: dict[str, Any] = {}
    for path, scheduler in schedulers_in(engine.lr_scheduler):
        for number, factor in enumerate(getattr(scheduler, "lr_lambdas", ())):
            found[f"{path}.lr_lambdas[{number}]"] = factor
        if is_user_object(scheduler):
            found |= {f"{path}.{name}": value for name, value in attributes_of(scheduler).items()
                      if name not in ("optimizer", "lr_lambdas")}  # fmt: skip
    for name, held in _owners(engine):
        for key, value in held.items():
            if isinstance(value, (types.FunctionType, functools.partial)):  # in place of a method
                found[f"{_path(name)}.{key}"] = value
            found |= _hooks_in(name, key, value)
    return {path: owner for path, owner in found.items() if not is_treadle_object(owner)}


def _registered_hooks(engine: Engine) -> frozenset[str]:
    """Return the places at which code of the user's has hooks on modules, parameters and the optimizer."""
    found: dict[str, Any] = {}
    for name, held in _owners(engine):
        for key, value in held.items():
            # Called at each save, and hardly any owner has a hook.
            if key.endswith("_hooks") and isinstance(value, Mapping) and value:
                found |= _hooks_in(name, key, value)
    hooks = {path: one.func if isinstance(one, functools.partial) else one
             for path, one in found.items() if not is_treadle_object(one)}  # fmt: skip
    return frozenset(path for path, one in hooks.items() if is_user_object(getattr(one, "__func__", one)))


def _owners(engine: Engine) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Yield the modules and parameters by name and the optimizer by None, each with what may hold callables."""
    yield from ((name, vars(module)) for name, module in engine.model.named_modules())
    for name, parameter in engine.model.named_parameters():
        yield name, {key: getattr(parameter, key, None) for key in _OF_TENSORS}
    yield None, vars(engine.optimizer)


def _path(name: str | None) -> str:
    return "optimizer" if name is None else f"model.{clean_name(name)}".rstrip(".")


def _hooks_in(name: str | None, key: str, value: Any) -> dict[str, Any]:
    if not (key.endswith("_hooks") and isinstance(value, Mapping)):
        return {}
    return {f"{_path(name)}.{key}[{number}]": hook for number, hook in enumerate(value.values())}


def parts_of(engine: Engine) -> Iterator[Any]:
    """Yield the objects of a run that checkpoints store under separate keys."""
    yield from (engine.optimizer, engine.precision, engine.precision.scaler, engine.hooks)
    yield from (scheduler for _, scheduler in schedulers_in(engine.lr_scheduler) if scheduler is engine.lr_scheduler)
    yield from (engine.cursor, engine.eval_cursor, engine.progress, engine.state, *engine.hooks, *engine.state.drivers)
    yield from (engine.cursor.loader, getattr(engine, "data_loader", None))  # whose position the cursor keeps
    yield from engine.model.modules()


def _roots(engine: Engine) -> dict[str, Any]:
    task = engine.task
    trainer = getattr(task, "trainer", None)
    found = {"trainer": trainer} if trainer is not None else {}
    if not is_treadle_object(engine) and trainer is not engine:
        found["trainer"] = engine
    return {**found, "task": task}


@contextlib.contextmanager
def hooks_beginning(engine: Engine) -> Iterator[None]:
    """Restore, after the block in which hooks begin, the state from a checkpoint that they changed."""
    kept = {"": engine.state.objects}
    kept |= {f"hook {key}: ": objects for key, objects in engine.state.hooks.objects.items()}
    before = {name: objects.loaded_states() for name, objects in kept.items()}
    beginning = engine.state.beginning
    beginning.begin(engine)
    with beginning.groups_added_once(engine.optimizer):
        yield
    beginning.end(engine)
    engine.state.search_again()
    engine.state.record_registered(_registered_hooks(engine))
    for name, objects in kept.items():
        for text in objects.restore_loaded(before[name]):
            engine.state.warn_once(engine, f"{name}the run continues with the checkpoint's {text}")


def warn_of_lost(engine: Engine) -> None:
    """Warn once about changes in the user's objects, and about iterators on them, that no checkpoint holds."""
    for name in engine.state.objects.lost():
        engine.state.warn_once(
            engine,
            f"{name} changes during the run, but checkpoints do not hold it: a resume is exact only if nothing "
            "depends on it. Keep it in an object with state_dict and load_state_dict; create iterators over data in "
            "the __iter__ of the loader",
        )

    for path in sorted(_registered_hooks(engine) - engine.state.registered) if engine.state.training else ():
        engine.state.warn_once(
            engine,
            f"{path} was registered while training, and a resumed run has no such hook: register it before training or "
            "in on_before_train, and let it act by an attribute, which is kept",
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
                f"the checkpoint has no state of {', '.join(missing)}, which start fresh; the resume is not exact"
            )

    def load(self, engine: Engine, saved: Saved) -> None:
        engine.state.objects.restore(saved.part("objects"))

    def differences(self, engine: Engine, saved: Saved) -> Iterator[Difference]:
        yield from engine.state.objects.differences(saved.part("objects"))


def attributes_in(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of the user's objects, which rank 0 writes for all ranks, by name."""
    groups = {f"hook {key}: ": (entry or {}).get("objects", {}) if isinstance(entry, Mapping) else {}
              for key, entry in tree["hooks"].items()}  # fmt: skip
    for prefix, objects in {"": tree.get("objects", {}), **groups}.items():
        for path, entry in objects.items():
            for name, value in entry.get("attributes", {}).items():
                yield prefix + f"{path}.{name}".lstrip("."), value
    for path, attributes in tree.get("modules", {}).get("attributes", {}).items():
        yield from ((f"model.{path}.{name}".replace("..", "."), value) for name, value in attributes.items())


def owners_of_values(engine: Engine) -> dict[str, Any]:
    """Return the modules of the model, the loss and the task, and the user's own objects, by path."""
    found = {"model": engine.model}
    for root in (getattr(engine.task, "trainer", engine.task), engine.task):
        found |= {name: value for name, value in attributes_of(root).items() if isinstance(value, nn.Module)}
    parts = {f"task.{name}": value for name, value in attributes_of(engine.task).items() if is_treadle_object(value)}
    settings = {f"{path}.config": offered(part, "config") for path, part in parts.items()}
    own = {**parts, **settings, **engine.state.objects.plain, **engine.state.objects.owners}
    own = {path: owner for path, owner in own.items() if owner is not None and not is_engine_or_trainer(owner)}
    seen: set[nn.Module] = set()
    nested = {
        f"{path}.{clean_name(name)}".rstrip("."): module
        for path, owner in {"model": engine.model, **found, **own}.items()
        if isinstance(owner, nn.Module)
        for name, module in owner.named_modules(memo=seen)
    }
    return {path: owner for path, owner in own.items() if not isinstance(owner, nn.Module)} | nested
