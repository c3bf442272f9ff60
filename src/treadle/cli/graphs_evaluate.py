"""How a graph run is evaluated from its checkpoint alone."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from treadle.checkpoint.store import load_weights, write_text
from treadle.cli.graphs_build import build_trainer, loader, prepare_data
from treadle.cli.graphs_config import GraphsConfig
from treadle.cli.run_folder import stored_json
from treadle.cli.start_block import cpu_threads
from treadle.device import get_device
from treadle.errors import ConfigError, nearest
from treadle.hooks.files import to_json
from treadle.naming import load_model_state

_SPLITS = ("train", "val", "test")


def evaluate_graphs(
    path: Path,
    tree: Mapping[str, Any],
    *,
    split: str,
    batch_size: int | None,
    num_workers: int,
    device: str | None,
    results: Console,
    messages: Console,
) -> dict[str, Any]:
    """Builds data and model as the checkpoint says and evaluates its scored weights.

    Args:
        path: the checkpoint; the results go beside the ``config.yaml`` of its run.
        tree: what it holds.
        split: ``"train"``, ``"val"`` or ``"test"``.
        batch_size: None takes that of the training.
        num_workers: processes that load batches.
        device: None takes CUDA, then MPS, then the CPU.
        results: where the metrics go.
        messages: where progress goes.

    Raises:
        ConfigError: an option is wrong, or the checkpoint is not of such a run.
    """
    config, threads = config_of(path, tree)
    if split not in _SPLITS:
        raise ConfigError(f"split={split!r}: {nearest(split, _SPLITS)}")
    for name, value, least in (("batch_size", batch_size, 1), ("num_workers", num_workers, 0)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ConfigError(f"{name}={value!r}: must be a whole number of at least {least}")
    with cpu_threads(threads):
        data = prepare_data(config, messages)
        graphs = copy.copy(getattr(data, split))
        graphs.transform = None  # of the training set: signs drawn anew, which are for training only
        trainer = build_trainer(config, data, device=get_device(device))
        load_model_state(trainer.model, load_weights(path))
        batches = loader(graphs, batch_size or config.training.batch_size, num_workers=num_workers)
        metrics = trainer.eval_epoch(batches)
    found = to_json({
        "metrics": metrics, "split": split, "graphs": len(graphs), "epoch": tree["epoch"], "checkpoint": path.name,
        "device": str(trainer.device),
    })  # fmt: skip
    out = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    target = out / f"eval_results_{split}.json"
    write_text(json.dumps(found, indent=2, allow_nan=False) + "\n", target)
    _print(found, data.name, target, results)
    if split == "test" and path.name == "best.pt":
        _compare(found, out, results)
    return dict(found)


def config_of(path: Path, tree: Mapping[str, Any]) -> tuple[GraphsConfig, int]:
    """Returns the settings of a checkpoint's run, and the threads it had: another number sums in another order.

    Raises:
        ConfigError: the checkpoint is not of such a run.
    """
    stored = tree.get("config", {}).get("run")
    if stored is None:
        raise ConfigError(
            f"{path}: does not say how its data and model were built, as it is no checkpoint of `treadle train graphs` "
            "or scripts/train.py; load it with your own GraphTrainer and call eval_epoch"
        )
    return GraphsConfig.from_values(stored), int(tree["config"]["threads"])


def _print(found: Mapping[str, Any], data: str, target: Path, console: Console) -> None:
    console.print(f"{data}, {found['split']}: {found['graphs']:,} graphs, weights of epoch {found['epoch']}\n")
    table = Table(box=None, pad_edge=False)
    for name in found["metrics"]:
        table.add_column(name, justify="right")
    table.add_row(*("undefined" if value is None else f"{value:.6f}" for value in found["metrics"].values()))
    console.print(table)
    console.print(f"\n{target}", soft_wrap=True, markup=False)


def _compare(found: Mapping[str, Any], out: Path, console: Console) -> None:
    """Says whether the metrics are those that the run ended with."""
    stored = stored_json(out / "test_results.json")
    if stored is None or stored["best_epoch"] != found["epoch"]:
        return
    same = stored["test_metrics"] == found["metrics"]
    text = "equal to the bit to" if same else "not equal to the bit to"
    console.print(f"{text} {out / 'test_results.json'}", soft_wrap=True, markup=False)
