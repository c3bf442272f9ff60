"""Benefit of encodings on real molecules, and comparison of our models with those of torch_geometric.

    python benchmarks/graphs_science.py                               # hours on two cores
    python benchmarks/graphs_science.py --sets nci --epochs 8         # a short one; also with --budget-minutes 20
    python benchmarks/graphs_science.py --write-data science.pt       # where rdkit and molsets are; then, elsewhere:
    python benchmarks/graphs_science.py --data science.pt --device cuda --jobs 8 --peer-device cpu --peer-jobs 24
    python benchmarks/graphs_science.py --tiny                        # a trial, writes nothing

Target: penalised logP; `nci` with 3,992 / 499 / 499 molecules, `zinc_clean_leads` with 10,000 / 1,000 / 1,000. Ways:

    gatedgcn       `treadle train graphs model=gatedgcn`: message passing, 20 return probabilities at each node,
                   standardised by the training graphs, mean and sum as readout
    without        the same without encodings
    transformer    `model=light`: the same with attention that hop distances of the pairs bias, in a smaller width
    peer gps       the model of torch_geometric's example graph_gps.py: GPSConv layers with GIN-E, batch normalisation
                   and 20 return probabilities at each node
    peer gine      GINEConv layers with the input and the head of that example
    peer gatedgcn  ResGatedGraphConv layers, likewise

The peers are no faster on the GPU: twelve GPS models in parallel took as long per epoch as each does on a core. Runs
begin in the order of their time, the longest first, so that no core waits for a last one; our models are dealt out to
all GPUs.

All have four layers, a width that gives them about as many parameters, and the same epochs, batches, loss (mean
absolute error), AdamW, schedule and seeds; the epoch with the best validation error is tested. The learning rate of a
way is the better of 1e-3 and 2e-3 by its validation error over the seeds. Every run has a folder below --runs and
resumes there if it was stopped, by --budget-minutes or otherwise: running the same command again completes the table,
which names what is missing until then.
On CUDA our models are replayed as one graph a step, in padded batches; the peers cannot be.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from machine import describe, write_result
from peers_pyg import WALK_WIDTH, PeerGNN, PeerGPS
from science import kept, options_of, parsed, pool_of, spread
from torch import Tensor, nn

from treadle import load_weights
from treadle.graphs import (
    GraphTrainer,
    encode_graphs,
    get_dataset,
    get_loss_fn,
    get_model,
    get_optimizer,
    get_scheduler,
    graph_statistics,
    parse_pe_config,
    set_seed,
)

Result = dict[str, Any]

SETS = ("nci", "zinc_clean_leads")
OURS, PEERS = ("gatedgcn", "without", "transformer"), ("peer gps", "peer gine", "peer gatedgcn")
WAYS = (*OURS, *PEERS)
EPOCHS = {"nci": 40, "zinc_clean_leads": 15}
RATES = (1e-3, 2e-3)
LONGEST = ("peer gps", "peer gatedgcn", "transformer", "peer gine", "gatedgcn", "without")
LAYERS, HEADS = 4, 4
WALKS: dict[str, Any] = {"node": {"type": "rwse", "rwse": {"scales": tuple(range(1, 21))}}}
ENCODINGS: dict[str, Any] = {"without": "none", "transformer": {**WALKS, "relative": {}}}  # of the others, the walks
WANTED = 189_109  # parameters of gatedgcn


def build(way: str, train: Encoded) -> nn.Module:
    """Return the model of a way; a peer in the width whose number of parameters is nearest to that of ours."""
    atoms, bonds = (getattr(train.graphs[0], name).shape[1] for name in ("x", "edge_attr"))
    if way in OURS:
        pe = parse_pe_config(ENCODINGS.get(way, WALKS))
        name, width = ("gps", 56) if way == "transformer" else ("mpnn", 68)
        return get_model(
            name, atoms, 1, width, LAYERS, HEADS, 0.0, num_edge_features=bonds, mpnn_type="gatedgcn",
            node_pe_dim=pe.node_dim, relative_pe_dim=pe.relative_dim, statistics=graph_statistics(train),
        )  # fmt: skip

    def peer(width: int) -> nn.Module:
        inputs = nn.Linear(atoms, width - WALK_WIDTH), nn.Linear(bonds, width)
        if way == "peer gps":
            return PeerGPS(*inputs, width=width, layers=LAYERS, heads=HEADS, walk=20)
        return PeerGNN(way.removeprefix("peer "), *inputs, width=width, layers=LAYERS, walk=20)

    with torch.random.fork_rng():
        counts = {width: parameters(peer(width)) for width in range(32, 193, HEADS)}
    return peer(min(counts, key=lambda width: abs(counts[width] - WANTED)))


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# -- data ---------------------------------------------------------------------------------------------------------


def write_data(sets: Sequence[str], path: Path) -> None:
    """Write the molecules as a few tensors, so that a machine without rdkit can read them."""
    torch.save({name: {part: _packed(graphs) for part, graphs in _from_packages(name).items()} for name in sets}, path)


def _from_packages(name: str) -> dict[str, list[Any]]:
    data = get_dataset(name)
    return {"train": list(data.train), "val": list(data.val), "test": list(data.test)}


def _packed(graphs: Sequence[Any]) -> dict[str, Tensor]:
    return {
        "x": torch.cat([graph.x for graph in graphs]).to(torch.uint8),  # zeros and ones
        "edge_attr": torch.cat([graph.edge_attr for graph in graphs]).to(torch.uint8),
        "edge_index": torch.cat([graph.edge_index for graph in graphs], 1).to(torch.int16),
        "y": torch.cat([graph.y for graph in graphs]),
        "num_nodes": torch.tensor([graph.num_nodes for graph in graphs]),
        "num_edges": torch.tensor([graph.num_edges for graph in graphs]),
    }


def _unpacked(packed: dict[str, Tensor]) -> list[Any]:
    from torch_geometric.data import Data

    nodes, edges = packed["num_nodes"].tolist(), packed["num_edges"].tolist()
    rows = zip(
        packed["x"].float().split(nodes), packed["edge_attr"].float().split(edges),
        packed["edge_index"].long().split(edges, 1), packed["y"].split(1), strict=True,
    )  # fmt: skip
    return [Data(x=x, edge_attr=bonds, edge_index=ends, y=y) for x, bonds, ends, y in rows]


def read(name: str, path: Path | None) -> dict[str, list[Any]]:
    if path is None:
        return _from_packages(name)
    stored = torch.load(path, weights_only=True)
    return {part: _unpacked(packed) for part, packed in stored[name].items()}


class Encoded(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Graphs whose encodings are computed on access, since those of all pairs would fill the memory."""

    def __init__(self, graphs: list[Any], encodings: Any) -> None:
        self.graphs = graphs
        config = parse_pe_config(encodings)
        plain = [(graph.edge_index, graph.num_nodes) for graph in graphs]
        self.encoded = encode_graphs(plain, config) if config.node or config.relative else None

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, index: int) -> Any:
        graph = self.graphs[index].clone()
        return graph if self.encoded is None else self.encoded[index].attach(graph)


