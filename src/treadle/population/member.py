"""Member of a population: name, settings, folder, construction and outcome of one run."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from treadle.device.host_transfer import read_scalars
from treadle.engine import Engine
from treadle.engine.block import StepBlock
from treadle.engine.hook import BaseHook
from treadle.engine.observers import observing
from treadle.errors import ConfigError
from treadle.hooks.bar import ProgressBarHook, RunProgress
from treadle.nested import flatten_nested_dict
from treadle.seed import as_seed, set_seed

Status = Literal["finished", "paused", "stopped", "failed"]
Make = Callable[..., Any]
Turn = Callable[[int], None]
_LONGEST_NAME = 120  # in characters; file systems allow 255 bytes


@dataclass(frozen=True)
class Until:
    """Point at which a run pauses.

    Attributes:
        count: epochs completed, or optimizer steps attempted, >= 1.
        unit: ``"epoch"`` or ``"step"``.
    """

    count: int
    unit: Literal["epochs", "steps"] = "epochs"

    def reached(self, engine: Engine) -> bool:
        """Return whether a run has reached the point."""
        return (engine.epoch if self.unit == "epochs" else engine.step) >= self.count


@dataclass(frozen=True)
class Member:
    """Run of a population.

    Attributes:
        name: name of its folder, such as ``lr=0.1,seed=3``.
        settings: arguments of the factory.
        folder: the run folder.
        until: point at which the run pauses; None trains it to its end.
    """

    name: str
    settings: Mapping[str, Any]
    folder: Path
    until: Until | None = None


@dataclass(frozen=True)
class Outcome:
    """Outcome of a member.

    Attributes:
        status: ``"finished"``, ``"paused"`` (at its ``until``), ``"stopped"`` (by a signal) or ``"failed"``.
        step: optimizer steps attempted.
        epoch: epochs completed.
        metrics: numbers by name: from the last record of the history and the last log, the best value, the loss.
        seconds: duration in this process, from construction of the run to its end.
        error: class and message of the error, or None.
        code: exit code of a stopped run, or None.
    """

    status: Status
    step: int = 0
    epoch: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    error: str | None = None
    code: int | None = None


def member_name(settings: Mapping[str, Any]) -> str:
    """Return the name of a member, which is also the name of its folder.

    Example:
        >>> member_name({"lr": 1e-3, "seed": 0}), member_name({"data": "a/b c"})
        ('lr=0.001,seed=0', 'data=a_b_c')
    """
    text = ",".join(f"{key}={value}" for key, value in settings.items()) or "run"
    name = re.sub(r"[^\w.,=+\-\[\]]", "_", text)
    if len(name) <= _LONGEST_NAME:
        return name
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{name[: _LONGEST_NAME - 9]}-{digest}"


def call_factory(make: Make, member: Member) -> Callable[[], Any]:
    """Seed, call the factory of a population for a member and return the function that trains the run.

    Args:
        make: called with the settings, and with ``workspace=`` if it accepts it.
        member: member whose run is built. A setting ``seed`` seeds every random generator first,
            unless the factory has a true attribute ``seeds_itself``.

    Raises:
        ConfigError: the factory does not accept the settings, or does not return something that trains.

    Example:
        >>> train = call_factory(lambda seed: lambda: {"loss": seed}, Member("seed=3", {"seed": 3}, Path("out")))
        >>> train()
        {'loss': 3}
    """
    given = dict(member.settings)
    parameters = inspect.signature(make).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}
    unknown = [] if takes_any else [name for name in given if name not in names]
    if unknown:
        raise ConfigError(
            f"takes no argument {unknown[0]!r}, which is a setting of member {member.name}; its arguments are "
            f"{', '.join(sorted(names)) or 'none'}",
            argument="make",
        )
    if "workspace" in names or takes_any:
        given.setdefault("workspace", member.folder)
    if given.get("seed") is not None and not getattr(make, "seeds_itself", False):
        set_seed(as_seed("seed", given["seed"]))
    made = make(**given)
    train = made if not hasattr(made, "train") and callable(made) else getattr(made, "train", None)
    if train is None or not callable(train):
        raise ConfigError(
            f"returned a {type(made).__name__} for member {member.name}; return a trainer whose train() takes no "
            "argument, or a function that trains, such as functools.partial(trainer.fit, 80)",
            argument="make",
        )
    needed = [
        parameter.name
        for parameter in inspect.signature(train).parameters.values()
        if parameter.default is parameter.empty and parameter.kind < parameter.VAR_POSITIONAL
    ]
    if needed:
        raise ConfigError(
            f"returned a {type(made).__name__} whose train() needs {needed[0]!r}; return a function that passes it, "
            "such as functools.partial(trainer.train, loader, 10, save_dir=workspace)",
            argument="make",
        )
    return train  # type: ignore[no-any-return]


class MemberHook(BaseHook):
    """Last hook of a member: pauses between turns and at the member's target, and stores the logged records.

    Args:
        member: member of the run.
        turn: called with the number of steps since the last call.
    """

    state_key = "treadle.population"
    implicit = True

    def __init__(self, member: Member, turn: Turn):
        self.member = member
        self.engine: Engine | None = None
        self.paused = False
        self._turn = turn
        self._logged: dict[str, float] = {}

    def on_before_train(self, trainer: Engine) -> None:
        """Store the engine."""
        self.engine = trainer

    def on_after_step(self, trainer: Engine) -> None:
        """Yield to the other members, and stop at a target in steps."""
        self._turn(1)
        self._pause_at_steps(trainer)

    def _pause_at_steps(self, trainer: Engine) -> None:
        if self.member.until is not None and self.member.until.unit == "steps":
            self._pause_if_reached(trainer)

    def steps_ahead(self, trainer: Engine) -> int | None:
        """Allow any number of steps, up to a target in steps."""
        if self.member.until is None or self.member.until.unit == "epochs":
            return None
        return max(self.member.until.count - trainer.step, 1)

    def on_after_steps(self, trainer: Engine, block: StepBlock) -> None:
        """Yield to the other members after a block."""
        self._turn(len(block))
        self._pause_at_steps(trainer)

    def on_after_epoch(self, trainer: Engine) -> None:
        """Stop at a target in epochs."""
        if self.member.until is not None and self.member.until.unit == "epochs":
            self._pause_if_reached(trainer)

    def on_log(self, trainer: Engine, records: Mapping[str, Any], dry_run: bool = False) -> None:
        """Store the latest number of every name."""
        if not dry_run:
            self._logged.update(numbers_in(records))

    def _pause_if_reached(self, trainer: Engine) -> None:
        assert self.member.until is not None
        if self.member.until.reached(trainer) and not trainer.is_last_step:
            trainer.should_stop = self.paused = True

    def metrics(self) -> dict[str, float]:
        """Return the final numbers of the run; reads the device."""
        if self.engine is None:
            return {}
        found = {**self._logged, **_losses(self.engine)}
        for driver in self.engine.state_parts:
            history, best = getattr(driver, "history", None), getattr(driver, "best", None)
            if history:
                found.update(numbers_in(history[-1]))
            if getattr(best, "best_epoch", None) is not None:
                found[f"best_{best.metric}"] = float(best.best)  # type: ignore[union-attr]
        found.pop("epoch", None)
        return found


def _losses(engine: Engine) -> dict[str, float]:
    """Return the mean loss of the running epoch or, if it has no step yet, the loss of the last step."""
    mean = engine.train_means().get("loss")
    if isinstance(mean, float) and math.isfinite(mean):
        return {"loss": mean}
    losses = [loss for loss in engine.step_info.get("loss", []) if loss is not None]
    return {"loss": float(read_scalars(losses).mean())} if losses else {}


def numbers_in(records: Mapping[str, Any]) -> dict[str, float]:
    """Flatten the numbers of nested records, with slashes in names.

    Example:
        >>> numbers_in({"val": {"loss": 0.5}, "name": "a"})
        {'val/loss': 0.5}
    """
    flat = flatten_nested_dict(dict(records))
    kept = {"/".join(key) if isinstance(key, tuple) else str(key): value for key, value in flat.items()}
    return {key: float(value) for key, value in kept.items() if type(value) in (int, float)}


class Workspaces:
    """Workspaces in which the members of one process have trained, each used by one member only."""

    def __init__(self) -> None:
        self._folders: dict[str, Path] = {}  # the folder of the member that has trained in a workspace

    def claim(self, workspace: Path, folder: Path) -> None:
        """Record that a member with a folder trains in a workspace.

        Raises:
            ConfigError: another member has trained in it.
        """
        owner = self._folders.setdefault(os.path.realpath(workspace), folder)
        if owner != folder:
            raise ConfigError(
                f"{folder.name} would write into the folder of {owner.name}; give the trainer the workspace that make "
                "gets",
                argument="workspace",
                value=str(workspace),
            )


class MemberObserver:
    """Observer of a member's engines, in the thread that trains it.

    Args:
        member: the member.
        workspaces: workspaces of all members.
        turn: see :class:`MemberHook`.
    """

    def __init__(self, member: Member, workspaces: Workspaces, turn: Turn):
        self.hook = MemberHook(member, turn)
        self._folder = member.folder.absolute()
        self._workspaces = workspaces
        self._thread = threading.get_ident()

    def before_building(self, engine: Engine) -> None:
        """Set the workspace of a trainer without one to the member's folder."""
        if threading.get_ident() == self._thread and engine.workspace is None:
            engine.workspace = self._folder

    def before_running(self, engine: Engine) -> None:
        """Append the hook and remove progress bars, which would overwrite each other."""
        if threading.get_ident() == self._thread and self.hook not in engine.hooks:
            others = [hook for hook in engine.hooks if not isinstance(hook, (ProgressBarHook, RunProgress))]
            engine.hooks = [*others, self.hook]
            self.hook.engine = engine
            if engine.workspace is not None:
                self._workspaces.claim(engine.workspace, self._folder)


