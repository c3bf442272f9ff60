"""Temporary wrappers around the calls of a run that are timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from treadle.cli.bench.timing import (
    AVERAGES,
    BACKWARD,
    DATA,
    FORWARD,
    HOOK,
    LOOP,
    REPLAY,
    SCHEDULE,
    UPDATE,
    WRITES,
    Timeline,
)
from treadle.engine import Engine
from treadle.engine.hook import STEP_EVENTS, BaseHook, listeners
from treadle.optim.ema import Ema

_ABSENT = object()


class Replaced:
    """Replaced attributes, to be restored.

    Example:
        >>> class Owner: value = 1
        >>> replaced = Replaced()
        >>> replaced.set(Owner, "value", 2); replaced.put_back(); Owner.value
        1
    """

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of an object or a class."""
        self._before.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def put_back(self) -> None:
        """Restore everything, last first."""
        for owner, name, value in reversed(self._before):
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self._before.clear()


class Watch:
    """Wrappers of the parts of an engine's steps.

    Args:
        engine: prepared, and not inside a step.
        timeline: receives the current part of the run.
        left_out: a hook that is not timed.

    Attributes:
        loader: the loader of the run, once an epoch was opened.
    """

    def __init__(self, engine: Engine, timeline: Timeline, *, left_out: BaseHook):
        self.loader: Any = None
        self._engine, self._timeline = engine, timeline
        self._replaced = Replaced()
        self._wrap_loop()
        self._wrap_step()
        self._wrap_hooks([hook for hook in engine.hooks if hook is not left_out])

    def remove(self) -> None:
        """Restore every call."""
        self._replaced.put_back()

    def _wrap(self, owner: Any, name: str, part: str, *, after: str | None = None) -> None:
        self._replaced.set(owner, name, self._timeline.inside(getattr(owner, name), part, after=after))

    def _wrap_loop(self) -> None:
        engine, line = self._engine, self._timeline
        cursor, take, opened = engine.cursor, engine.cursor.take, engine.cursor.open

        def take_timed(count: int) -> Any:
            line.begin_step(DATA)
            try:
                return take(count)
            finally:
                line.switch(LOOP)

        def open_noted(loader: Any) -> None:
            self.loader = loader
            line.drop_step()  # the previous epoch ended with its evaluation
            opened(loader)

        self._replaced.set(cursor, "take", take_timed)
        self._replaced.set(cursor, "open", open_noted)
        self._wrap(engine, "write_requested", WRITES)

    def _wrap_step(self) -> None:
        engine = self._engine
        if is_replayed(engine):
            self._wrap(engine, "steps", REPLAY)
        self._wrap(engine, "forward", FORWARD, after=LOOP)
        # After the last backward pass come the norm, the check of gradients, clipping and the optimizer, up to the
        # guard's end.
        self._wrap(Tensor, "backward", BACKWARD, after=UPDATE)
        self._wrap(engine.guard, "apply", UPDATE, after=LOOP)
        self._wrap(Ema, "update", AVERAGES)
        if engine.lr_scheduler is not None:
            # On the class, since attributes of the scheduler object are part of its state.
            self._wrap(type(engine.lr_scheduler), "step", SCHEDULE)

    def _wrap_hooks(self, hooks: list[BaseHook]) -> None:
        for event in STEP_EVENTS:
            for hook in listeners(hooks, event):
                self._wrap(hook, event, f"{HOOK}{hook.state_key}")


def is_replayed(engine: Engine) -> bool:
    """Return whether a prepared engine captures its steps; ``capture="auto"`` may have found that it cannot.

    Example:
        >>> from types import SimpleNamespace
        >>> class Eager:
        ...     def train_step(self): ...
        >>> engine = Eager(); engine.steps = engine.train_step
        >>> is_replayed(engine)
        False
    """
    return getattr(engine.steps, "__func__", None) is not type(engine).train_step


def parts_in_order(parts: dict[str, float]) -> dict[str, float]:
    """Return the parts in the order of a step; parts that did not occur are left out.

    Example:
        >>> list(parts_in_order({"hook A": 1.0, "files": 1.0, "forward": 1.0}))
        ['forward', 'hook A', 'files']
    """
    known = [DATA, REPLAY, FORWARD, BACKWARD, UPDATE, SCHEDULE, AVERAGES]
    hooks = sorted(name for name in parts if name.startswith(HOOK))
    return {name: parts[name] for name in [*known, *hooks, WRITES, LOOP] if name in parts}


Step = Callable[[Any], Any]
