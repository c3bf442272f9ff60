"""Report of ``treadle train text``: settings at the start, scores with baselines, samples, a plot and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from treadle.checkpoint.store import write_text
from treadle.data import steps_per_epoch
from treadle.errors import number_of
from treadle.functional import Trainer
from treadle.runs.figures import BLUE, INK, MUTED, ORANGE, epoch_axis, label_axes, new_figure, save_figure, style_axes
from treadle.runs.report import Picture, Report, Table
from treadle.runs.results import Results
from treadle.runs.start_block import precision_line
from treadle.text.generation import sample_texts
from treadle.text.ngrams import bits_per_byte, ngram_losses
from treadle.text.run_config import TextConfig
from treadle.text.run_data import Part, TextData

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_EXCERPT_LINES = 14
_CHOSEN_BY = "validation, which chose the epoch"


@dataclass(frozen=True)
class Tuned:
    """Fine-tuning of a run: its trainer, whose model has the best adapters, and the number of trained weights."""

    trainer: Trainer
    num_trained: int


# -- the block at the start ---------------------------------------------------------------------------------------


def decisions(config: TextConfig, data: TextData, trainer: Trainer) -> dict[str, str]:
    """Return the decisions and their reasons, as name -> string."""
    parts = data.parts
    topics, size = sum(len(part.topics) for part in parts.values()), sum(part.num_bytes for part in parts.values())
    steps = steps_per_epoch(data.train.loader(config.batch_size), config.training.accumulation_steps)
    weights = sum(p.numel() for p in trainer.model.parameters())
    return {
        "precision": precision_line(
            config.training.mixed_precision, trainer.device, setting="training.mixed_precision"
        ),
        "data": f"Python's manual (pydoc_data.topics): {topics} topics, {size:,} bytes, without duplicate passages",
        "split": f"by topic: {_counted(data.train, data.val, data.test)}; about statements, kept for LoRA: "
        f"{_counted(data.lora_train, data.lora_val, data.lora_test)}",
        "tokens": f"byte-level BPE of {data.tokenizer.get_vocab_size():,}; {data.train.blocks.num_targets:,} tokens "
        f"to train on, {data.val.blocks.num_targets:,} to validate, in blocks of {config.data.block_length}",
        "model": f"GPT-2, {weights:,} parameters, {number_of(config.model.n_layer, 'layer')} of width "
        f"{config.model.n_embd}",
        "schedule": f"{number_of(config.epochs, 'epoch')} of {number_of(steps, 'step')}, batches of "
        f"{config.batch_size}, learning rate {config.optimizer.lr:g}; then LoRA of rank {config.lora.r}, "
        f"{number_of(config.lora.epochs, 'epoch')}, {config.lora.lr:g}",
    }  # fmt: skip


def _counted(train: Part, val: Part, test: Part | None) -> str:
    tested = "" if test is None else f", {len(test.topics)} test"
    return f"{len(train.topics)} train, {len(val.topics)} validate{tested}"


# -- scores and samples -------------------------------------------------------------------------------------------


def score(trainer: Trainer, part: Part, *, batch_size: int | None = None) -> dict[str, Any]:
    """Return the loss per token of a split and derived scores; every token but the first end token counts."""
    return _score(float(trainer.evaluate(part.eval_loader(batch_size))["loss"]), part)


def _score(loss: float, part: Part) -> dict[str, Any]:
    """Return loss, perplexity (exp of the mean over all tokens) and bits per byte, which is tokenizer-independent."""
    tokens = part.blocks.num_targets
    return {
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "bits_per_byte": bits_per_byte(loss, num_tokens=tokens, num_bytes=part.num_bytes),
        "tokens": tokens,
        "bytes": part.num_bytes,
    }


def baselines(data: TextData, part: Part, *, seen: Sequence[Part]) -> dict[str, Any]:
    """Return the scores of n-gram models on the same tokens, counted on the splits that the model has seen."""
    counted = torch.cat([other.tokens_N for other in seen])
    losses = ngram_losses(counted, part.tokens_N, vocab_size=data.tokenizer.get_vocab_size())
    return {name: _score(loss, part) for name, loss in losses.items()}


def draw_samples(model: Any, tokenizer: Any, config: TextConfig) -> list[str]:
    """Sample texts as configured; the same settings and weights give the same texts."""
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
) -> Results:
    """Write the samples and draw the plot.

    Args:
        config: the settings of the run.
        data: its data.
        trainer: trainer of the first training.
        tuned: the fine-tuning.
        scores: ``val`` and ``before`` of the base, ``val_after`` and ``after`` of the fine-tuned model; ``test``,
            ``test_before`` and ``test_after`` if there are test splits.
        samples: samples from the base and from the fine-tuned model.
        out: the run folder.
    """
    metrics: dict[str, Any] = {
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
    }
    if data.test is not None:
        metrics |= {"test": scores["test"], "test_baselines": baselines(data, data.test, seen=[data.train])}
    if data.lora_test is not None:
        counted = baselines(data, data.lora_test, seen=[data.train, data.lora_train])
        metrics["lora"] |= {name: scores[name] for name in ("test_before", "test_after")} | {"test_baselines": counted}
    write_text(_samples_file(config, samples), out / "samples.txt")
    path = plot_losses(trainer.history, tuned.trainer.history, metrics=metrics, path=out / "pictures" / "loss.png")
    caption = (
        "Training and validation loss by epoch, of the first training and of the fine-tuning; the lines are the n-gram "
        "baselines."
    )
    return Results(metrics, [Picture(path, "Training", caption)])


def _samples_file(config: TextConfig, samples: Mapping[str, list[str]]) -> str:
    drawn = config.samples
    begins = f"prompt {drawn.prompt!r}" if drawn.prompt else "no prompt: the model begins a topic"
    blocks = [f"{begins}; temperature {drawn.temperature:g}, top_k {drawn.top_k}, seed {drawn.seed}"]
    for name, texts in samples.items():
        for number, text in enumerate(texts, start=1):
            blocks.append(f"===== {name}, {number} of {len(texts)} =====\n\n{text.strip()}")
    return "\n\n".join(blocks) + "\n"


# -- the tables ---------------------------------------------------------------------------------------------------


def results(metrics: Mapping[str, Any]) -> Report:
    """Return the tables of a run and excerpts of its samples from the contents of ``metrics.json``."""
    lora, name = metrics["lora"], f"GPT-2, epoch {metrics['best_epoch']}"
    base = {name: metrics["val"], **_named(metrics["baselines"])}
    if "test" in metrics:
        base = {name: metrics["test"], **_named(metrics["test_baselines"]), _CHOSEN_BY: metrics["val"]}
    tuned = {"before LoRA": lora["before"], "after LoRA": lora["after"], **_named(lora["baselines"])}
    if "test_after" in lora:
        tuned = {"before LoRA": lora["test_before"], "after LoRA": lora["test_after"]}
        tuned |= {**_named(lora["test_baselines"]), _CHOSEN_BY: lora["after"]}
    return Report(
        title="A small GPT-2 on Python's manual, then LoRA",
        lead="Scores on held-out topics, compared with n-gram models. Bits per byte do not depend on the tokenizer.",
        tables=[
            _table(f"Held-out {'test topics' if 'test' in metrics else 'topics'}", base),
            _table(f"Held-out {'test topics' if 'test_after' in lora else 'topics'} about statements", tuned),
        ],
        texts={f"samples, {name}": _excerpt(text) for name, text in metrics["excerpts"].items()},
        files=[
            "  samples.txt  pretrained/  best_model.pt  metrics.json  run.json  config.json  tokenizer.json  "
            "history.json",
            "  checkpoints/  lora/ (adapters and files of the fine-tuning)  page.html  pictures/loss.png",
        ],
    )  # fmt: skip


def _excerpt(text: str) -> str:
    lines = text.strip().splitlines()
    return "\n".join([*lines[:_EXCERPT_LINES], *(["…"] if len(lines) > _EXCERPT_LINES else [])])


def _named(scores: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{name} counts": scores[name] for name in reversed(list(scores))}


def _table(title: str, scores: Mapping[str, Mapping[str, float]]) -> Table:
    rows = [
        [name, f"{row['loss']:.3f}", f"{row['perplexity']:,.1f}", f"{row['bits_per_byte']:.3f}"]
        for name, row in scores.items()
    ]
    return Table(["", "nats per token", "perplexity", "bits per byte"], rows, title=title, width=24, about_first=False)


_History = Mapping[str, Sequence[Any]]


def plot_losses(base: _History, lora: _History, *, metrics: Mapping[str, Any], path: Path) -> Path:
    """Plot training and validation loss by epoch of both trainings, with the n-gram baselines as lines.

    Args:
        base: history of the first training: ``epoch``, ``train_loss``, ``eval_loss``.
        lora: history of the fine-tuning.
        metrics: contents of ``metrics.json``.
        path: output file, ending in ``.png``.

    Returns:
        The path.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(10.0, 4.4)
    left, right = figure.subplots(1, 2)
    _curves(left, base, metrics["best_epoch"])
    _levels(left, {f"{name}s counted": score["loss"] for name, score in metrics["baselines"].items()})
    label_axes(left, x="epoch", y="loss, nats per token", title="GPT-2 on the manual")
    _curves(right, lora, metrics["lora"]["best_epoch"])
    counted = metrics["lora"]["baselines"]
    _levels(right, {"before LoRA": metrics["lora"]["before"]["loss"], "bigrams counted": counted["bigram"]["loss"]})
    label_axes(right, x="epoch", title="LoRA on the topics about statements")
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=9)
    return save_figure(figure, path)


