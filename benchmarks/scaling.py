"""Tokens per second and GPU on 1, 2, 4, … ranks: replicas and a sharded model, against plain torch and Accelerate.

    python benchmarks/scaling.py --ranks 1 2            # on GPUs of one host; writes results/scaling.md and .json
    python benchmarks/scaling.py --tiny --ranks 1 2     # on the CPU with gloo, a trial that writes nothing
    python benchmarks/scaling.py --sizes --ranks 4 --saves fsdp:1b   # the stall of saves only; writes results/saves.md

Everything on eight GPUs, with the stall of saves, the collectives alone, runs that are stopped or killed, and the model
against the measurements:

    python benchmarks/scaling.py --ranks 1 2 4 8 --saves ddp:100m fsdp:100m fsdp:1b --all

Every number of ranks is one launch of torchrun in which all ways train the same decoder, one after another: bfloat16,
AdamW fused, gradients clipped, tokens on the device. Weak: each rank has as many tokens as one rank alone. Strong: the
ranks share the tokens of one. "Share of N" is one rank with the tokens that each of N ranks then has. Ways:

    plain ddp     DistributedDataParallel in a loop of ten lines
    plain fsdp    fully_shard in the same loop
    accelerate    the same loop with Accelerate around DistributedDataParallel
    ddp, fsdp     treadle's Engine with parallelize(model, …)

Stall: the total time by which a save lengthens the steps after it.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from decoder import SIZES, Decoder, NextToken, loss_of
from machine import describe, write_result
from torch import Tensor, nn

from treadle import BaseHook, Engine
from treadle.faces.parallel import parallelize
from treadle.hooks import CheckpointingHook

SAVE_STEPS = {"tiny": 6, "100m": 150, "1b": 80}  # from save to save: longer than a write takes
WAYS = ("plain ddp", "ddp", "accelerate", "plain fsdp", "fsdp")
MOST = 10  # ranks of ranks_resume.py
COLUMNS = (
    "model", "scaling", "way", "ranks", "tokens/s/rank", "efficiency", "of plain", "ms a step", "GiB",
)  # fmt: skip


class Clock(BaseHook):
    """Hook that records the time of every step's end, after synchronizing the device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.times = device, []  # type: ignore[var-annotated]

    def tick(self) -> None:
        _wait(self.device)
        self.times.append(time.perf_counter())

    def on_after_step(self, trainer: Engine) -> None:
        self.tick()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- one way on this number of ranks ------------------------------------------------------------------------------


