"""Benefit of pair encodings at long range: error by distance, with and without an attention bias.

    python benchmarks/graphs_distances.py          # minutes on two cores; writes a table and a picture
    python benchmarks/graphs_distances.py --tiny   # a trial, writes nothing

The task is `distance_regression` on random trees of 16 to 40 nodes: the number of hops between two nodes. All ways have
the same layers of message passing and attention, the same trees, epochs, seeds and schedule; they differ in the bias:

    none         no encoding
    spd          hops, one-hot
    resistance   effective resistance, a number; on a tree it equals the hops

The epoch with the best validation error is tested.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from machine import describe, write_result
from torch_geometric.loader import DataLoader

from treadle import load_weights
from treadle.graphs import GraphTrainer, get_dataset, get_loss_fn, get_model, get_optimizer, get_scheduler, set_seed
from treadle.runs.figures import BLUE, INK, ORANGE, label_axes, new_figure, save_figure, style_axes

BIASES: dict[str, dict[str, Any]] = {
    "none": {},
    "spd": {"relative": {"type": "spd", "num_buckets": 32, "max_distance": 31}},
    "resistance": {"relative": {"type": "resistance"}},
}
BINS = ((1, 3), (4, 6), (7, 9), (10, 13), (14, 40))
PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "graphs_distances.png"


def train_and_test(bias: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the parameters, and the distance and the error of every pair of the test set."""
    data = get_dataset(
        "synthetic_tree", pe_config=BIASES[bias], num_graphs=options.graphs, task="distance_regression",
        use_preprocessed_pe=False, num_workers=0,
    )  # fmt: skip
    set_seed(seed)
    model = get_model(
        "gps", data.num_features, data.num_classes, hidden_dim=32, num_layers=3, num_heads=4, dropout=0.0,
        task=data.level, relative_pe_dim=data.relative_pe_dim,
    )  # fmt: skip
    optimizer = get_optimizer(model, lr=2e-3)
    scheduler = get_scheduler(optimizer, total_epochs=options.epochs, warmup_epochs=min(2, options.epochs - 1))
    train, val, test = (
        DataLoader(part, 16, shuffle=part is data.train) for part in data.get_splits()
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trainer = GraphTrainer(
            model, optimizer, scheduler, get_loss_fn("regression", "mae"), device="cpu", grad_clip=1.0, log_every=0,
            checkpoint_dir=folder,
        )  # fmt: skip
        trainer.fit(train, val, options.epochs)
        model.load_state_dict(load_weights(Path(folder) / "best.pt"))
    distances = torch.cat([graph.y for graph in data.test])
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "distances": distances,
        "errors": (trainer.predict(test)[:, 0] - distances).abs(),
        "guess": (torch.cat([graph.y for graph in data.train]).median() - distances).abs(),
    }


def spread(values: Sequence[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.2f} ± {deviation:.2f}"


def in_bin(result: dict[str, Any], low: int, high: int, key: str = "errors") -> float:
    inside = (result["distances"] >= low) & (result["distances"] <= high)
    return float(result[key][inside].mean())


def rows_of(results: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    first = results["none"][0]
    columns = {f"{low} to {high} hops" if high < 40 else f"{low} or more": (low, high) for low, high in BINS}
    rows = []
    for bias, runs in results.items():
        row = {
            "bias": bias,
            "parameters": f"{runs[0]['parameters']:,}",
            "all": spread([float(r["errors"].mean()) for r in runs]),
        }
        rows.append(row | {name: spread([in_bin(run, *ends) for run in runs]) for name, ends in columns.items()})
    guess = {"bias": "guess: the median", "parameters": "", "all": f"{float(first['guess'].mean()):.2f}"}
    return [*rows, guess | {name: f"{in_bin(first, *ends, key='guess'):.2f}" for name, ends in columns.items()}]


def draw(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Plot the mean error by distance, with the spread over seeds shaded."""
    figure = new_figure(8.0, 4.4)
    axes = figure.subplots()
    style_axes(axes)
    distances = results["none"][0]["distances"]
    hops = [int(h) for h in distances.unique() if int((distances == h).sum()) >= 20]
    for (bias, runs), color in zip(results.items(), (INK, BLUE, ORANGE), strict=True):
        by_hop = torch.tensor([[in_bin(run, h, h) for h in hops] for run in runs])
        mean, deviation = by_hop.mean(0), by_hop.std(0, correction=0)
        axes.fill_between(hops, mean - deviation, mean + deviation, color=color, alpha=0.15, linewidth=0)
        label = "no bias" if bias == "none" else f"{bias} bias"
        axes.plot(hops, mean, color=color, linewidth=1.8, marker="o", markersize=4, label=label)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=10)
    label_axes(axes, x="hops between the two nodes", y="mean absolute error in hops", title="Distances in random trees")
    axes.set_title(f"mean of {len(results['none'])} seeds, ± their deviation", fontsize=9, color="#6b6b6b", loc="right")
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--graphs", type=int, default=600)
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--tiny", action="store_true", help="few trees, two epochs, no files")
    options = parser.parse_args()
    if options.tiny:
        options.seeds, options.graphs, options.epochs = [0], 40, 2
    torch.set_num_threads(1)
    results: dict[str, list[dict[str, Any]]] = {bias: [] for bias in BIASES}
    started = time.process_time()
    for seed in options.seeds:
        for bias in BIASES:
            results[bias].append(train_and_test(bias, seed, options))
            print(f"seed {seed}, {bias}: {float(results[bias][-1]['errors'].mean()):.3f} hops", flush=True)
    rows = rows_of(results)
    if options.tiny:
        print(rows)
        return
    title = (
        f"Error of the distance between two nodes of a random tree, in hops ({options.graphs} trees, {options.epochs} "
        f"epochs, {len(options.seeds)} seeds: mean ± standard deviation)"
    )
    machine = describe() | {"CPU seconds": f"{time.process_time() - started:.0f}"}
    write_result("graphs_distances", title, list(rows[0]), rows, machine)
    draw(results, PICTURE)


if __name__ == "__main__":
    main()
