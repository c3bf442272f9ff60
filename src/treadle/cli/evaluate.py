"""The command ``treadle evaluate``."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from treadle.cli.console import errors_as_one_line, log_to, message_console, print_table, result_console, show_table
from treadle.cli.pack_options import AsJson, BatchSize, Device
from treadle.errors import ConfigError
from treadle.errors.arguments import check_whole
from treadle.runs.folder import known_split, run_folder_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from treadle.runs.pack import Evaluation, Pack

_log = logging.getLogger("treadle.cli")

_BEST = ("checkpoints/best.pt", "best.pt", "best_model.pt", "checkpoints/last.pt", "checkpoints/checkpoint_latest.pt")
_MOST_COLUMNS = 8

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or one of its checkpoints.")]
Split = Annotated[
    Optional[str],  # noqa: UP045  (typer on Python 3.10 reads this form)
    typer.Option(
        show_default=False,
        help="train, val or test; for text train, val, lora_train or lora_val.  [default: test; for text val, or "
        "lora_val in the folder lora]",
    ),
]  # fmt: skip


def evaluate(
    run: Run,
    split: Split = None,
    batch_size: BatchSize = None,
    num_workers: Annotated[int, typer.Option(help="Worker processes for loading; only for graphs and astro.")] = 0,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate the best weights of a run, with the model and data of its folder.

    Works for runs of treadle train graphs, spectra, astro and text, and of a configuration file whose trainer has
    build_eval_data_loader(), to which --split does not apply. Writes eval_results_SPLIT.json into the run folder. On
    the device and with the versions of the run, the metrics equal those in its test_results.json or metrics.json, if
    any, to the bit.

    Astro: the losses, and the report's questions about the objects. Text: nats per token (loss), perplexity and bits
    per byte, of the first training, or of the fine-tuning if RUN is the run's folder lora.

    \b
    Examples:
      treadle evaluate runs/graphs
      treadle evaluate runs/graphs --split val
      treadle evaluate runs/spectra --json
      treadle evaluate runs/text/lora --split val
      treadle evaluate logs/experiment/checkpoints/last.pt --device cpu
    """
    messages, results = message_console(), result_console()
    with errors_as_one_line(messages), log_to(messages):
        found = evaluate_checkpoint(
            run, split=split, batch_size=batch_size, num_workers=num_workers, device=device,
            results=None if as_json else results, messages=messages,
        )  # fmt: skip
        if as_json:
            results.print(json.dumps(found, allow_nan=False), markup=False, soft_wrap=True)


def evaluate_checkpoint(
    run: Path,
    *,
    split: str | None,
    batch_size: int | None,
    num_workers: int,
    device: str | None,
    results: Console | None,
    messages: Console,
) -> dict[str, Any]:
    """Evaluate a run by the record in its checkpoint.

    Args:
        run: its folder, or a checkpoint.
        split: None takes the split of the run's own report.
        batch_size: None takes the one used in training.
        num_workers: processes that load batches.
        device: None takes CUDA, then MPS, then the CPU.
        results: console for the metrics; None prints none.
        messages: console for progress.

    Returns:
        The content of ``eval_results_<split>.json``.

    Raises:
        ConfigError: there is no such run, its face has no evaluation, or an option is invalid.
        CheckpointError: the checkpoint is damaged.
    """
    from treadle.checkpoint.store import write_text
    from treadle.hooks.files import to_json

    stored = stored_run(run)
    split = stored.split(split)
    check_sizes(batch_size, num_workers)
    if num_workers and not stored.pack.loads_in_processes:
        _log.warning("num_workers=%d: has no effect on a run of the face %s", num_workers, stored.pack.name)
    path, tree = stored.path, stored.tree
    with stored.pack.open(path, tree, device=device, messages=messages) as opened:
        measured = stored.pack.evaluate(opened, split, batch_size=batch_size, num_workers=num_workers)
    about = {"split": split, "epoch": tree["epoch"], "checkpoint": path.name}
    found: dict[str, Any] = to_json({**about, **measured.as_values()})
    target = run_folder_of(path) / f"eval_results_{split}.json"
    write_text(json.dumps(found, indent=2, allow_nan=False) + "\n", target)
    if results is not None:
        _print(measured, found, target, results)
    return found


def check_sizes(batch_size: int | None, num_workers: int = 0) -> None:
    """Raise ConfigError for a size that is too small; accept None."""
    if batch_size is not None:
        check_whole(1, batch_size=batch_size)
    check_whole(0, num_workers=num_workers)