def build(way: str, size: str, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model, distributed over the ranks, and its optimizer."""
    torch.manual_seed(0)
    with device:
        model: nn.Module = Decoder(size)
    if way == "plain fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    elif way == "fsdp":
        model = parallelize(model, "fsdp", param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    elif way == "ddp" and dist.get_world_size() > 1:
        model = parallelize(model, "ddp")
    elif way == "plain ddp" and dist.get_world_size() > 1:
        model = nn.parallel.DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda" or None)


def loop_of(
    way: str, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> Callable[[Tensor], Tensor]:
    """Return one step of the ways other than treadle."""
    if way == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(mixed_precision="bf16", cpu=device.type == "cpu")
        model, optimizer = accelerator.prepare(model, optimizer)

        def accelerated(tokens: Tensor) -> Tensor:
            optimizer.zero_grad()
            with accelerator.autocast():
                loss = loss_of(model, tokens)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss.detach()

        return accelerated

    def plain(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled="fsdp" not in way):
            loss = loss_of(model, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return plain


def measure(way: str, size: str, rows: int, steps: int, device: torch.device) -> dict[str, Any]:
    """Train for some steps; return milliseconds per step, peak memory and the last loss."""
    length, vocab = SIZES[size][3], SIZES[size][5]
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randint(0, vocab, (rows, length), generator=generator).to(device) for _ in range(4)]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model, optimizer = build(way, size, device)
    clock, warm_up = Clock(device), 5
    if way in ("ddp", "fsdp"):
        engine = Engine(
            model, optimizer, NextToken(), device=device, precision="bf16" if way == "ddp" else None, grad_clip=1.0,
            hooks=[clock],
        )  # fmt: skip
        engine.run([batches[step % 4] for step in range(warm_up + steps)], max_steps=warm_up + steps)
        loss = engine.train_means()["loss"]
    else:
        step_of = loop_of(way, model, optimizer, device)
        for step in range(warm_up + steps):
            loss = float(step_of(batches[step % 4]))
            clock.tick()
    times = clock.times[warm_up - 1 :]
    seconds = [after - before for before, after in itertools.pairwise(times)]
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return {"seconds": _slowest(median(seconds), device), "GiB": _slowest(peak, device), "loss": round(loss, 3)}


def _slowest(value: float, device: torch.device) -> float:
    told = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return float(told)


def stall(way: str, size: str, background: bool, folder: Path, device: torch.device) -> dict[str, Any]:
    """Train with two saves; return the seconds by which the steps after the second one were longer."""
    _, _, _, length, rows, _ = SIZES[size]
    steps = SAVE_STEPS[size]
    batch = torch.zeros(rows, length, dtype=torch.long, device=device)
    model, optimizer = build(way, size, device)
    clock = Clock(device)
    # The clock comes last: a step's time includes other hooks and the writes requested by the previous step.
    saves = CheckpointingHook(
        interval=steps, path=folder / f"{way}-{size}-{background}", background=background, keep_previous=1
    )
    engine = Engine(
        model, optimizer, NextToken(), device=device, precision="bf16" if way == "ddp" else None, grad_clip=1.0,
        hooks=[saves, clock],
    )  # fmt: skip
    engine.run([batch] * (3 * steps - 1), max_steps=3 * steps - 1)
    seconds = [after - before for before, after in itertools.pairwise(clock.times)]
    # seconds[n] is the time of step n + 2; the save after step `steps` falls on the step after it.
    usual = mean(seconds[steps // 4 : steps - 1])
    longer = [sum(seconds[at - 1 : at + steps - 2]) - (steps - 1) * usual for at in (steps, 2 * steps)]
    return {"seconds": _slowest(longer[1], device), "first": _slowest(longer[0], device)}


# -- all ways in one launch ---------------------------------------------------------------------------------------


def worker(options: argparse.Namespace) -> None:
    on_gpu = torch.cuda.is_available() and not options.tiny
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    ranks, rows = dist.get_world_size(), []
    for size in options.sizes:
        for scaling, share in shares(SIZES[size][4], ranks, options.shares).items():
            for way in [way for way in options.ways if scaling == "weak" or way != "accelerate"]:
                try:
                    result = measure(way, size, share, options.steps, device)
                except torch.OutOfMemoryError as error:
                    result = {"failed": str(error)[:200]}
                rows.append({"model": size, "scaling": scaling, "way": way, "ranks": ranks, "rows": share, **result})
                _say(rows[-1])
                _forget(on_gpu)
    for way, size in (pair.split(":") for pair in options.saves):
        for background in (False, True):
            with tempfile.TemporaryDirectory(dir=options.disk) as folder:
                place = [folder]
                dist.broadcast_object_list(place)
                result = stall(way, size, background, Path(place[0]), device)
                dist.barrier()
            rows.append({"model": size, "way": way, "ranks": ranks, "background": background, **result})
            _say(rows[-1])
            _forget(on_gpu)
    if dist.get_rank() == 0:
        options.found.write_text(json.dumps(rows), encoding="utf-8")
    dist.destroy_process_group()


def shares(whole: int, ranks: int, others: Sequence[int]) -> dict[str, int]:
    """Return the rows of a rank's micro-batch by name; a single rank also has those of ``others``."""
    if ranks > 1:
        return {"weak": whole, "strong": max(1, whole // ranks)}
    return {"weak": whole} | {f"share of {other}": max(1, whole // other) for other in others}


def _say(row: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        print(row, flush=True)


def _forget(on_gpu: bool) -> None:
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()


def launch(ranks: int, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    found = folder / f"{ranks}.json"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__,
        "--found", str(found), "--sizes", *options.sizes, "--ways", *options.ways, "--steps", str(options.steps),
    ]  # fmt: skip
    command += ["--tiny"] if options.tiny else []
    command += ["--shares", *(str(other) for other in options.ranks if other > 1)] if ranks == 1 else []
    command += ["--saves", *options.saves] if ranks == max(options.ranks) else []
    command += ["--disk", str(options.disk)] if options.disk else []
    subprocess.run(command, check=True, env={"OMP_NUM_THREADS": "1", **os.environ})
    rows: list[dict[str, Any]] = json.loads(found.read_text(encoding="utf-8"))
    return rows


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the result: rates, efficiency against one rank, and against the corresponding plain loop."""
    done = {(row["model"], row["scaling"], row["way"], row["ranks"]): row for row in rows if "scaling" in row}
    lines = []
    for (size, scaling, way, ranks), row in done.items():
        if "failed" in row:
            lines.append({"model": size, "scaling": scaling, "way": way, "ranks": ranks, "ms a step": row["failed"]})
            continue
        rate = _rate(row)
        alone, plain = done.get((size, "weak", way, 1)), done.get((size, scaling, _plain_of(way), ranks))
        lines.append({
            "model": size, "scaling": scaling, "way": way, "ranks": ranks, "tokens/s/rank": f"{rate:,.0f}",
            "efficiency": f"{rate / _rate(alone):.3f}" if alone and "seconds" in alone else "",
            "of plain": f"{rate / _rate(plain):.3f}" if plain and "seconds" in plain else "",
            "ms a step": f"{1e3 * row['seconds']:.1f}", "GiB": f"{row['GiB']:.1f}",
        })  # fmt: skip
    for row in rows:
        if "background" in row:
            kind = "in the background" if row["background"] else "in the foreground"
            lines.append({
                "model": row["model"], "scaling": f"save {kind}", "way": row["way"], "ranks": row["ranks"],
                "ms a step": f"stall {1e3 * row['seconds']:,.0f} (first {1e3 * row['first']:,.0f})",
            })  # fmt: skip
    return lines


def _plain_of(way: str) -> str:
    return "plain fsdp" if way in ("fsdp", "plain fsdp") else "plain ddp"


def _rate(row: dict[str, Any]) -> float:
    return float(row["rows"] * SIZES[row["model"]][3] / row["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=["100m", "1b"], help="none: only --saves")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=20, help="measured, of each way")
    parser.add_argument(
        "--saves", nargs="*", default=[], help="also the stall of saves on most ranks: ddp:100m fsdp:1b"
    )
    parser.add_argument("--disk", type=Path, help="folder for the saves")
    parser.add_argument("--all", action="store_true", help="also collectives.py, ranks_resume.py and scaling_model.py")
    parser.add_argument("--tiny", action="store_true", help="a small decoder on the CPU, and no files")
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--shares", type=int, nargs="*", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tiny:
        options.sizes = ["tiny"] if options.sizes else []
        options.steps, options.saves = 4, ["ddp:tiny", "fsdp:tiny"]
    if not options.sizes and not options.saves:
        parser.error("--sizes without a size measures --saves only: name some, such as fsdp:1b")
    if importlib.util.find_spec("accelerate") is None:
        options.ways = [way for way in options.ways if way != "accelerate"]
    if options.found:
        worker(options)
        return
    if options.all and (max(options.ranks) not in range(2, MOST + 1) or max(options.ranks) % 2):
        parser.error(f"--all --ranks {options.ranks}: the most must be an even number of ranks, up to {MOST}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks:
            rows += launch(ranks, options, Path(folder))
            write(rows, options, partial=ranks != options.ranks[-1])
    if options.all:
        the_rest(options)


def write(rows: list[dict[str, Any]], options: argparse.Namespace, *, partial: bool) -> None:
    lines = table(rows)
    if not options.tiny:
        machine = describe() | {"gpus": str(torch.cuda.device_count())}
        if options.sizes:
            title = "Tokens per second and GPU of one host, bfloat16, AdamW, clipped; efficiency against one GPU"
            write_result("scaling", title, COLUMNS, lines, machine, partial=partial)
        else:
            title = "By how many milliseconds a save makes the steps after it longer, all of them together"
            write_result(
                "saves", title, ("model", "scaling", "way", "ranks", "ms a step"), lines, machine, partial=partial
            )
    elif not partial:
        print(*lines, sep="\n")


def the_rest(options: argparse.Namespace) -> None:
    """Run the other benchmarks of several ranks, and last the model, which reads their results."""
    tiny = ["--tiny"] if options.tiny else []
    disk = ["--disk", str(options.disk)] if options.disk else []
    several = [str(ranks) for ranks in options.ranks if ranks > 1]
    for name, *arguments in (
        ["collectives.py", "--ranks", *several, *tiny],
        ["ranks_resume.py", "--ranks", str(max(options.ranks)), *tiny, *disk],
        ["scaling_model.py", *(["--dry"] if tiny else [])],
    ):
        subprocess.run([sys.executable, str(Path(__file__).with_name(name)), *arguments], check=True)


if __name__ == "__main__":
    main()
