"""Cost of attention within each graph against one attention over all nodes of the batch, on molecules.

    python benchmarks/graph_attention.py                 # writes results/graph_attention.md and .json
    python benchmarks/graph_attention.py --batches 8 16 --repeats 1 --dry     # a trial, nothing is written

One attention layer of 64 channels and 4 heads, forward and backward, on one thread, with a learned bias for each pair
of nodes in a graph. Time is processor time, as other work may share the machine; memory is what the forward pass keeps
for the backward pass.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import describe, write_result
from molecules import load
from torch import Tensor
from torch.nn import functional as F

from treadle.graphs.attention import GraphAttention, PairBias, batch_layout

WIDTH, HEADS, PAIR_WIDTH = 64, 4, 8


def whole_batch(
    module: GraphAttention, bias: PairBias, nodes: Tensor, graph: Tensor, pairs: Tensor, pe: Tensor
) -> Tensor:
    """Compute the same result from one attention matrix (ΣN)² with nodes of other graphs masked out."""
    count = len(nodes)
    mask = torch.full((HEADS, count * count), 0.0).index_add(1, pairs[0] * count + pairs[1], bias.proj(pe).T)
    mask = mask.view(HEADS, count, count).masked_fill(graph[:, None] != graph[None, :], -torch.inf)
    query, key, value = module.qkv(nodes).view(count, 3, HEADS, -1).permute(1, 2, 0, 3)
    mixed = F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=mask[None])
    return module.out(mixed[0].transpose(0, 1).flatten(1))


def per_graph(
    module: GraphAttention, bias: PairBias, nodes: Tensor, graph: Tensor, pairs: Tensor, pe: Tensor
) -> Tensor:
    return module(nodes, bias(batch_layout(graph, int(graph[-1]) + 1), pairs, pe))


def batch_of(sizes: list[int]) -> tuple[Tensor, ...]:
    graph = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    inside = [torch.cartesian_prod(*[torch.arange(size)] * 2).view(-1, 2).T for size in sizes]
    pairs = torch.cat([index + start for index, start in zip(inside, starts, strict=True)], dim=1)
    nodes, pe = torch.randn(len(graph), WIDTH, requires_grad=True), torch.randn(pairs.shape[1], PAIR_WIDTH)
    return nodes, graph, pairs, pe


def measure(run: Callable[..., Tensor], parts: tuple[Any, ...], repeats: int) -> tuple[float, float]:
    """Return the seconds of one forward and backward pass (median), and the MiB kept between the two."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.process_time()
        run(*parts).sum().backward()
        seconds.append(time.process_time() - start)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run(*parts)
    return median(seconds[1:]), sum(kept.values()) / 2**20


def row(sizes: list[int], repeats: int) -> dict[str, Any]:
    torch.manual_seed(0)
    parts = (GraphAttention(WIDTH, num_heads=HEADS), PairBias(PAIR_WIDTH, num_heads=HEADS), *batch_of(sizes))
    torch.testing.assert_close(per_graph(*parts), whole_batch(*parts), rtol=1e-4, atol=1e-5)
    seconds, mebibytes = measure(per_graph, parts, repeats)
    whole_seconds, whole_mebibytes = measure(whole_batch, parts, max(1, repeats // 10))
    squares, pairs = sum(size * size for size in sizes), batch_layout(parts[3], len(sizes)).num_pairs
    return {
        "graphs": len(sizes),
        "nodes": sum(sizes),
        "Σ nᵢ²": f"{squares:,}",
        "attention elements": f"{pairs:,}",
        "(Σ nᵢ)²": f"{sum(sizes) ** 2:,}",
        "elements / Σ nᵢ²": f"{pairs / squares:.2f}",
        "ms": f"{1e3 * seconds:.1f}",
        "ms, whole": f"{1e3 * whole_seconds:.0f}",
        "µs per 1,000 Σ nᵢ²": f"{1e9 * seconds / squares:.0f}",
        "MiB": f"{mebibytes:.1f}",
        "MiB, whole": f"{whole_mebibytes:.0f}",
        "time, whole / per graph": f"{whole_seconds / seconds:.0f}",
        "memory, whole / per graph": f"{whole_mebibytes / mebibytes:.0f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--data", type=Path, help="made by molecules.py; else rdkit's file is read")
    parser.add_argument("--dry", action="store_true", help="print the rows, write nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    graphs, what = load(arguments.data)
    draw = random.Random(0)
    rows = []
    for count in arguments.batches:
        rows.append(row([len(graph["x"]) for graph in draw.sample(graphs, count)], arguments.repeats))
        print(rows[-1], flush=True)
    if not arguments.dry:
        title = f"Attention inside each graph beside attention over the whole batch ({what})"
        write_result("graph_attention", title, list(rows[0]), rows, describe())


if __name__ == "__main__":
    main()
