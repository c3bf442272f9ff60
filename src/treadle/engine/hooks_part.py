"""Checkpoint part with the state of hooks: their own state dicts, and further attributes of users' hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from treadle.checkpoint.attributes import Attributes, missing_from_state
from treadle.checkpoint.introspection import has_state, is_user_class
from treadle.checkpoint.references import References
from treadle.checkpoint.schema import KEYS, OPTIONAL_KEYS, from_plain
from treadle.engine.hook import BaseHook
from treadle.engine.own_objects import OwnObjects
from treadle.engine.search import is_treadle_object
from treadle.engine.state_part import Difference, Notice, Saved, StatePart
from treadle.errors import CheckpointError

if TYPE_CHECKING:
    from treadle.engine.loop import Engine

_OF_PARTS = {*KEYS, *OPTIONAL_KEYS}


class HookStates:
    """State of a run's hooks beyond what they save themselves, by state key.

    Args:
        hooks: hooks of the run.
        known: ids of objects kept elsewhere.
        model: model of the run, whose parts they may refer to.

    Attributes:
        objects: everything held by users' hooks that save nothing themselves.
        attributes: what users' hooks that do save state may leave out.
    """

    def __init__(self, hooks: Iterable[BaseHook] = (), *, known: Collection[int] = (), model: nn.Module | None = None):
        self.objects: dict[str, OwnObjects] = {}
        self.attributes: dict[str, Attributes] = {}
        for hook in hooks:
            kinds = [kind for kind in type(hook).__mro__ if kind not in (BaseHook, object)]
            if _keeps_itself(hook):
                if all(map(is_user_class, kinds)):
                    self.attributes[hook.state_key] = Attributes(hook, deep=True, references=References(model))
            elif not (is_treadle_object(hook) or has_state(hook)):
                self.objects[hook.state_key] = OwnObjects({"": hook}, known=set(known) - {id(hook)}, model=model)


def _keeps_itself(hook: BaseHook) -> bool:
    methods = ("on_state_dict", "on_load_state_dict")
    return any(getattr(type(hook), name) is not getattr(BaseHook, name) for name in methods)


class HooksPart(StatePart):
    """State of the hooks, by state key or under keys of their choice."""

    def collect(self, engine: Engine, tree: dict[str, Any]) -> None:
        tree["hooks"] = {}
        for hook in engine.hooks:
            before = {key: id(value) for key, value in tree.items()}
            others = dict(tree["hooks"])
            hook.on_state_dict(engine, tree)
            self._add_attributes(engine, hook.state_key, tree)
            changed = [key for key, identity in before.items() if key not in tree or id(tree[key]) != identity]
            kept = tree.get("hooks") or {}
            changed += [f"hooks.{key}" for key, value in others.items() if kept.get(key) is not value]
            if changed:
                raise CheckpointError(
                    f"{type(hook).__name__}.on_state_dict overwrites {changed[0]!r}, which belongs to another part; "
                    'write to state_dict["hooks"][self.state_key]'
                )

        for key, attributes in engine.state.hooks.attributes.items():
            if changed_here := missing_from_state(tree["hooks"].get(key), attributes.changed()):
                tree.setdefault("objects", {})[_of_hook(key)] = {"attributes": changed_here}

    def _add_attributes(self, engine: Engine, key: str, tree: dict[str, Any]) -> None:
        """Add the attributes of a hook that saves no state itself."""
        objects = engine.state.hooks.objects.get(key)
        if objects is None:
            return
        if states := objects.collect():
            tree["hooks"][key] = {"objects": states}
        for name in objects.lost():
            advice = (
                "Create it in __init__, as plain values, or define on_state_dict and on_load_state_dict in the hook"
            )
            engine.state.warn_of_lost(engine, f"hook {key}: {name}", advice)

    def notices(self, engine: Engine, saved: Saved) -> Iterator[Notice]:
        kept, known = saved.part("hooks"), {hook.state_key for hook in engine.hooks}
        unknown = [key for key in kept if key not in known]
        stateful = [
            hook
            for hook in engine.hooks
            if type(hook).on_state_dict is not BaseHook.on_state_dict and not hook.implicit
        ]
        without = [hook for hook in stateful if "hooks" in saved.tree and hook.state_key not in kept]
        # A user's hook may save its state under any key, at the top level or among the hooks.
        own_keys = set(saved.tree) - _OF_PARTS
        if unknown and any(not is_treadle_object(hook) for hook in without):
            return
        for key in unknown:
            text = f"the checkpoint's state of hook {key!r} is ignored: this run has no such hook"
            yield Notice(text, topic="ignored hook state")
        for hook in without if not own_keys else ():
            yield Notice(f"the checkpoint has no state of hook {hook.state_key!r}, so it starts fresh")

    def check(self, engine: Engine, saved: Saved) -> None:
        if engine.state.options.strict:
            for key, objects in engine.state.hooks.objects.items():
                objects.check(_objects_of(saved, key))

    def load(self, engine: Engine, saved: Saved) -> None:
        own = {key: from_plain(value) for key, value in saved.tree.items() if key == "hooks" or key not in _OF_PARTS}
        tree = {**saved.tree, **own}
        for hook in engine.hooks:
            attributes = engine.state.hooks.attributes.get(hook.state_key)
            entry = saved.part("objects").get(_of_hook(hook.state_key)) or {}
            with contextlib.nullcontext() if attributes is None else attributes.completing(entry.get("attributes", {})):
                hook.on_load_state_dict(engine, tree)
        for key, objects in engine.state.hooks.objects.items():
            objects.restore(_objects_of(saved, key))

    def differences(self, engine: Engine, saved: Saved) -> Iterator[Difference]:
        for key, objects in engine.state.hooks.objects.items():
            for path, how in objects.differences(_objects_of(saved, key)):
                yield f"hooks.{key}.{path}", how


def _of_hook(key: str) -> str:
    """Return the path under which attributes are kept that the hook's own state leaves out."""
    return f"hooks.{key}"


def _objects_of(saved: Saved, key: str) -> Mapping[str, Any]:
    entry = saved.part("hooks").get(key)
    found = entry.get("objects") if isinstance(entry, Mapping) else None
    return found if isinstance(found, Mapping) else {}
