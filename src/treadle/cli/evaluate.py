"""The command ``treadle evaluate``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from treadle.cli.console import errors_as_one_line, log_to, message_console, result_console
from treadle.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

_OF_FACES = {"graphs": "graphs_evaluate:evaluate_graphs"}
"""Face of a checkpoint -> who evaluates its runs, a module of this package and a function."""

_BEST = ("checkpoints/best.pt", "best.pt", "best_model.pt")


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or one of its checkpoints.")],
    split: Annotated[str, typer.Option(help="train, val or test.")] = "test",
    batch_size: Annotated[
        Optional[int],  # noqa: UP045  (typer on Python 3.10 reads this form)
        typer.Option(help="By default that of the training.", show_default=False),
    ] = None,
    num_workers: Annotated[int, typer.Option(help="Processes that load batches.")] = 0,
    device: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="cpu, cuda, cuda:1, mps. By default CUDA, then MPS, then the CPU.", show_default=False),
    ] = None,
) -> None:
    """Evaluate the best weights of a run of the graph pack; model, data and encodings are those of the checkpoint.

    Writes eval_results_SPLIT.json into the run folder. On the device and with the versions of the run, the metrics of
    the test split equal its test_results.json to the bit.

    \b
    Examples:
      treadle evaluate runs/graphs
      treadle evaluate runs/graphs --split val
      treadle evaluate logs/experiment/checkpoints/last.pt --device cpu
    """
    messages = message_console()
    with errors_as_one_line(messages), log_to(messages):
        evaluate_checkpoint(
            run, split=split, batch_size=batch_size, num_workers=num_workers, device=device,
            results=result_console(), messages=messages,
        )  # fmt: skip


def evaluate_checkpoint(
    run: Path,
    *,
    split: str,
    batch_size: int | None,
    num_workers: int,
    device: str | None,
    results: Console,
    messages: Console,
) -> dict[str, Any]:
    """Evaluates a run by what its checkpoint says of it.

    Args:
        run: its folder, or a checkpoint.
        split: ``"train"``, ``"val"`` or ``"test"``.
        batch_size: None takes that of the training.
        num_workers: processes that load batches.
        device: None takes CUDA, then MPS, then the CPU.
        results: where the metrics go.
        messages: where progress goes.

    Returns:
        What was written to ``eval_results_<split>.json``.

    Raises:
        ConfigError: there is no such run, its face has no evaluation, or an option is wrong.
        CheckpointError: the checkpoint is damaged.
    """
    from treadle.checkpoint.store import load_checkpoint

    path = _checkpoint_of(run)
    tree = load_checkpoint(path)
    face = str(tree.get("format", {}).get("face"))
    if face not in _OF_FACES:
        raise ConfigError(
            f"RUN={str(run)!r}: {path.name} is of the face {face}, whose runs cannot be evaluated from their "
            f"checkpoints; known: {', '.join(_OF_FACES)}"
        )
    module, function = _OF_FACES[face].split(":")
    of_face: Callable[..., dict[str, Any]] = getattr(importlib.import_module(f"treadle.cli.{module}"), function)
    return of_face(
        path, tree, split=split, batch_size=batch_size, num_workers=num_workers, device=device,
        results=results, messages=messages,
    )  # fmt: skip


def _checkpoint_of(run: Path) -> Path:
    from treadle.checkpoint.marker import is_whole

    if run.is_file() or is_whole(run):
        return run
    found = [run / name for name in _BEST if (run / name).is_file()]
    if not found:
        raise ConfigError(f"RUN={str(run)!r}: is no checkpoint, and no folder with one of {', '.join(_BEST)}")
    return found[0]
