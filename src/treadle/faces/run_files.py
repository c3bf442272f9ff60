"""Hooks of every front end: RunFilesHook, which writes logs and settings into the run folder, and the progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from treadle import distributed
from treadle.checkpoint.schema import versions
from treadle.checkpoint.store import write_text
from treadle.engine.hook import BaseHook
from treadle.engine.run_log import turned_off
from treadle.hooks.bar import ProgressBarHook, RunProgress
from treadle.hooks.files import set_aside, to_json
from treadle.hooks.progress import ProgressHook
from treadle.hooks.sessionlog import SessionLogHook
from treadle.hooks.steplog import StepLogHook
from treadle.hooks.tracking import Guard

if TYPE_CHECKING:
    from treadle.engine import Engine
    from treadle.engine.block import StepBlock


class RunFilesHook(BaseHook):
    """Hook that writes ``steps.jsonl``, ``sessions.jsonl`` and ``settings.json``; added by every front end.

    ``treadle report`` and ``treadle runs`` show these files. A StepLogHook or SessionLogHook, if given, writes its own
    file instead. A trainer without a workspace writes nothing. The hook saves nothing in checkpoints.
    """

    state_key = "RunFilesHook"
    writes = True
    implicit = True

    def __init__(self) -> None:
        self._guard = Guard()
        self._steps: StepLogHook | None = None
        self._sessions: SessionLogHook | None = None
        self._settings: Path | None = None

    def on_before_train(self, trainer: Engine) -> None:
        """Open the logs that no other hook writes."""
        self._steps = self._sessions = self._settings = None
        self.idle = trainer.workspace is None
        if trainer.workspace is None:
            return
        if not any(isinstance(hook, StepLogHook) for hook in trainer.hooks):
            self._steps = StepLogHook()
            self._steps.on_before_train(trainer)
        if not any(isinstance(hook, SessionLogHook) for hook in trainer.hooks):
            self._sessions = SessionLogHook()
            self._sessions.on_before_train(trainer)
        if distributed.rank() == 0:
            self._settings = trainer.workspace / "settings.json"
            if trainer.step == 0:
                with self._guard(trainer, self, "moving aside the settings of an earlier run"):
                    set_aside(trainer, self._settings)

    def on_after_step(self, trainer: Engine) -> None:
        """Log the step; after the first one, once the loader is known, write the settings."""
        if self._settings is not None:
            path, self._settings = self._settings, None
            with self._guard(trainer, self, "writing the settings"):
                write_text(json.dumps(to_json(settings_of(trainer)), indent=1, default=str) + "\n", path)
        if self._steps is not None:
            self._steps.on_after_step(trainer)
        if self._sessions is not None:
            self._sessions.on_after_step(trainer)

    def steps_ahead(self, trainer: Engine) -> int | None:
        """Allow any number of steps once the first is logged."""
        return 1 if self._settings is not None else None

    def on_after_steps(self, trainer: Engine, block: StepBlock) -> None:
        """Log the steps of a block."""
        if self._steps is not None:
            self._steps.on_after_steps(trainer, block)
        if self._sessions is not None:
            self._sessions.on_after_steps(trainer, block)

    def on_state_dict(self, trainer: Engine, state_dict: dict[str, Any]) -> None:
        """Write the steps that a run resumed from this state would not repeat."""
        if self._steps is not None:
            self._steps.flush(trainer)

    def on_close(self, trainer: Engine, error: BaseException | None = None) -> None:
        """Write the remaining rows, and how the session ended."""
        for part in (self._steps, self._sessions):
            if part is not None:
                part.on_close(trainer, error)
        self._steps = self._sessions = self._settings = None


def settings_of(trainer: Engine) -> dict[str, Any]:
    """Return the settings of a run as plain values: trainer, data, model, optimizer, scheduler, versions, commit."""
    model, scheduler = distributed.unwrap(trainer.model), trainer.lr_scheduler
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    found: dict[str, Any] = {
        "face": trainer.face,
        "target": str(trainer.target),
        "trainer": trainer.config if isinstance(trainer.config, Mapping) else {},
        "data": _data(trainer.cursor.loader, trainer.accumulation_steps),
        "model": {
            "class": type(model).__name__,
            "parameters": sum(size for size, _ in sizes),
            "trainable": sum(size for size, trainable in sizes if trainable),
        },
        "optimizer": _optimizer(trainer.optimizer),
        **_seed(),
        "precision": trainer.precision.name or "full",
        "device": str(trainer.device),
        "ranks": distributed.world_size(),
        "versions": versions(),
    }
    if scheduler is not None:
        values = {key: value for key, value in scheduler.state_dict().items() if key.lstrip("_") in _FIXED}
        found["scheduler"] = {"class": type(scheduler).__name__, "interval": trainer.scheduler_interval, **values}
    commit = git_commit(_script_folder())
    if commit is not None:
        found["git_commit"] = commit
    return found


def _seed() -> dict[str, int]:
    """Return the seed of torch's generator as a setting; nothing if none was set, when torch draws 64 random bits."""
    seed = torch.initial_seed()
    return {"seed": seed} if seed < 2**32 else {}


