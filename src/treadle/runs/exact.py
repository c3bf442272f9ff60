"""Checks of exactness as functions: verification of a training, replay of a step."""

from __future__ import annotations

import inspect
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from treadle.errors import ConfigError
from treadle.errors.arguments import checked, is_whole_number
from treadle.runs.compare import Replay, replay_and_compare
from treadle.runs.target import PackRun, checked_target
from treadle.runs.verify.runs import Verification, Verifier, two_servers

_STEPS_OF_PACKS = 120  # more than two epochs, since their faces save after each; other targets get a saving hook
_STEPS = 24
_CALL = """
from __future__ import annotations

import importlib.util
import sys

spec = importlib.util.spec_from_file_location({module!r}, {file!r})
module = importlib.util.module_from_spec(spec)
sys.modules[{module!r}] = module
sys.path[:0] = {path!r}
spec.loader.exec_module(module)
module.{name}()
"""


@checked
def verify(
    target: str | os.PathLike[str] | Callable[[], Any],
    arguments: Sequence[str] = (),
    *,
    steps: int | None = None,
    kills: int = 3,
    seed: int = 0,
) -> Verification:
    """Train a target twice without a stop, and again with kills, and compare every step to the bit.

    For each step, the samples, random states, loss, gradients, weights, optimizer, averages, schedule, metrics and log
    are compared. The runs are separate processes; workspaces are moved into a temporary folder, and a trainer without a
    saving hook gets one. ``treadle verify`` is the same as a command.

    Args:
        target: path of a script or a configuration, the name of a pack, or a function without parameters at the top
            of a module, which builds and trains.
        arguments: arguments of the script, or settings ``key=value``.
        steps: steps of each run, >= 2; by default 24, or 120 for a pack.
        kills: number of kills, >= 1.
        seed: seed of the steps and signals of the kills.

    Returns:
        The result; ``result.verdict`` is ``"EXACT"``, ``"NOT EXACT"`` or ``"NOT CHECKED"``, and ``str(result)`` the
        reason.

    Raises:
        ConfigError: a value is out of range, or there is no such target.
        TreadleError: the target itself failed.

    Example:
        >>> # assert treadle.verify("train.py").verdict == "EXACT"
    """
    if callable(target):
        with tempfile.TemporaryDirectory(prefix="treadle-verify-") as folder:
            script = Path(folder) / f"{target.__name__}.py"
            script.write_text(_script_of(target), encoding="utf-8")
            return run_verification(str(script), arguments, steps=steps, kills=kills, seed=seed)
    return run_verification(os.fspath(target), arguments, steps=steps, kills=kills, seed=seed)


@checked
def replay(
    run: str | os.PathLike[str],
    step: int,
    *,
    script: str | os.PathLike[str] | None = None,
    arguments: Sequence[str] = (),
    device: str | None = None,
) -> Replay:
    """Rerun one step of a finished or broken run and compare it with the run's record, to the bit.

    The replay starts from the nearest checkpoint before the step. A run of ``treadle train`` is rebuilt from its
    folder, which is only read; for a run of another script, give the script. ``treadle replay`` is the same as a
    command.

    Args:
        run: the run folder, or the workspace of a script's trainer.
        step: 1-based.
        script: script or configuration whose workspace or ``save_dir`` is ``run``.
        arguments: arguments of the script.
        device: only for a run of a pack; None takes CUDA, then MPS, then the CPU.

    Raises:
        ConfigError: the arguments contradict each other, or the run has no such step.
        CheckpointError: a file that the step needs is missing or damaged.

    Example:
        >>> # assert treadle.replay("runs/demo", 120).equal
    """
    from rich.console import Console

    if not is_whole_number(step, 1):
        raise ConfigError("must be the number of a step, >= 1", argument="step", value=step)
    return replay_and_compare(
        Path(run), step, script=None if script is None else Path(script), arguments=arguments, device=device,
        debug=False, messages=Console(quiet=True),
    )  # fmt: skip


def _script_of(function: Callable[[], Any]) -> str:
    """Return a script that loads the module of a function and calls it.

    Raises:
        ConfigError: the function is nested in another one, or its module has no file.
    """
    name, file = getattr(function, "__qualname__", ""), inspect.getsourcefile(function)
    if not name.isidentifier() or file is None:
        raise ConfigError(
            "must be defined at the top level of a module in a file, since each run is a new process; move it there, "
            "or give the path of a script",
            argument="target",
            value=function,
        )
    path = str(Path(file).absolute())
    return _CALL.format(module=f"verified_{Path(file).stem}", file=path, path=[str(Path(path).parent)], name=name)


def run_verification(
    target: str,
    arguments: Sequence[str],
    *,
    steps: int | None,
    kills: int,
    seed: int,
    report: Callable[[str], None] = lambda text: None,
) -> Verification:
    """Verify a target in a new temporary folder; if it is exact, its checkpoints are removed and its records kept.

    Args:
        target: path of a script or a configuration, or the name of a pack.
        arguments: arguments of the script, or settings.
        steps: steps of each run; None for the default.
        kills: number of kills.
        seed: seed of the steps and signals of the kills.
        report: called with a line for each run.

    Raises:
        ConfigError: a value is out of range, there is no such script, or a setting is invalid.
    """
    default = check_arguments(target, list(arguments), steps, kills)
    folder = Path(tempfile.mkdtemp(prefix="treadle-verify-"))
    verifier = Verifier(
        target, list(arguments), steps=steps or default, kills=kills, seed=seed, folder=folder, log_progress=report
    )
    with two_servers(target, seed, folder / "server.log") as servers:
        result = verifier.run(servers)
    if result.verdict == "EXACT":
        for workspace in folder.glob("*/workspace"):
            shutil.rmtree(workspace, ignore_errors=True)
    return result


def check_arguments(target: str, arguments: list[str], steps: int | None, kills: int) -> int:
    """Reject invalid arguments before anything is started.

    Returns:
        The default number of steps.

    Raises:
        ConfigError: a value is out of range, there is no such script, or a setting is invalid.

    Example:
        >>> check_arguments("spectra", ["epochs=3"], 24, 3)
        120
    """
    if not hasattr(os, "fork"):
        raise ConfigError("treadle verify: needs a system with fork and signals (Linux or macOS)")
    if steps is not None and steps < 2:
        raise ConfigError(f"--steps {steps}: must be at least 2, so that the run can be killed in between")
    if kills < 1:
        raise ConfigError(f"--kills {kills}: must be at least 1")
    return _STEPS_OF_PACKS if isinstance(checked_target(target, arguments), PackRun) else _STEPS
