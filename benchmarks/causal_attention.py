"""The cost of padding in the astronomy model: attention without a mask against the usual ways, and the key/value cache.

    python benchmarks/causal_attention.py --out .     # on a GPU; writes causal_attention.md and .json
    python benchmarks/causal_attention.py --tiny      # a trial on any machine, writes nothing

The model of the specification (12 layers, width 768, 12 heads) on (B, L) = (16, 2048), bf16 autocast, forward and
backward of the hidden states. A fifth of all positions is padding. Ways:

    none           padding is ignored: the cost of the layers alone
    padding last   ours: rows are reordered before the first layer and back after the last one
    mask           the same layers with a (B, 1, L, L) mask of causality and padding
    torch          nn.TransformerEncoder with a causal and a key-padding mask
    checkpointed   padding last, with gradient checkpointing

The measured work takes a quarter of a minute on an H200.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import machine
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from treadle.astro import CausalTransformerLM

VOCAB, TYPES, DROPOUT = 13317, 20, 0.1
SIZES = {"batch": 16, "length": 2048, "width": 768, "layers": 12, "heads": 12}
TINY = {"batch": 2, "length": 32, "width": 16, "layers": 2, "heads": 2}


def masked(model: CausalTransformerLM, tokens: Tensor, types: Tensor, valid: Tensor) -> Tensor:
    """Return the hidden states with an explicit mask in every layer instead of is_causal."""
    length = tokens.shape[1]
    seen = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril() & valid[:, None, None, :]
    seen |= torch.eye(length, dtype=torch.bool, device=tokens.device)  # a row without any key would be NaN
    attend = F.scaled_dot_product_attention

    def with_mask(query: Tensor, key: Tensor, value: Tensor, *, dropout_p: float, is_causal: bool) -> Tensor:
        return attend(query, key, value, attn_mask=seen, dropout_p=dropout_p)

    F.scaled_dot_product_attention = with_mask
    try:
        return model.hidden_states(tokens, types)
    finally:
        F.scaled_dot_product_attention = attend


def peer(sizes: dict[str, int], device: torch.device) -> Callable[..., Tensor]:
    """Return torch's own encoder between the same embeddings and norm."""
    width, length = sizes["width"], sizes["length"]
    layer = nn.TransformerEncoderLayer(
        width, sizes["heads"], 4 * width, DROPOUT, "gelu", batch_first=True, norm_first=True, device=device
    )
    encoder = nn.TransformerEncoder(
        layer, sizes["layers"], norm=nn.LayerNorm(width, device=device), enable_nested_tensor=False
    )
    embeddings = [nn.Embedding(rows, width, device=device) for rows in (VOCAB, TYPES, length)]
    causal = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
    positions = torch.arange(length, device=device)

    def run(tokens: Tensor, types: Tensor, valid: Tensor) -> Tensor:
        embedded = sum(table(ids) for table, ids in zip(embeddings, (tokens, types, positions), strict=True))
        out: Tensor = encoder(embedded, mask=causal, src_key_padding_mask=~valid)
        return out

    return run


def measure(run: Callable[[], Tensor], device: torch.device, repeats: int) -> dict[str, str]:
    """Return the milliseconds of a forward and backward pass (median) and its extra peak memory."""
    seconds, extra = [], 0
    on_gpu = device.type == "cuda"
    for _ in range(repeats + 2):
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            hidden = run()
        hidden.sum().backward()
        if on_gpu:
            torch.cuda.synchronize()
            extra = torch.cuda.max_memory_allocated() - before
        seconds.append(time.perf_counter() - start)
    return {"ms": f"{1e3 * median(seconds[2:]):.1f}", "GiB": f"{extra / 2**30:.2f}"}


def attention_rows(sizes: dict[str, int], device: torch.device, repeats: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    batch, length, width = sizes["batch"], sizes["length"], sizes["width"]
    with device:
        model = CausalTransformerLM(VOCAB, TYPES, width, sizes["layers"], sizes["heads"], 4 * width, DROPOUT, length)
        tokens, types = (torch.randint(size, (batch, length)) for size in (VOCAB, TYPES))
        right = torch.arange(length) < torch.linspace(0.6, 1.0, batch)[:, None] * length
        inside = torch.rand(batch, length) < 0.8
    torch_encoder = peer(sizes, device)
    rows = [{"way": "none", "padding": "", **measure(lambda: model.hidden_states(tokens, types), device, repeats)}]
    for name, valid in (("right", right), ("inside", inside)):
        ways: dict[str, Callable[[], Tensor]] = {
            "padding last": lambda valid=valid: model.hidden_states(tokens, types, valid),
            "mask": lambda valid=valid: masked(model, tokens, types, valid),
            "torch": lambda valid=valid: torch_encoder(tokens, types, valid),
        }
        rows += [{"way": way, "padding": name, **measure(run, device, repeats)} for way, run in ways.items()]
    model.gradient_checkpointing_enable()
    checkpointed = measure(lambda: model.hidden_states(tokens, types, right), device, repeats)
    return [*rows, {"way": "checkpointed", "padding": "right", **checkpointed}]


def generation_rows(sizes: dict[str, int], device: torch.device) -> list[dict[str, Any]]:
    """Return new tokens per second, with the cache and by recomputing the whole sequence; both decode greedily."""
    torch.manual_seed(0)
    width, count = sizes["width"], sizes["length"] // 4
    with device:
        model = CausalTransformerLM(
            VOCAB, TYPES, width, sizes["layers"], sizes["heads"], 4 * width, DROPOUT, sizes["length"]
        ).eval()
        tokens = torch.ones(1, 1, dtype=torch.long)

    def uncached() -> Tensor:
        grown = tokens
        for _ in range(count):
            likeliest = model(grown, torch.ones_like(grown))[:, -1:].argmax(-1)
            grown = torch.cat([grown, likeliest], dim=1)
        return grown

    rows, found = [], []
    ways = {"cache": lambda: model.generate(tokens, tokens, count, temperature=0)[0], "whole sequence": uncached}
    for way, run in ways.items():
        with torch.no_grad():
            for _ in range(2):  # the first one is a warm-up
                start = time.perf_counter()
                found.append(run().cpu())
                seconds = time.perf_counter() - start
        rows.append({"way": way, "new tokens": count, "tokens/s": f"{count / seconds:.0f}"})
    rows[-1]["equal ids"] = f"{(found[0] == found[-1]).float().mean().item():.0%}"
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, help="folder of the result; default: benchmarks/results")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = TINY if arguments.tiny else SIZES
    rows = attention_rows(sizes, device, 1 if arguments.tiny else arguments.repeats)
    rows += generation_rows(sizes, device)
    if arguments.tiny:
        print(*rows, sep="\n")
        return
    machine.RESULTS = arguments.out or machine.RESULTS
    columns = ["way", "padding", "ms", "GiB", "new tokens", "tokens/s", "equal ids"]
    machine.write_result("causal_attention", "Padding without an attention mask", columns, rows, machine.describe())


if __name__ == "__main__":
    main()
