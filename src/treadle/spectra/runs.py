"""The steps of ``treadle train spectra``: settings, data, model, training; what follows is in ``spectra_report``."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from treadle.checkpoint.lock import check_free
from treadle.checkpoint.ranks import open_on_ranks
from treadle.checkpoint.store import find_latest, write_text
from treadle.data import steps_per_epoch
from treadle.device import get_device
from treadle.hooks import SignalHook, StepLogHook
from treadle.hooks.bar import ProgressBarHook
from treadle.runs.folder import finished_metrics, readable, refuse_other_run, stored_json, writable
from treadle.runs.overrides import apply_overrides, leaves
from treadle.runs.ranks import after_ranks, by_rank_0, device_of_rank, parallel_of, ranks_line
from treadle.runs.setting_names import as_settings, settings_named
from treadle.runs.settings import changes
from treadle.runs.start_block import cpu_threads, device_line, print_block, print_settings, without_epoch_lines
from treadle.seed import set_seed
from treadle.spectra.model import ChemoMAE
from treadle.spectra.optim import build_optimizer, build_scheduler
from treadle.spectra.report import evaluate_run, print_results
from treadle.spectra.run_config import FLAGS, SpectraConfig, check_changes
from treadle.spectra.run_data import SpectraData, prepare_data
from treadle.spectra.trainer import SpectraTrainer

_log = logging.getLogger("treadle.cli")


def run_spectra(
    settings: Sequence[str], *, out: Path, device: str | None, resume: bool, results: Console, messages: Console
) -> dict[str, Any] | None:
    """Trains, or goes on training, evaluates and writes the run folder; a finished run shows its results.

    Args:
        settings: texts ``key=value``.
        out: the run folder.
        device: None takes CUDA, then MPS, then the CPU.
        resume: go on from the folder's checkpoint.
        results: where the summary goes.
        messages: where progress goes.

    Returns:
        What ``metrics.json`` holds; None on other ranks than the first.

    Raises:
        ConfigError: a setting is wrong, or not that of the run in this folder.
        CheckpointError: no checkpoint of the folder is intact, or a file cannot be written.
        NonFiniteError: training diverged.
    """
    where = device_of_rank(device)
    config = read_settings(settings, device)
    finished = by_rank_0(lambda: finished_metrics(out, config.to_dict(), needed=["best_model.pt"]) if resume else None)
    if finished is not None:
        print_results(finished, out, results)
        return finished
    with cpu_threads(config.threads), settings_named(dict(leaves(config))):
        return _run(
            config, out=out, device=where, explicit=device is not None, resume=resume, consoles=(results, messages)
        )


def _run(
    config: SpectraConfig,
    *,
    out: Path,
    device: torch.device,
    explicit: bool,
    resume: bool,
    consoles: tuple[Console, Console],
) -> dict[str, Any] | None:
    results, messages = consoles
    data = prepare_data(config.data)
    set_seed(config.seed)
    model = build_model(config, data.x.shape[1])
    untrained = copy.deepcopy(model)
    trainer = build_trainer(config, model, data, out=out, device=device, resume=resume, messages=messages)
    source = _open_folder(out, config.to_dict(), trainer, resume=resume)
    _print_start(config, data, trainer, source, explicit=explicit, console=messages)
    started, first_epoch = time.perf_counter(), trainer.epoch
    _fit(trainer, config.epochs)
    if trainer.epoch > first_epoch:
        seconds = timedelta(seconds=round(time.perf_counter() - started))
        _log.info(
            "trained %d epochs in %s; now the test, the probes and the pictures", trainer.epoch - first_epoch, seconds
        )
    alone = after_ranks(trainer, lambda: _reopen(config, copy.deepcopy(untrained), data, out=out, device=device))
    if alone is None:
        return None
    metrics = evaluate_run(config, data, alone, untrained, out)
    print_results(metrics, out, results)
    return metrics


def _reopen(
    config: SpectraConfig, model: nn.Module, data: SpectraData, *, out: Path, device: torch.device
) -> SpectraTrainer:
    """Returns the trainer of a run that has ended on several ranks, in one process."""
    config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, parallel=None))
    trainer = build_trainer(config, model, data, out=out, device=device, resume=False, messages=Console(quiet=True))
    trainer.load_checkpoint(out / "checkpoints" / "last.pt")
    return trainer


def read_settings(settings: Sequence[str], device: str | None) -> SpectraConfig:
    """Returns the defaults of a device with texts ``key=value`` applied.

    Raises:
        ConfigError: a key is unknown, or a value is wrong.
    """
    return apply_overrides(SpectraConfig.for_device(get_device(device)), settings, elsewhere=FLAGS)


def show_settings(settings: Sequence[str], device: str | None, console: Console) -> None:
    """Prints every setting with its value, one ``key=value`` a line."""
    print_settings(read_settings(settings, device), console, hidden=FLAGS)


def build_model(config: SpectraConfig, seq_len: int) -> ChemoMAE:
    """Returns the model with its initial weights, drawn from the global RNG."""
    with as_settings("model", vars(config.model)):
        return ChemoMAE(seq_len=seq_len, **vars(config.model))


def build_trainer(
    config: SpectraConfig,
    model: nn.Module,
    data: SpectraData,
    *,
    out: Path,
    device: torch.device,
    resume: bool,
    messages: Console,
) -> SpectraTrainer:
    """Returns the trainer with its loaders, optimizer, schedule, bar and signals."""
    train_loader = data.loader(data.train, config.batch_size, shuffle=True, seed=config.seed, device=device)
    model = model.to(device)
    with as_settings("optimizer", vars(config.optimizer)):
        optimizer = build_optimizer(model, **vars(config.optimizer))
    with as_settings("schedule", vars(config.schedule)):
        scheduler = build_scheduler(
            optimizer,
            steps_per_epoch=steps_per_epoch(train_loader, config.trainer.accumulation_steps),
            epochs=config.epochs,
            **vars(config.schedule),
        )
    cfg = dataclasses.replace(
        config.trainer, out_dir=out, device=str(device), resume_from="auto" if resume else None,
        parallel=parallel_of(config.trainer.parallel),
    )  # fmt: skip
    trainer = SpectraTrainer(
        model,
        optimizer,
        train_loader,
        data.loader(data.val, 256, device=device),
        scheduler=scheduler,
        cfg=cfg,
        hooks=[
            StepLogHook("steps.jsonl"),  # what `treadle replay` compares with
            ProgressBarHook(status=lambda: _status(trainer), console=messages),
            SignalHook(lambda: trainer.save_checkpoint(trainer.epoch, False)),
        ],
    )
    return trainer


def _status(trainer: SpectraTrainer) -> str:
    if not trainer.history:
        return ""
    return f"val {trainer.history[-1]['val_loss']:.4f} (best {trainer.best['val_loss']:.4f})"


def _fit(trainer: SpectraTrainer, epochs: int) -> None:
    try:
        with without_epoch_lines("spectra"):
            trainer.fit(epochs)
    except SystemExit:
        _log.info("saved at step %d; the same command goes on from here", trainer.step)
        raise
    if trainer.epoch < epochs:
        _log.info(
            "stopped early after epoch %d of %d: no better validation loss for %s epochs",
            trainer.epoch, epochs, trainer.cfg.early_stop_patience,
        )  # fmt: skip


# -- the run folder -----------------------------------------------------------------------------------------------


def _open_folder(out: Path, values: dict[str, Any], trainer: SpectraTrainer, *, resume: bool) -> Path | None:
    """Loads the folder's checkpoint, if there is one and it is of these settings, and writes ``config.json``.

    Returns:
        The checkpoint that was loaded, or None for a fresh start.
    """
    candidates, stored = by_rank_0(lambda: _look_into(out, values, resume=resume))
    found = find_latest(candidates, load=open_on_ranks)  # a damaged last.pt is named, and best.pt taken in its place
    if found is not None:
        trainer.load_checkpoint(found[0])
    by_rank_0(lambda: _write_settings(out, values, stored, resume=resume))
    return None if found is None else found[0]


def _look_into(out: Path, values: dict[str, Any], *, resume: bool) -> tuple[list[Path], dict[str, Any] | None]:
    """Returns the checkpoints to go on from, after saying what these settings change, and the stored settings."""
    refuse_other_run(out, "spectra")
    check_free(out)  # before config.json is written: it may be that of a run that is going on
    with readable(out):
        names = (out / "checkpoints" / "last.pt", out / "checkpoints" / "best.pt")
        candidates = [path for path in names if os.path.lexists(path)]
        stored = stored_json(out / "config.json")
    if not (resume and candidates):
        return [], stored
    for sentence in [] if stored is None else check_changes(changes(stored, values), str(out)):
        _log.warning("%s", sentence)
    return candidates, stored


def _write_settings(out: Path, values: dict[str, Any], stored: dict[str, Any] | None, *, resume: bool) -> None:
    with writable(out):
        if not resume:
            # Else a killed fresh start would be taken for the finished run that was here before.
            (out / "metrics.json").unlink(missing_ok=True)
        if stored != values:
            write_text(json.dumps(values, indent=2) + "\n", out / "config.json")


# -- the block at the start ---------------------------------------------------------------------------------------


def _print_start(
    config: SpectraConfig,
    data: SpectraData,
    trainer: SpectraTrainer,
    source: Path | None,
    *,
    explicit: bool,
    console: Console,
) -> None:
    """Prints what was decided and why, a line each."""
    device = trainer.device
    rows, groups = len(data.x), data.num_groups
    low, high = float(data.wavelengths[0]), float(data.wavelengths[-1])
    per_epoch = steps_per_epoch(trainer.train_loader, config.trainer.accumulation_steps)
    if source is None:
        start = "fresh"
    else:
        start = f"goes on from {source}: epoch {trainer.epoch} of {config.epochs}, step {trainer.step:,}"
    model, trained = config.model, sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    lines = {
        "device": device_line(device, explicit=explicit),
        "precision": _precision_line(config, device),
        "data": f"SpeX, {rows:,} spectra of {groups:,} objects, {data.x.shape[1]} channels, {low:.2f} to {high:.2f} "
        f"{data.wavelength_unit}, SNV-scaled",
        "split": f"by object: {len(data.train):,} spectra train, {len(data.val):,} validate, {len(data.test):,} test",
        "model": f"ChemoMAE, {trained:,} parameters, latent of {model.latent_dim}; hides {model.n_mask} of "
        f"{model.n_blocks} blocks",
        "schedule": f"{config.epochs} epochs of {per_epoch} steps, batches of {config.batch_size}, learning rate "
        f"{config.optimizer.lr:g} after {config.schedule.warmup_epochs} epochs of warm-up",
        **ranks_line(config.trainer.parallel),
        "start": start,
    }  # fmt: skip
    print_block(lines, console)


def _precision_line(config: SpectraConfig, device: torch.device) -> str:
    if config.trainer.amp:
        return f"{config.trainer.amp_dtype} autocast (trainer.amp=false turns it off)"
    why = "bf16 is slower than fp32 on most CPUs" if device.type == "cpu" else "trainer.amp=false"
    return f"fp32 ({why})"
