"""Settings and weights that hooks change in ``on_before_train``, put back in a resumed run."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treadle.checkpoint.comparison import same
from treadle.checkpoint.schema import to_plain
from treadle.distributed import unwrap
from treadle.distributed.state_names import clean_name
from treadle.engine.hook import BaseHook
from treadle.engine.search import is_treadle_object
from treadle.engine.settings import MOVABLE
from treadle.errors import ConfigError
from treadle.optim.optimizer import parameter_names

if TYPE_CHECKING:
    from treadle.engine.loop import Engine

WEIGHTS, OPTIMIZER, SCHEDULE = "weights", "optimizer", "schedule"
Setting = tuple[Any, Callable[[Any], Any]]
"""A value, and the function that sets it."""


class Beginning:
    """Changes by users' hooks in ``on_before_train``, which a resumed run calls again.

    Settings that they set to the same value as at the start of the run, and weights that they changed then too, are put
    back to those of the checkpoint. Other settings are meant for the resumed run and stay.

    Attributes:
        changed: values that hooks have set in ``on_before_train`` so far in this run, by name.
        start: settings of the optimizer and the schedule with which the run started.
    """

    def __init__(self) -> None:
        self.changed: dict[str, Any] = {}
        self.start: dict[str, Any] = {}
        self._loaded = self._resumed = False  # since hooks began last, and before they do now
        self._before: dict[str, tuple[Any, Any]] | None = None  # by name, the value and its form for comparison
        self._weights: dict[str, Tensor] = {}
        self._versions: dict[str, Any] = {}
        self._num_groups: int | None = None  # of the optimizer, before hooks added any

    def record_loaded(self) -> None:
        """Record that a checkpoint was loaded, so that the next run continues another one."""
        self._loaded = True

    def begin_anew(self) -> None:
        """Let the next run count as a new one."""
        self._loaded = False

    def begin(self, engine: Engine) -> None:
        """Record the settings before hooks begin."""
        self._resumed, self._loaded = self._loaded, False
        if self._num_groups is None:
            self._num_groups = len(engine.optimizer.param_groups)
        own = [hook for hook in engine.hooks if not is_treadle_object(hook)]
        self._before = None
        if all(type(hook).on_before_train is BaseHook.on_before_train for hook in own):
            return
        self._before = {name: (copy.deepcopy(value), _plain(value)) for name, (value, _) in _settings(engine).items()}
        self._versions = {name: _version_of(value) for name, value in _weights(engine)}
        if self._resumed and WEIGHTS in self.changed:
            self._weights = {name: value.detach().clone() for name, value in _weights(engine)}

    @contextlib.contextmanager
    def groups_added_once(self, optimizer: Any) -> Iterator[None]:
        """Skip, in a resumed run, parameter groups that hooks add in the block and that the checkpoint has added."""
        add = getattr(optimizer, "add_param_group", None)
        if not self._resumed or add is None:
            yield
            return
        held = [_identities(group["params"]) for group in optimizer.param_groups]

        def add_once(group: dict[str, Any]) -> None:
            group = {**group, "params": _listed(group["params"])}
            if _identities(group["params"]) not in held:
                add(group)

        optimizer.add_param_group = add_once
        try:
            yield
        finally:
            del optimizer.add_param_group

    def foreign_group(self, engine: Engine) -> str | None:
        """Return a sentence about a group that was added with parameters outside the model, which no load restores."""
        groups = engine.optimizer.param_groups
        if self._num_groups is None or len(groups) <= self._num_groups:
            return None
        names = parameter_names(engine.model)
        for number in range(self._num_groups, len(groups)):
            if not all(id(parameter) in names for parameter in groups[number]["params"]):
                return (
                    f"optimizer: group {number} was added with parameters that the model does not have, so no "
                    "checkpoint can restore it; make them parameters of the model, or build the optimizer with them"
                )
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the entry of a checkpoint; an empty one where no hook of the user's begins."""
        return {"changed": dict(self.changed), "start": dict(self.start)} if self.changed or self.start else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore an entry of a checkpoint."""
        self.changed, self.start = dict(state.get("changed") or {}), dict(state.get("start") or {})

    def end(self, engine: Engine) -> None:
        """Put back, in a resumed run, what hooks have set as at the start of the run.

        Of the optimizer and the schedule, a value with which the run started is put back even if hooks did not change
        it then; a warning names it, since it may be set on purpose.
        """
        if engine.workspace is not None and (foreign := self.foreign_group(engine)) is not None:
            raise ConfigError(foreign)
        before, weights, self._before, self._weights = self._before, self._weights, None, {}
        if before is None:
            return
        for name, (value, put) in _settings(engine).items():
            now = _plain(value)
            if engine.progress.step == 0 and name.startswith((OPTIMIZER, SCHEDULE)):
                self.start[name] = now
            if name not in before or same(before[name][1], now):
                continue
            if not (self._resumed and same(self.changed.get(name, self.start.get(name)), now)):
                self.changed[name] = now
                continue
            put(before[name][0])
            if name not in self.changed:
                engine.state.warn_once(
                    engine,
                    f"the run continues with the checkpoint's {name}={before[name][0]!r} (on_before_train set {now!r}, "
                    "the value at the start of the run)",
                )
        if any(self._versions.get(name) != _version_of(value) for name, value in _weights(engine)):
            self.changed[WEIGHTS] = True
        with torch.no_grad():
            for name, value in _weights(engine):
                if name in weights and weights[name].shape == value.shape:
                    value.copy_(weights[name])


def _listed(params: Any) -> list[Any]:
    return [params] if isinstance(params, Tensor) else list(params)


def _identities(params: Iterable[Any]) -> list[int]:
    return [id(one[1] if isinstance(one, tuple) else one) for one in params]  # a tuple has its name


def _plain(value: Any) -> Any:
    return to_plain(value.clone() if isinstance(value, Tensor) else value, encoding="odd")


def _version_of(value: Tensor) -> tuple[int, int]:
    return id(value), -1 if value.is_inference() else value._version


def _is_setting(value: Any) -> bool:
    """Return whether a value is a number, a string, a tensor, or a list or tuple of numbers."""
    if isinstance(value, (list, tuple)):
        return all(isinstance(item, (int, float)) for item in value)
    return value is None or isinstance(value, (int, float, str, Tensor))


def _weights(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    yield from engine.model.named_parameters()
    yield from engine.model.named_buffers()


def _settings(engine: Engine) -> dict[str, Setting]:
    """Return the settings of optimizer, schedule, step and parameters by name."""
    found: dict[str, Setting] = {}

    def item(holder: dict[str, Any], key: str) -> Setting:
        held = holder[key]
        return held, held.copy_ if isinstance(held, Tensor) else partial(holder.__setitem__, key)

    holders = {f"{OPTIMIZER}[{number}]": group for number, group in enumerate(engine.optimizer.param_groups)}
    holders |= {} if engine.lr_scheduler is None else {SCHEDULE: vars(engine.lr_scheduler)}
    for path, holder in holders.items():
        found |= {f"{path}.{key}": item(holder, key) for key, value in holder.items() if _is_setting(value)}
    for name, parameter in unwrap(engine.model).named_parameters():
        found[f"{clean_name(name)}.requires_grad"] = parameter.requires_grad, parameter.requires_grad_
    for name, module in unwrap(engine.model).named_modules():
        found |= {f"{clean_name(name)}.{key}": item(vars(module), key) for key, value in vars(module).items()
                  if isinstance(value, (int, float)) and key != "training"}  # fmt: skip
    for name in MOVABLE:
        found[name] = getattr(engine.settings, name), partial(setattr, engine, name)
    return found