@functools.lru_cache(maxsize=2)  # a process trains several models on the same molecules
def parts_of(name: str, path: Path | None, most: int | None, way: str | None) -> dict[str, Encoded]:
    """Return up to ``most`` molecules of each part, encoded for a way; None: the walks alone."""
    encodings = WALKS if way is None else ENCODINGS[way]
    return {part: Encoded(graphs[:most], encodings) for part, graphs in read(name, path).items()}


# -- one run ------------------------------------------------------------------------------------------------------


def run(name: str, way: str, lr: float, seed: int, options: argparse.Namespace) -> Result | None:
    """Train one model as far as the time allows; return its result, or None if it is not finished."""
    from torch_geometric.loader import DataLoader

    torch.set_num_threads(1)
    epochs, device = options.epochs[name], options.device if way in OURS else options.peer_device
    folder = options.runs / f"{name}-{way.replace(' ', '-')}-{lr}-{seed}-{epochs}x{options.batch_size}"
    result_file = folder / "result.json"
    if result_file.exists():
        return dict(json.loads(result_file.read_text(encoding="utf-8")))
    if time.time() > options.deadline:
        return None
    parts = parts_of(name, options.data, options.most, way if way in ENCODINGS else None)
    sizes = {"train": options.batch_size, "val": 128, "test": 128}
    loaders = {part: DataLoader(parts[part], sizes[part], shuffle=part == "train") for part in parts}
    set_seed(seed)
    model = build(way, parts["train"]).to(device)
    optimizer = get_optimizer(model, lr=lr)
    scheduler = get_scheduler(optimizer, total_epochs=epochs, warmup_epochs=min(2, epochs - 1), warmup_offset=1)
    captured = way in OURS and torch.device(device).type == "cuda"
    trainer = GraphTrainer(
        model, optimizer, scheduler, get_loss_fn("regression", "mae"), device=device, grad_clip=1.0,
        log_every=0, checkpoint_dir=folder, capture=captured, pad_to=4 if captured else None,
    )  # fmt: skip
    at_once = epochs if options.deadline == float("inf") else 1
    trainer.fit(loaders["train"], loaders["val"], at_once, resume_from="auto")
    while trainer.epoch < epochs:
        if time.time() > options.deadline:
            print(f"{folder.name}: epoch {trainer.epoch} of {epochs}, resumes with the next call", flush=True)
            return None
        trainer.fit(loaders["train"], loaders["val"], trainer.epoch + 1)
    model.load_state_dict(load_weights(folder / "best.pt"))
    result = {
        "set": name, "way": way, "seed": seed, "epochs": epochs, "parameters": parameters(model), "lr": lr,
        "best_epoch": trainer.best_epoch, "val": trainer.best_metric,
        "test": trainer.eval_epoch(loaders["test"])["mae"],
        "seconds": sum(record["time"] for record in trainer.history["train"]), "device": str(trainer.device),
    }  # fmt: skip
    kept(result_file, lambda path: path.write_text(json.dumps(result) + "\n", encoding="utf-8"))
    print(f"{folder.name}: test {result['test']:.4f} at epoch {result['best_epoch']}", flush=True)
    return result


