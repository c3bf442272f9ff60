"""Graphs per second in training: torch_geometric's GPS against ours, eager, padded, captured, compiled, in one run.

    python benchmarks/molecules.py molecules.pt                    # where rdkit is
    python benchmarks/graphs_gpu.py --data molecules.pt --out .    # on a GPU; writes graphs_gpu.md and .json
    python benchmarks/graphs_gpu.py --tiny                         # a trial on any machine, writes nothing

The peer is the model of torch_geometric's example ``graph_gps.py``: ten ``GPSConv`` layers of 64 channels with GIN-E,
four heads, 20 return probabilities at each node. Ours has the same layers, width, heads and dropout. All take the same
batches, which are on the device already, the same loss and the same AdamW. Ways:

    peer      torch_geometric's GPSConv, eager
    eager     get_model("gps"), on the same batches
    padded    the same model on padded batches of a few fixed shapes
    captured  GraphTrainer(capture=True) on those batches: one CUDA graph for each shape, the losses, outputs and
              metrics of its epochs included; its batches are in pinned memory and are copied in each step
    by hand   the padded step as one CUDA graph for each shape, hand-written, without a trainer
    compiled  captured, through torch.compile first

Every round runs every way, in a new order each time; the files are written after each turn. The three rounds should
take two minutes on an H200, by older figures there, and compiling comes on top of them, for which no time is known:
``compiled`` is therefore the last way of the first round, and ``--ways`` leaves it out.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import torch
from machine import RESULTS, describe
from molecules import ATOM_TYPES, BOND_TYPES, WALK, load, made_up
from peers_pyg import WALK_WIDTH, PeerGPS
from rounds import Rounds, exit_if_failed
from torch import Tensor, nn

from treadle.graphs import GraphTrainer, PaddedGraphBatch, get_loss_fn, get_model, pad_batch, plan_buckets

WIDTH, HEADS, LAYERS, ATTENTION_DROPOUT = 64, 4, 10, 0.5
Step = Callable[[Any], Tensor]
Pass = Callable[[], Any]  # trains on all batches once and returns the loss of the last, a trainer the mean of all


def peer_model(layers: int) -> nn.Module:
    atoms, bonds = nn.Embedding(ATOM_TYPES, WIDTH - WALK_WIDTH), nn.Embedding(BOND_TYPES, WIDTH)
    return PeerGPS(atoms, bonds, width=WIDTH, layers=layers, heads=HEADS, walk=len(WALK))


def our_model(layers: int) -> nn.Module:
    return get_model(
        "gps", ATOM_TYPES, 1, WIDTH, layers, HEADS, 0.0, attn_dropout=ATTENTION_DROPOUT, readout="add",
        num_edge_features=BOND_TYPES, node_pe_dim=len(WALK),
    )  # fmt: skip


def collate(graphs: Sequence[dict[str, Tensor]]) -> SimpleNamespace:
    """Join graphs as torch_geometric's loader does."""
    sizes = torch.tensor([len(graph["x"]) for graph in graphs])
    starts = (sizes.cumsum(0) - sizes).tolist()
    joined = {name: torch.cat([graph[name] for graph in graphs]) for name in ("x", "edge_attr", "node_pe", "y")}
    edges = torch.cat([graph["edge_index"] + start for graph, start in zip(graphs, starts, strict=True)], dim=1)
    owner = torch.arange(len(graphs)).repeat_interleave(sizes)
    return SimpleNamespace(**joined, edge_index=edges, batch=owner, num_graphs=len(graphs))


def to_device(batch: SimpleNamespace, device: torch.device) -> SimpleNamespace:
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in vars(batch).items()}
    return SimpleNamespace(**moved)


def make_step(model: Callable[[Any], Tensor], weights: nn.Module, device: torch.device) -> Step:
    """Return forward, backward and update; the mean absolute error of the real graphs is the loss."""
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.AdamW(weights.parameters(), lr=1e-3, fused=True, capturable=on_gpu)

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        error = model(batch).squeeze(1) - batch.y
        if isinstance(batch, PaddedGraphBatch):
            loss = torch.where(batch.target_mask, error, 0).abs().sum() / batch.target_mask.sum()
        else:
            loss = error.abs().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


