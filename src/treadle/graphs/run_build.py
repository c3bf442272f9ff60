"""Construction of graph runs: data, model, loaders and trainer, for training and evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from treadle.capture.compile import check_compile
from treadle.engine.hook import BaseHook
from treadle.engine.settings import check_capture
from treadle.errors import ConfigError, refuse_unknown
from treadle.graphs import (
    GraphDataset,
    GraphTrainer,
    GraphTransformer,
    PaddingCollater,
    get_dataset,
    get_loss_fn,
    get_model,
    get_optimizer_from_config,
    get_scheduler,
    graph_statistics,
)
from treadle.graphs.padding import buckets_for
from treadle.graphs.run_config import GraphsConfig, given
from treadle.graphs.statistics import GraphStatistics
from treadle.runs.ranks import shared_batches
from treadle.seed import set_seed

_SCHEDULER_KEYS = ("type", "warmup_epochs", "warmup_offset", "min_lr", "step_size", "gamma")


def prepare_data(config: GraphsConfig, progress: Callable[[int, int], None] | None = None) -> GraphDataset:
    """Load the data set with its encodings.

    Args:
        config: the settings.
        progress: called with the number of encoded graphs and the total.

    Raises:
        ConfigError: a setting is unknown or invalid, or the data are missing and cannot be downloaded.
        ImportError: a package is missing; the message names what to install.
    """
    try:
        section = {key: value for key, value in given(config.dataset).items() if key != "standardize"}  # of the model
        return get_dataset(**section, pe_config=config.encodings, progress=progress)
    except FileNotFoundError as error:
        raise ConfigError(f"={config.dataset.get('name')}: {error}", argument="dataset") from error


def build_model(config: GraphsConfig, data: GraphDataset, *, measure: bool = True) -> GraphTransformer:
    """Build the model with its initial weights, for the feature widths and the level of the data.

    Args:
        config: the settings.
        data: the data set.
        measure: measure the training graphs if the settings request it; otherwise a checkpoint provides the statistics.

    Raises:
        ConfigError: an option is unknown, out of range, or without effect.
    """
    options = config.model_options
    if "statistics" in options:
        scaled = scales_targets(config, data)
        options["statistics"] = (
            graph_statistics(data.train, targets=scaled)
            if measure
            else GraphStatistics.unknown(data.node_pe_dim, data.num_classes if scaled else None)
        )
    if data.level != "graph":
        options.pop("readout", None)  # there is no readout over nodes; the groups have one for graph targets
    has_attention = options.get("name") != "mpnn" and options.get("use_global", True)
    if data.relative_pe_dim and not has_attention:
        raise ConfigError(
            "encodings of pairs of nodes bias the attention, and this model has none; set pe.relative.enabled=false",
            argument="pe.relative.enabled",
            value=True,
        )
    return get_model(
        num_features=data.num_features,
        num_classes=data.num_classes,
        num_edge_features=data.num_edge_features if options.get("use_local", True) else None,
        node_pe_dim=data.node_pe_dim,
        relative_pe_dim=data.relative_pe_dim,
        task=data.level,
        **options,
    )


def scales_targets(config: GraphsConfig, data: GraphDataset) -> bool:
    """Return whether the model scales its outputs by the mean and deviation of the training targets."""
    wanted = config.dataset.get("standardize") and "statistics" in config.model_options
    return bool(wanted) and data.task_type == "regression"


def loader(
    graphs: Sequence[Any],
    batch_size: int,
    *,
    shuffle: bool = False,
    num_workers: int = 0,
    seed: int = 0,
    num_buckets: int | None = None,
    level: str = "graph",
) -> Iterable[Any]:
    """Return a torch_geometric loader over a split; in distributed runs, over this rank's part of each batch.

    Args:
        graphs: the split.
        batch_size: graphs per batch, summed over all ranks.
        shuffle: whether to reshuffle every epoch.
        num_workers: processes that load and pad.
        seed: seed of the shuffling in distributed runs.
        num_buckets: number of padded shapes; None disables padding.
        level: level of the targets, for padding.
    """
    from torch_geometric.loader import DataLoader

    shared = shared_batches(graphs, batch_size, shuffle=shuffle, seed=seed)
    batches: Any = DataLoader(graphs, num_workers=num_workers, **shared)
    if num_buckets is not None:
        collate = PaddingCollater(buckets_for(batches, num_buckets), level=level)
        plain: Any = torch.utils.data.DataLoader
        batches = plain(graphs, num_workers=num_workers, collate_fn=collate, **shared)
    return batches  # type: ignore[no-any-return]


def train_loader(config: GraphsConfig, data: GraphDataset) -> Iterable[Any]:
    """Return the loader of the training split, which pads its batches if configured."""
    training = config.training
    return loader(
        data.train,
        training.batch_size,
        shuffle=True,
        num_workers=training.num_workers,
        seed=config.seed,
        num_buckets=training.num_buckets,
        level=data.level,
    )


def optimizer_and_schedule(config: GraphsConfig, model: torch.nn.Module) -> tuple[Optimizer, LRScheduler | None]:
    """Build the optimizer of a model and its schedule over the epochs of the run.

    Raises:
        ConfigError: a setting is unknown or invalid.
    """
    optimizer = get_optimizer_from_config(model, given(config.training.optimizer))
    schedule = given(config.training.scheduler)
    refuse_unknown("training.scheduler", schedule, _SCHEDULER_KEYS)
    kind = schedule.pop("type", "cosine_warmup")
    return optimizer, get_scheduler(optimizer, kind, total_epochs=config.training.epochs, **schedule)


def refuse_wrong(config: GraphsConfig) -> None:
    """Validate the optimizer and schedule settings without data or model.

    Raises:
        ConfigError: a setting is unknown or invalid.
    """
    longer = (config.training.scheduler.get("warmup_epochs") or 0) + config.training.epochs + 1
    without_warning = dataclasses.replace(config.training, epochs=longer)  # which is given once, later
    optimizer_and_schedule(dataclasses.replace(config, training=without_warning), torch.nn.Linear(1, 1))


def build_trainer(
    config: GraphsConfig,
    data: GraphDataset,
    *,
    device: torch.device,
    name: str = "graphs",
    checkpoint_dir: Path | None = None,
    hooks: Sequence[BaseHook] = (),
    parallel: str | None = None,
    measure: bool = True,
) -> GraphTrainer:
    """Seed, and build the trainer with a new model, optimizer and schedule.

    Args:
        config: the settings; distributed settings are up to the caller.
        data: the data set.
        device: device for the computation.
        name: name of the run in log lines and checkpoints.
        checkpoint_dir: checkpoint folder; None writes none.
        hooks: additional hooks.
        parallel: how the model is distributed over ranks.
        measure: as for :func:`build_model`.

    Raises:
        ConfigError: a setting is unknown or invalid.
    """
    training = config.training
    set_seed(config.seed, deterministic=config.deterministic)
    model = build_model(config, data, measure=measure).to(device)
    optimizer, scheduler = optimizer_and_schedule(config, model)
    loss_fn = get_loss_fn(
        data.task_type,
        training.loss.get(data.task_type),
        num_classes=data.num_classes,
        class_weights=training.class_weights,
        target_scale=getattr(model.head, "target_scale", None),
    )
    trainer = GraphTrainer(
        model,
        optimizer,
        scheduler,
        loss_fn,
        device=device,
        task_type=data.task_type,
        num_classes=data.num_classes,
        grad_clip=training.grad_clip,
        mixed_precision=training.mixed_precision,
        log_every=config.log_every,
        checkpoint_dir=checkpoint_dir,
        experiment_name=name,
        accumulation_steps=training.accumulation_steps,
        hooks=hooks,
        parallel=parallel,
        capture=check_capture(training.capture),
        compile=check_compile(training.compile),
    )
    named = {"targets": list(data.target_names)} if data.target_names else {}
    trainer.config.update({"run": config.to_dict(), "threads": torch.get_num_threads(), **named})
    return trainer
