"""The command ``treadle train graphs``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

from treadle.cli.console import errors_as_one_line, log_to, message_console, result_console
from treadle.cli.pack_options import Device, Out, Resume, Show, Trackers, settings_argument
from treadle.runs.tracking import tracked


def graphs(
    settings: Annotated[Optional[list[str]], settings_argument("pe=none training.epochs=20")] = None,  # noqa: UP045
    out: Out = Path("runs/graphs"),
    device: Device = None,
    resume: Resume = True,
    trackers: Trackers = None,
    show: Show = False,
) -> None:
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
      torchrun --nproc_per_node 2 -m treadle train graphs
      treadle train graphs --show-settings
    """
    messages = message_console()
    with errors_as_one_line(messages), log_to(messages):
        from treadle.graphs.runs import read_settings, run_graphs, show_settings

        if show:
            show_settings(settings or [], device, result_console())
            return
        given, results = settings or [], result_console()
        with tracked(trackers, lambda: read_settings(given, device).to_dict()) as tracking:
            tracking.final(run_graphs(given, out=out, device=device, resume=resume, results=results, messages=messages))
