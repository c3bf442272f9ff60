"""The command ``treadle train spectra``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from treadle.cli.console import errors_as_one_line, log_to, message_console, result_console


def spectra(
    settings: Annotated[
        Optional[list[str]],  # noqa: UP045  (typer on Python 3.10 reads this form)
        typer.Argument(metavar="KEY=VALUE", show_default=False, help="Settings, such as epochs=20 model.d_model=32."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The run folder; made if it is not there.")] = Path("runs/spectra"),
    device: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="cpu, cuda, cuda:1, mps. By default CUDA, then MPS, then the CPU.", show_default=False),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on from the folder's checkpoint, or start afresh.")
    ] = True,
    show: Annotated[bool, typer.Option("--show-settings", help="Show every setting and its value, and leave.")] = False,
) -> None:
    """Train a masked autoencoder on 1,939 real near-infrared spectra and show what it learned.

    A run that was stopped, at any moment and by anything, goes on when the same command is given again; one that is
    finished shows its results. Ctrl-C saves before it leaves.

    The run folder holds config.json, training_history.json, steps.jsonl, checkpoints/, best_model.pt, metrics.json and
    pictures/.

    \b
    Examples:
      treadle train spectra
      treadle train spectra epochs=20 optimizer.lr=1e-3 --out runs/short
      treadle train spectra model.d_model=96 trainer.early_stop_patience=none --device cuda
      treadle train spectra --show-settings
    """
    messages = message_console()
    with errors_as_one_line(messages), log_to(messages):
        from treadle.cli.spectra_run import run_spectra, show_settings

        if show:
            show_settings(settings or [], device, result_console())
            return
        run_spectra(settings or [], out=out, device=device, resume=resume, results=result_console(), messages=messages)
