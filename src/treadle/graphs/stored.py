"""What the model of a graph run says, built again from its checkpoint alone: metrics and predictions of a split."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from treadle.checkpoint.store import load_weights
from treadle.device import get_device
from treadle.distributed.state_names import load_model_state
from treadle.errors import ConfigError
from treadle.graphs import GraphTrainer
from treadle.graphs.masks import MaskName
from treadle.graphs.run_build import build_trainer, loader, prepare_data
from treadle.graphs.run_config import GraphsConfig
from treadle.hooks.files import to_json
from treadle.runs.folder import part_of, run_folder_of, stored_json
from treadle.runs.start_block import cpu_threads


def evaluate_graphs(
    path: Path, tree: Mapping[str, Any], *, split: str, batch_size: int | None, num_workers: int, **where: Any
) -> dict[str, Any]:
    """Builds data and model as the checkpoint says and evaluates its scored weights.

    Args:
        path: the checkpoint.
        tree: what it holds.
        split: ``"train"``, ``"val"`` or ``"test"``.
        batch_size: None takes that of the training.
        num_workers: processes that load batches.
        where: ``device`` and ``messages``.

    Raises:
        ConfigError: the checkpoint is not of such a run.
    """
    config, threads = config_of(path, tree)
    with cpu_threads(threads):
        trainer, graphs, name = _stored(path, config, split=split, **where)
        batches = loader(graphs, batch_size or config.training.batch_size, num_workers=num_workers)
        masks: dict[str, MaskName] = {"train": "train_mask", "val": "val_mask", "test": "test_mask"}
        metrics = to_json(trainer.eval_epoch(batches, mask=masks[split]))
    found = {"data": name, "metrics": metrics, "graphs": len(graphs), "device": str(trainer.device)}
    stored = stored_json(run_folder_of(path) / "test_results.json")
    if split == "test" and path.name == "best.pt" and stored is not None and stored["best_epoch"] == tree["epoch"]:
        found["equal_to_test_results"] = stored["test_metrics"] == metrics
    return found


def predict_graphs(
    path: Path, tree: Mapping[str, Any], *, split: str, batch_size: int | None, **where: Any
) -> dict[str, Any]:
    """Returns the model's outputs for a split, and the targets where each output has one.

    Raises:
        ConfigError: the checkpoint is not of such a run.
    """
    config, threads = config_of(path, tree)
    with cpu_threads(threads):
        trainer, graphs, _ = _stored(path, config, split=split, **where)
        outputs = trainer.predict(loader(graphs, batch_size or config.training.batch_size))
    prediction = outputs.float().numpy()
    target = torch.cat([graph.y.reshape(1) if graph.y.dim() == 0 else graph.y for graph in graphs]).numpy()
    return {"prediction": prediction, **({"target": target} if len(target) == len(prediction) else {})}


def _stored(
    path: Path, config: GraphsConfig, *, split: str, device: str | None, messages: Console
) -> tuple[GraphTrainer, Sequence[Any], str]:
    data = prepare_data(config, messages)
    graphs = copy.copy(part_of(data, split))
    graphs.transform = None  # of the training set: signs drawn anew, which are for training only
    trainer = build_trainer(config, data, device=get_device(device), measure=False)
    load_model_state(trainer.model, load_weights(path))
    return trainer, graphs, data.name


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
