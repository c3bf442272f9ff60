"""The command ``treadle evaluate``."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from treadle.cli.console import errors_as_one_line, log_to, message_console, result_console
from treadle.cli.pack_options import AsJson, BatchSize, Device
from treadle.errors import ConfigError
from treadle.runs.folder import SPLITS, known_split, run_folder_of
from treadle.runs.tables import print_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_log = logging.getLogger("treadle.cli")

_OF_FACES = {
    "graphs": "graphs.stored:evaluate_graphs",
    "spectra": "spectra.stored:evaluate_spectra",
    "astro": "astro.stored:evaluate_astro",
    "text": "text.stored:evaluate_text",
    "mini": "cli.config_stored:evaluate_config",
}
"""Face of a checkpoint -> who evaluates its runs, a module of this package and a function."""

_BEST = ("checkpoints/best.pt", "best.pt", "best_model.pt", "checkpoints/last.pt", "checkpoints/checkpoint_latest.pt")
_SPLITS_OF_TEXT = ("train", "val", "lora_train", "lora_val")
_LOADS_IN_PROCESSES = ("graphs", "astro")
_REPORTS = {"equal_to_test_results": "test_results.json", "equal_to_metrics": "metrics.json"}
_COUNTED = ("graphs", "spectra", "sequences", "tokens", "bytes")
_MOST_COLUMNS = 8

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or one of its checkpoints.")]
Split = Annotated[
    Optional[str],  # noqa: UP045  (typer on Python 3.10 reads this form)
    typer.Option(
        show_default=False,
        help="train, val or test; of text train, val, lora_train or lora_val.  [default: test; of text val, or "
        "lora_val in the folder lora]",
    ),
]  # fmt: skip


def evaluate(
    run: Run,
    split: Split = None,
    batch_size: BatchSize = None,
    num_workers: Annotated[int, typer.Option(help="Processes that load batches; of graphs and astro.")] = 0,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate the best weights of a run; model and data are those that its folder says.

    Of treadle train graphs, spectra, astro and text, and of a configuration file whose trainer has
    build_eval_data_loader(), for which --split has no meaning. Writes eval_results_SPLIT.json into the run folder. On
    the device and with the versions of the run, the metrics equal those of its test_results.json or metrics.json to
    the bit, where it has them.

    Astro: the losses, and the report's questions about the objects. Text: nats per token (loss), perplexity and bits
    per byte, of the first training, or of the fine-tuning where RUN is the folder lora of the run.

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
    """Evaluates a run by what its checkpoint says of it.

    Args:
        run: its folder, or a checkpoint.
        split: see :func:`chosen_split`.
        batch_size: None takes that of the training.
        num_workers: processes that load batches.
        device: None takes CUDA, then MPS, then the CPU.
        results: where the metrics go; None shows none.
        messages: where progress goes.

    Returns:
        What was written to ``eval_results_<split>.json``.

    Raises:
        ConfigError: there is no such run, its face has no evaluation, or an option is wrong.
        CheckpointError: the checkpoint is damaged.
    """
    from treadle.checkpoint.store import write_text
    from treadle.hooks.files import to_json

    path, tree, face = checkpoint_of(run)
    if face not in _OF_FACES:
        raise ConfigError(
            f"{path.name} is of the face {face}, whose runs cannot be evaluated from their "
            f"checkpoints; known: {', '.join(_OF_FACES)}",
            argument="RUN",
            value=str(run),
        )
    split = chosen_split(split, face, path)
    check_sizes(batch_size, num_workers)
    if num_workers and face not in _LOADS_IN_PROCESSES:
        _log.warning("num_workers=%d: has no effect on a run of the face %s", num_workers, face)
    module, function = _OF_FACES[face].split(":")
    of_face: Callable[..., dict[str, Any]] = getattr(importlib.import_module(f"treadle.{module}"), function)
    measured = of_face(
        path, tree, split=split, batch_size=batch_size, num_workers=num_workers, device=device, messages=messages
    )
    found: dict[str, Any] = to_json({"split": split, "epoch": tree["epoch"], "checkpoint": path.name, **measured})
    target = run_folder_of(path) / f"eval_results_{split}.json"
    write_text(json.dumps(found, indent=2, allow_nan=False) + "\n", target)
    if results is not None:
        _print(found, target, results)
    return found


def chosen_split(split: str | None, face: str, path: Path) -> str:
    """Returns the part of the data that is meant.

    Args:
        split: None takes the one that the run's own report is about.
        face: of the checkpoint.
        path: the checkpoint.

    Raises:
        ConfigError: the runs of this face have no such split.

    Example:
        >>> chosen_split(None, "astro", Path("a/best.pt")), chosen_split(None, "text", Path("t/lora/best_model.pt"))
        ('test', 'lora_val')
    """
    if face != "text":
        return known_split("test" if split is None else split, SPLITS)
    from treadle.text.folder import home_of

    run = run_folder_of(path)
    kept_out = "val" if home_of(run) == run else "lora_val"
    return known_split(kept_out if split is None else split, _SPLITS_OF_TEXT)


def check_sizes(batch_size: int | None, num_workers: int = 0) -> None:
    """Raises ConfigError for a size that is too small; None passes."""
    for name, value, least in (("batch_size", batch_size, 1), ("num_workers", num_workers, 0)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ConfigError(f"must be a whole number of at least {least}", argument=name, value=value)


def checkpoint_of(run: Path) -> tuple[Path, Mapping[str, Any], str]:
    """Returns the checkpoint that a run is used by, what it holds, and its face, ``"text"`` for that pack.

    Args:
        run: a run folder, of which the best weights count, or a checkpoint.

    Raises:
        ConfigError: there is none.
        CheckpointError: it is damaged.
    """
    from treadle.checkpoint.shard_manifest import is_whole
    from treadle.checkpoint.store import load_checkpoint
    from treadle.text.folder import is_text_run

    path = run
    if not (run.is_file() or is_whole(run)):
        found = [run / name for name in _BEST if (run / name).exists()]
        if not found:
            raise ConfigError(
                f"is no checkpoint, and no folder with one of {', '.join(_BEST)}", argument="RUN", value=str(run)
            )
        path = found[0]
    tree = load_checkpoint(path)
    described = tree.get("format", {})
    face = str(described.get("face") if isinstance(described, Mapping) else None)
    # The runs of the text pack are made by the trainer of that face.
    return path, tree, "text" if face == "functional" and is_text_run(run_folder_of(path)) else face


def _print(found: Mapping[str, Any], target: Path, console: Console) -> None:
    from treadle.text.folder import home_of

    counts = [f"{value:,} {name}" for name, value in found.items() if name in _COUNTED]
    stage = [found["stage"]] if "stage" in found else []
    about = ", ".join([*stage, found["split"], *counts, f"weights of epoch {found['epoch']}"])
    data = f"{found['data']}, " if "data" in found else ""
    console.print(f"{data}{about}\n", markup=False)
    print_table(_table(found["metrics"]), console)
    if "predictions" in found:
        from treadle.astro.report import print_predictions

        console.print()
        print_predictions(found["predictions"], console, part=found["split"])
    console.print(f"\n{target}", soft_wrap=True, markup=False)
    for key, name in _REPORTS.items():
        if key in found:
            same = "equal to the bit to" if found[key] else "not equal to the bit to"
            # Of both parts of a run of text there is one report, above the folder of the fine-tuning.
            home = home_of(target.parent) if "stage" in found else target.parent
            console.print(f"{same} {home / name}", soft_wrap=True, markup=False)


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
