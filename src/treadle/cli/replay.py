"""The command ``treadle replay``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from treadle.cli.console import errors_as_one_line, log_to, message_console, result_console, show_loading
from treadle.cli.pack_options import AsJson


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder, which is only read.")],
    step: Annotated[int, typer.Option(min=1, help="The step to rerun, counted from 1.")],
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
        typer.Option(help="Your script or configuration, whose workspace or save_dir is RUN.", show_default=False),
    ] = None,
    save: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Write the step's batch to this file.", show_default=False),
    ] = None,
    device: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="cpu, cuda, cuda:1, mps; only for a run of a pack.", show_default=False),
    ] = None,
    pdb: Annotated[
        bool, typer.Option("--pdb", help="Stop in the debugger inside the step, before the optimizer step.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Rerun one step of a finished or broken run and compare it with the run's record, to the bit.

    The replay starts from the nearest checkpoint before the step, or from the beginning of the run, and runs every step
    up to the requested one. A run of `treadle train` is rebuilt from its folder; for a run of your own script, or of a
    configuration that has moved, give --script. A replay executes the code of the run: only replay runs that you trust.
    With --pdb, model, batch and grads are available inside the step.

    Exit code: 0 if the step is equal or the run kept no record, 3 if it differs, 2 for an invalid setting.

    \b
    Examples:
      treadle replay runs/spectra --step 120
      treadle replay runs/spectra --step 120 --save batch.pt
      treadle replay out --step 40 --script train.py -- --lr 0.1
    """
    messages = message_console()
    with errors_as_one_line(messages), log_to(messages):
        show_loading(str(run))
        from treadle.cli.replay_report import replay_and_report

        equal = replay_and_report(
            run, step, script=script, arguments=arguments or [], save=save, device=device, debug=pdb, as_json=as_json,
            results=result_console(), messages=messages,
        )  # fmt: skip
    if equal is False:
        raise SystemExit(3)
