"""Checks of a subclass of BaseTrainer: names that it overrides, hides or misspells."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from functools import partial
from typing import Any

from treadle.data.cursor import Cursor
from treadle.engine import Engine
from treadle.engine.attempt import Attempt
from treadle.engine.events import Events
from treadle.engine.names import FOREIGN, idle_attributes, is_own_helper, refuse_signatures, uncalled_methods
from treadle.engine.progress import Progress
from treadle.engine.session import HookDeclarations
from treadle.engine.settings import EngineSettings
from treadle.engine.signals import SignalListener
from treadle.engine.state import RunState
from treadle.engine.stopping import Target
from treadle.errors import ConfigError
from treadle.optim.nonfinite import FiniteGuard
from treadle.optim.precision import Precision

_PARTS: dict[str, Any] = {
    "settings": EngineSettings, "progress": Progress, "attempt": Attempt, "state": RunState, "events": Events,
    "signals": SignalListener, "cursor": Cursor, "eval_cursor": Cursor, "target": Target, "declared": HookDeclarations,
    "precision": Precision, "guard": FiniteGuard, "steps": Callable,
}  # fmt: skip
"""Parts of the engine that a subclass could replace by mistake."""
_OVERRIDABLE = (
    "build_data_loader", "build_model", "build_optimizer", "build_lr_scheduler", "build_grad_scaler", "build_hooks",
    "forward", "train_step", "evaluate", "log", "log_images",
    "build_eval_data_loader", "build_predict_data_loader", "predict_step",  # for the commands evaluate and predict
)  # fmt: skip
_ARGUMENTS = {**dict.fromkeys(_OVERRIDABLE[:6], (0,)), "forward": (1,), "train_step": (1,)}


def refuse_own_loop(kind: type, base: type) -> None:
    """Raise ConfigError for a ``_run_step`` as in mini or trainloop, which nothing here would call."""
    if hasattr(kind, "_run_step") and not is_own_helper(kind, base, "_run_step"):
        raise ConfigError(
            f"{kind.__name__}._run_step: nothing calls it; override train_step(group), which returns what "
            "super().train_step(group) does, or use on_before_step and on_after_step of a hook"
        )


def check_overrides(trainer: Engine, base: type) -> None:
    """Raise or warn about methods and attributes of a trainer that the base class would not use, or not as meant.

    Raises:
        ConfigError: an attribute replaces a part or a method of the engine, or an override takes other arguments.
    """
    refuse_replaced_parts(trainer, base)
    refuse_other_kinds(type(trainer), base)
    refuse_signatures(trainer, _ARGUMENTS)
    for text in (
        *uncalled_methods(type(trainer), base, known=_OVERRIDABLE, foreign=FOREIGN), *idle_attributes(trainer, base)
    ):  # fmt: skip
        trainer.logger.warning("%s", text)


def refuse_other_kinds(kind: type, base: type) -> None:
    """Raise ConfigError for a property of the base class that a subclass replaces, or a method replaced by one."""
    for owner in kind.__mro__[: kind.__mro__.index(base)]:
        for name, value in vars(owner).items():
            inherited = inspect.getattr_static(base, name, None)
            if isinstance(inherited, property) and inherited.fset is None:
                raise ConfigError(
                    f"{owner.__name__}.{name}: hides {base.__name__}.{name}, which the loop reads; rename it"
                )
            if isinstance(inherited, types.FunctionType) and isinstance(value, (property, functools.cached_property)):
                raise ConfigError(
                    f"{owner.__name__}.{name}: is a property, but {name}() is called; define it without the decorator"
                )


def refuse_replaced_parts(trainer: Engine, base: type) -> None:
    """Raise ConfigError for an attribute with the name of a part or a method of the engine."""
    for name, kind in _PARTS.items():
        value = vars(trainer).get(name)
        if name in vars(trainer) and not isinstance(value, kind):
            raise ConfigError(
                f"{type(trainer).__name__}.{name}={value!r}: the engine stores its {kind.__name__} under this name; "
                "rename the attribute of the subclass"
            )
    functions = (types.FunctionType, types.MethodType, partial)  # may replace a method on purpose
    for name, value in vars(trainer).items():
        if callable(getattr(base, name, None)) and not isinstance(value, functions):
            raise ConfigError(
                f"{type(trainer).__name__}.{name}: a {type(value).__name__} was assigned to this attribute, which "
                f"hides the method {name}() of {base.__name__}; rename the attribute"
            )
