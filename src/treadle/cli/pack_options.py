"""Options shared by the commands of all packs and by some others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

Out = Annotated[Path, typer.Option(help="The run folder; created if missing.")]
Device = Annotated[
    Optional[str],  # noqa: UP045  (typer on Python 3.10 reads this form)
    typer.Option(help="cpu, cuda, cuda:1, mps. By default CUDA, then MPS, then the CPU.", show_default=False),
]
Resume = Annotated[
    bool, typer.Option("--resume/--no-resume", help="Resume from the folder's checkpoint, or start over.")
]
Trackers = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        metavar="NAMES", show_default=False,
        help="Track the run with tensorboard, wandb, mlflow, trackio or jsonl; separate several by commas.",
    ),
]  # fmt: skip
Seeds = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        metavar="SEEDS", show_default=False,
        help="One run for each seed, such as 0..7 or 0,3,5, in a folder OUT/seed=N. KEY=A,B,C also runs each value.",
    ),
]  # fmt: skip
Halving = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        metavar="METRIC:EPOCHS", show_default=False,
        help="For several runs: val_loss:1,3,9 continues the best third at each of these epochs; max:accuracy:1,3,9 "
        "if more is better, val_loss:1,3,9:2 to keep a half.",
    ),
]  # fmt: skip
Workers = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        metavar="N", show_default=False, min=0,
        help="For several runs: number of processes. By default one per core on the CPU; 0 on a GPU, which runs "
        "all in this process.",
    ),
]  # fmt: skip
Show = Annotated[bool, typer.Option("--show-settings", help="Show every setting with its value, and exit.")]

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON value.")]
BatchSize = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        show_default=False,
        help="Batch size; by default that of the training, or of the pack's evaluations.",
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
    """Return the Typer argument ``KEY=VALUE``.

    Args:
        example: settings of the command.
    """
    found: typer.models.ArgumentInfo = typer.Argument(
        metavar="KEY=VALUE", show_default=False, help=f"Settings, such as {example}."
    )
    return found
