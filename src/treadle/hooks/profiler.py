"""ProfilerHook: Chrome trace of a few steps."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from treadle import distributed
from treadle.checkpoint.store import replacing
from treadle.engine.hook import BaseHook
from treadle.errors.arguments import check_least, checked
from treadle.hooks.files import in_workspace
from treadle.hooks.tracking import Guard

if TYPE_CHECKING:
    from treadle.engine import Engine


class ProfilerHook(BaseHook):
    """``torch.profiler`` trace of a few steps on rank 0, written to ``<path>/trace_step_<last step>.json``.

    Open the file in a trace viewer such as chrome://tracing. Steps are counted from the start of this process, so a
    resumed run is profiled again.

    Args:
        path: folder; relative to the trainer's workspace.
        wait: steps to skip in each round.
        warmup: steps to run the profiler without recording.
        active: steps to record, >= 1.
        repeat: number of rounds, each with its own trace; 0 repeats to the end.

    Raises:
        ConfigError: a value is outside its range.

    Example:
        >>> hook = ProfilerHook(wait=10, warmup=2, active=3)
    """

    writes = True

    @checked
    def __init__(self, path: str | Path = "profile", wait: int = 10, warmup: int = 2, active: int = 3, repeat: int = 1):
        self._schedule = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
        check_least(0, wait=wait, warmup=warmup, repeat=repeat)
        check_least(1, active=active)
        self.path = Path(path)
        self._guard = Guard()
        self._profiler: Any = None
        self._rounds = 0

    def on_before_train(self, trainer: Engine) -> None:
        """Start the profiler's schedule."""
        folder = in_workspace(trainer, self.path)
        if distributed.rank() != 0:
            return
        self._rounds = 0
        self._profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(**self._schedule),
            on_trace_ready=lambda profiler: self._write(trainer, folder, profiler),
        )
        self._profiler.start()

    def on_after_step(self, trainer: Engine) -> None:
        """Count the step; stop the profiler after the last round."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None  # a failed one must not be stopped: that can crash
        with self._guard(trainer, self, "profiling"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*Profiler clears events", category=UserWarning)
            profiler.step()
            if self._rounds == self._schedule["repeat"] > 0:
                profiler.stop()
            else:
                self._profiler = profiler

    def on_close(self, trainer: Engine, error: BaseException | None = None) -> None:
        """Stop the profiler; an open recording is written."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        with self._guard(trainer, self, "stopping the profiler"):
            profiler.stop()
        if not self._rounds:
            first = self._schedule["wait"] + self._schedule["warmup"] + 1
            trainer.logger.warning("ProfilerHook: no trace was written; the first step it records is number %d", first)

    def _write(self, trainer: Engine, folder: Path, profiler: Any) -> None:
        self._rounds += 1
        with self._guard(trainer, self, "writing the trace"):
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(folder / f"trace_step_{trainer.step}.json") as temporary:
                profiler.export_chrome_trace(str(temporary))
