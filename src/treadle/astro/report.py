"""Report of ``treadle train astro``: settings at the start, scores against baselines, tables."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treadle.astro.cross_modal import CrossResult, cross_predict
from treadle.astro.page import draw
from treadle.astro.pictures import question_name
from treadle.astro.run_config import AstroRunConfig, loss_line
from treadle.astro.run_data import TOKENIZERS, AstroData
from treadle.astro.trainer import AstroTrainer
from treadle.data import steps_per_epoch
from treadle.errors import number_of
from treadle.hooks.files import to_json
from treadle.runs.report import Report, Table
from treadle.runs.results import Results
from treadle.runs.start_block import precision_line

_log = logging.getLogger("treadle.cli")

# -- the block at the start ---------------------------------------------------------------------------------------


def decisions(config: AstroRunConfig, data: AstroData, trainer: AstroTrainer) -> dict[str, str]:
    """Return the decisions and their reasons, as name -> string."""
    training, model, vocab = config.training, config.model, data.tokenizers.vocab()
    steps = steps_per_epoch(trainer.train_loader, training.grad_accum_steps)
    weights = sum(parameter.numel() for parameter in trainer.model.parameters())
    sizes = {name: [len(part[name]) for part in data.parts.values()] for name in data.train}
    return {
        "precision": precision_line(config.mixed_precision, trainer.device, setting="mixed_precision"),
        "data": "XDF images of galaxies, SpeX spectra of cool dwarfs, an SDSS catalogue of galaxies",
        "split": "by tile, dwarf and galaxy; train, validate, test: "
        + "; ".join(f"{name} {', '.join(f'{size:,}' for size in counts)}" for name, counts in sizes.items()),
        "tokens": f"{vocab.v_image} patches, {vocab.n_columns} columns of {vocab.scalar_bins} bins, "
        f"{len(vocab.spectrum_groups)} spectrum groups of {vocab.v_spectra} segments: {vocab.vocab_size:,} ids, "
        "fitted to the training objects",
        "model": f"causal transformer, {weights:,} parameters, {number_of(model.n_layers, 'layer')} of width "
        f"{model.d_model}",
        "loss": loss_line(config.to_dict()),
        "schedule": f"{number_of(training.epochs, 'epoch')} of {number_of(steps, 'step')}, batches of "
        f"{training.batch_size}, learning rate {training.learning_rate:g} after "
        f"{number_of(training.warmup_steps, 'step')} of warm-up, seed {config.seed}",
    }  # fmt: skip


# -- the end ------------------------------------------------------------------------------------------------------


def finish_run(config: AstroRunConfig, data: AstroData, trainer: AstroTrainer, out: Path) -> Results:
    """Test the weights of the trainer's model, predict one modality from another, and draw the plots.

    Args:
        config: the settings of the run.
        data: surveys and tokenizers.
        trainer: its model has the best weights.
        out: run folder; plots go to ``pictures/``.
    """
    _log.info("  one modality from another")
    asked = cross_predict(trainer.model, data.tokenizers, data.train, data.test, scalars_last=config.scalars_last > 0)
    _log.info("  losses and tokens")
    metrics = to_json({
        "epochs": trainer.epoch,
        "best_epoch": int(min(trainer.history, key=lambda record: record["val_loss_total"])["epoch"]),
        "val": trainer.evaluate(data.loader("val", config)),
        "test": trainer.evaluate(data.loader("test", config)),
        "tokenizers": data.tokenizers.quality(data.test.values()),
        "predictions": [as_values(result) for result in asked],
        "objects": {name: {part: len(of[name]) for part, of in data.parts.items()} for name in data.train},
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
    })  # fmt: skip
    _log.info("  plots")
    return Results(metrics, draw(data, trainer, asked, out / "pictures"))


def as_values(result: CrossResult) -> dict[str, Any]:
    """Return a prediction task and its scores in the format of ``metrics.json``."""
    question = result.question
    given = question.given if isinstance(question.given, str) else list(question.given)
    return {"survey": question.survey, "target": question.target, "given": given, **result.scores()}


# -- the tables ---------------------------------------------------------------------------------------------------


def results(metrics: Mapping[str, Any], out: Path) -> Report:
    """Return the tables of a run from the contents of ``metrics.json``."""
    test = metrics["test"]
    pictures = sorted(path.name for path in (out / "pictures").glob("*.png"))
    return Report(
        title="One modality from another",
        lead="A causal transformer on tokens of galaxy images (XDF), spectra of cool dwarfs (SpeX) and a galaxy "
        "catalogue (SDSS), tested on held-out objects. Variance explained: 0 is the mean of the training objects, 1 is "
        "exact. Ridge regression and trees see the values of the same tokens; the true bin is the best that a "
        "prediction in bins can reach.",
        tables=[_tokens_table(metrics["tokenizers"]), predictions_table(metrics["predictions"])],
        note=f"cross-entropy of the test sequences {test['loss_ce']:.3f} nats per token, epoch "
        f"{metrics['best_epoch']}.",
        files=[
            f"  page.html  metrics.json  run.json  config.json  {TOKENIZERS}  checkpoints/ (best.pt, ckpt_epoch_….pt)  "
            "steps.jsonl",
            f"  pictures/  {'  '.join(pictures)}",
        ],
    )  # fmt: skip


def predictions_table(predictions: Sequence[Mapping[str, Any]], part: str = "test") -> Table:
    """Return the scores of each prediction task on a split, from the contents of ``metrics.json``."""
    rows, notes = [], []
    peers = [name for name in _PEERS if all(name in found for found in predictions)]
    ahead = []
    for found in predictions:
        name = question_name(found["target"], found["given"])
        explained = [_number(found[method]["explained"]) for method in ("model", *peers, "bins")]
        ours, *theirs = (found[method]["explained"] for method in ("model", *peers))
        if None not in (ours, *theirs) and ours >= max(theirs, default=ours):
            ahead.append(name)
        errors = [f"{found[method]['rmse']:.3g}" for method in ("model", "ridge")]
        rows.append([name, f"{found['n']:,}", *explained, *errors])
        if "balanced_accuracy" in found["model"]:
            scores = ", ".join(
                f"{method} {found[method]['balanced_accuracy']:.3f}" for method in ("model", *peers, "mean")
            )
            notes.append(f"{name}, balanced accuracy of the classes: {scores}")
    notes.append(f"The model is at or above the best of {', '.join(peers)} on: {', '.join(ahead) or 'none'}.")
    columns = ["variance explained", "objects", "model", *peers, "true bin", "rmse, model", "rmse, ridge"]
    title = f"One modality from another, {part} objects"
    return Table(columns, rows, title=title, width=27, notes=notes, about_first=False)


_PEERS = ("ridge", "boosted trees", "extra trees")


def _tokens_table(quality: Mapping[str, Mapping[str, Any]]) -> Table:
    columns = [name for name in quality if "." in name]
    rows = []
    for name, found in quality.items():
        if name not in columns:
            cells = (found["codes"], found["codes"] - found["dead_codes"])
            shares = (f"{found['perplexity']:.1f}", _number(found["explained_variance"]))
            rows.append([name, *map(str, cells), *shares])
    worst = min(columns, key=lambda name: quality[name]["explained_variance"] or 0)
    bins, used, even, kept = (
        [quality[name][key] for name in columns]
        for key in ("codes", "dead_codes", "perplexity", "explained_variance")
    )  # fmt: skip
    rows.append([
        f"{len(columns)} columns, the minimum of each", str(min(bins)), str(min(bins) - max(used)), f"{min(even):.1f}",
        f"{_number(min(v for v in kept if v is not None))} ({worst})",
    ])  # fmt: skip
    names = ["", "codes", "used", "perplexity", "variance explained"]
    return Table(names, rows, title="Tokens of the test objects", width=26, about_first=False)


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.3f}"