# -- the table ----------------------------------------------------------------------------------------------------


def rows_of(results: Sequence[Result], asked: int) -> list[dict[str, Any]]:
    rows = []
    for (name, way), rates in by_rate(results).items():
        runs = min(rates.values(), key=lambda found: (-len(found), mean_of(found, "val")))
        rows.append({
            "molecules": name, "way": way, "epochs": runs[0]["epochs"], "parameters": f"{runs[0]['parameters']:,}",
            "lr": runs[0]["lr"],
            "test MAE": spread([result["test"] for result in runs]),
            "validation MAE": spread([result["val"] for result in runs]),
            "best epoch": ", ".join(str(result["best_epoch"]) for result in runs),
            "seconds a run": f"{mean_of(runs, 'seconds'):.0f} ({torch.device(runs[0]['device']).type})",
            "seeds": f"{len(runs)} of {asked}",
        })  # fmt: skip
    return rows


def notes_of(results: Sequence[Result], missing: Sequence[str]) -> list[str]:
    """Return the errors at every learning rate, and the runs that are not finished."""
    every = [
        f"{name} {way} {lr:g}: {mean_of(runs, 'val'):.4f} / {mean_of(runs, 'test'):.4f}"
        for (name, way), rates in by_rate(results).items()
        for lr, runs in sorted(rates.items())
    ]
    notes = [f"Validation / test error at each learning rate: {'; '.join(every)}."]
    return notes + ([f"Not finished, the same command resumes: {'; '.join(missing)}."] if missing else [])


def side_by_side(options: argparse.Namespace) -> str:
    """Return where the runs were trained, and how many shared the machine, which their seconds depend on."""
    if options.trained_on:
        return f"Trained on {options.trained_on}."
    return (
        f"{options.jobs} runs of our models on {options.device} and {options.peer_jobs} of the peers on "
        f"{options.peer_device} shared the machine at a time."
    )


def by_rate(results: Sequence[Result]) -> dict[tuple[str, str], dict[float, list[Result]]]:
    """Return the runs of each set and way by learning rate, in the order of the table."""
    found: dict[tuple[str, str], dict[float, list[Result]]] = {}
    for result in sorted(results, key=lambda one: (SETS.index(one["set"]), WAYS.index(one["way"]), one["seed"])):
        found.setdefault((result["set"], result["way"]), {}).setdefault(result["lr"], []).append(result)
    return found


def mean_of(runs: Sequence[Result], name: str) -> float:
    return statistics.mean(run[name] for run in runs)


def main() -> None:
    parser = options_of("graphs_science", __doc__)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--epochs", type=int, nargs="+", help="for all sets, or one number for each; default 40 and 15")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--peer-jobs", type=int, default=1, help="runs of peers beside them")
    parser.add_argument("--peer-device", default="cpu")
    parser.add_argument("--data", type=Path, help="made by --write-data; else the packages are read")
    parser.add_argument("--write-data", type=Path)
    parser.add_argument("--trained-on", help="the machine of runs that were brought here, for the notes")
    options = parsed(parser)
    if options.write_data:
        write_data(options.sets, options.write_data)
        return
    options.most = None  # molecules of each part
    if options.tiny:
        options.sets, options.seeds, options.epochs, options.most, options.batch_size = ["nci"], [0], [2], 40, 16
        options.rates = [1e-3]
    if options.epochs is None:
        options.epochs = [EPOCHS[name] for name in options.sets]
    if len(options.epochs) not in (1, len(options.sets)):
        parser.error(f"--epochs: give one number, or one for each of {', '.join(options.sets)}")
    options.epochs = dict(zip(options.sets, options.epochs * (len(options.sets) // len(options.epochs)), strict=True))
    ways = sorted(options.ways, key=LONGEST.index)
    asked = [
        (name, way, lr, seed) for way in ways for name in options.sets for lr in options.rates for seed in options.seeds
    ]
    with pool_of(options.jobs) as ours, pool_of(options.peer_jobs) as peers:
        futures = [(ours if each[1] in OURS else peers).submit(run, *each, options) for each in asked]
        found = [future.result() for future in futures]
    results = [result for result in found if result is not None]
    missing = [" ".join(map(str, each)) for each, result in zip(asked, found, strict=True) if result is None]
    rows, notes = rows_of(results, len(options.seeds)), [side_by_side(options), *notes_of(results, missing)]
    if options.tiny or not rows:
        print(rows, *notes, sep="\n")
        return
    title = "Penalised logP of molecules: mean absolute error, ± standard deviation over seeds"
    write_result("graphs_science", title, list(rows[0]), rows, describe(), notes=notes)


if __name__ == "__main__":
    main()
