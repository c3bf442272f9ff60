"""chemprop with its defaults against our message passing, on the same molecules, split, epochs and seeds.

    python -m venv chemprop && chemprop/bin/pip install chemprop    # an environment for it alone
    python benchmarks/molecules_peers.py --chemprop chemprop/bin/python
    python benchmarks/molecules_peers.py --device cuda --jobs 6 --epochs 40    # where the same python has both

The molecules are those of `nci`, the target is penalised logP, the split that of the data set; the epoch with the best
validation error is tested.

    ours      `gatedgcn` of graphs_science.py: 189,109 parameters, mean absolute error as loss, batches of 32
    chemprop  `chemprop train` with no option about the model, the loss (mean squared error), the batches (64) or the
              schedule, which goes over the same epochs

Every run has a folder below --runs and is not repeated when the command is rerun; ours resumes in the middle. A table
with fewer seeds is marked.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import graphs_science
from machine import describe, write_result
from science import kept, options_of, parsed, pool_of, spread

from treadle.graphs import get_dataset

SET, OURS = "nci", "gatedgcn"
PARTS = ("train", "val", "test")
COUNT = """
import sys
from chemprop.models import load_model
print(sum(parameter.numel() for parameter in load_model(sys.argv[1]).parameters()))
"""


def write_molecules(path: Path, most: int | None) -> None:
    """Write SMILES, target and split of every molecule, as both ways use them."""
    data = get_dataset(SET)
    parts = zip(PARTS, data.get_splits(), strict=True)
    rows = [(graph.smiles, graph.y.item(), part) for part, graphs in parts for graph in list(graphs)[:most]]
    path.parent.mkdir(parents=True, exist_ok=True)

    def write(part: Path) -> None:
        with part.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("smiles", "target", "split"), *rows])

    kept(path, write)


def run_chemprop(seed: int, options: argparse.Namespace) -> dict[str, Any] | None:
    """Train chemprop in a process, and return its test error, computed from the predictions that it wrote."""
    folder = options.runs / f"chemprop-{seed}-{options.epochs}"
    result_file, molecules = folder / "result.json", options.molecules
    if result_file.exists():
        return dict(json.loads(result_file.read_text(encoding="utf-8")))
    if time.time() > options.deadline:
        return None
    if next(folder.rglob("test_predictions.csv"), None) is None:
        shutil.rmtree(folder, ignore_errors=True)
        train_chemprop(seed, folder, options)
    predictions = next(folder.rglob("test_predictions.csv"))
    seconds = predictions.stat().st_mtime - (folder / "config.toml").stat().st_mtime
    true = {row["smiles"]: float(row["target"]) for row in _rows(molecules) if row["split"] == "test"}
    predicted = _rows(predictions)
    assert len(predicted) == len(true), "chemprop left out molecules"
    errors = [abs(float(row["target"]) - true[row["smiles"]]) for row in predicted]
    count = [options.chemprop, "-c", COUNT, str(next(folder.rglob("best.pt")))]
    parameters = int(subprocess.run(count, check=True, capture_output=True, text=True).stdout.split()[-1])
    result = {
        "way": "chemprop", "seed": seed, "epochs": options.epochs, "test": statistics.mean(errors), "seconds": seconds,
        "parameters": parameters,
    }  # fmt: skip
    kept(result_file, lambda path: path.write_text(json.dumps(result) + "\n", encoding="utf-8"))
    print(f"{folder.name}: test {result['test']:.4f}", flush=True)
    return result


def train_chemprop(seed: int, folder: Path, options: argparse.Namespace) -> None:
    where = ("cpu",) if options.device == "cpu" else ("gpu", "--devices", "1")
    command = [
        options.chemprop, "-c", "from chemprop.cli.main import main; main()", "train",
        "-i", str(options.molecules), "-o", str(folder),
        "--smiles-columns", "smiles", "--target-columns", "target", "--splits-column", "split", "--epochs",
        str(options.epochs), "--pytorch-seed", str(seed), "--num-workers", "0", "--accelerator", *where,
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} returned {ended.returncode}:\n{ended.stderr[-4000:]}")


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def run_ours(seed: int, options: argparse.Namespace) -> dict[str, Any] | None:
    """Train our model as graphs_science.py does."""
    settings = argparse.Namespace(
        **{**vars(options), "epochs": {SET: options.epochs}, "peer_device": "cpu", "batch_size": 32, "data": None}
    )
    found = graphs_science.run(SET, OURS, 2e-3, seed, settings)
    return None if found is None else {**found, "way": "ours"}


def rows_of(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for way in ("ours", "chemprop"):
        runs = [result for result in results if result["way"] == way]
        if runs:
            rows.append({
                "way": way, "parameters": f"{runs[0]['parameters']:,}", "epochs": runs[0]["epochs"],
                "test MAE": spread([result["test"] for result in runs]), "seeds": len(runs),
                "seconds a run": f"{statistics.mean(result['seconds'] for result in runs):.0f}",
            })  # fmt: skip
    return rows


def main() -> None:
    parser = options_of("molecules_peers", __doc__)
    parser.add_argument("--chemprop", default=sys.executable, help="the python of its environment")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--most", type=int, help="molecules of each part; default all")
    parser.add_argument("--trained-on", help="the machine of runs that were brought here, for the notes")
    options = parsed(parser)
    if options.tiny:
        options.seeds, options.epochs, options.most = [0], 3, 40
    if options.most is not None:
        options.runs = options.runs / f"most{options.most}"
    options.molecules = options.runs / "molecules.csv"
    if not options.molecules.exists():
        write_molecules(options.molecules, options.most)
    with pool_of(options.jobs) as pool:
        each = [pool.submit(run, seed, options) for seed in options.seeds for run in (run_chemprop, run_ours)]
        results = [found for future in each if (found := future.result()) is not None]
    rows = rows_of(results)
    if options.tiny or not rows:
        print(rows)
        return
    counts = ", ".join(f"{sum(row['split'] == part for row in _rows(options.molecules)):,} {part}" for part in PARTS)
    notes = [f"Molecules: {counts}. Seconds are of runs beside each other and compare nothing."]
    notes += [f"Trained on {options.trained_on}."] if options.trained_on else []
    title = "chemprop at its defaults beside our message passing: penalised logP of NCI molecules"
    partial = len(results) < len(each)
    write_result("molecules_peers", title, list(rows[0]), rows, describe(), notes=notes, partial=partial)


if __name__ == "__main__":
    main()
