"""Parts with which a run was prepared: a resumed run builds the same, so replaced ones are refused or warned about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

from treadle.distributed import unwrap
from treadle.distributed.state_names import clean_name
from treadle.errors import CheckpointError

if TYPE_CHECKING:
    from treadle.engine.loop import Engine


class PreparedParts:
    """Model, optimizer, schedule, loss and loader with which an engine was prepared.

    Args:
        engine: the prepared engine.
    """

    def __init__(self, engine: Engine):
        self._handles: list[RemovableHandle] = []
        self._names = set(_saved_names(engine.model))
        self._parameters = {id(parameter) for parameter in engine.model.parameters()}
        self._by_name = {clean_name(name): one for name, one in unwrap(engine.model).named_parameters()}
        self._groups = [_settings_of(group) for group in engine.optimizer.param_groups]
        self._held = {id(one) for group in engine.optimizer.param_groups for one in group["params"]}
        self.begin(engine)

    def begin(self, engine: Engine) -> None:
        """Record the parts at the start of a run; they may be replaced between two runs of one object."""
        self._optimizer, self._scheduler = engine.optimizer, engine.lr_scheduler
        self._model, self._task = engine.model, engine.task
        self._owner = getattr(engine.task, "trainer", None)
        self._loss = getattr(self._owner, "loss_fn", None)

    def moved_groups(self, engine: Engine) -> list[dict[str, Any]]:
        """Return how the optimizer's groups were built, as far as code of the user's has moved their settings since."""
        groups = [_settings_of(group) for group in engine.optimizer.param_groups]
        return [
            {key: value for key, value in built.items() if now.get(key, value) != value}
            for built, now in zip(self._groups, groups, strict=False)
        ]

    def watch(self, engine: Engine) -> None:
        """Warn at once about anything added to the model while a run takes steps."""
        self.end_watch()
        paths = {id(module): clean_name(name) for name, module in unwrap(engine.model).named_modules()}
        root = type(unwrap(engine.model)).__name__

        def name_addition(module: nn.Module, name: str, value: Any) -> None:
            if id(module) not in paths or value is None:
                return
            path = f"{paths[id(module)]}.{name}".lstrip(".")
            inside = {f"{path}.{inner}" for inner in _saved_names(value)} if isinstance(value, nn.Module) else {path}
            if not inside <= self._names or (not inside and path not in paths.values()):
                engine.state.warn_once(engine, _unloadable(f"{path} was added to this {root}"))

        self._handles = [
            register_module_module_registration_hook(name_addition),
            register_module_parameter_registration_hook(name_addition),
        ]

    def end_watch(self) -> None:
        """Stop watching the model, if it is watched."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def refuse_replaced(self, engine: Engine) -> None:
        """Raise if the model, the optimizer or the schedule was replaced since the run began.

        Raises:
            CheckpointError: one of them was replaced.
        """
        for name, before, now in (
            ("model", self._model, engine.model), ("optimizer", self._optimizer, engine.optimizer),
            ("scheduler", self._scheduler, engine.lr_scheduler),
        ):  # fmt: skip
            if before is not now:
                raise CheckpointError(
                    f"{name}: replaced after the run began ({type(before).__name__} then, another "
                    f"{type(now).__name__} now); a resumed run builds the original, which cannot load the state of "
                    "the new one. Change it in place, or build the new one from the start"
                )

    def refuse_lost_parameters(self, engine: Engine) -> None:
        """Raise if parameters were taken out of the optimizer's groups since the run was prepared.

        Raises:
            CheckpointError: fewer parameters are in the groups.
        """
        held = {id(one) for group in engine.optimizer.param_groups for one in group["params"]}
        if len(held) < len(self._held):
            gone = [name for name, one in self._by_name.items() if id(one) in self._held - held]
            raise CheckpointError(
                f"optimizer: {_listed(gone)} was taken out of its groups; a resumed run builds them whole, and would "
                "not take the state. Leave the parameters in their groups and freeze them with requires_grad_(False): "
                "the optimizer passes over those without a gradient"
            )

    def unloadable(self, engine: Engine) -> Iterator[str]:
        """Yield warnings about parameters that a run with the original model cannot load from a checkpoint."""
        names = set(_saved_names(engine.model))
        if names != self._names:
            gained, lost = _listed(names - self._names), _listed(self._names - names)
            yield _unloadable(f"since the run began it gained {gained} and lost {lost}")
        added = {id(one) for group in engine.optimizer.param_groups for one in group["params"]} - self._held
        late = [name for name, one in engine.model.named_parameters()
                if id(one) in added and id(one) not in self._parameters and name in self._names]  # fmt: skip
        if late:
            yield (
                f"optimizer: {_listed(late)} replaced another parameter during training; a run that builds the "
                "original model cannot load checkpoints from here on. Create all layers when the model is built"
            )
        inner = unwrap(engine.model)
        now = {clean_name(name): one for name, one in inner.named_parameters(remove_duplicate=False)}
        other = [name for name, one in self._by_name.items() if now.get(name, one) is not one and name not in late]
        if other:
            yield (
                f"model: {_listed(other)} was replaced by another parameter after the run began; a run that builds "
                "the original model cannot resume from checkpoints from here on. Write into parameters in place, and "
                "tie or replace them when the model is built"
            )

    def replaced(self, engine: Engine) -> Iterator[str]:
        """Yield warnings about replaced parts that no checkpoint holds."""
        advice = (
            "a resumed run starts with the original. Build both and switch between them by an attribute, which "
            "checkpoints hold"
        )
        if engine.task is not self._task:
            yield f"task: replaced by another {type(engine.task).__name__}: {advice}"
        loss = getattr(self._owner, "loss_fn", None)
        if loss is not self._loss:
            yield f"loss_fn: replaced by {_name_of(loss)}: {advice}"
        loader = getattr(engine, "data_loader", None)
        if loader is not None and engine.cursor.loader is not None and loader is not engine.cursor.loader:
            yield (
                f"data_loader: replaced by another {type(loader).__name__} during training, which continues with the "
                "original; the new one is used from the next call of train(). Change the loader's data or sampler in "
                "place"
            )


def _unloadable(what: str) -> str:
    return (
        f"model: {what}; a run that builds the original model cannot load checkpoints from here on. Create all "
        "parameters when the model is built, as prune.identity and frozen layers do, or build it this way before "
        "resuming"
    )


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group that are numbers, strings, or tuples of them."""
    return {key: value for key, value in group.items() if isinstance(value, (int, float, str, tuple))}


def _name_of(value: Any) -> str:
    return str(getattr(value, "__name__", type(value).__name__))


def _saved_names(model: nn.Module) -> Iterator[str]:
    """Yield the names of parameters and persistent buffers."""
    for prefix, module in unwrap(model).named_modules(remove_duplicate=False):
        names = [*module._parameters.keys(), *(name for name in module._buffers.keys()  # noqa: SIM118  (of TorchScript)
                                        if name not in module._non_persistent_buffers_set)]  # fmt: skip
        yield from (clean_name(f"{prefix}.{name}".lstrip(".")) for name in names)


def _listed(names: Any) -> str:
    found = sorted(names)
    return ", ".join(found[:6]) + (" and more" if len(found) > 6 else "") if found else "nothing"
