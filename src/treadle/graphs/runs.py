"""The steps of a graph run: data, model, training; what follows is in ``graphs_report``.

``treadle train graphs`` and ``scripts/train.py`` are the same run with other defaults.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from treadle.checkpoint.lock import check_free
from treadle.checkpoint.ranks import open_on_ranks
from treadle.checkpoint.store import find_latest, load_weights, write_text
from treadle.distributed.state_names import load_model_state
from treadle.graphs import GraphDataset, GraphTrainer
from treadle.graphs.idle_settings import refuse_idle
from treadle.graphs.report import finish_run, print_results, print_start
from treadle.graphs.run_build import build_trainer, loader, prepare_data, refuse_wrong, train_loader
from treadle.graphs.run_config import FREE, RENAMED, GraphsConfig, read_settings
from treadle.hooks import SignalHook, StepLogHook
from treadle.hooks.bar import ProgressBarHook
from treadle.runs.folder import explain_changes, finished_metrics, readable, refuse_other_run, set_aside, writable
from treadle.runs.ranks import after_ranks, by_rank_0, device_of_rank, parallel_of, rank_0_first
from treadle.runs.setting_names import settings_named
from treadle.runs.settings import changes, flat
from treadle.runs.start_block import cpu_threads, without_epoch_lines

__all__ = ["GraphRun", "build", "fit", "read_settings", "run_graphs", "show_settings", "train_graphs"]

_log = logging.getLogger("treadle.cli")


@dataclass(frozen=True)
class GraphRun:
    """What is asked of a run beside its settings.

    Attributes:
        out: the run folder.
        device: None takes CUDA, then MPS, then the CPU.
        resume: go on from the folder's checkpoint; else an earlier run's checkpoints are set aside.
        checkpoint: a file whose weights a fresh start begins with.
        given: the settings that were set by hand, as texts ``key=value``; one without effect is refused.
        results: where the summary goes.
        messages: where progress goes.
    """

    out: Path
    device: str | None
    resume: bool
    results: Console
    messages: Console
    checkpoint: Path | None = None
    given: Sequence[str] = ()

    @property
    def checkpoints(self) -> Path:
        """The folder of the trainer."""
        return self.out / "checkpoints"


def run_graphs(
    settings: Sequence[str], *, out: Path, device: str | None, resume: bool, results: Console, messages: Console
) -> dict[str, Any] | None:
    """Reads settings and runs :func:`train_graphs`.

    Args:
        settings: texts ``key=value``.
        out: the run folder.
        device: None takes CUDA, then MPS, then the CPU.
        resume: go on from the folder's checkpoint.
        results: where the summary goes.
        messages: where progress goes.
    """
    run = GraphRun(out, device, resume, results, messages, given=settings)
    return train_graphs(read_settings(settings, device), run)


def show_settings(settings: Sequence[str], device: str | None, console: Console) -> None:
    """Prints every setting with its value, one ``key=value`` a line."""
    for key, value in flat(read_settings(settings, device).to_dict()).items():
        console.print(f"{key}={'null' if value is None else value}", markup=False, soft_wrap=True)


def train_graphs(config: GraphsConfig, run: GraphRun) -> dict[str, Any] | None:
    """Trains, or goes on training, tests and writes the run folder; a finished run shows its results.

    Returns:
        What ``metrics.json`` holds; None on other ranks than the first.

    Raises:
        ConfigError: a setting is wrong, or not that of the run in this folder.
        CheckpointError: no checkpoint of the folder is intact, or a file cannot be written.
        NonFiniteError: training diverged.
        ImportError: a package is missing; the message names what to install.
    """
    device = device_of_rank(run.device)
    needed = ["checkpoints/best.pt"]
    finished = by_rank_0(lambda: finished_metrics(run.out, config.to_dict(), needed=needed) if run.resume else None)
    if finished is not None:
        print_results(finished, run.out, run.results)
        return finished
    with cpu_threads(config.threads), settings_named(flat(config.to_dict()), RENAMED):
        metrics = _train(config, run, device)
    if metrics is not None:
        print_results(metrics, run.out, run.results)
    return metrics


def _train(config: GraphsConfig, run: GraphRun, device: torch.device) -> dict[str, Any] | None:
    refuse_wrong(config)  # before the data are loaded
    data = rank_0_first(lambda: prepare_data(config, run.messages))  # what it downloads and encodes lies on the disk
    parallel = parallel_of(config.training.parallel)
    trainer = build(config, run, data, device, parallel=parallel)  # wrong values are refused before idle ones
    refuse_idle(run.given, config, level=data.level, task_type=data.task_type)
    start = _open_folder(config, run, trainer)
    print_start(config, data, trainer, start=start, explicit=run.device is not None, console=run.messages)
    fit(trainer, config, data)
    alone = after_ranks(trainer, lambda: _reopen(config, run, data, device))
    if alone is None:
        return None
    load_model_state(alone.model, load_weights(run.checkpoints / "best.pt"))
    return finish_run(config, data, alone, run.out)


def _reopen(config: GraphsConfig, run: GraphRun, data: GraphDataset, device: torch.device) -> GraphTrainer:
    """Returns the trainer of a run that has ended on several ranks, in one process."""
    trainer = build(config, run, data, device)
    trainer.load_checkpoint("last.pt")
    return trainer


def build(
    config: GraphsConfig, run: GraphRun, data: GraphDataset, device: torch.device, *, parallel: str | None = None
) -> GraphTrainer:
    """Returns the trainer of a run, with its bar, its signals and its log of steps."""
    trainer = build_trainer(
        config,
        data,
        device=device,
        name=run.out.name,
        checkpoint_dir=run.checkpoints,
        hooks=[
            StepLogHook((run.out / "steps.jsonl").absolute()),
            ProgressBarHook(status=lambda: _status(trainer, config.training.metric_for_best), console=run.messages),
            SignalHook(lambda: trainer.save_checkpoint("last.pt")),
        ],
        parallel=parallel,
    )
    return trainer


def _status(trainer: GraphTrainer, metric: str) -> str:
    records = trainer.history["val"]
    if not records or trainer.best_metric is None:
        return ""
    return f"val {metric} {records[-1][metric]:.4f} (best {trainer.best_metric:.4f})"


def fit(trainer: GraphTrainer, config: GraphsConfig, data: GraphDataset) -> None:
    """Trains to the number of epochs; a run that has them already does nothing."""
    training = config.training
    started, first_epoch = time.perf_counter(), trainer.epoch
    try:
        with without_epoch_lines("graphs"):
            trainer.fit(
                train_loader(config, data),
                loader(data.val, training.batch_size, num_workers=training.num_workers),
                training.epochs,
                training.metric_for_best,
                training.minimize_metric,
                training.early_stopping,
            )
    except SystemExit:
        _log.info("saved at step %d; the same command goes on from here", trainer.global_step)
        raise
    if trainer.epoch > first_epoch:
        seconds = timedelta(seconds=round(time.perf_counter() - started))
        early = "" if trainer.epoch == training.epochs else ", stopped early"
        _log.info("trained %d epochs in %s%s; now the test", trainer.epoch - first_epoch, seconds, early)


# -- the run folder -----------------------------------------------------------------------------------------------


def _open_folder(config: GraphsConfig, run: GraphRun, trainer: GraphTrainer) -> str:
    """Loads the folder's checkpoint, if there is one and it is of these settings, and writes ``config.yaml``.

    Returns:
        Where the run starts, in words.
    """
    found = by_rank_0(lambda: _stored_states(run))
    start = "fresh"
    # A damaged last.pt is named, and best.pt taken in its place.
    latest = find_latest(found, load=open_on_ranks) if run.resume and found else None
    if latest is not None:
        _take_up_changes(latest[1].get("config", {}).get("run"), config, run)
        trainer.load_checkpoint(latest[0])
        start = f"goes on from {latest[0]}: epoch {trainer.epoch} of {config.training.epochs}"
        start += f", step {trainer.global_step:,}"
    elif run.checkpoint is not None:
        trainer.load_checkpoint(run.checkpoint, load_optimizer=False)
        start = f"fresh, with the weights of {run.checkpoint}"
    by_rank_0(lambda: _ready_folder(config, run, fresh=latest is None, outdated=bool(found)))
    return start


def _stored_states(run: GraphRun) -> list[Path]:
    """Returns the checkpoints of the folder."""
    refuse_other_run(run.out, "graphs")
    check_free(run.checkpoints)  # before config.yaml is written: it may be that of a run that is going on
    with readable(run.out):
        paths = (run.checkpoints / "last.pt", run.checkpoints / "best.pt")
        return [path for path in paths if path.is_symlink() or path.exists()]


def _ready_folder(config: GraphsConfig, run: GraphRun, *, fresh: bool, outdated: bool) -> None:
    with writable(run.out):
        if fresh:
            # Else a killed fresh start would be taken for the run that was here before.
            for name in ("metrics.json", "test_results.json"):
                (run.out / name).unlink(missing_ok=True)
            if outdated:
                set_aside(run.checkpoints)
        write_text(_as_yaml(config), run.out / "config.yaml")


def _take_up_changes(stored: Any, config: GraphsConfig, run: GraphRun) -> None:
    if stored is not None:
        for sentence in explain_changes(changes(stored, config.to_dict()), str(run.out), free=FREE):
            _log.warning("%s", sentence)


def _as_yaml(config: GraphsConfig) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(config.to_dict()))
