"""The command ``treadle verify``."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from treadle.cli.console import errors_as_one_line, message_console, result_console
from treadle.cli.pack_options import AsJson, Target, TargetArguments
from treadle.errors import ConfigError

if TYPE_CHECKING:
    from treadle.cli.verify.runs import Verification

_STEPS_OF_PACKS = 120  # more than two epochs, since their faces save after each; other targets are given a saving hook
_STEPS = 24


def verify(
    target: Target,
    arguments: TargetArguments = None,
    steps: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Steps of each run.  [default: 24, of a pack 120]", show_default=False),
    ] = None,
    kills: Annotated[int, typer.Option(help="How often the run is killed.")] = 3,
    seed: Annotated[int, typer.Option(help="Decides at which steps and how it is killed.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Check that a stop changes nothing: train straight and again with kills, and compare every step to the bit.

    The target runs for some steps, twice, and then again while it is killed (SIGKILL and SIGTERM) at random steps and
    rerun until it ends. Of each step the samples, random states, loss, gradients, weights, optimizer, averages,
    schedule, metrics and log are compared. The answer is EXACT, or the first thing that differs, the likely cause and
    the fix.

    A script runs as `python TARGET` does, a configuration as `treadle train TARGET`, up to the end of its first
    training; its trainer saves every 3 steps at least and writes to a temporary folder. What your code itself writes
    elsewhere before that is not held back.

    Exit code: 0 exact, 3 not exact, 2 a wrong setting or nothing to check, 1 the target failed by itself.

    \b
    Examples:
      treadle verify train.py
      treadle verify train.py --steps 60 --kills 5 -- --lr 1e-3
      treadle verify digits.yaml model.width=32
      treadle verify spectra data.max_rows=80 batch_size=16
      treadle verify text --steps 60
    """
    with errors_as_one_line(message_console()):
        default = check_arguments(target, arguments or [], steps, kills)
        result = run_verification(target, arguments or [], steps=steps or default, kills=kills, seed=seed)
    from treadle.cli.verify.report import as_json as to_json
    from treadle.cli.verify.report import print_report

    if as_json:
        typer.echo(json.dumps(to_json(result), indent=2))
    else:
        print_report(result, result_console())
    raise typer.Exit({"EXACT": 0, "NOT EXACT": 3, "NOT CHECKED": 2}[result.verdict])


def run_verification(target: str, arguments: list[str], *, steps: int, kills: int, seed: int) -> Verification:
    """Runs the target in a new temporary folder; of an exact one the checkpoints are removed, the records stay."""
    from treadle.cli.verify.runs import Verifier, two_servers

    folder = Path(tempfile.mkdtemp(prefix="treadle-verify-"))
    messages = message_console()
    verifier = Verifier(
        target,
        arguments,
        steps=steps,
        kills=kills,
        seed=seed,
        folder=folder,
        say=lambda text: messages.print(text, markup=False, soft_wrap=True),
    )
    with two_servers(target, seed, folder / "server.log") as servers:
        result = verifier.run(servers)
    if result.verdict == "EXACT":
        for workspace in folder.glob("*/workspace"):
            shutil.rmtree(workspace, ignore_errors=True)
    return result


def check_arguments(target: str, arguments: list[str], steps: int | None, kills: int) -> int:
    """Refuses what cannot work before anything is started.

    Returns:
        How many steps to run if nobody says.

    Raises:
        ConfigError: a value is out of range, there is no such script, or a setting is wrong.

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
    from treadle.runs.target import PackRun, checked_target

    return _STEPS_OF_PACKS if isinstance(checked_target(target, arguments), PackRun) else _STEPS