class Captured:
    """Step on padded batches as one CUDA graph per bucket, with inputs copied into fixed buffers."""

    def __init__(self, step: Step, examples: Sequence[PaddedGraphBatch]) -> None:
        self.step = step  # the captured kernels hold addresses only: model and optimizer must live as long as they do
        self.graphs: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, PaddedGraphBatch, Tensor]] = {}
        for example in examples:
            buffers = example.clone()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    step(buffers)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                loss = step(buffers)
            self.graphs[_shape(example)] = (graph, buffers, loss)

    def __call__(self, batch: PaddedGraphBatch) -> Tensor:
        graph, buffers, loss = self.graphs[_shape(batch)]
        buffers.copy_(batch)
        graph.replay()
        return loss


def _shape(batch: PaddedGraphBatch) -> tuple[int, ...]:
    return (*batch.x.shape, batch.row_length, batch.edge_index.shape[1])


def pass_of(step: Step, batches: Sequence[Any]) -> Pass:
    def once() -> Tensor:
        for batch in batches:
            loss = step(batch)
        return loss

    return once


def trainer_pass(model: nn.Module, batches: Sequence[PaddedGraphBatch], device: torch.device) -> Pass:
    """Return an epoch of a trainer that captures its steps; on a CPU it logs that it cannot."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    trainer = GraphTrainer(
        model, optimizer, loss_fn=get_loss_fn("regression", "mae"), device=device, log_every=None,
        capture=True if device.type == "cuda" else "auto",
    )  # fmt: skip
    return lambda: trainer.train_epoch(batches)["loss"]


def graphs_per_second(once: Pass, count: int, device: torch.device, seconds: float) -> tuple[float, float]:
    """Run whole passes for about the given seconds, at least one; return the rate and the last loss."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    wait()
    done, start = 0, time.perf_counter()
    while True:
        loss = once()
        done += count
        wait()
        if time.perf_counter() - start > seconds:
            return done / (time.perf_counter() - start), float(loss)


def ways(
    batches: Sequence[Any], padded: Sequence[PaddedGraphBatch], layers: int, device: torch.device
) -> dict[str, Callable[[], Pass]]:
    """Return, for each way, a function that builds its pass; the padded batches are on the host."""

    def seeded(make: Callable[[int], nn.Module] = our_model) -> nn.Module:
        torch.manual_seed(0)
        return make(layers).to(device)

    def stepped(model: nn.Module, inputs: Sequence[Any]) -> Pass:
        return pass_of(make_step(model, model, device), inputs)

    def by_hand() -> Pass:
        model = seeded()
        one_of_each = list({_shape(batch): batch for batch in there}.values())
        return pass_of(Captured(make_step(model, model, device), one_of_each), there)

    there = [batch.to(device) for batch in padded]
    pinned = [batch.pin_memory() if device.type == "cuda" else batch for batch in padded]
    found: dict[str, Callable[[], Pass]] = {
        "peer": lambda: stepped(seeded(peer_model), batches),
        "eager": lambda: stepped(seeded(), batches),
        "padded": lambda: stepped(seeded(), there),
        "captured": lambda: trainer_pass(seeded(), pinned, device),
    }
    if device.type == "cuda":
        found["by hand"] = by_hand
        found["compiled"] = lambda: trainer_pass(
            cast(nn.Module, torch.compile(seeded(), dynamic=False)), pinned, device
        )
    return found


def check_same_numbers(batch: Any, padded: PaddedGraphBatch, layers: int, device: torch.device) -> float:
    """Return the largest difference between the outputs on a batch and on the padded batch."""
    torch.manual_seed(0)
    model = our_model(layers).to(device).eval()
    with torch.no_grad():
        return (padded.real(model(padded)) - model(batch)).abs().max().item()


