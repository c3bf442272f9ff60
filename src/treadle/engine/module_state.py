"""State of a model that its state dict does not hold: trainable flags, modes, other buffers, plain attributes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from treadle.checkpoint.attributes import Attributes, same, unequal
from treadle.checkpoint.schema import to_plain
from treadle.distributed import is_dtensor, unwrap
from treadle.distributed.state_names import clean_name
from treadle.engine.state_part import Difference, Notice, Saved, StatePart

if TYPE_CHECKING:
    from treadle.engine.loop import Engine

_OF_EVERY_MODULE = (*vars(nn.Module()), "_is_full_backward_hook", "_version", "_forward_module")
_LARGEST = 1_000_000  # elements of a plain tensor attribute that counts as state


class Version:
    """A tensor as it was at one moment, to detect a later replacement or write.

    Example:
        >>> tensor = torch.zeros(1)
        >>> version = Version(tensor)
        >>> version.is_of(tensor), version.is_of(tensor.add_(1))
        (True, False)
    """

    def __init__(self, tensor: Tensor):
        self._tensor = weakref.ref(tensor)
        self._version = _count_of(tensor)
        self.shape = tensor.shape

    def is_of(self, tensor: Tensor) -> bool:
        """Returns whether the tensor is that one, as it was."""
        return self._tensor() is tensor and self._version == _count_of(tensor)


def _count_of(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class ModuleState:
    """Changes to a model since it was built that no state dict holds.

    Attributes:
        built_frozen: names of the parameters that did not require gradients when the run was prepared.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> state = ModuleState(model)
        >>> model.bias.requires_grad_(False) is model.bias, state.collect(model)
        (True, {'frozen': ['bias'], 'built_frozen': []})
    """

    def __init__(self, model: nn.Module):
        self.built_frozen = frozen_names(model)
        named = dict(_modules(model))
        self._attributes = {
            name: Attributes(module, leave_out=_OF_EVERY_MODULE, stashes=True)
            for name, module in named.items()
            if not type(module).__module__.startswith("torch.")
        }
        self._tensors = {path: Version(value) for path, (_, value) in _other_tensors(named).items()}
        self._trained_eval: list[str] | None = None  # modules in eval mode after train(), during a run
        self._pending_eval: list[str] | None = None  # those of a checkpoint, or of the end of the last run
        self._last: dict[str, Any] = {}

    # -- modes ----------------------------------------------------------------------------------------------------

    def begin(self, model: nn.Module) -> list[str]:
        """Puts every module into training mode, but for those that a hook had put into eval mode while it trained.

        Returns:
            The names of the modules that stay in eval mode for that reason.
        """
        model.train()
        self._trained_eval = _eval_names(model)
        if self._pending_eval is None:
            return []
        _set_modes(model, self._pending_eval)
        return self._pending_eval

    def end(self, model: nn.Module) -> None:
        """Keeps the modes for the next run of the same objects."""
        if self._trained_eval is not None:
            self._pending_eval = self._changed_modes(model)
            self._trained_eval = None

    def _changed_modes(self, model: nn.Module) -> list[str] | None:
        if self._trained_eval is None or not model.training:
            return self._pending_eval
        now = _eval_names(model)
        return None if now == self._trained_eval else now

    # -- collect and load -----------------------------------------------------------------------------------------

    def collect(self, model: nn.Module) -> dict[str, Any]:
        """Returns what differs from the model as it was built; nothing where nothing does."""
        found: dict[str, Any] = {}
        frozen = frozen_names(model)
        if frozen or self.built_frozen:
            found["frozen"], found["built_frozen"] = sorted(frozen), sorted(self.built_frozen)
        modes = self._changed_modes(model)
        if modes is not None:
            found["eval"] = modes
        found["tensors"] = self._changed_tensors(model)
        found["attributes"] = {
            name: changed for name, attributes in self._attributes.items() if (changed := attributes.changed())
        }
        return {key: value for key, value in found.items() if value or key in ("frozen", "built_frozen", "eval")}

    def _changed_tensors(self, model: nn.Module) -> dict[str, Tensor]:
        return {
            path: value
            for path, (is_buffer, value) in _other_tensors(dict(_modules(model))).items()
            if self._has_changed(path, value, is_buffer=is_buffer)
        }

    def _has_changed(self, path: str, value: Tensor, *, is_buffer: bool) -> bool:
        built = self._tensors.get(path)
        if built is None:
            return is_buffer  # a plain tensor that appeared may be anything that a module remembers
        return not built.is_of(value) and (is_buffer or built.shape == value.shape)

    def lost(self) -> Iterator[str]:
        """Yields names of attributes that changed since this was last asked and that no checkpoint holds."""
        for name, attributes in self._attributes.items():
            for attribute, value in {} if attributes.can_be_written else attributes.differing().items():
                path = f"{name}.{attribute}".lstrip(".")
                if path in self._last and not same(self._last[path], value):
                    yield path
                self._last[path] = value

    def restore(self, model: nn.Module, entry: Mapping[str, Any], *, ready: bool) -> None:
        """Loads what :meth:`collect` returned.

        Args:
            model: as it was built, or as it was left.
            entry: of a checkpoint; an empty one restores the attributes and modes of the start.
            ready: whether the run is under way, so that modes are set at once.
        """
        if "frozen" in entry:
            frozen = set(entry["frozen"])
            for name, parameter in unwrap(model).named_parameters(remove_duplicate=False):
                parameter.requires_grad_(clean_name(name) not in frozen)
        self._pending_eval = entry.get("eval")
        if self._pending_eval is not None and ready:
            _set_modes(model, self._pending_eval)
        named = dict(_modules(model))
        for path, value in (entry.get("tensors") or {}).items():
            owner, _, attribute = path.rpartition(".")
            if owner in named:
                _set_tensor(named[owner], attribute, value)
        for name, attributes in self._attributes.items():
            attributes.restore((entry.get("attributes") or {}).get(name, {}))

    def unknown(self, model: nn.Module, entry: Mapping[str, Any]) -> list[str]:
        """Returns the names of an entry that this model does not have."""
        named = dict(_modules(model))
        tensors = [path for path in entry.get("tensors") or {} if path.rpartition(".")[0] not in named]
        attributes = [name for name in entry.get("attributes") or {} if name not in self._attributes]
        return tensors + attributes


def frozen_names(model: nn.Module) -> set[str]:
    """Returns the clean names of parameters that do not require gradients.

    Example:
        >>> frozen_names(nn.Linear(1, 1))
        set()
    """
    parameters = unwrap(model).named_parameters(remove_duplicate=False)
    return {clean_name(name) for name, parameter in parameters if not parameter.requires_grad}


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in unwrap(model).named_modules():
        yield clean_name(name), module


def _eval_names(model: nn.Module) -> list[str]:
    return [name for name, module in _modules(model) if not module.training]


def _set_modes(model: nn.Module, evaluating: list[str]) -> None:
    names = set(evaluating)
    for name, module in _modules(model):
        module.training = name not in names


def _other_tensors(named: Mapping[str, nn.Module]) -> dict[str, tuple[bool, Tensor]]:
    """Returns buffers that are not persistent and plain tensor attributes, by path, with whether it is a buffer."""
    found = {}
    for name, module in named.items():
        for key in module._non_persistent_buffers_set:
            if (buffer := module._buffers.get(key)) is not None and not is_dtensor(buffer):
                found[f"{name}.{key}".lstrip(".")] = (True, buffer)
        for key, value in vars(module).items():
            if type(value) is Tensor and value.grad_fn is None and value.numel() <= _LARGEST:
                found[f"{name}.{key}".lstrip(".")] = (False, value)
    return found


@torch.no_grad()
def _set_tensor(module: nn.Module, name: str, value: Tensor) -> None:
    held = module._buffers.get(name) if name in module._buffers else vars(module).get(name)
    if isinstance(held, Tensor) and held.shape == value.shape and held.dtype == value.dtype:
        held.copy_(value)
        return
    beside = held if isinstance(held, Tensor) else next(module.parameters(), None)
    made = value.clone() if beside is None else value.clone().to(beside.device)
    if name in module._buffers:
        module.register_buffer(name, made, persistent=name not in module._non_persistent_buffers_set)
    else:
        setattr(module, name, made)


class ModulesPart(StatePart):
    """What no state dict of the model holds: trainable flags, modes, buffers that are not persistent, attributes."""

    def collect(self, engine: Engine, tree: dict[str, Any]) -> None:
        entry = engine.state.modules.collect(engine.model)
        known = set(tree["base"] or ())  # frozen as they were at the start, which their fingerprints tell
        if entry.get("frozen") == entry.get("built_frozen") and known.issuperset(entry.get("frozen", ())):
            entry = {key: value for key, value in entry.items() if key not in ("frozen", "built_frozen")}
        if entry:
            tree["modules"] = entry
        for name in engine.state.modules.lost():
            engine.state.warn_once(
                engine,
                f"model: {name} has changed, and no checkpoint holds it: a resume is exact only if nothing "
                "depends on it. Make it a buffer, or give the module get_extra_state and set_extra_state",
            )

    def notices(self, engine: Engine, saved: Saved) -> Iterator[Notice]:
        entry, modules = saved.part("modules"), engine.state.modules
        if "frozen" in entry and sorted(modules.built_frozen) != entry["built_frozen"]:
            differ = sorted(modules.built_frozen ^ set(entry["built_frozen"]))
            yield Notice(
                f"{', '.join(differ[:5])}: requires_grad is set as in the checkpoint, which was written by a run that "
                "froze other parameters than this one when it began; to change it, set it in a hook's on_before_train"
            )
        for path in modules.unknown(engine.model, entry):
            yield Notice(f"the checkpoint's state of {path} is ignored: the model of this run has no such module")

    def load(self, engine: Engine, saved: Saved) -> None:
        engine.state.modules.restore(engine.model, saved.part("modules"), ready=engine.state.training)

    def differences(self, engine: Engine, saved: Saved) -> Iterator[Difference]:
        entry, now = saved.part("modules"), engine.state.modules.collect(engine.model)
        if "frozen" in entry:
            yield from unequal(entry["frozen"], now.get("frozen", []), "modules.frozen")
        tensors = now.get("tensors", {})
        for path, value in entry.get("tensors", {}).items():
            if path in tensors:
                yield from unequal(value, to_plain(tensors[path], path), f"modules.tensors.{path}")
