"""Ablation in the astronomy pack: what a loss on the values behind the tokens adds to cross-entropy.

    python benchmarks/astro_ablation.py                     # three seeds of both, as long as `treadle train astro` each
    python benchmarks/astro_ablation.py training.epochs=2 data.max_rows=4000 repeats.xdf=2 repeats.spex=2   # short runs
    python benchmarks/astro_ablation.py --tiny              # a trial, writes nothing

Both ways are `treadle train astro` with the same settings, seed by seed: surveys, split, tokens, model, starting
weights, order of batches, schedule and steps. `cross-entropy` has no other term in its loss; `with values` has the
expected-value terms too, at the command's weights. Each way's epoch with the lowest validation loss is evaluated on the
test objects. Every run has a folder below --runs and resumes there if it was stopped.

The errors of expected values are those of the loss terms on the test sequences, each token given all tokens before
it: patches and segments over the variance of all their numbers, scalars over the variance of their column.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from machine import describe, write_result
from rich.console import Console

from treadle import load_weights
from treadle.astro.cross_modal import cross_predict
from treadle.astro.run_config import AstroRunConfig
from treadle.astro.run_data import AstroData, prepare_data
from treadle.astro.runs import PACK
from treadle.astro.trainer import AstroTrainer
from treadle.runs.pack import Run

WAYS = {"cross-entropy": ["training.meaningful_loss.enabled=false"], "with values": []}
TERMS = {"loss_ce": "cross-entropy, nats per token", "loss_img": "expected patches, squared error",
         "loss_sca": "expected scalars, squared error", "loss_spec": "expected segments, squared error"}  # fmt: skip


def run(way: str, seed: int, data: AstroData, options: argparse.Namespace) -> dict[str, Any]:
    """Train one model, or resume it, and return its result."""
    folder = options.runs / "-".join([way.replace(" ", "-"), str(seed), *options.settings])
    result_file = folder / "result.json"
    if result_file.exists():
        return dict(json.loads(result_file.read_text(encoding="utf-8")))
    config = settings(options, seed, WAYS[way])
    made = Run(config, folder, torch.device("cpu"), Console(quiet=True))
    trainer = PACK.build(made, data)
    started = time.perf_counter()
    PACK.fit(made, data, trainer)
    seconds = time.perf_counter() - started
    trainer.model.load_state_dict(load_weights(folder / "checkpoints" / "best.pt"))
    answers = cross_predict(trainer.model, data.tokenizers, data.train, data.test, scalars_last=config.scalars_last > 0)
    scores = {answer.question.target: answer.scores() for answer in answers}
    result = {
        "way": way, "seed": seed, "seconds": seconds, "steps": trainer.global_step,
        "best_epoch": min(trainer.history, key=lambda record: record["val_loss_total"])["epoch"],
        "explained": {target: score["model"]["explained"] for target, score in scores.items()},
        "ridge": {target: score["ridge"]["explained"] for target, score in scores.items()},
        **all_terms(trainer, data, settings(options, seed, [])),
    }  # fmt: skip
    result_file.write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(f"{folder.name}: {result['explained']}", flush=True)
    return result


def settings(options: argparse.Namespace, seed: int, changed: Sequence[str]) -> AstroRunConfig:
    return PACK.read_settings([*options.settings, f"seed={seed}", *changed], "cpu")


def all_terms(trainer: AstroTrainer, data: AstroData, config: AstroRunConfig) -> dict[str, float]:
    """Return all loss terms on the test sequences, including those not used in training."""
    tokenizers = data.tokenizers
    judge = AstroTrainer(
        trainer.model, trainer.vocab, [], {"total_steps": 1, "meaningful_loss": vars(config.training.meaningful_loss)},
        tokenizers.image.codebook, tokenizers.spectrum.codebooks, tokenizers.scalar.codebook, device="cpu",
    )  # fmt: skip
    values = judge.evaluate(data.loader("test", config))
    return {term: float(values[term]) for term in TERMS}


def rows_of(results: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    by_way = {way: [result for result in results if result["way"] == way] for way in WAYS}

    def row(name: str, picked: Any, ridge: str) -> dict[str, str]:
        cells = {way: _spread([picked(result) for result in found]) for way, found in by_way.items()}
        return {"test objects": name, **cells, "ridge": ridge}

    rows = [
        row(f"{target}, variance explained", lambda result, t=target: result["explained"][t], f"{score:.3f}")
        for target, score in results[0]["ridge"].items()
    ]
    rows += [row(name, lambda result, t=term: result[t], "") for term, name in TERMS.items()]
    rows.append(row("best epoch", lambda result: result["best_epoch"], ""))
    return rows


def _spread(values: Sequence[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{deviation}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="as `treadle train astro` takes them")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs/astro_ablation"))
    parser.add_argument("--tiny", action="store_true", help="one seed of few objects, and no table in a file")
    options = parser.parse_args()
    if options.tiny:
        options.runs, options.seeds = Path(tempfile.mkdtemp()), [0]
        options.settings = [
            "training.epochs=1", "training.warmup_steps=5", "data.max_rows=150", "model.d_model=16",
            "tokens.v_image=16", "tokens.v_spectra=16",
        ]  # fmt: skip
    torch.set_num_threads(1)
    data = prepare_data(settings(options, 0, []), None)
    # Seed by seed, so that an interrupted run leaves complete pairs.
    results = [run(way, seed, data, options) for seed in options.seeds for way in WAYS]
    rows = rows_of(results)
    if options.tiny:
        print(rows)
        return
    title = (
        f"One modality from another with and without a loss on values, {results[0]['steps']:,} steps "
        f"({' '.join(options.settings) or 'defaults'}): mean ± standard deviation over {len(options.seeds)} seeds"
    )
    write_result("astro_ablation", title, list(rows[0]), rows, describe())


if __name__ == "__main__":
    main()
