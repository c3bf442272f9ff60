"""The command ``treadle train astro``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

from treadle.cli.console import errors_as_one_line, log_to, message_console, result_console
from treadle.cli.pack_options import Device, Out, Resume, Show, Trackers, settings_argument
from treadle.runs.tracking import tracked


def astro(
    settings: Annotated[Optional[list[str]], settings_argument("model.d_model=96 training.epochs=20")] = None,  # noqa: UP045
    out: Out = Path("runs/astro"),
    device: Device = None,
    resume: Resume = True,
    trackers: Trackers = None,
    show: Show = False,
) -> None:
    """Train a transformer on tokens of galaxy pictures, spectra and catalogues, and ask it for one from the others.

    The data come with the package. A run that was stopped, at any moment and by anything, goes on when the same
    command is given again; one that is finished shows its results. Ctrl-C saves before it leaves.

    The run folder holds config.json, tokenizers.safetensors, steps.jsonl, checkpoints/ with best.pt, ckpt_epoch_….pt
    and training_history.json, metrics.json, page.html and pictures/.

    \b
    Examples:
      treadle train astro
      treadle train astro training.epochs=4 model.d_model=32 --out runs/short
      treadle train astro training.meaningful_loss.enabled=false --out runs/cross_entropy_alone
      torchrun --nproc_per_node 2 -m treadle train astro
      treadle train astro --show-settings
    """
    messages = message_console()
    with errors_as_one_line(messages), log_to(messages):
        from treadle.astro.runs import read_settings, run_astro, show_settings

        if show:
            show_settings(settings or [], device, result_console())
            return
        given, results = settings or [], result_console()
        with tracked(trackers, lambda: read_settings(given, device).to_dict()) as tracking:
            tracking.final(run_astro(given, out=out, device=device, resume=resume, results=results, messages=messages))