def _curves(axes: Axes, history: _History, best_epoch: int) -> None:
    style_axes(axes)
    epochs, val = list(history["epoch"]), list(history["eval_loss"])
    epoch_axis(axes, epochs)
    line: dict[str, Any] = {"linewidth": 1.8, "marker": "o", "markersize": 3.5}
    axes.plot(epochs, history["train_loss"], color=BLUE, label="training, with dropout", **line)
    axes.plot(epochs, val, color=ORANGE, label="validation", **line)
    if best_epoch in epochs:
        best = val[epochs.index(best_epoch)]
        axes.plot([best_epoch], [best], "o", color=ORANGE, markersize=9, fillstyle="none")
        axes.annotate(
            f"{best:.2f}", (best_epoch, best), xytext=(0, 9), textcoords="offset points", ha="center", fontsize=9,
            color=INK,
        )  # fmt: skip


def _levels(axes: Axes, levels: Mapping[str, float]) -> None:
    for name, level in levels.items():
        axes.axhline(level, color=MUTED, linewidth=1.0, linestyle="--")
        axes.annotate(
            f"{name}: {level:.2f}", (1.0, level), xycoords=("axes fraction", "data"), xytext=(0, 3),
            textcoords="offset points", ha="right", fontsize=9, color=MUTED,
        )  # fmt: skip
