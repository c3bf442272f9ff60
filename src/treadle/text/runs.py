"""The steps of ``treadle train text``: settings, data, training, fine-tuning; what is shown is in ``text_report``."""

from __future__ import annotations

import logging
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from treadle.capture.compile import check_compile, compile_model
from treadle.checkpoint.ranks import held_by_rank_0
from treadle.checkpoint.store import load_weights
from treadle.data import steps_per_epoch
from treadle.device import get_device
from treadle.distributed.state_names import load_model_state, model_state
from treadle.engine.settings import Capture, check_capture
from treadle.functional import Trainer
from treadle.hooks import CheckpointingHook, StepLogHook
from treadle.hooks.bar import ProgressBarHook
from treadle.optim.adamw import build_optimizer, build_warmup_cosine
from treadle.runs.folder import finished_metrics, refuse_other_run
from treadle.runs.overrides import apply_overrides, leaves
from treadle.runs.ranks import after_ranks, by_rank_0, device_of_rank, parallel_of
from treadle.runs.setting_names import as_settings, settings_named
from treadle.runs.start_block import cpu_threads, print_settings
from treadle.seed import set_seed
from treadle.text.extras import without_progress_bars
from treadle.text.folder import BEST, open_folder, start_line
from treadle.text.model import add_lora, build_gpt2
from treadle.text.report import Tuned, draw_samples, finish_run, print_results, print_start, score
from treadle.text.run_config import TextConfig
from treadle.text.run_data import Part, TextData, check_same_on_ranks, prepare_data
from treadle.text.tokenizer import as_transformers

_log = logging.getLogger("treadle.cli")


@dataclass(frozen=True)
class TextRun:
    """What both parts of a run share."""

    config: TextConfig
    data: TextData
    out: Path
    device: torch.device
    messages: Console


def run_text(
    settings: Sequence[str], *, out: Path, device: str | None, resume: bool, results: Console, messages: Console
) -> dict[str, Any] | None:
    """Trains and fine-tunes, or goes on with it, and writes the run folder; a finished run shows its results.

    Args:
        settings: texts ``key=value``.
        out: the run folder.
        device: None takes CUDA, then MPS, then the CPU.
        resume: go on from the folder's checkpoints.
        results: where the summary goes.
        messages: where progress goes.

    Returns:
        What ``metrics.json`` holds; None on other ranks than the first.

    Raises:
        ConfigError: a setting is wrong, or not that of the run in this folder.
        CheckpointError: no checkpoint of the folder is intact, or a file cannot be written.
        NonFiniteError: training diverged.
        ImportError: a package of the extra ``hf`` is missing.
    """
    where = device_of_rank(device)
    config = read_settings(settings, device)
    finished = by_rank_0(lambda: finished_metrics(out, config.to_dict()) if resume else None)
    if finished is not None:
        print_results(finished, out, results)
        return finished
    with cpu_threads(config.threads), without_progress_bars(), settings_named(dict(leaves(config))):
        run = TextRun(config, prepare_data(config), out, where, messages)
        metrics = _run(run, resume=resume, explicit=device is not None)
    if metrics is not None:
        print_results(metrics, out, results)
    return metrics


def read_settings(settings: Sequence[str], device: str | None) -> TextConfig:
    """Returns the defaults of a device with texts ``key=value`` applied.

    Raises:
        ConfigError: a key is unknown, or a value is wrong.
    """
    return apply_overrides(TextConfig.for_device(get_device(device)), settings)


def show_settings(settings: Sequence[str], device: str | None, console: Console) -> None:
    """Prints every setting with its value, one ``key=value`` a line."""
    print_settings(read_settings(settings, device), console)


def _run(run: TextRun, *, resume: bool, explicit: bool) -> dict[str, Any] | None:
    by_rank_0(lambda: refuse_other_run(run.out, "text"))
    check_same_on_ranks(run.data)
    model, trainer = build_base(run, parallel=parallel_of(run.config.training.parallel))
    by_rank_0(lambda: open_folder(run.config, run.data, run.out, resume=resume))
    with held_by_rank_0(run.out):
        print_start(run.config, run.data, trainer, start=start_line(run.out), explicit=explicit, console=run.messages)
        _fit_base(trainer, run)
        alone = after_ranks((model, trainer), lambda: _reopen(run))
        return None if alone is None else _tune_and_report(*alone, run)


def _reopen(run: TextRun) -> tuple[Any, Trainer]:
    """Returns model and trainer of a first training that has ended on several ranks, in one process."""
    model, trainer = build_base(run)
    _fit_base(trainer, run)  # it has no epoch left to train
    return model, trainer


def _tune_and_report(model: Any, trainer: Trainer, run: TextRun) -> dict[str, Any]:
    load_model_state(model, load_weights(run.out / BEST))
    _add_tokenizer(run, run.out)
    scores = {"val": score(trainer, run.data.val), "before": score(trainer, run.data.lora_val)}
    samples = {"base": draw_samples(model, run.data.tokenizer, run.config)}
    tuned = _fine_tune(model, run)
    scores["after"] = score(tuned.trainer, run.data.lora_val)
    scores["val_after"] = score(tuned.trainer, run.data.val)
    samples["fine-tuned"] = draw_samples(tuned.trainer.model, run.data.tokenizer, run.config)
    return finish_run(run.config, run.data, trainer=trainer, tuned=tuned, scores=scores, samples=samples, out=run.out)


