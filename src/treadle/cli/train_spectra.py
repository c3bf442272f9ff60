"""The command ``treadle train spectra``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

from treadle.cli.console import errors_as_one_line, log_to, message_console, result_console
from treadle.cli.pack_options import Device, Out, Resume, Show, Trackers, settings_argument
from treadle.runs.tracking import tracked


def spectra(
    settings: Annotated[Optional[list[str]], settings_argument("epochs=20 model.d_model=32")] = None,  # noqa: UP045
    out: Out = Path("runs/spectra"),
    device: Device = None,
    resume: Resume = True,
    trackers: Trackers = None,
    show: Show = False,
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
      torchrun --nproc_per_node 2 -m treadle train spectra
      treadle train spectra --show-settings
    """
    messages = message_console()
    with errors_as_one_line(messages), log_to(messages):
        from treadle.spectra.runs import read_settings, run_spectra, show_settings

        if show:
            show_settings(settings or [], device, result_console())
            return
        given, results = settings or [], result_console()
        with tracked(trackers, lambda: read_settings(given, device).to_dict()) as tracking:
            tracking.final(
                run_spectra(given, out=out, device=device, resume=resume, results=results, messages=messages)
            )