# Arguments of torch's schedulers; the rest of their state changes during the run.
_FIXED = {
    "step_size", "gamma", "milestones", "T_max", "eta_min", "T_0", "T_mult", "start_factor", "end_factor",
    "total_iters", "power", "factor", "patience", "mode", "threshold", "cooldown", "total_steps", "max_lrs",
    "warmup_steps",
}  # fmt: skip


def _data(loader: Any, accumulation: int) -> dict[str, Any]:
    found: dict[str, Any] = {"loader": type(loader).__name__}
    dataset = getattr(loader, "dataset", None)
    if dataset is not None:
        found["dataset"] = type(dataset).__name__
    for key, holder in (("samples", dataset), ("batches", loader)):
        try:
            found[key] = len(holder)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError, AttributeError):  # the last without a super().__init__()
            continue
    for key in ("batch_size", "num_workers", "drop_last"):
        value = getattr(loader, key, None)
        if isinstance(value, (int, bool)):
            found[key] = value
    return {**found, "accumulation_steps": accumulation}


def _optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Return the class and the plain values of each group, with the initial learning rate."""
    groups = {}
    for index, group in enumerate(optimizer.param_groups):
        values = {key: _plain(value) for key, value in group.items() if key not in ("params", "initial_lr")}
        values["lr"] = _plain(group.get("initial_lr", group.get("lr")))
        groups[str(group.get("name", index))] = {**values, "parameters": sum(p.numel() for p in group["params"])}
    only = next(iter(groups.values())) if len(groups) == 1 else {"groups": groups}
    return {"class": type(optimizer).__name__, **only}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def _script_folder() -> Path:
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path.cwd() if script is None else Path(script).resolve().parent


def git_commit(folder: Path) -> str | None:
    """Return the checked-out commit of a folder's git repository, read from its files; None outside a repository.

    Example:
        >>> git_commit(Path("/")) is None
        True
    """
    try:
        for place in (folder, *folder.parents):
            git = place / ".git"
            if git.is_file():  # in a worktree, a file that names the folder
                git = (place / git.read_text(encoding="utf-8").partition("gitdir: ")[2].strip()).resolve()
            if (git / "HEAD").is_file():
                return _commit_in(git)
    except (OSError, UnicodeDecodeError):
        return None
    return None


def _commit_in(git: Path) -> str | None:
    head = (git / "HEAD").read_text(encoding="utf-8").strip()
    name = head.removeprefix("ref: ")
    if name == head:
        return head
    common = git / "commondir"
    root = (git / common.read_text(encoding="utf-8").strip()).resolve() if common.is_file() else git
    for place in (git, root):
        if (place / name).is_file():
            return (place / name).read_text(encoding="utf-8").strip()
    packed = root / "packed-refs"
    for line in packed.read_text(encoding="utf-8").splitlines() if packed.is_file() else ():
        commit, _, ref = line.partition(" ")
        if ref == name:
            return commit
    return None


def with_default_hooks(hooks: Sequence[BaseHook], *, given: Sequence[BaseHook], progress: bool) -> list[BaseHook]:
    """Return hooks with the default ones appended.

    Args:
        hooks: all hooks of the run.
        given: hooks given by the user; one that shows progress replaces the default one.
        progress: whether the run shows its progress.

    Example:
        >>> hooks = [ProgressHook(10)]
        >>> [hook.state_key for hook in with_default_hooks(hooks, given=hooks, progress=True)]
        ['ProgressHook', 'RunFilesHook']
    """
    own: list[BaseHook] = [RunFilesHook()]
    if progress and not turned_off() and not shows_progress(given):
        own.append(RunProgress())
    return [*hooks, *own]


def shows_progress(hooks: Sequence[BaseHook]) -> bool:
    """Return whether one of the hooks shows the progress of a run."""
    return any(isinstance(hook, (ProgressHook, ProgressBarHook)) for hook in hooks)
