"""chemprop at its defaults beside our message passing, on the same molecules, split, epochs and seeds, on the CPU.

python -m venv chemprop && chemprop/bin/pip install chemprop    # an environment for it alone
python benchmarks/molecules_peers.py --chemprop chemprop/bin/chemprop

The molecules are those of `nci`, the target is penalised logP, the split that of the data set; the epoch with the best
validation error is tested.

    ours      `gatedgcn` of graphs_science.py: 189,109 parameters, mean absolute error as loss, batches of 32
    chemprop  `chemprop train` with no option about the model, the loss (mean squared error), the batches (64) or the
              schedule, which goes over the same epochs

Every run has a folder below --runs and is not repeated when the command is given again. Several commands may train a
seed each; one with all seeds then writes the table.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import graphs_science
from machine import describe, write_result
from science import spread

from treadle.graphs import get_dataset

SET, OURS = "nci", "gatedgcn"
PARTS = ("train", "val", "test")
COUNT = """
import sys
from chemprop.models import load_model
print(sum(parameter.numel() for parameter in load_model(sys.argv[1]).parameters()))
"""


def write_molecules(path: Path, most: int | None) -> None:
    """Writes SMILES, target and part of every molecule, as both ways have them."""
    data = get_dataset(SET)
    parts = zip(PARTS, data.get_splits(), strict=True)
    rows = [(graph.smiles, graph.y.item(), part) for part, graphs in parts for graph in list(graphs)[:most]]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("smiles", "target", "split"), *rows])


def run_chemprop(command: str, molecules: Path, seed: int, epochs: int, folder: Path) -> dict[str, Any]:
    """Trains chemprop in a process, and returns its error on the test molecules from the predictions that it wrote."""
    result_file = folder / "result.json"
    if result_file.exists():
        return dict(json.loads(result_file.read_text(encoding="utf-8")))
    if next(folder.rglob("test_predictions.csv"), None) is None:
        shutil.rmtree(folder, ignore_errors=True)
        train_chemprop(command, molecules, seed, epochs, folder)
    predictions = next(folder.rglob("test_predictions.csv"))
    seconds = predictions.stat().st_mtime - (folder / "config.toml").stat().st_mtime
    true = {row["smiles"]: float(row["target"]) for row in _rows(molecules) if row["split"] == "test"}
    predicted = _rows(predictions)
    assert len(predicted) == len(true), "chemprop left out molecules"
    errors = [abs(float(row["target"]) - true[row["smiles"]]) for row in predicted]
    count = [str(Path(command).with_name("python")), "-c", COUNT, str(next(folder.rglob("best.pt")))]
    parameters = int(subprocess.run(count, check=True, capture_output=True, text=True).stdout.split()[-1])
    result = {
        "way": "chemprop", "seed": seed, "epochs": epochs, "test": statistics.mean(errors), "seconds": seconds,
        "parameters": parameters,
    }  # fmt: skip
    result_file.write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(f"{folder.name}: test {result['test']:.4f}", flush=True)
    return result


def train_chemprop(command: str, molecules: Path, seed: int, epochs: int, folder: Path) -> None:
    subprocess.run(
        [
            command, "train", "-i", str(molecules), "-o", str(folder), "--smiles-columns", "smiles",
            "--target-columns", "target", "--splits-column", "split", "--epochs", str(epochs), "--accelerator", "cpu",
            "--pytorch-seed", str(seed), "--num-workers", "0",
        ],
        check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def run_ours(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Trains our model as graphs_science.py does."""
    settings = argparse.Namespace(
        epochs={SET: options.epochs}, device="cpu", peer_device="cpu", runs=options.runs, batch_size=32,
        deadline=float("inf"), data=None, most=options.most,
    )  # fmt: skip
    found = graphs_science.run(SET, OURS, 2e-3, seed, settings)
    assert found is not None
    return {**found, "way": "ours"}


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chemprop", default="chemprop", help="the command of its environment")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--most", type=int, help="molecules of each part; default all")
    parser.add_argument("--runs", type=Path, default=Path("runs/molecules_peers"))
    options = parser.parse_args()
    if options.most is not None:
        options.runs = options.runs / f"most{options.most}"
    molecules = options.runs / "molecules.csv"
    if not molecules.exists():
        write_molecules(molecules, options.most)
    results: list[dict[str, Any]] = []
    for seed in options.seeds:
        folder = options.runs / f"chemprop-{seed}-{options.epochs}"
        results.append(run_chemprop(options.chemprop, molecules, seed, options.epochs, folder))
        results.append(run_ours(seed, options))
        rows = rows_of(results)
        counts = ", ".join(f"{sum(row['split'] == part for row in _rows(molecules)):,} {part}" for part in PARTS)
        notes = [f"Molecules: {counts}. Seconds are of a shared machine and compare nothing."]
        title = "chemprop at its defaults beside our message passing: penalised logP of NCI molecules"
        last = seed == options.seeds[-1]
        write_result("molecules_peers", title, list(rows[0]), rows, describe(), notes=notes, partial=not last)


if __name__ == "__main__":
    main()
