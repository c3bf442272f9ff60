"""The command ``treadle bench``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from treadle.cli.console import errors_as_one_line, message_console, result_console, show_loading
from treadle.cli.pack_options import AsJson, Target, TargetArguments
from treadle.cli.settings_command import warn_of_repeats


def bench(
    target: Target,
    arguments: TargetArguments = None,
    steps: Annotated[int, typer.Option(help="Steps to measure.")] = 30,
    compiles: Annotated[
        bool, typer.Option("--compile", help="Also try compiled blocks, which can take minutes.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure where the time of a step goes, what its floor is, and which settings would make it faster.

    The target runs for a few dozen steps and is then stopped. Its parts are timed: waiting for data, forward, backward,
    the update, each hook. Operator calls, kernel launches and reads of the device by the host are counted. The floor is
    the step's operations and bytes divided by what this machine reaches in the same run. Then settings that may help
    are tried on the run's own steps, each against the current step.

    A script runs as with `python TARGET`, a configuration as with `treadle train TARGET`, up to its first training; its
    trainer writes to a temporary folder. Files that your own code writes elsewhere are not redirected.

    Exit code: 0 measured, 2 invalid setting or nothing to measure, 1 the target failed.

    \b
    Examples:
      treadle bench train.py
      treadle bench digits.yaml model.width=256
      treadle bench spectra batch_size=64 --steps 50
      treadle bench text --compile
    """
    with errors_as_one_line(message_console()):
        show_loading(target)
        from treadle.cli.bench.target import check_target, run_bench

        check_target(target, arguments or [], steps)
        if not target.endswith(".py"):
            warn_of_repeats(arguments or [])
        result = run_bench(target, arguments or [], steps=steps, compiles=compiles)
        if as_json:
            typer.echo(json.dumps(result.to_dict(), indent=2))
            return
        from treadle.cli.bench.report import print_report

        print_report(result, result_console())
