"""Execution of a target under the bench: a script, configuration or pack, with its files in a temporary folder."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from treadle.cli.bench.result import BenchResult
from treadle.cli.bench.session import BenchHook, StepReached
from treadle.engine import Engine
from treadle.engine.observers import observing
from treadle.errors import ConfigError
from treadle.runs.packs import find_pack
from treadle.runs.script import RedirectedRuns, run_as_main, train_from
from treadle.runs.target import PackRun, checked_target, resolve


class BenchSetup(RedirectedRuns):
    """Observer of the first trainer of a target, which moves its files and adds the hook.

    Args:
        hook: the measuring hook.
        workspace: where the files go.
        pack: whether the target is a pack, whose command takes the run folder as an option.
    """

    command = "bench"

    def __init__(self, hook: BenchHook, workspace: Path, *, pack: bool):
        super().__init__(hook.result.target, workspace)
        self.hook, self.pack = hook, pack
        self.met = False

    def before_running(self, engine: Engine) -> None:
        """Move the files of hooks and append the measuring hook.

        Raises:
            ConfigError: the target's face writes files that cannot be moved.
        """
        if not self.pack:
            self.hook.result.left_out = self.move(engine)
        if not self.met:
            engine.hooks = [*engine.hooks, self.hook]
        self.met = True


def run_bench(target: str, arguments: Sequence[str], *, steps: int, compiles: bool) -> BenchResult:
    """Run a target until its steps are measured; its output goes to standard error.

    Args:
        target: path of a script or a configuration, or the name of a pack.
        arguments: arguments of the script, or settings.
        steps: number of steps to measure.
        compiles: whether to try compiled blocks.

    Raises:
        ConfigError: the target creates no trainer, or one that cannot be measured.
    """
    found = resolve(target, arguments)
    hook = BenchHook(BenchResult(target), steps=steps, compiles=compiles)
    with tempfile.TemporaryDirectory(prefix="treadle-bench-") as scratch, contextlib.redirect_stdout(sys.stderr):
        stage = BenchSetup(hook, Path(scratch), pack=isinstance(found, PackRun))
        with observing(stage), contextlib.suppress(StepReached):
            _start(target, arguments, found, workspace=Path(scratch))
    if not stage.met:
        raise ConfigError(
            f"={target}: ended without training; it must make a BaseTrainer (or an Engine) and call train(), as "
            f"a script does with `python {target}`",
            argument="TARGET",
        )
    if not hook.result.parts:
        raise ConfigError(
            f"={target}: its run ended before {steps} steps were measured; use fewer --steps", argument="TARGET"
        )
    return hook.result


def _start(target: str, arguments: Sequence[str], found: object, *, workspace: Path) -> None:
    if isinstance(found, PackRun):
        find_pack(found.face).train(
            found.settings, out=workspace / "run", device=found.device, resume=False, messages=Console(quiet=True)
        )
    elif isinstance(found, dict):
        train_from(found, Path(target).parent)
    else:
        run_as_main(Path(target), arguments)


def check_target(target: str, arguments: Sequence[str], steps: int) -> None:
    """Reject invalid arguments before anything is started.

    Raises:
        ConfigError: a value is out of range, there is no such script, or a setting is invalid.
    """
    if steps < 3:
        raise ConfigError(f"--steps {steps}: must be at least 3, so that there is a typical one")
    checked_target(target, arguments)
