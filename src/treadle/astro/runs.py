"""The steps of ``treadle train astro``: settings, tokens, model, training; what follows is in ``astro_report``."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from treadle.astro.initialisation import initialise_from_codebooks
from treadle.astro.model import CausalTransformerLM
from treadle.astro.report import finish_run, print_results, print_start
from treadle.astro.run_config import FLAGS, FREE, AstroRunConfig
from treadle.astro.run_data import TOKENIZERS, AstroData, prepare_data
from treadle.astro.tokenizer_files import save_tokenizers
from treadle.astro.trainer import AstroTrainer
from treadle.checkpoint.lock import check_free
from treadle.checkpoint.store import load_weights, write_text
from treadle.device import get_device
from treadle.distributed.state_names import load_model_state
from treadle.hooks import SignalHook, StepLogHook
from treadle.hooks.bar import ProgressBarHook
from treadle.runs.folder import (
    explain_changes,
    finished_metrics,
    readable,
    refuse_other_run,
    set_aside,
    stored_json,
    writable,
)
from treadle.runs.overrides import apply_overrides, leaves
from treadle.runs.ranks import after_ranks, by_rank_0, device_of_rank, parallel_of
from treadle.runs.setting_names import as_settings, settings_named
from treadle.runs.settings import changes
from treadle.runs.start_block import cpu_threads, print_settings, without_epoch_lines
from treadle.seed import set_seed

_log = logging.getLogger("treadle.cli")


@dataclasses.dataclass(frozen=True)
class AstroRun:
    """What a run is made of beside its data.

    Attributes:
        config: the settings.
        out: the run folder.
        device: where it computes.
        messages: where progress goes.
    """

    config: AstroRunConfig
    out: Path
    device: torch.device
    messages: Console

    @property
    def checkpoints(self) -> Path:
        """The folder of the trainer."""
        return self.out / "checkpoints"


def run_astro(
    settings: Sequence[str], *, out: Path, device: str | None, resume: bool, results: Console, messages: Console
) -> dict[str, Any] | None:
    """Trains, or goes on training, evaluates and writes the run folder; a finished run shows its results.

    Args:
        settings: texts ``key=value``.
        out: the run folder.
        device: None takes CUDA, then MPS, then the CPU.
        resume: go on from the folder's checkpoint; else an earlier run's checkpoints are set aside.
        results: where the summary goes.
        messages: where progress goes.

    Returns:
        What ``metrics.json`` holds; None on other ranks than the first.

    Raises:
        ConfigError: a setting is wrong, or not that of the run in this folder.
        CheckpointError: no checkpoint of the folder is intact, or a file cannot be written.
        NonFiniteError: training diverged.
        ImportError: a package is missing; the message names what to install.
    """
    run = AstroRun(read_settings(settings, device), out, device_of_rank(device), messages)
    needed = ["checkpoints/best.pt"]
    finished = by_rank_0(lambda: finished_metrics(out, run.config.to_dict(), needed=needed) if resume else None)
    if finished is not None:
        print_results(finished, out, results)
        return finished
    with cpu_threads(run.config.threads), settings_named(dict(leaves(run.config))):
        metrics = _run(run, resume=resume, explicit=device is not None)
    if metrics is not None:
        print_results(metrics, out, results)
    return metrics


def read_settings(settings: Sequence[str], device: str | None) -> AstroRunConfig:
    """Returns the defaults of a device with texts ``key=value`` applied.

    Raises:
        ConfigError: a key is unknown, or a value is wrong.
    """
    return apply_overrides(AstroRunConfig.for_device(get_device(device)), settings, elsewhere=FLAGS)


def show_settings(settings: Sequence[str], device: str | None, console: Console) -> None:
    """Prints every setting with its value, one ``key=value`` a line."""
    print_settings(read_settings(settings, device), console, hidden=FLAGS)


def _run(run: AstroRun, *, resume: bool, explicit: bool) -> dict[str, Any] | None:
    goes_on = by_rank_0(lambda: _goes_on(run, resume=resume))
    data = prepare_data(run.config, run.out / TOKENIZERS if goes_on else None)
    trainer = build_trainer(run, data)
    by_rank_0(lambda: _ready_folder(run, data, goes_on=goes_on))
    start = f"goes on from the newest checkpoint in {run.checkpoints}" if goes_on else "fresh"
    print_start(run.config, data, trainer, start=start, explicit=explicit, console=run.messages)
    fit(trainer, run.config, data)
    alone = after_ranks(trainer, lambda: _reopen(run, data))
    if alone is None:
        return None
    load_model_state(alone.model, load_weights(run.checkpoints / "best.pt"))
    return finish_run(run.config, data, alone, run.out)


def _reopen(run: AstroRun, data: AstroData) -> AstroTrainer:
    """Returns the trainer of a run that has ended on several ranks, in one process."""
    config = dataclasses.replace(run.config, training=dataclasses.replace(run.config.training, parallel=None))
    trainer = build_trainer(dataclasses.replace(run, config=config), data)
    trainer.train(val_loader=data.loader("val", config), resume_from="auto")  # it has no epoch left to train
    return trainer


def build_trainer(run: AstroRun, data: AstroData) -> AstroTrainer:
    """Seeds, and returns the trainer with a new model, its loader, bar, signals and log of steps.

    Raises:
        ConfigError: a setting is wrong.
    """
    config, tokenizers = run.config, data.tokenizers
    vocab, parallel = tokenizers.vocab(), parallel_of(config.training.parallel)
    training = dataclasses.replace(config.training, seed=config.seed, parallel=parallel)
    set_seed(config.seed)
    with as_settings("model", vars(config.model)):
        model = CausalTransformerLM(vocab.vocab_size, vocab.n_types, **vars(config.model), max_len=data.longest)
    if config.start_from_codebooks:
        initialise_from_codebooks(
            model,
            vocab,
            image_codebook=tokenizers.image.codebook,
            spectrum_codebook=tokenizers.spectrum.codebooks,
        )
    trainer = AstroTrainer(
        model,
        vocab,
        data.train_loader(config),
        training,
        image_codebook=tokenizers.image.codebook,
        spectrum_codebook=tokenizers.spectrum.codebooks,
        scalar_centers=tokenizers.scalar.codebook,
        device=run.device,
        output_dir=run.checkpoints,
        use_amp=config.mixed_precision is not None,
        amp_dtype="fp16" if config.mixed_precision == "fp16" else "bf16",
        use_ce=config.use_ce,
        hooks=[
            StepLogHook((run.out / "steps.jsonl").absolute()),  # what `treadle replay` compares with
            ProgressBarHook(status=lambda: _status(trainer), console=run.messages),
            SignalHook(lambda: trainer.save_checkpoint(f"ckpt_step_{trainer.global_step:08d}.pt")),
        ],
    )
    return trainer


def _status(trainer: AstroTrainer) -> str:
    if not trainer.history:
        return ""
    losses = [record["val_loss_total"] for record in trainer.history]
    return f"val {losses[-1]:.3f} (best {min(losses):.3f})"


def fit(trainer: AstroTrainer, config: AstroRunConfig, data: AstroData) -> None:
    """Trains to the number of epochs, from the newest checkpoint if there is one; at the end it does nothing."""
    started, done = time.perf_counter(), trainer.applied_steps
    try:
        with without_epoch_lines("astro"):
            trainer.train(val_loader=data.loader("val", config), resume_from="auto")
    except SystemExit:
        _log.info("saved at step %d; the same command goes on from here", trainer.global_step)
        raise
    if trainer.applied_steps > done:
        seconds = timedelta(seconds=round(time.perf_counter() - started))
        _log.info("trained in %s to the end of epoch %d; now the test and the pictures", seconds, trainer.epoch)


# -- the run folder -----------------------------------------------------------------------------------------------


def _goes_on(run: AstroRun, *, resume: bool) -> bool:
    """Returns whether the run of the folder goes on, and says what its rerun changes; writes nothing.

    Raises:
        ConfigError: it was started with settings that cannot change on the way.
        CheckpointError: another process trains in the folder.
    """
    refuse_other_run(run.out, "astro")
    check_free(run.checkpoints)  # before config.json is written: it may be that of a run that is going on
    with readable(run.out):
        stored = stored_json(run.out / "config.json")
        begun = any(run.checkpoints.glob("*.pt"))
    if not (resume and begun):
        return False
    if stored is not None:
        stored.pop("face", None)
        for sentence in explain_changes(changes(stored, run.config.to_dict()), str(run.out), free=FREE):
            _log.warning("%s", sentence)
    return True


def _ready_folder(run: AstroRun, data: AstroData, *, goes_on: bool) -> None:
    """Writes settings and tokenizers, and sets aside what an earlier run left."""
    out = run.out
    with writable(out):
        if not goes_on:
            # Else a killed fresh start would be taken for the finished run that was here before.
            (out / "metrics.json").unlink(missing_ok=True)
            if any(run.checkpoints.glob("*.pt")):
                set_aside(run.checkpoints)
        out.mkdir(parents=True, exist_ok=True)
        save_tokenizers(out / TOKENIZERS, data.tokenizers)
        write_text(json.dumps({"face": "astro", **run.config.to_dict()}, indent=2) + "\n", out / "config.json")
