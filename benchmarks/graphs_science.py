"""Do the encodings help on real molecules, and how does the model compare with torch_geometric's GPS?

    python benchmarks/graphs_science.py                               # hours on two cores
    python benchmarks/graphs_science.py --sets nci --epochs 8         # a short one; also with --budget-minutes 20
    python benchmarks/graphs_science.py --write-data science.pt       # where rdkit and molsets are; then, elsewhere:
    python benchmarks/graphs_science.py --data science.pt --device cuda --jobs 9
    python benchmarks/graphs_science.py --tiny                        # a trial, writes nothing

Target: penalised logP; `nci` with 3,992 / 499 / 499 molecules, `zinc_clean_leads` with 10,000 / 1,000 / 1,000. Ways:

    on     get_model("gps") with the encodings of pe=default: four of the nodes, hop distances of the pairs
    off    the same model without any
    peer   the model of torch_geometric's example graph_gps.py: GPSConv layers with GIN-E, batch normalisation and 20
           return probabilities at each node, in a width that gives it about as many parameters

All have as many layers, and the same epochs, batches, loss (mean absolute error), AdamW, schedule and seeds; the epoch
with the best validation error is tested. Every run has a folder below --runs, and goes on there when it was stopped,
by --budget-minutes or anything else: the same command again completes the table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from machine import describe, write_result
from peer_gps import WALK_WIDTH, PeerGPS
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
    parse_pe_config,
    set_seed,
)

SETS, WAYS = ("nci", "zinc_clean_leads"), ("on", "off", "peer")
LAYERS, HEADS, WIDTH, WALK = 4, 4, 64, tuple(range(1, 21))
ENCODINGS: dict[str, Any] = {
    "on": "default",
    "off": "none",
    "peer": {"node": {"type": "rwse", "dim": len(WALK), "rwse": {"scales": WALK}}},
}


def peer_model(atom_features: int, bond_features: int, width: int) -> nn.Module:
    atoms, bonds = nn.Linear(atom_features, width - WALK_WIDTH), nn.Linear(bond_features, width)
    return PeerGPS(atoms, bonds, width=width, layers=LAYERS, heads=HEADS, walk=len(WALK))


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def build(way: str, atom_features: int, bond_features: int) -> nn.Module:
    """Returns the model of a way; the peer in the width whose number of parameters is nearest to ours."""
    pe = parse_pe_config(ENCODINGS["off" if way == "off" else "on"])

    def ours() -> nn.Module:
        return get_model(
            "gps", atom_features, 1, WIDTH, LAYERS, HEADS, 0.0, num_edge_features=bond_features,
            node_pe_dim=pe.node_dim, relative_pe_dim=pe.relative_dim,
        )  # fmt: skip

    if way != "peer":
        return ours()
    with torch.random.fork_rng():
        wanted = parameters(ours())
        counts = {width: parameters(peer_model(atom_features, bond_features, width)) for width in range(32, 129, HEADS)}
    return peer_model(atom_features, bond_features, min(counts, key=lambda width: abs(counts[width] - wanted)))


# -- data ---------------------------------------------------------------------------------------------------------


def write_data(sets: Sequence[str], path: Path) -> None:
    """Writes the molecules in few tensors, so that a machine without rdkit can read them."""
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
    """Graphs with their encodings, attached when they are asked for: those of all pairs would fill the memory."""

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


# -- one run ------------------------------------------------------------------------------------------------------


def run(name: str, way: str, seed: int, options: argparse.Namespace) -> dict[str, Any] | None:
    """Trains one model as far as the time allows; returns its result, None if it is not finished."""
    from torch_geometric.loader import DataLoader

    torch.set_num_threads(1)
    epochs = options.epochs[name]
    folder = options.runs / f"{name}-{way}-{seed}-{epochs}x{options.batch_size}"
    result_file = folder / "result.json"
    if result_file.exists():
        return dict(json.loads(result_file.read_text(encoding="utf-8")))
    if time.time() > options.deadline:
        return None
    parts = {part: graphs[: options.most] for part, graphs in read(name, options.data).items()}
    loaders = {
        part: DataLoader(Encoded(graphs, ENCODINGS[way]), options.batch_size, shuffle=part == "train")
        for part, graphs in parts.items()
    }
    set_seed(seed)
    model = build(way, parts["train"][0].x.shape[1], parts["train"][0].edge_attr.shape[1]).to(options.device)
    optimizer = get_optimizer(model, lr=1e-3)
    scheduler = get_scheduler(optimizer, total_epochs=epochs, warmup_epochs=min(2, epochs - 1))
    trainer = GraphTrainer(
        model, optimizer, scheduler, get_loss_fn("regression", "mae"), device=options.device, grad_clip=1.0,
        log_every=0, checkpoint_dir=folder,
    )  # fmt: skip
    trainer.fit(loaders["train"], loaders["val"], 1, resume_from="auto")
    while trainer.epoch < epochs:
        if time.time() > options.deadline:
            print(f"{folder.name}: epoch {trainer.epoch} of {epochs}, goes on with the next call", flush=True)
            return None
        trainer.fit(loaders["train"], loaders["val"], trainer.epoch + 1)
    model.load_state_dict(load_weights(folder / "best.pt"))
    result = {
        "set": name, "way": way, "seed": seed, "epochs": epochs, "parameters": parameters(model),
        "best_epoch": trainer.best_epoch, "val": trainer.best_metric,
        "test": trainer.eval_epoch(loaders["test"])["mae"],
        "seconds": sum(record["time"] for record in trainer.history["train"]), "device": str(trainer.device),
    }  # fmt: skip
    result_file.write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(f"{folder.name}: test {result['test']:.4f} at epoch {result['best_epoch']}", flush=True)
    return result


# -- the table ----------------------------------------------------------------------------------------------------


def rows_of(results: Sequence[dict[str, Any]], asked: int) -> list[dict[str, Any]]:
    rows = []
    for name, way in dict.fromkeys((result["set"], result["way"]) for result in results):
        runs = [result for result in results if (result["set"], result["way"]) == (name, way)]
        rows.append({
            "molecules": name, "way": way, "epochs": runs[0]["epochs"], "parameters": f"{runs[0]['parameters']:,}",
            "test MAE": _spread([result["test"] for result in runs]),
            "validation MAE": _spread([result["val"] for result in runs]),
            "best epoch": ", ".join(str(result["best_epoch"]) for result in runs),
            "seconds a run": f"{statistics.mean(result['seconds'] for result in runs):.0f}",
            "seeds": f"{len(runs)} of {asked}",
        })  # fmt: skip
    return rows


def _spread(values: Sequence[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{deviation}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, nargs="+", default=[100], help="for all sets, or one number for each")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--budget-minutes", type=float, default=float("inf"), help="then every run stops at its epoch")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, a process each")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", type=Path, help="made by --write-data; else the packages are read")
    parser.add_argument("--write-data", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs/graphs_science"))
    parser.add_argument("--tiny", action="store_true", help="one seed of few molecules, and no table in a file")
    options = parser.parse_args()
    if options.write_data:
        write_data(options.sets, options.write_data)
        return
    options.most = None  # molecules of each part
    if options.tiny:
        options.runs = Path(tempfile.mkdtemp())
        options.sets, options.seeds, options.epochs, options.most, options.batch_size = ["nci"], [0], [2], 40, 16
    if len(options.epochs) not in (1, len(options.sets)):
        parser.error(f"--epochs: give one number, or one for each of {', '.join(options.sets)}")
    options.epochs = dict(zip(options.sets, options.epochs * (len(options.sets) // len(options.epochs)), strict=True))
    options.deadline = time.time() + 60 * options.budget_minutes
    # Seed by seed, so that a budget ends with complete rows of fewer seeds.
    asked = [(name, way, seed) for name in options.sets for seed in options.seeds for way in options.ways]
    if options.jobs == 1:
        found = [run(*each, options) for each in asked]
    else:
        with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
            found = [future.result() for future in [pool.submit(run, *each, options) for each in asked]]
    rows = rows_of([result for result in found if result is not None], len(options.seeds))
    if options.tiny or not rows:
        print(rows)
        return
    title = "Penalised logP of molecules: mean absolute error, ± standard deviation over seeds"
    write_result("graphs_science", title, list(rows[0]), rows, describe() | {"device": options.device})


if __name__ == "__main__":
    main()
