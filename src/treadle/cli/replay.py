"""The command ``treadle replay``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Optional

import typer

from treadle.cli.console import errors_as_one_line, log_to, message_console, result_console


def replay(
    run: Annotated[Path, typer.Argument(help="The run folder; it is only read.")],
    step: Annotated[int, typer.Option(min=1, help="The step to run again, 1-based.")],
    arguments: Annotated[
        Optional[list[str]],  # noqa: UP045  (typer on Python 3.10 reads this form)
        typer.Argument(metavar="[-- ARGS]", show_default=False, help="Arguments of the script."),
    ] = None,
    script: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Your own script with a BaseTrainer, whose workspace RUN is.", show_default=False),
    ] = None,
    save: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Write the step's batch to this file.", show_default=False),
    ] = None,
    device: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="cpu, cuda, cuda:1, mps; of a spectra run only.", show_default=False),
    ] = None,
    pdb: Annotated[bool, typer.Option("--pdb", help="Stop inside the step, before the optimizer's.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write the result as JSON.")] = False,
) -> None:
    """Run one step of a finished or broken run again and compare it with what the run's record says, to the bit.

    It starts from the nearest checkpoint before the step, or from the run's beginning, and runs every step up to the
    one asked for. With --pdb, model, batch and grads are at hand inside the step.

    Leaves with 0 if the step is equal or the run kept no record, 3 if it differs, 2 for a wrong setting.

    \b
    Examples:
      treadle replay runs/spectra --step 120
      treadle replay runs/spectra --step 120 --save batch.pt
      treadle replay out --step 40 --script train.py -- --lr 0.1
    """
    messages, results = message_console(), result_console()
    with errors_as_one_line(messages), log_to(messages):
        from treadle.cli.replay_report import as_values, print_step
        from treadle.cli.replay_run import replay_script, replay_spectra, save_batch
        from treadle.errors import ConfigError
        from treadle.hooks.files import to_json
        from treadle.hooks.steplog import read_steps

        if script is None and arguments:
            raise ConfigError(f"{arguments[0]!r}: only a script takes arguments; name it with --script")
        if script is not None and device is not None:
            raise ConfigError(f"--device={device}: the script decides where it runs")
        if script is None:
            replayed = replay_spectra(run, step, device=device, debug=pdb, messages=messages)
        else:
            replayed = replay_script(run, step, script=script, arguments=arguments or [], debug=pdb)
        if save is not None:
            save_batch(replayed.batches, save)
        saved = None if save is None else str(save)
        values = as_values(replayed, read_steps(run / "steps.jsonl"), script=script is not None, saved=saved)
        if as_json:
            results.print(json.dumps(to_json(values), allow_nan=False), soft_wrap=True, markup=False)
        else:
            print_step(values, results)
        if values["equal"] is False:
            raise SystemExit(3)