# -- the two trainings --------------------------------------------------------------------------------------------


def build_base(run: TextRun, *, parallel: str | None = None) -> tuple[Any, Trainer]:
    """Returns a GPT-2 with its initial weights and the trainer of its first training.

    Args:
        run: what to build.
        parallel: how the model is spread over ranks.
    """
    config = run.config
    set_seed(config.seed)
    with as_settings("model", vars(config.model)):
        model = build_gpt2(config.data.vocab_size, n_positions=config.data.block_length, **vars(config.model))
    steps = config.epochs * _steps_per_epoch(run.data.train, config)
    with as_settings("optimizer", vars(config.optimizer)):
        optimizer = build_optimizer(model.to(run.device), **vars(config.optimizer))
    schedule = config.schedule
    with as_settings("schedule", vars(schedule)):
        scheduler = build_warmup_cosine(
            optimizer, warmup_steps=schedule.warmup_steps, total_steps=steps, min_lr_scale=schedule.min_lr_scale
        )
    compile_model(model, check_compile(config.training.compile))
    capture = check_capture(config.training.capture)
    return model, _build_trainer(model, optimizer, scheduler=scheduler, run=run, parallel=parallel, capture=capture)


def build_lora(model: Any, run: TextRun) -> Trainer:
    """Returns the trainer of the fine-tuning; the model gets adapters in place, and only they are trained.

    It starts from seeds of its own: whether the first training ran in this process or an earlier one changes nothing.
    """
    config = run.config
    set_seed(config.seed)
    with as_settings("lora", vars(config.lora)):
        adapted = add_lora(model, r=config.lora.r, alpha=config.lora.alpha, dropout=config.lora.dropout)
        optimizer = build_optimizer(adapted.to(run.device), lr=config.lora.lr, weight_decay=0.0)
    steps = config.lora.epochs * _steps_per_epoch(run.data.lora_train, config)
    # Updates that start at 0 need no warm-up.
    scheduler = build_warmup_cosine(
        optimizer, warmup_steps=0, total_steps=steps, min_lr_scale=config.schedule.min_lr_scale
    )
    capture: Capture = "auto" if config.training.capture else False  # a refusal here would come after the training
    return _build_trainer(adapted, optimizer, scheduler=scheduler, run=run, capture=capture)


def _steps_per_epoch(part: Part, config: TextConfig) -> int:
    return steps_per_epoch(part.loader(config.batch_size), config.training.accumulation_steps)


def _build_trainer(
    model: Any, optimizer: Any, *, scheduler: Any, run: TextRun, capture: Capture, parallel: str | None = None
) -> Trainer:
    training = run.config.training
    trainer = Trainer(
        model,
        optimizer,
        None,  # the model computes its loss
        {
            "training": {
                "max_grad_norm": training.grad_clip,
                "gradient_accumulation_steps": training.accumulation_steps,
                "mixed_precision": training.mixed_precision,
                "scheduler_step_per_batch": True,
            }
        },
        run.device,
        scheduler,
        hooks=[
            StepLogHook("steps.jsonl"),
            ProgressBarHook(status=lambda: _status(trainer), console=run.messages),
            CheckpointingHook(training.checkpoint_interval, exit_signals=(signal.SIGTERM, signal.SIGINT)),
        ],
        parallel=parallel,
        capture=capture,
    )
    return trainer


def _status(trainer: Trainer) -> str:
    losses = trainer.history.get("eval_loss")
    if not losses or trainer.best_metric is None:
        return ""
    return f"val {losses[-1]:.3f} (best {trainer.best_metric:.3f})"


def _fit_base(trainer: Trainer, run: TextRun) -> None:
    fit(trainer, run, train=run.data.train, val=run.data.val, epochs=run.config.epochs, folder=run.out)


def fit(trainer: Trainer, run: TextRun, *, train: Part, val: Part, epochs: int, folder: Path) -> None:
    """Trains to the number of epochs, from where the checkpoints in the folder are; at the end it does nothing."""
    try:
        batches = train.loader(run.config.batch_size, seed=run.config.seed)
        trainer.train(batches, epochs, val.loader(), folder, save_freq=None)
    except SystemExit:
        _log.info("saved at step %d; the same command goes on from here", trainer.step)
        raise


def _fine_tune(model: Any, run: TextRun) -> Tuned:
    trainer = build_lora(model, run)
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    part = run.data.lora_train
    _log.info(
        "fine-tuning %s adapter weights by LoRA on %d topics about statements, %s tokens",
        f"{trained:,}", len(part.topics), f"{part.blocks.num_targets:,}",
    )  # fmt: skip
    folder = run.out / "lora"
    fit(trainer, run, train=part, val=run.data.lora_val, epochs=run.config.lora.epochs, folder=folder)
    # The file holds what was trained; the base is in the model already.
    load_model_state(trainer.model, load_weights(folder / BEST), kept=model_state(trainer.model))
    _add_tokenizer(run, folder)
    return Tuned(trainer, trained)


def _add_tokenizer(run: TextRun, folder: Path) -> None:
    """Puts the tokenizer beside the weights that the trainer wrote for ``from_pretrained``."""
    as_transformers(run.data.tokenizer).save_pretrained(folder / "pretrained")