@dataclass(frozen=True)
class StoredRun:
    """Run together with one of its checkpoints.

    Attributes:
        pack: the pack of the run.
        path: the checkpoint.
        tree: the content of the checkpoint.
    """

    pack: Pack[Any, Any, Any]
    path: Path
    tree: Mapping[str, Any]

    def split(self, asked: str | None) -> str:
        """Return the name of a split; None means the split of the run's own report.

        Raises:
            ConfigError: runs of this pack have no such split.
        """
        if asked is None:
            return self.pack.default_split(self.pack.home_of(run_folder_of(self.path))[1])
        if not self.pack.splits:
            raise ConfigError(
                "the run of a configuration file has no splits: its batches are those of the trainer's own data "
                "loader; leave it out",
                argument="--split", value=asked,
            )  # fmt: skip
        return known_split(asked, self.pack.splits)


def stored_runs(run: Path) -> list[StoredRun]:
    """Return the run of a folder or checkpoint, or the runs in a folder of runs, such as one for each seed.

    Raises:
        ConfigError: there is none, or its face cannot be evaluated.
        CheckpointError: one is damaged.
    """
    if run.is_dir() and not any((run / name).exists() for name in _BEST):
        inside = [
            path
            for path in sorted(run.iterdir())
            if path.is_dir() and not path.name.startswith(".") and any((path / name).exists() for name in _BEST)
        ]
        if inside:
            return [stored_run(path) for path in inside]
    return [stored_run(run)]


def stored_run(run: Path) -> StoredRun:
    """Return a run with the checkpoint to use.

    Args:
        run: a run folder, whose best weights are taken, or a checkpoint.

    Raises:
        ConfigError: there is none, or its face cannot be evaluated.
        CheckpointError: it is damaged.
    """
    from treadle.checkpoint.shard_manifest import is_whole
    from treadle.checkpoint.store import load_checkpoint
    from treadle.runs.configured import ConfiguredRuns
    from treadle.runs.packs import find_pack, pack_names, pack_of_folder

    path = run
    if not (run.is_file() or is_whole(run)):
        found = [run / name for name in _BEST if (run / name).exists()]
        if not found:
            raise ConfigError(
                f"is neither a checkpoint nor a folder with one of {', '.join(_BEST)}", argument="RUN", value=str(run)
            )
        path = found[0]
    tree = load_checkpoint(path)
    if (pack := pack_of_folder(run_folder_of(path))) is not None:
        return StoredRun(pack, path, tree)
    described = tree.get("format", {})
    face = str(described.get("face") if isinstance(described, Mapping) else None)
    if face in pack_names():  # a checkpoint outside its run folder
        return StoredRun(find_pack(face), path, tree)
    if face != ConfiguredRuns.name:
        instead = (
            f"in Python, treadle.open_run({str(run_folder_of(path))!r}, trainer) opens it with the trainer as your "
            "script makes it, and gives test() and predict()"
        )
        raise ConfigError(
            f"{path.name} is of the face {face}, whose runs cannot be evaluated from their "
            f"checkpoints; {instead}; known: {', '.join([*pack_names(), ConfiguredRuns.name])}",
            argument="RUN",
            value=str(run),
        )
    return StoredRun(ConfiguredRuns(), path, tree)


def _print(measured: Evaluation, found: Mapping[str, Any], target: Path, console: Console) -> None:
    counts = [f"{value:,} {name}" for name, value in measured.counts.items()]
    about = [*measured.about.values(), found["split"], *counts, f"weights of epoch {found['epoch']}"]
    console.print(f"{', '.join(about)}\n", markup=False)
    print_table(_table(found["metrics"]), console)
    for table in measured.tables:
        console.print()
        show_table(table, console)
    console.print(f"\n{target}", soft_wrap=True, markup=False)
    if measured.compared is not None:
        file, equal = measured.compared
        same = "equal to the bit to" if equal else "not equal to the bit to"
        console.print(f"{same} {file}", soft_wrap=True, markup=False)


def _table(metrics: Mapping[str, Any]) -> Table:
    from rich.table import Table

    shown = {name: _shown(value) for name, value in metrics.items()}
    table = Table(box=None, pad_edge=False, show_header=len(shown) <= _MOST_COLUMNS)
    if not table.show_header:
        table.add_column()
        table.add_column(justify="right")
        for name, value in shown.items():
            table.add_row(name, value)
        return table
    for name in shown:
        table.add_column(name, justify="right")
    table.add_row(*shown.values())
    return table


def _shown(value: float | None) -> str:
    if value is None:
        return "undefined"
    return f"{value:,}" if isinstance(value, int) else f"{value:.6f}"
