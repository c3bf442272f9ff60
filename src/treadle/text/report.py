"""What ``treadle train text`` shows and leaves: decisions at the start, scores with baselines, texts, a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from treadle.checkpoint.store import write_text
from treadle.data import steps_per_epoch
from treadle.functional import Trainer
from treadle.hooks.files import to_json
from treadle.runs.ranks import ranks_line
from treadle.runs.start_block import device_line, precision_line, print_block
from treadle.runs.tables import print_table
from treadle.text.generation import sample_texts
from treadle.text.ngrams import bits_per_byte, ngram_losses
from treadle.text.pictures import plot_losses
from treadle.text.run_config import TextConfig
from treadle.text.run_data import Part, TextData

_EXCERPT_LINES = 14


@dataclass(frozen=True)
class Tuned:
    """The fine-tuning of a run: its trainer, whose model has the best adapters, and how many weights were trained."""

    trainer: Trainer
    num_trained: int


# -- the block at the start ---------------------------------------------------------------------------------------


def print_start(
    config: TextConfig, data: TextData, trainer: Trainer, *, start: str, explicit: bool, console: Console
) -> None:
    """Prints what was decided and why, a line each."""
    parts = data.parts
    topics, size = sum(len(part.topics) for part in parts.values()), sum(part.num_bytes for part in parts.values())
    steps = steps_per_epoch(data.train.loader(config.batch_size), config.training.accumulation_steps)
    weights = sum(p.numel() for p in trainer.model.parameters())
    lines = {
        "device": device_line(trainer.device, explicit=explicit),
        "precision": precision_line(
            config.training.mixed_precision, trainer.device, setting="training.mixed_precision"
        ),
        "data": f"Python's manual (pydoc_data.topics): {topics} topics, {size:,} bytes, no passage twice",
        "split": f"by topic: {len(data.train.topics)} train, {len(data.val.topics)} validate; about statements, kept "
        f"for LoRA: {len(data.lora_train.topics)} train, {len(data.lora_val.topics)} validate",
        "tokens": f"byte-level BPE of {data.tokenizer.get_vocab_size():,}; {data.train.blocks.num_targets:,} tokens "
        f"to learn from, {data.val.blocks.num_targets:,} to validate, in blocks of {config.data.block_length}",
        "model": f"GPT-2, {weights:,} parameters, {config.model.n_layer} layers of width {config.model.n_embd}",
        "schedule": f"{config.epochs} epochs of {steps} steps, batches of {config.batch_size}, learning rate "
        f"{config.optimizer.lr:g}; then LoRA of rank {config.lora.r}, {config.lora.epochs} epochs, {config.lora.lr:g}",
        **ranks_line(config.training.parallel),
        "start": start,
    }  # fmt: skip
    print_block(lines, console)


# -- scores and texts ---------------------------------------------------------------------------------------------


def score(trainer: Trainer, part: Part, *, batch_size: int | None = None) -> dict[str, Any]:
    """Returns the loss per token of a part, and what follows from it; every token but the first end token counts."""
    return _score(float(trainer.evaluate(part.eval_loader(batch_size))["loss"]), part)


def _score(loss: float, part: Part) -> dict[str, Any]:
    """Perplexity is exp of the mean over all tokens; bits per byte do not depend on the tokenizer."""
    tokens = part.blocks.num_targets
    return {
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "bits_per_byte": bits_per_byte(loss, num_tokens=tokens, num_bytes=part.num_bytes),
        "tokens": tokens,
        "bytes": part.num_bytes,
    }


def baselines(data: TextData, part: Part, *, seen: Sequence[Part]) -> dict[str, Any]:
    """Returns the scores of n-gram models on the same tokens, counted on the parts a model has seen by then."""
    counted = torch.cat([other.tokens_N for other in seen])
    losses = ngram_losses(counted, part.tokens_N, vocab_size=data.tokenizer.get_vocab_size())
    return {name: _score(loss, part) for name, loss in losses.items()}


def draw_samples(model: Any, tokenizer: Any, config: TextConfig) -> list[str]:
    """Draws texts by the settings; the same settings and weights give the same texts."""
    samples = config.samples
    return sample_texts(
        model, tokenizer, prompt=samples.prompt, count=samples.count, num_tokens=samples.num_tokens,
        context=config.data.block_length, generator=torch.Generator().manual_seed(samples.seed),
        temperature=samples.temperature, top_k=samples.top_k,
    )  # fmt: skip


def finish_run(
    config: TextConfig,
    data: TextData,
    *,
    trainer: Trainer,
    tuned: Tuned,
    scores: Mapping[str, dict[str, Any]],
    samples: Mapping[str, list[str]],
    out: Path,
) -> dict[str, Any]:
    """Writes samples, picture, and ``metrics.json`` last of all.

    Args:
        config: the settings of the run.
        data: its texts.
        trainer: of the first training.
        tuned: the fine-tuning.
        scores: ``val`` and ``before`` of the base, ``val_after`` and ``after`` of the fine-tuned model.
        samples: texts of the base and of the fine-tuned model.
        out: the run folder.

    Returns:
        What was written to ``metrics.json``.
    """
    metrics = {
        "treadle": version("treadle"),
        "epochs": trainer.epoch,
        "best_epoch": trainer.best_epoch,
        "val": scores["val"],
        "baselines": baselines(data, data.val, seen=[data.train]),
        "lora": {
            "epochs": tuned.trainer.epoch,
            "best_epoch": tuned.trainer.best_epoch,
            "trained_parameters": tuned.num_trained,
            "before": scores["before"],
            "after": scores["after"],
            "baselines": baselines(data, data.lora_val, seen=[data.train, data.lora_train]),
            "val_after": scores["val_after"],
        },
        "excerpts": {name: texts[0] for name, texts in samples.items()},
        "topics": {name: list(part.topics) for name, part in data.parts.items()},
        "device": str(trainer.device),
        "corpus": data.fingerprint,
        "config": config.to_dict(),
    }
    write_text(_samples_file(config, samples), out / "samples.txt")
    plot_losses(trainer.history, tuned.trainer.history, metrics=metrics, path=out / "pictures" / "loss.png")
    # The last file of a run: where it is and has these settings, nothing is left to do.
    write_text(json.dumps(to_json(metrics), indent=2, allow_nan=False) + "\n", out / "metrics.json")
    return metrics


def _samples_file(config: TextConfig, samples: Mapping[str, list[str]]) -> str:
    drawn = config.samples
    begins = f"prompt {drawn.prompt!r}" if drawn.prompt else "no prompt: the model begins a topic"
    blocks = [f"{begins}; temperature {drawn.temperature:g}, top_k {drawn.top_k}, seed {drawn.seed}"]
    for name, texts in samples.items():
        for number, text in enumerate(texts, start=1):
            blocks.append(f"===== {name}, {number} of {len(texts)} =====\n\n{text.strip()}")
    return "\n\n".join(blocks) + "\n"


# -- the table ----------------------------------------------------------------------------------------------------


def print_results(metrics: Mapping[str, Any], out: Path, console: Console) -> None:
    """Prints the short tables of a run and an excerpt of its texts from what ``metrics.json`` holds."""
    lora = metrics["lora"]
    console.print()
    rows = {f"GPT-2, epoch {metrics['best_epoch']}": metrics["val"], **_named(metrics["baselines"])}
    print_table(_table("Topics kept out of training", rows), console)
    console.print()
    rows = {"before LoRA": lora["before"], "after LoRA": lora["after"], **_named(lora["baselines"])}
    print_table(_table("Topics about statements, kept out too", rows), console)
    for name, text in metrics["excerpts"].items():
        console.print(f"\n[bold]drawn, {name}[/bold]")
        lines = text.strip().splitlines()
        for line in [*lines[:_EXCERPT_LINES], *(["…"] if len(lines) > _EXCERPT_LINES else [])]:
            console.print(Text(f"  {line}".rstrip()), soft_wrap=True)
    console.print(f"\nFiles in {out}:", soft_wrap=True)
    for line in (
        "  samples.txt  pretrained/  best_model.pt  metrics.json  config.json  tokenizer.json  history.json",
        "  checkpoints/  lora/ (adapters and files of the fine-tuning)  pictures/loss.png",
    ):
        console.print(line, soft_wrap=True, markup=False)


def _named(scores: Mapping[str, Any]) -> dict[str, Any]:
    return {f"counting: {name}": scores[name] for name in reversed(list(scores))}


def _table(title: str, rows: Mapping[str, Mapping[str, float]]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("", min_width=24)
    for name in ("nats per token", "perplexity", "bits per byte"):
        table.add_column(name, justify="right")
    for name, row in rows.items():
        table.add_row(name, f"{row['loss']:.3f}", f"{row['perplexity']:,.1f}", f"{row['bits_per_byte']:.3f}")
    return table
