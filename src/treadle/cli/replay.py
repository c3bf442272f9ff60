"""The command ``treadle replay``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from treadle.cli.console import errors_as_one_line, log_to, message_console, result_console
from treadle.cli.pack_options import AsJson


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder; it is only read.")],
    step: Annotated[int, typer.Option(min=1, help="The step to run again, counted from 1.")],
    arguments: Annotated[
        Optional[list[str]],  # noqa: UP045  (typer on Python 3.10 reads this form)
        typer.Argument(
            metavar="-- ARGUMENTS",
            show_default=False,
            help="Arguments of the script, or settings of the configuration.",
        ),
    ] = None,
    script: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Your own script or configuration, whose workspace or save_dir RUN is.", show_default=False),
    ] = None,
    save: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Write the step's batch to this file.", show_default=False),
    ] = None,
    device: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="cpu, cuda, cuda:1, mps; of the run of a pack only.", show_default=False),
    ] = None,
    pdb: Annotated[
        bool, typer.Option("--pdb", help="Stop in the debugger inside the step, before the optimizer's.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run one step of a finished or broken run again and compare it with the run's record, to the bit.

    It starts from the nearest checkpoint before the step, or from the run's beginning, and runs every step up to the
    one asked for. A run of `treadle train` is built again from what its folder holds; for a run of your own script, or
    of a configuration that has moved, give --script. A replay runs the code of the run: give only runs that you trust.
    With --pdb, model, batch and grads are at hand inside the step.

    Leaves with 0 if the step is equal or the run kept no record, 3 if it differs, 2 for a wrong setting.

    \b
    Examples:
      treadle replay runs/spectra --step 120
      treadle replay runs/spectra --step 120 --save batch.pt
      treadle replay out --step 40 --script train.py -- --lr 0.1
    """
    messages = message_console()
    with errors_as_one_line(messages), log_to(messages):
        from treadle.cli.replay_report import replay_and_report

        equal = replay_and_report(
            run, step, script=script, arguments=arguments or [], save=save, device=device, debug=pdb, as_json=as_json,
            results=result_console(), messages=messages,
        )  # fmt: skip
    if equal is False:
        raise SystemExit(3)
