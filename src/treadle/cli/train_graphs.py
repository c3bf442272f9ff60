"""The command ``treadle train graphs``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from treadle.cli.console import errors_as_one_line, log_to, message_console, result_console


def graphs(
    settings: Annotated[
        Optional[list[str]],  # noqa: UP045  (typer on Python 3.10 reads this form)
        typer.Argument(
            metavar="KEY=VALUE", show_default=False,
            help="Settings, such as pe=none model.hidden_dim=96 training.epochs=20.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The run folder; made if it is not there.")] = Path("runs/graphs"),
    device: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="cpu, cuda, cuda:1, mps. By default CUDA, then MPS, then the CPU.", show_default=False),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on from the folder's checkpoint, or start afresh.")
    ] = True,
    show: Annotated[bool, typer.Option("--show-settings", help="Show every setting and its value, and leave.")] = False,
) -> None:  # fmt: skip
    """Train a graph transformer with positional encodings on 4,990 real molecules and show what it learned.

    The molecules come with rdkit; nothing is downloaded unless dataset names a benchmark. A run that was stopped, at
    any moment and by anything, goes on when the same command is given again; one that is finished shows its results.
    Ctrl-C saves before it leaves.

    A setting without a dot chooses from a group: dataset, model, pe (encodings) or train; the others set one value.

    The run folder holds config.yaml, steps.jsonl, checkpoints/ with best.pt, last.pt and history.json,
    test_results.json, metrics.json, pictures/, and page.html, which shows what it learned in any browser.

    \b
    Examples:
      treadle train graphs
      treadle train graphs pe=none training.epochs=20 --out runs/without
      treadle train graphs dataset=zinc_clean_leads model=gps --device cuda --out runs/zinc
      treadle train graphs dataset=synthetic/tree dataset.task=distance_regression --out runs/hops
      treadle train graphs --show-settings
    """
    messages = message_console()
    with errors_as_one_line(messages), log_to(messages):
        from treadle.cli.graphs_run import run_graphs, show_settings

        if show:
            show_settings(settings or [], device, result_console())
            return
        run_graphs(settings or [], out=out, device=device, resume=resume, results=result_console(), messages=messages)
