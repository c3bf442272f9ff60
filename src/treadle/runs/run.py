"""A run of a pack: its settings, its folders, and the checkpoint that it resumes from."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from treadle.checkpoint.order import by_progress, is_moved_aside
from treadle.checkpoint.ranks import open_on_ranks
from treadle.checkpoint.store import find_latest
from treadle.engine import Engine
from treadle.engine.hook import BaseHook
from treadle.hooks import SignalHook, StepLogHook
from treadle.hooks.bar import ProgressBarHook
from treadle.hooks.checkpointing import step_states
from treadle.runs.ranks import by_rank_0

if TYPE_CHECKING:
    from rich.console import Console

Config = TypeVar("Config")


class Watch(BaseHook):
    """Last hook of a run, which records the engine and the epoch at which this process began to train."""

    engine: Engine | None = None
    first_epoch = 0

    def on_before_train(self, trainer: Engine) -> None:
        """Keep a reference to the engine after it resumed."""
        self.engine, self.first_epoch = trainer, trainer.epoch


@dataclass(frozen=True)
class Run(Generic[Config]):
    """Run of a pack: its settings, device and folders.

    Attributes:
        config: the settings.
        out: the output folder; a temporary one while a run is replayed or evaluated.
        device: the device of the run.
        messages: console for progress.
        home: the folder of the run being resumed, replayed or evaluated; None for a fresh start.
        part: the training within the run, a name in :attr:`Pack.parts`; empty for the first one.
        resume: load the newest checkpoint of ``out``.
        parallel: how the model is distributed over ranks: ``"ddp"``, ``"fsdp"`` or None.
        trains: whether the run trains; False for a run that is evaluated.
        given: the settings given by the user, strings ``key=value``.
        explicit: whether the user named the device.
        weights: a checkpoint whose weights initialize a fresh start.
        watch: the hook through which the base class observes the training.
        paused: called after the training, returns whether it will be continued later; the run is then not evaluated.
    """

    config: Config
    out: Path
    device: torch.device
    messages: Console
    home: Path | None = None
    part: str = ""
    resume: bool = False
    parallel: str | None = None
    trains: bool = True
    given: Sequence[str] = ()
    explicit: bool = False
    weights: Path | None = None
    watch: Watch = field(default_factory=Watch)
    paused: Callable[[], bool] = lambda: False

    @property
    def folder(self) -> Path:
        """The folder of the part."""
        return self.out / self.part

    @property
    def checkpoints(self) -> Path:
        """The folder ``checkpoints`` of the part."""
        return self.folder / "checkpoints"

    def hooks(
        self, *, status: Callable[[], str] | None = None, save: Callable[[], Any] | None = None
    ) -> list[BaseHook]:
        """Return the hooks of a pack's trainer: the step log, the progress bar, and saving on a signal.

        Args:
            status: returns a short string for the end of the bar.
            save: saves a checkpoint on SIGINT and SIGTERM; None if a CheckpointingHook does.
        """
        made = [
            StepLogHook((self.folder / "steps.jsonl").absolute()),  # what `treadle replay` compares with
            ProgressBarHook(status=status, console=self.messages),
        ]
        return [*made, *([] if save is None else [SignalHook(save)]), self.watch]


def load_newest(run: Run[Any], trainer: Any, *, epochs: int, step: Callable[[], int]) -> str:
    """Load ``last.pt`` of a run, or ``best.pt`` if it is damaged, and return where the run starts.

    Args:
        run: the run that resumes.
        trainer: a trainer with ``load_checkpoint``.
        epochs: the epochs of the whole run.
        step: returns the step of the trainer.

    Raises:
        CheckpointError: neither is intact.
    """
    last = run.checkpoints / "last.pt"
    candidates = by_rank_0(lambda: [path for path in (last, last.with_name("best.pt")) if os.path.lexists(path)])
    found = find_latest(candidates, load=open_on_ranks)  # a damaged last.pt is reported and replaced by best.pt
    if found is None:
        return "fresh"
    trainer.load_checkpoint(found[0])
    return f"resumes from {found[0]}: epoch {trainer.epoch} of {epochs}, step {step():,}"


def newest_checkpoint(out: Path, parts: Sequence[str]) -> str:
    """Return where a run starts, from the furthest checkpoint of the last part that has one.

    Example:
        >>> newest_checkpoint(Path("no_such_run"), [""])
        'fresh'
    """
    for part in reversed(parts):
        states = [state for state in step_states(out / part / "checkpoints") if not is_moved_aside(state)]
        if states:
            furthest = by_progress(states)[0]
            return f"resumes from {furthest.with_name(Path(os.path.realpath(furthest)).name)}"
    return "fresh"
