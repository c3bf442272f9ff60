"""The commands of ``treadle``."""

from __future__ import annotations

from typing import Annotated

import typer

from treadle.cli.bench.command import bench
from treadle.cli.compare import compare
from treadle.cli.evaluate import evaluate
from treadle.cli.export import export
from treadle.cli.inspect import inspect
from treadle.cli.new import new
from treadle.cli.predict import predict
from treadle.cli.replay import replay
from treadle.cli.report import report
from treadle.cli.runs import runs
from treadle.cli.train_config import NAME, FileCommand, TrainGroup, config, on_ranks
from treadle.cli.verify.command import verify
from treadle.requirements import own_version

EXIT_CODES = """\b
Exit codes:
  0      done
  1      the run failed, or a file is damaged or untrusted
  2      invalid setting, option or path; nothing was done
  3      replay or verify found a difference
  128+n  stopped by signal n; a run that saved resumes with the same command
"""

# Plain help and usage errors, without boxes: they look the same in a file and on a narrow terminal.
app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None, epilog=EXIT_CODES,
)  # fmt: skip
train = typer.Typer(
    cls=TrainGroup, no_args_is_help=True, rich_markup_mode=None, subcommand_metavar="COMMAND | FILE [ARGS]...",
    help="Train a model: one of the packs below, with its own data, or what your configuration FILE (.yaml, .yml, "
    ".py) describes. Running the same command again resumes.\n\n\b\nExamples:\n  treadle train spectra epochs=20\n"
    "  treadle train run.yaml\n  torchrun --nproc_per_node 4 -m treadle train run.yaml",
)  # fmt: skip
app.add_typer(train, name="train", short_help="Train a model, or resume its training.")
train.callback()(on_ranks)
train.command(NAME, cls=FileCommand, short_help="What your configuration file describes.")(config)
app.command(short_help="Evaluate a split with the best weights of a run.")(evaluate)
app.command(short_help="Predict a split with the best weights of a run.")(predict)
app.command(short_help="List the runs below a folder.")(runs)
app.command(short_help="Test whether two groups of runs differ by more than noise.")(compare)
app.command(short_help="Write an HTML page about one or several runs.")(report)
app.command(short_help="Rerun one step and compare it with its record.")(replay)
app.command(short_help="Check that stopping and resuming changes nothing.")(verify)
app.command(short_help="Measure where the time of a step goes.")(bench)
app.command(short_help="Show the contents of a checkpoint without executing it.")(inspect)
app.command(short_help="Export weights for other programs.")(export)
app.command(short_help="Write a small commented script to start from.")(new)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"treadle {own_version()}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """PyTorch training that you can stop, resume and replay to the bit.

    \b
    Examples:
      treadle new mini
      treadle train spectra
      treadle train spectra --help
      treadle train digits.yaml optimizer.lr=1e-3
      treadle evaluate runs/graphs --split val
      treadle predict runs/graphs --out predictions.csv
      treadle runs
      treadle compare runs/wide runs/narrow
      treadle report runs/spectra runs/short
      treadle replay runs/spectra --step 120
      treadle verify train.py
      treadle bench train.py
      treadle export runs/spectra --to safetensors
    """
