"""What ``treadle train astro`` shows and leaves: decisions at the start, scores beside simple methods, tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from treadle.astro.cross_modal import CrossResult, cross_predict
from treadle.astro.page import draw_and_write
from treadle.astro.pictures import question_name
from treadle.astro.run_config import AstroRunConfig, loss_line
from treadle.astro.run_data import TOKENIZERS, AstroData
from treadle.astro.trainer import AstroTrainer
from treadle.checkpoint.store import write_text
from treadle.data import steps_per_epoch
from treadle.hooks.files import to_json
from treadle.runs.ranks import ranks_line
from treadle.runs.start_block import device_line, precision_line, print_block
from treadle.runs.tables import print_table

# -- the block at the start ---------------------------------------------------------------------------------------


def print_start(
    config: AstroRunConfig, data: AstroData, trainer: AstroTrainer, *, start: str, explicit: bool, console: Console
) -> None:
    """Prints what was decided and why, a line each."""
    training, model, vocab = config.training, config.model, data.tokenizers.vocab()
    steps = steps_per_epoch(trainer.train_loader, training.grad_accum_steps)
    weights = sum(parameter.numel() for parameter in trainer.model.parameters())
    sizes = {name: [len(part[name]) for part in data.parts.values()] for name in data.train}
    lines = {
        "device": device_line(trainer.device, explicit=explicit),
        "precision": precision_line(config.mixed_precision, trainer.device, setting="mixed_precision"),
        "data": "XDF pictures of galaxies, SpeX spectra of cool dwarfs, an SDSS catalogue of galaxies",
        "split": "by tile, dwarf and galaxy; train, validate, test: "
        + "; ".join(f"{name} {', '.join(f'{size:,}' for size in counts)}" for name, counts in sizes.items()),
        "tokens": f"{vocab.v_image} patches, {vocab.n_columns} columns of {vocab.scalar_bins} bins, "
        f"{len(vocab.spectrum_groups)} spectrum groups of {vocab.v_spectra} segments: {vocab.vocab_size:,} ids, "
        "fitted to the training objects",
        "model": f"causal transformer, {weights:,} parameters, {model.n_layers} layers of width {model.d_model}",
        "loss": loss_line(config.to_dict()),
        "schedule": f"{training.epochs} epochs of {steps} steps, batches of {training.batch_size}, learning rate "
        f"{training.learning_rate:g} after {training.warmup_steps} steps of warm-up, seed {config.seed}",
        **ranks_line(training.parallel),
        "start": start,
    }  # fmt: skip
    print_block(lines, console)


# -- the end ------------------------------------------------------------------------------------------------------


def finish_run(config: AstroRunConfig, data: AstroData, trainer: AstroTrainer, out: Path) -> dict[str, Any]:
    """Tests the weights that the trainer's model has, asks it for one modality from others, draws, and writes.

    Args:
        config: the settings of the run.
        data: surveys and tokenizers.
        trainer: its model has the best weights.
        out: gets ``pictures/``, ``page.html``, and ``metrics.json`` last of all.

    Returns:
        What was written to ``metrics.json``.
    """
    results = cross_predict(trainer.model, data.tokenizers, data.train, data.test, scalars_last=config.scalars_last > 0)
    metrics = to_json({
        "treadle": version("treadle"),
        "epochs": trainer.epoch,
        "best_epoch": _best_epoch(trainer),
        "val": trainer.evaluate(data.loader("val", config)),
        "test": trainer.evaluate(data.loader("test", config)),
        "tokenizers": data.tokenizers.quality(data.test.values()),
        "predictions": [as_values(result) for result in results],
        "objects": {name: {part: len(of[name]) for part, of in data.parts.items()} for name in data.train},
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "device": str(trainer.device),
        "config": config.to_dict(),
    })  # fmt: skip
    draw_and_write(data, trainer, results, metrics, out)
    # The last file of a run: where it is and has these settings, nothing is left to do.
    write_text(json.dumps(metrics, indent=2, allow_nan=False) + "\n", out / "metrics.json")
    return dict(metrics)


def _best_epoch(trainer: AstroTrainer) -> int:
    return int(min(trainer.history, key=lambda record: record["val_loss_total"])["epoch"])


def as_values(result: CrossResult) -> dict[str, Any]:
    """Returns a question and the scores of its answers, as ``metrics.json`` has them."""
    question = result.question
    given = question.given if isinstance(question.given, str) else list(question.given)
    return {"survey": question.survey, "target": question.target, "given": given, **result.scores()}


# -- the table ----------------------------------------------------------------------------------------------------


def print_results(metrics: Mapping[str, Any], out: Path, console: Console) -> None:
    """Prints the short tables of a run from what ``metrics.json`` holds."""
    console.print()
    print_table(_tokens_table(metrics["tokenizers"]), console)
    console.print()
    print_predictions(metrics["predictions"], console)
    test = metrics["test"]
    console.print(f"\ncross-entropy of the test sequences {test['loss_ce']:.3f} nats per token, epoch "
                  f"{metrics['best_epoch']}. Files in {out}:", soft_wrap=True)  # fmt: skip
    for line in (
        f"  page.html  metrics.json  config.json  {TOKENIZERS}  checkpoints/ (best.pt, ckpt_epoch_….pt)  steps.jsonl",
        f"  pictures/  {'  '.join(sorted(path.name for path in (out / 'pictures').glob('*.png')))}",
    ):
        console.print(line, soft_wrap=True, markup=False)


def print_predictions(predictions: Sequence[Mapping[str, Any]], console: Console, *, part: str = "test") -> None:
    """Prints how well each question about a part was answered, from what ``metrics.json`` holds."""
    print_table(_predictions_table(predictions, part), console)
    for prediction in predictions:
        if "balanced_accuracy" in prediction["model"]:
            scores = ", ".join(
                f"{method} {prediction[method]['balanced_accuracy']:.3f}" for method in ("model", "ridge", "mean")
            )
            name = question_name(prediction["target"], prediction["given"])
            console.print(f"{name}, balanced accuracy of the classes: {scores}", soft_wrap=True)


def _tokens_table(quality: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(title="Tokens of the test objects", title_justify="left", box=None, pad_edge=False)
    table.add_column("", min_width=26)
    for name in ("codes", "used", "perplexity", "variance explained"):
        table.add_column(name, justify="right")
    columns = [name for name in quality if "." in name]
    for name, found in quality.items():
        if name not in columns:
            cells = (found["codes"], found["codes"] - found["dead_codes"])
            shares = (f"{found['perplexity']:.1f}", _number(found["explained_variance"]))
            table.add_row(name, *map(str, cells), *shares)
    worst = min(columns, key=lambda name: quality[name]["explained_variance"] or 0)
    bins, used, even, kept = (
        [quality[name][key] for name in columns]
        for key in ("codes", "dead_codes", "perplexity", "explained_variance")
    )  # fmt: skip
    table.add_row(
        f"{len(columns)} columns, the least of each", str(min(bins)), str(min(bins) - max(used)), f"{min(even):.1f}",
        f"{_number(min(v for v in kept if v is not None))} ({worst})",
    )  # fmt: skip
    return table


def _predictions_table(predictions: Sequence[Mapping[str, Any]], part: str) -> Table:
    table = Table(title=f"One modality from another, {part} objects", title_justify="left", box=None, pad_edge=False)
    table.add_column("variance explained, rmse", min_width=27)
    for name in ("objects", "model", "ridge", "true bin", "rmse", "ridge"):
        table.add_column(name, justify="right")
    for found in predictions:
        explained = [_number(found[method]["explained"]) for method in ("model", "ridge", "bins")]
        errors = [f"{found[method]['rmse']:.3g}" for method in ("model", "ridge")]
        table.add_row(question_name(found["target"], found["given"]), f"{found['n']:,}", *explained, *errors)
    return table


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.3f}"