def measure(
    arguments: argparse.Namespace, graphs: Sequence[Any], size: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Measure every way with batches of one size; yield the results after each turn."""
    draw = random.Random(0)
    order = draw.sample(range(len(graphs)), min(len(graphs), arguments.graphs))
    plain = [collate([graphs[i] for i in order[at : at + size]]) for at in range(0, len(order) - size + 1, size)]
    buckets = plan_buckets([SimpleNamespace(**graph) for graph in graphs], size, num_buckets=arguments.buckets)
    batches = [to_device(batch, device) for batch in plain]
    padded = [pad_batch(batch, buckets) for batch in plain]
    difference = check_same_numbers(batches[0], padded[0].to(device), arguments.layers, device)
    result: dict[str, Any] = {
        "batch": size,
        "batches": len(plain),
        "buckets": [vars(bucket) for bucket in buckets],
        "slots per node": sum(len(batch.x) for batch in padded) / sum(len(batch.x) for batch in plain),
        "largest difference of padded outputs": difference,
    }

    def rate(once: Pass, number: int) -> tuple[float, float]:
        seconds = arguments.seconds if number else 0.0  # the first pass is a warm-up
        return graphs_per_second(once, size * len(plain), device, seconds)

    found = ways(batches, padded, arguments.layers, device)
    rounds = Rounds({way: found[way] for way in found if not arguments.ways or way in arguments.ways}, rate)
    for way, figure in rounds.play(arguments.rounds):
        if figure is not None:
            print(size, way, f"{figure[0]:.0f} graphs/s, loss {figure[1]:.4f}", flush=True)
        yield result | {
            "rates": {name: [each for each, _ in figures] for name, figures in rounds.figures.items()},
            "losses": {name: figures[-1][1] for name, figures in rounds.figures.items()},
            "failed": {name: why[:2000] for name, why in rounds.failed.items()},
        }


def table(results: Sequence[dict[str, Any]], what: str, parameters: dict[str, int], machine: dict[str, str]) -> str:
    lines = [
        "# Graphs per second of training, ten GPS layers of 64 channels", "",
        f"{what}; {', '.join(f'{name}: {count:,} parameters' for name, count in parameters.items())}. Median of the "
        "rounds (least – most). The batches are on the device, those of captured and compiled in pinned memory; the "
        "loss of these two is the mean of a pass, not that of its last batch.", "",
        "| batch | way | graphs/s | times the peer | ms a step | loss |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for result in results:
        base = median(result["rates"].get("peer", [float("nan")]))
        for name, rates in result["rates"].items():
            rate = median(rates)
            spread = f"{min(rates):,.0f} – {max(rates):,.0f}"
            lines.append(
                f"| {result['batch']} | {name} | {rate:,.0f} ({spread}) | {rate / base:.1f} | "
                f"{1e3 * result['batch'] / rate:.2f} | {result['losses'][name]:.3f} |"
            )
        failed = result["failed"].items()
        lines += [f"| {result['batch']} | {name} | failed: {why[:200]} | | | |" for name, why in failed]
    lines.append("")
    for result in results:
        lines.append(
            f"Batch {result['batch']}: {result['batches']} batches, {result['slots per node']:.2f} slots per node, "
            f"padded outputs differ by at most {result['largest difference of padded outputs']:.1e}."
        )
    lines += ["", f"Machine: {', '.join(f'{key} {value}' for key, value in machine.items())}.", ""]
    return "\n".join(lines)


def write(folder: Path, page: str, whole: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "graphs_gpu.md").write_text(page, encoding="utf-8")
    (folder / "graphs_gpu.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="made by molecules.py; else rdkit's file, else made-up graphs")
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--graphs", type=int, default=2048, help="graphs of one pass")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--buckets", type=int, default=2, help="shapes of padded batches, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each way in each round, at least one pass")
    parser.add_argument("--ways", nargs="+", help="only these")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the files")
    parser.add_argument("--tiny", action="store_true", help="two layers on few made-up graphs, and no files")
    arguments = parser.parse_args()
    graphs, what = load(arguments.data) if not arguments.tiny else (made_up(64), "made-up graphs")
    if arguments.tiny:
        torch.set_num_threads(1)
        arguments.batches, arguments.layers, arguments.rounds, arguments.seconds = [4, 16], 2, 1, 0.1
    device = torch.device(arguments.device)
    models = {"peer": peer_model, "ours": our_model}
    parameters = {name: sum(p.numel() for p in make(arguments.layers).parameters()) for name, make in models.items()}
    results: list[dict[str, Any]] = []
    machine = describe()
    for size in arguments.batches:
        results.append({})
        for result in measure(arguments, graphs, size, device):
            results[-1] = result
            page = table(results, what, parameters, machine)
            if not arguments.tiny:
                whole = {"what": what, "parameters": parameters, "machine": machine, "results": results}
                write(arguments.out, page, whole)
    print(page)
    exit_if_failed(any(result["failed"] for result in results))


if __name__ == "__main__":
    main()
