"""State of a model outside its state dict: trainable flags, modes, non-persistent buffers, plain attributes."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod

from treadle.checkpoint.attributes import Attributes, Mark
from treadle.checkpoint.introspection import is_user_object
from treadle.checkpoint.references import References
from treadle.distributed import is_dtensor, unwrap
from treadle.distributed.state_names import clean_name

_OF_EVERY_MODULE = (*vars(nn.Module()), "_is_full_backward_hook", "_version", "_forward_module")
_OF_TORCHS = (*_OF_EVERY_MODULE, "_flat_weights", "_flat_weight_refs")  # the parameters of an LSTM
_LARGEST = 1_000_000  # largest plain tensor attribute that counts as state, in elements
_LARGEST_THAT_APPEARS = 65_536  # of a later attribute or one in a container, which may be an activation


class ModuleState:
    """Changes to a model since it was built that are not in its state dict.

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
        self._built = {name: weakref.ref(module) for name, module in named.items()}
        self._replaced: set[str] = set()
        references = References(model)
        self._attributes = {name: _attributes_of(module, references) for name, module in named.items()}
        self._tensors = {path: Mark(value) for path, (_, value) in _other_tensors(named).items()}
        self._shapes = {path: value.shape for path, (_, value) in _other_tensors(named).items()}
        self._trained_eval: list[str] | None = None  # modules that train() leaves in eval mode, during a run
        self._pending_eval: list[str] | None = None  # those from a checkpoint, or from the end of the last run

    # -- modes ----------------------------------------------------------------------------------------------------

    def begin(self, model: nn.Module) -> list[str]:
        """Put every module into training mode, except those that a hook put into eval mode during training.

        Returns:
            The names of the modules that stay in eval mode.
        """
        model.train()
        self._trained_eval = _eval_names(model)
        if self._pending_eval is None:
            return []
        _set_modes(model, self._pending_eval)
        return self._pending_eval

    def end(self, model: nn.Module) -> None:
        """Keep the modes for the next run with the same objects."""
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
        """Return the differences from the model as built; empty if there are none."""
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
            return is_buffer  # a plain tensor that appeared may be anything, such as a cache
        return not built.is_of(value) and (is_buffer or self._shapes[path] == value.shape)

    def replaced(self, model: nn.Module) -> Iterator[str]:
        """Yield the names of modules that were replaced or added, once each."""
        for name, module in _modules(model):
            built = self._built.get(name)
            inside = any(name.startswith(f"{outer}.") for outer in self._replaced)
            if (built is None or built() is not module) and name not in self._replaced and not inside:
                self._replaced.add(name)
                yield name

    def lost(self) -> Iterator[str]:
        """Yield names of attributes that changed since this was last asked and that no checkpoint holds."""
        for name, attributes in self._attributes.items():
            yield from (f"{name}.{attribute}".lstrip(".") for attribute in attributes.lost())

    def restore(self, model: nn.Module, entry: Mapping[str, Any], *, ready: bool) -> None:
        """Load the result of :meth:`collect`.

        Args:
            model: model, as built or as left by a run.
            entry: entry of a checkpoint; an empty one restores the initial attributes and modes.
            ready: whether the run has begun, so that modes are set at once.
        """
        if "frozen" in entry:
            frozen = set(entry["frozen"])
            for name, parameter in unwrap(model).named_parameters(remove_duplicate=False):
                parameter.requires_grad_(clean_name(name) not in frozen)
        self._pending_eval = entry.get("eval")
        if self._pending_eval is not None and ready:
            _set_modes(model, self._pending_eval)
        named = dict(_modules(model))
        shared = Counter(id(value) for _, value in _other_tensors(named).values())
        for path, value in (entry.get("tensors") or {}).items():
            owner, _, attribute = path.rpartition(".")
            if owner in named:
                _set_tensor(named[owner], attribute, value, shared)
        for name, attributes in self._attributes.items():
            attributes.restore((entry.get("attributes") or {}).get(name, {}))

    def unknown(self, model: nn.Module, entry: Mapping[str, Any]) -> list[str]:
        """Return the names in an entry that this model lacks."""
        named = dict(_modules(model))
        tensors = [path for path in entry.get("tensors") or {} if path.rpartition(".")[0] not in named]
        attributes = [name for name in entry.get("attributes") or {} if name not in self._attributes]
        return tensors + attributes


def _attributes_of(module: nn.Module, references: References) -> Attributes:
    """Return the attributes of a module; only numbers for torch's own, such as a dropout rate set by a hook."""
    if type(module).__module__.startswith("torch."):
        return Attributes(module, leave_out=(*_OF_TORCHS, *_pruned_in(module)), stashes=True)
    own = [name for name, value in vars(module).items() if type(value) is Tensor]  # collected with the buffers
    return Attributes(
        module, deep=True, leave_out=(*_OF_EVERY_MODULE, *own), stashes=True, largest=_LARGEST_THAT_APPEARS,
        references=references,
    )  # fmt: skip


def frozen_names(model: nn.Module) -> set[str]:
    """Return the clean names of parameters that do not require grad.

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
    """Return non-persistent buffers and plain tensor attributes by path, each with whether it is a buffer."""
    found = {}
    for name, module in named.items():
        for key in module._non_persistent_buffers_set:
            if (buffer := module._buffers.get(key)) is not None and not is_dtensor(buffer):
                found[f"{name}.{key}".lstrip(".")] = (True, buffer)
        for key, value in vars(module).items():
            may_be_kept = type(value) is Tensor and (value.grad_fn is None or is_user_object(module))
            if may_be_kept and value.numel() <= _LARGEST:
                found[f"{name}.{key}".lstrip(".")] = (False, value if value.grad_fn is None else value.detach())
        for key in _pruned_in(module):
            if isinstance(value := vars(module).get(key), Tensor):
                # The next pruning ranks the weights of the last forward pass, not those after the step.
                found[f"{name}.{key}".lstrip(".")] = (False, value.detach())
    return found


def _pruned_in(module: nn.Module) -> list[str]:
    """Return the names of the tensors that torch.nn.utils.prune computes before each forward pass of a module."""
    return [hook._tensor_name for hook in module._forward_pre_hooks.values() if isinstance(hook, BasePruningMethod)]


@torch.no_grad()
def _set_tensor(module: nn.Module, name: str, value: Tensor, shared: Mapping[int, int]) -> None:
    """Set a tensor in place, unless it is shared with another state or, as in torchmetrics, with a default."""
    held = module._buffers.get(name) if name in module._buffers else vars(module).get(name)
    is_alone = name in module._buffers or (shared[id(held)] < 2 and is_user_object(module))
    if isinstance(held, Tensor) and held.shape == value.shape and held.dtype == value.dtype and is_alone:
        held.copy_(value)
        return
    like = held if isinstance(held, Tensor) else next(module.parameters(), None)
    made = value.clone() if like is None else value.clone().to(like.device)
    if name in module._buffers:
        module.register_buffer(name, made, persistent=name not in module._non_persistent_buffers_set)
    elif not hasattr(module, name):  # a buffer that appeared, which a hook may register again
        module.register_buffer(name, made, persistent=False)
    else:
        setattr(module, name, made)
