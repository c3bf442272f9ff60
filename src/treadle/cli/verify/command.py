"""The command ``treadle verify``."""

from __future__ import annotations

import json
from typing import Annotated, Optional

import typer

from treadle.cli.console import errors_as_one_line, message_console, result_console, show_loading
from treadle.cli.pack_options import AsJson, Target, TargetArguments
from treadle.cli.settings_command import warn_of_repeats


def verify(
    target: Target,
    arguments: TargetArguments = None,
    steps: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Steps of each run.  [default: 24; 120 for a pack]", show_default=False),
    ] = None,
    kills: Annotated[int, typer.Option(help="Number of kills.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the steps and signals of the kills.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Check that stopping and resuming changes nothing: train with and without kills and compare every step to the bit.

    The target runs twice without a stop, and then again while it is killed (SIGKILL and SIGTERM) at random steps and
    rerun until it ends. For each step, the samples, random states, loss, gradients, weights, optimizer, averages,
    schedule, metrics and log are compared. The answer is EXACT, or the first difference, its likely cause and the fix.

    A script runs as with `python TARGET`, a configuration as with `treadle train TARGET`, up to the end of its first
    training; its trainer saves at least every 3 steps and writes to a temporary folder. Files that your own code writes
    elsewhere before that are not redirected.

    Exit code: 0 exact, 3 not exact, 2 invalid setting or nothing to check, 1 the target itself failed.

    \b
    Examples:
      treadle verify train.py
      treadle verify train.py --steps 60 --kills 5 -- --lr 1e-3
      treadle verify digits.yaml model.width=32
      treadle verify spectra data.max_rows=80 batch_size=16
      treadle verify text --steps 60
    """
    with errors_as_one_line(message_console()):
        show_loading(target)
        from treadle.runs.exact import run_verification

        messages = message_console()
        if not target.endswith(".py"):
            warn_of_repeats(arguments or [])
        result = run_verification(
            target, arguments or [], steps=steps, kills=kills, seed=seed,
            report=lambda text: messages.print(text, markup=False, soft_wrap=True),
        )  # fmt: skip
    from treadle.cli.verify.report import print_report
    from treadle.runs.verify.describe import as_json as to_json

    if as_json:
        typer.echo(json.dumps(to_json(result), indent=2))
    else:
        print_report(result, result_console())
    raise typer.Exit({"EXACT": 0, "NOT EXACT": 3, "NOT CHECKED": 2}[result.verdict])
