"""The options that the commands of all packs have, and some of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

Out = Annotated[Path, typer.Option(help="The run folder; made if it is not there.")]
Device = Annotated[
    Optional[str],  # noqa: UP045  (typer on Python 3.10 reads this form)
    typer.Option(help="cpu, cuda, cuda:1, mps. By default CUDA, then MPS, then the CPU.", show_default=False),
]
Resume = Annotated[
    bool, typer.Option("--resume/--no-resume", help="Resume from the folder's checkpoint, or start afresh.")
]
Trackers = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        metavar="NAMES", show_default=False,
        help="Follow the run in tensorboard, wandb, mlflow, trackio or jsonl; several with commas between.",
    ),
]  # fmt: skip
Seeds = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        metavar="SEEDS", show_default=False,
        help="One run for each seed, such as 0..7 or 0,3,5, in a folder OUT/seed=N. KEY=A,B,C runs each value, too.",
    ),
]  # fmt: skip
Halving = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        metavar="METRIC:EPOCHS", show_default=False,
        help="Of several runs: val_loss:1,3,9 continues the best third at each of these epochs; max:accuracy:1,3,9 "
        "where more is better, val_loss:1,3,9:2 for a half.",
    ),
]  # fmt: skip
Workers = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        metavar="N", show_default=False, min=0,
        help="Of several runs: processes. By default one a core on the CPU; on a GPU 0, all in this process.",
    ),
]  # fmt: skip
Show = Annotated[bool, typer.Option("--show-settings", help="Show every setting and its value, and leave.")]

AsJson = Annotated[bool, typer.Option("--json", help="Write the result as one JSON value.")]
BatchSize = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        show_default=False,
        help="Samples in a batch; by default as in the training, or in the pack's evaluations.",
    ),
]

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET", help="A script, a configuration (.yaml, .py), or a pack: spectra, text, graphs or astro."
    ),
]
TargetArguments = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Argument(
        metavar="[KEY=VALUE]... | -- ARGUMENTS", show_default=False,
        help="Settings of a pack or of a configuration; for a script its own arguments, after --.",
    ),
]  # fmt: skip


def settings_argument(example: str) -> typer.models.ArgumentInfo:
    """Return the argument ``KEY=VALUE``.

    Args:
        example: settings that the command has.
    """
    found: typer.models.ArgumentInfo = typer.Argument(
        metavar="KEY=VALUE", show_default=False, help=f"Settings, such as {example}."
    )
    return found
