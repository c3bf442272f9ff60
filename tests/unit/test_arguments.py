"""Arguments of another type than they are annotated with are refused by name, when the object is made."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import treadle.hooks
from treadle import BaseTrainer, BestRule, ConfigError, ValidationHook
from treadle.errors.arguments import check_argument
from treadle.hooks import BaseHook, CheckpointingHook, EmaHook, HistoryHook, SignalHook, WandbHook

GOOD = {
    HistoryHook: {"history": list},
    SignalHook: {"write": lambda: None},
    EmaHook: {"decay": 0.9},
}
OF_ONE_KIND = {"int", "int | None", "float", "float | None", "bool", "str | Path", "str | Path | None"}


def cases():
    """Every argument of every hook whose annotation has one kind of value."""
    kinds = [kind for name in treadle.hooks.__all__ if isinstance(kind := getattr(treadle.hooks, name), type)]
    for kind in (kind for kind in kinds if issubclass(kind, BaseHook) and kind.__init__ is not object.__init__):
        for name, parameter in inspect.signature(kind).parameters.items():
            if str(parameter.annotation) in OF_ONE_KIND:
                yield pytest.param(kind, name, id=f"{kind.__name__}-{name}")


@pytest.mark.parametrize(("kind", "name"), list(cases()))
def test_a_hook_refuses_an_argument_of_another_type(kind, name):
    with pytest.raises(ConfigError, match=f"^{name}=<object"):
        kind(**{**GOOD.get(kind, {}), name: object()})


def test_there_are_many_such_cases():
    assert len(list(cases())) > 40


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CheckpointingHook(interval=1.5), "interval=1.5: must be a whole number$"),
        (lambda: CheckpointingHook(10, keep_previous="3"), "keep_previous='3': must be a whole number or None"),
        (lambda: CheckpointingHook(10, keep_steps=["a"]), r"keep_steps=\['a'\]: must be a list of whole numbers"),
        (lambda: CheckpointingHook(10, exit_code="x"), "exit_code='x': must be '128\\+signal' or a whole number"),
        (lambda: CheckpointingHook(10, background=1), "background=1: must be True or False"),
        (lambda: WandbHook(project=3), "project=3: must be a string or None"),
        (lambda: ValidationHook([1], 2, metric=3), "metric=3: must be a string or None"),
        (lambda: BestRule("loss", patience="3"), "patience='3': must be a whole number or None"),
        (lambda: BaseTrainer(2, workspace=3), "workspace=3: must be a path or None"),
        (lambda: BaseTrainer(2, no_sync_accumulate="no"), "no_sync_accumulate='no': must be True or False"),
        (lambda: BaseTrainer("ten"), "max_steps='ten': must be a whole number"),
    ],
)
def test_the_message_names_argument_value_and_rule(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (np.int64(3), int), (np.float32(3), float), (3, float), ("runs", Path | None), (None, Path | None),
        (Path("runs"), str | Path), ((1, 2), Sequence[int]), ({1}, Sequence[int]), ("min", Literal["min"]),
        (object(), BaseHook), (object(), Sequence[BaseHook]), (object(), str | BaseHook), (np.bool_(1), bool),
    ],
)  # fmt: skip
def test_what_fits_or_is_not_known_is_left_alone(value, hint):
    check_argument("it", value, hint)