class _ThreadState(threading.local):
    hook: MemberHook | None = None


_THREAD = _ThreadState()


def is_paused() -> bool:
    """Return whether the member trained in this thread has paused at its ``until``.

    Example:
        >>> is_paused()
        False
    """
    return _THREAD.hook is not None and _THREAD.hook.paused


def run_member(make: Make, member: Member, *, workspaces: Workspaces, turn: Turn = lambda steps: None) -> Outcome:
    """Build and train the run of a member in this thread; errors become part of the outcome.

    Args:
        make: the factory.
        member: the member.
        workspaces: workspaces of all members.
        turn: called with the number of steps since the last call.

    Raises:
        KeyboardInterrupt: the population was interrupted.
    """
    started = time.perf_counter()
    observer = MemberObserver(member, workspaces, turn)
    _THREAD.hook = observer.hook
    returned: Any = None
    status: Status = "finished"
    error: BaseException | None = None
    with observing(observer):
        try:
            returned = call_factory(make, member)()
        except (Exception, SystemExit) as raised:  # noqa: BLE001  (one member's error must not end the others)
            error = raised
            status = "stopped" if isinstance(raised, SystemExit) else "failed"
        finally:
            _THREAD.hook = None
    hook = observer.hook
    if status == "finished" and hook.paused:
        status = "paused"
    outcome = Outcome(
        status, seconds=time.perf_counter() - started, error=None if error is None else _described(error),
        code=error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else None,
    )  # fmt: skip
    if hook.engine is not None:
        outcome = dataclasses.replace(outcome, step=hook.engine.step, epoch=hook.engine.epoch)
        with contextlib.suppress(RuntimeError):  # of a failed device; the error of the run takes precedence
            outcome = dataclasses.replace(outcome, metrics=hook.metrics())
    if isinstance(returned, Mapping):
        outcome = dataclasses.replace(outcome, metrics={**outcome.metrics, **numbers_in(_results(returned))})
    return outcome


def _results(returned: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of training without its settings."""
    return {key: value for key, value in returned.items() if key != "config"}


def _described(error: BaseException) -> str | None:
    return None if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"[:1000]


def varied(settings: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of settings that differ between members, in order.

    Example:
        >>> varied(iter([{"lr": 1, "seed": 0}, {"lr": 1, "seed": 1}]))
        ['seed']
    """
    rows = list(settings)
    names = dict.fromkeys(name for row in rows for name in row)
    return [name for name in names if len({repr(row.get(name)) for row in rows}) > 1]
