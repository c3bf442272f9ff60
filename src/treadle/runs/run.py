"""A run of a pack: its settings, where it reads and writes, and the checkpoint that it resumes from."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from treadle.checkpoint.order import furthest_first, is_aside
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
    """The last hook of a run: the engine, and the epoch at which this process began to train."""

    engine: Engine | None = None
    first_epoch = 0

    def on_before_train(self, trainer: Engine) -> None:
        """Keep the engine after it resumed."""
        self.engine, self.first_epoch = trainer, trainer.epoch


@dataclass(frozen=True)
class Run(Generic[Config]):
    """A run of a pack: its settings, and where it computes, reads and writes.

    Attributes:
        config: the settings.
        out: the folder that is written to; a temporary one while a run is replayed or evaluated.
        device: where it computes.
        messages: the console of progress.
        home: the folder of the run that is resumed, replayed or evaluated; None for a fresh start.
        part: the training inside of the run that is meant, a name of :attr:`Pack.parts`; empty for its first one.
        resume: load the newest checkpoint of ``out``.
        parallel: how the model is spread over ranks: ``"ddp"``, ``"fsdp"`` or None.
        trains: whether steps are made; False for a run that is evaluated.
        given: the settings that were set by hand, texts ``key=value``.
        explicit: whether the user named the device.
        weights: a checkpoint whose weights a fresh start begins with.
        watch: the hook by which the base class sees the training.
        paused: returns, after the training, whether it will be continued later; the run is not evaluated then.
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
        """The folder of the part that is meant."""
        return self.out / self.part

    @property
    def checkpoints(self) -> Path:
        """The folder ``checkpoints`` of that part."""
        return self.folder / "checkpoints"

    def hooks(
        self, *, status: Callable[[], str] | None = None, save: Callable[[], Any] | None = None
    ) -> list[BaseHook]:
        """Return the hooks that a trainer of a pack has: the log of steps, the bar, and saving on a signal.

        Args:
            status: returns a short text for the end of the bar.
            save: saves a checkpoint on SIGINT and SIGTERM; None where a CheckpointingHook does.
        """
        made = [
            StepLogHook((self.folder / "steps.jsonl").absolute()),  # what `treadle replay` compares with
            ProgressBarHook(status=status, console=self.messages),
        ]
        return [*made, *([] if save is None else [SignalHook(save)]), self.watch]


def load_newest(run: Run[Any], trainer: Any, *, epochs: int, step: Callable[[], int]) -> str:
    """Load ``last.pt`` of a run, or if it is damaged ``best.pt``, and return where the run starts.

    Args:
        run: the run that resumes.
        trainer: with ``load_checkpoint``.
        epochs: of the whole run.
        step: returns the step of the trainer.

    Raises:
        CheckpointError: neither is intact.
    """
    last = run.checkpoints / "last.pt"
    candidates = by_rank_0(lambda: [path for path in (last, last.with_name("best.pt")) if os.path.lexists(path)])
    found = find_latest(candidates, load=open_on_ranks)  # a damaged last.pt is named, and best.pt taken in its place
    if found is None:
        return "fresh"
    trainer.load_checkpoint(found[0])
    return f"resumes from {found[0]}: epoch {trainer.epoch} of {epochs}, step {step():,}"


def newest_checkpoint(out: Path, parts: Sequence[str]) -> str:
    """Return where a run starts, by the furthest checkpoint of its folder, of the last part that has one.

    Example:
        >>> newest_checkpoint(Path("no_such_run"), [""])
        'fresh'
    """
    for part in reversed(parts):
        states = [state for state in step_states(out / part / "checkpoints") if not is_aside(state)]
        if states:
            furthest = furthest_first(states)[0]
            return f"resumes from {furthest.with_name(Path(os.path.realpath(furthest)).name)}"
    return "fresh"
