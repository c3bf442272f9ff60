"""The command ``treadle evaluate``."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from treadle.cli.console import errors_as_one_line, log_to, message_console, result_console
from treadle.cli.pack_options import Device
from treadle.errors import ConfigError, nearest

if TYPE_CHECKING:
    from rich.console import Console

_OF_FACES = {
    "graphs": "graphs_evaluate:evaluate_graphs",
    "spectra": "spectra_stored:evaluate_spectra",
    "mini": "config_stored:evaluate_config",
}
"""Face of a checkpoint -> who evaluates its runs, a module of this package and a function."""

_BEST = ("checkpoints/best.pt", "best.pt", "best_model.pt", "checkpoints/last.pt", "checkpoints/checkpoint_latest.pt")
_SPLITS = ("train", "val", "test")

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or one of its checkpoints.")]
Split = Annotated[str, typer.Option(help="train, val or test.")]
BatchSize = Annotated[
    Optional[int],  # noqa: UP045  (typer on Python 3.10 reads this form)
    typer.Option(help="By default that of the training, or of the pack's evaluations.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Write the result as JSON.")]


def evaluate(
    run: Run,
    split: Split = "test",
    batch_size: BatchSize = None,
    num_workers: Annotated[int, typer.Option(help="Processes that load batches; of graphs.")] = 0,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate the best weights of a run; model and data are those that its folder says.

    Of treadle train graphs and spectra, and of a configuration file whose trainer has build_eval_data_loader(), for
    which --split has no meaning. Writes eval_results_SPLIT.json into the run folder. On the device and with the
    versions of a graph run, the metrics of the test split equal its test_results.json to the bit.

    \b
    Examples:
      treadle evaluate runs/graphs
      treadle evaluate runs/graphs --split val
      treadle evaluate runs/spectra --json
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
    split: str,
    batch_size: int | None,
    num_workers: int,
    device: str | None,
    results: Console | None,
    messages: Console,
) -> dict[str, Any]:
    """Evaluates a run by what its checkpoint says of it.

    Args:
        run: its folder, or a checkpoint.
        split: ``"train"``, ``"val"`` or ``"test"``.
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
            f"RUN={str(run)!r}: {path.name} is of the face {face}, whose runs cannot be evaluated from their "
            f"checkpoints; known: {', '.join(_OF_FACES)}"
        )
    _check(split, batch_size, num_workers)
    module, function = _OF_FACES[face].split(":")
    of_face: Callable[..., dict[str, Any]] = getattr(importlib.import_module(f"treadle.cli.{module}"), function)
    measured = of_face(
        path, tree, split=split, batch_size=batch_size, num_workers=num_workers, device=device, messages=messages
    )
    found: dict[str, Any] = to_json({"split": split, "epoch": tree["epoch"], "checkpoint": path.name, **measured})
    target = run_folder_of(path) / f"eval_results_{split}.json"
    write_text(json.dumps(found, indent=2, allow_nan=False) + "\n", target)
    if results is not None:
        _print(found, target, results)
    return found


def _check(split: str, batch_size: int | None, num_workers: int) -> None:
    if split not in _SPLITS:
        raise ConfigError(f"split={split!r}: {nearest(split, _SPLITS)}")
    for name, value, least in (("batch_size", batch_size, 1), ("num_workers", num_workers, 0)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ConfigError(f"{name}={value!r}: must be a whole number of at least {least}")


def checkpoint_of(run: Path) -> tuple[Path, Mapping[str, Any], str]:
    """Returns the checkpoint that a run is used by, what it holds, and its face.

    Args:
        run: a run folder, of which the best weights count, or a checkpoint.

    Raises:
        ConfigError: there is none.
        CheckpointError: it is damaged.
    """
    from treadle.checkpoint.marker import is_whole
    from treadle.checkpoint.store import load_checkpoint

    path = run
    if not (run.is_file() or is_whole(run)):
        found = [run / name for name in _BEST if (run / name).exists()]
        if not found:
            raise ConfigError(f"RUN={str(run)!r}: is no checkpoint, and no folder with one of {', '.join(_BEST)}")
        path = found[0]
    tree = load_checkpoint(path)
    described = tree.get("format", {})
    return path, tree, str(described.get("face") if isinstance(described, Mapping) else None)


def run_folder_of(path: Path) -> Path:
    """Returns the folder of the run that a checkpoint is of.

    Example:
        >>> run_folder_of(Path("runs/a/checkpoints/best.pt")).name, run_folder_of(Path("runs/a/best.pt")).name
        ('a', 'a')
    """
    return path.parent.parent if path.parent.name == "checkpoints" else path.parent


def part_of(data: Any, split: str) -> Any:
    """Returns one part of a pack's data.

    Raises:
        ConfigError: there is no such split.
    """
    _check(split, None, 0)
    return getattr(data, split)


def _print(found: Mapping[str, Any], target: Path, console: Console) -> None:
    from rich.table import Table

    counts = [f"{value:,} {name}" for name, value in found.items() if name in ("graphs", "spectra")]
    about = ", ".join([found["split"], *counts, f"weights of epoch {found['epoch']}"])
    data = f"{found['data']}, " if "data" in found else ""
    console.print(f"{data}{about}\n", markup=False)
    table = Table(box=None, pad_edge=False)
    for name in found["metrics"]:
        table.add_column(name, justify="right")
    table.add_row(*("undefined" if value is None else f"{value:.6f}" for value in found["metrics"].values()))
    console.print(table)
    console.print(f"\n{target}", soft_wrap=True, markup=False)
    if "equal_to_test_results" in found:
        same = "equal to the bit to" if found["equal_to_test_results"] else "not equal to the bit to"
        console.print(f"{same} {target.with_name('test_results.json')}", soft_wrap=True, markup=False)
