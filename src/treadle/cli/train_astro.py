"""The command ``treadle train astro``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from treadle.cli.console import errors_as_one_line, log_to, message_console, result_console


def astro(
    settings: Annotated[
        Optional[list[str]],  # noqa: UP045  (typer on Python 3.10 reads this form)
        typer.Argument(
            metavar="KEY=VALUE", show_default=False, help="Settings, such as model.d_model=96 training.epochs=20."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The run folder; made if it is not there.")] = Path("runs/astro"),
    device: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="cpu, cuda, cuda:1, mps. By default CUDA, then MPS, then the CPU.", show_default=False),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on from the folder's checkpoint, or start afresh.")
    ] = True,
    show: Annotated[bool, typer.Option("--show-settings", help="Show every setting and its value, and leave.")] = False,
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
      treadle train astro --show-settings
    """
    messages = message_console()
    with errors_as_one_line(messages), log_to(messages):
        from treadle.cli.astro_run import run_astro, show_settings

        if show:
            show_settings(settings or [], device, result_console())
            return
        run_astro(settings or [], out=out, device=device, resume=resume, results=result_console(), messages=messages)
