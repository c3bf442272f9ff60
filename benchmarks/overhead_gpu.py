"""Step time on a GPU: a hand-written loop, the same step captured by hand, treadle eager and captured, and peers.

    python benchmarks/overhead_gpu.py                        # writes results/overhead_gpu_*.md and .json
    python benchmarks/overhead_gpu.py --workloads mlp d128   # two of mlp, d128 and d256, with a table each
    python benchmarks/overhead_gpu.py --halves               # bf16 and fp16; writes results/overhead_gpu_halves.*
    torchrun --nproc-per-node=2 benchmarks/overhead_gpu.py --halves   # on replicas; writes overhead_gpu_replicas.*
    python benchmarks/overhead_gpu.py --tiny                 # a trial on the CPU, nothing is captured or written

Model, data, AdamW (fused) and clipping are the same for all, and all data is on the GPU. The eager ways read a list of
batches. The captured ones gather each batch from whole tensors in a shuffled order, into fixed memory; the hand-made
graph contains forward, backward, clipping and update, and is the floor that the others are compared with. Every round
runs every way, in a new order each time. A step time is a mean: from the end of a warm-up, which includes capturing, to
the end of the last step, including the GPU's work. The table has medians over rounds, and medians of the ratios within
each round. Peers that are not installed are omitted, and one that fails is reported on standard error; ``d256`` runs
without them.

``--halves`` compares eager and captured steps of the Engine in bf16 and fp16, with and without a schedule that moves in
each step, and fp16 with a scaler of another class, whose result the host reads before the update. On replicas, each
rank has whole batches, and steps of two micro-batches are measured too; times are those of rank 0.

The table is written after every round. The steps of five rounds take three minutes on an H200, of ``mlp`` less than
one; capturing and the peers' own start come on top.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from machine import describe, write_result
from overhead import (
    CLIP,
    WAYS,
    Clock,
    Cost,
    Encoder,
    Fit,
    Net,
    Ticks,
    Way,
    Ways,
    Workload,
    engine,
    installed,
    parts_of,
    rounds_of,
    spread,
    step_by_hand,
)
from torch import Tensor

from treadle import BaseHook, BaseTrainer, CheckpointingHook, EmaHook, Engine, ProgressHook, TensorLoader, compile_model
from treadle.faces.parallel import parallelize
from treadle.optim.precision import Precision

LOOP, FLOOR = "hand loop", "hand-captured"
COLUMNS = ("way", "µs a step", "processor µs a step", f"of the {LOOP}", f"of the {FLOOR} step")


class Watch(Clock):
    """Clock that is read after the warm-up and after the last step, when the GPU is idle."""

    def __init__(self, warm_up: int, steps: int) -> None:
        super().__init__(warm_up)
        self.steps, self.ticks = steps, 0

    def tick(self) -> None:
        self.ticks += 1
        if self.ticks in (self.warm_up, self.steps):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            super().tick()

    def steps_ahead(self) -> int | None:
        left = self.warm_up - self.ticks
        return left if left > 0 else None

    def per_step(self) -> Cost:
        """Return the mean of the steps after the warm-up."""
        start, end = self.times
        return Cost(*(1e6 * (end[clock] - start[clock]) / (self.steps - self.warm_up) for clock in (0, 1)))


@dataclass
class Case:
    """Workload and its number of steps.

    Attributes:
        title: the title in the table.
        work: model and batches.
        steps: the steps of each way in each round.
        with_peers: whether the peers are run too.
    """

    title: str
    work: Workload
    steps: int
    with_peers: bool = True


def cases(device: torch.device) -> dict[str, Case]:
    return {
        "mlp": Case("MLP 64-64-1, batch 32, fp32", Workload(Net, (32, 64), device, fused=True), 400),
        "d128": Case(
            "transformer d128 x4 on 32 positions, batch 64, bf16",
            Workload(Encoder, (64, 32, 64), device, bf16=True, fused=True), 120,
        ),
        "d256": Case(
            "transformer d256 x16 on 32 positions, batch 256, bf16",
            Workload(lambda: Encoder(256, 16), (256, 32, 64), device, bf16=True, fused=True), 60, with_peers=False,
        ),
    }  # fmt: skip


def tensors(work: Workload, steps: int) -> tuple[Tensor, Tensor]:
    """Return rows for a number of batches, created on the device."""
    generator = torch.Generator(work.device).manual_seed(1)
    x = torch.randn((steps * work.shape[0], *work.shape[1:]), generator=generator, device=work.device)
    return x, x.flatten(1).sum(1, keepdim=True)


# -- the ways -----------------------------------------------------------------------------------------------------


def hand_captured(work: Workload, steps: int, clock: Clock) -> None:
    model = work.build()[0]
    rate = torch.tensor(1e-3, device=work.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=work.device.type == "cuda")
    rows = tensors(work, steps)
    size = work.shape[0]
    batch = (torch.zeros_like(rows[0][:size]), torch.zeros_like(rows[1][:size]))

    launch = recorded(lambda: step_by_hand(work, model, optimizer, batch), work.device)
    order = torch.randperm(steps * size, device=work.device)
    for number in range(steps):
        picked = order[number * size : (number + 1) * size]
        for tensor, out in zip(rows, batch, strict=True):
            torch.index_select(tensor, 0, picked, out=out)
        launch()
        clock.tick()


def recorded(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Return a function that launches a step as one graph, or the step itself if there are no graphs."""
    if device.type != "cuda":
        return step
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def loader_of(work: Workload, steps: int) -> TensorLoader:
    return TensorLoader(*tensors(work, steps), batch_size=work.shape[0], shuffle=True, num_buffers=1)


def captured(
    work: Workload, steps: int, clock: Clock, hooks: Sequence[BaseHook] = (), *, compiled: bool = False
) -> None:
    model, optimizer = work.build()
    if compiled:
        compile_model(model)
    run = Engine(
        model, optimizer, Fit(), device=work.device, precision="bf16" if work.bf16 else None, grad_clip=CLIP,
        hooks=[*hooks, Ticks(clock)], capture=work.device.type == "cuda" or "auto",
    )  # fmt: skip
    run.run(loader_of(work, steps), max_steps=steps)


def with_hooks(way: Callable[..., None]) -> Way:
    """Return the same with the usual hooks of a run."""

    def run(work: Workload, steps: int, clock: Clock) -> None:
        with tempfile.TemporaryDirectory() as folder:
            saves = CheckpointingHook(100_000, path=folder)
            way(work, steps, clock, [EmaHook(0.999), ProgressHook(100), saves])

    return run


def trainer_captured(work: Workload, steps: int, clock: Clock) -> None:
    class Mini(parts_of(work, steps), BaseTrainer):  # type: ignore[misc]
        def build_data_loader(self) -> Iterable[Any]:
            return loader_of(work, steps)

        def build_hooks(self) -> list[BaseHook]:
            return [Ticks(clock)]

    precision, capture = "bf16" if work.bf16 else None, work.device.type == "cuda" or "auto"
    Mini(steps, grad_clip=CLIP, mixed_precision=precision, device=work.device, capture=capture).train()


OURS: Ways = {
    LOOP: WAYS[LOOP],
    FLOOR: (hand_captured, None),
    "treadle Engine": WAYS["treadle Engine"],
    "treadle Engine, captured": (captured, None),
    "treadle Engine, usual hooks": (with_hooks(engine), None),
    "treadle Engine, usual hooks, captured": (with_hooks(captured), None),
    "treadle BaseTrainer": WAYS["treadle BaseTrainer"],
    "treadle BaseTrainer, captured": (trainer_captured, None),
}
COMPILED: Ways = {"treadle Engine, captured, compiled": (functools.partial(captured, compiled=True), None)}
PEERS: Ways = {name: (way, package) for name, (way, package) in WAYS.items() if package is not None}


def forgiving(name: str, way: Way) -> Way:
    """Return a peer's way that yields no figures if the peer fails."""

    def run(work: Workload, steps: int, clock: Clock) -> None:
        try:
            way(work, steps, clock)
        except Exception as error:  # noqa: BLE001  # the others continue
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            clock.times.clear()

    return run


# -- half precision, replicas -------------------------------------------------------------------------------------


class HostScaler(torch.amp.GradScaler):
    """Scaler whose ``update`` is not torch's, so that the host reads the result of each step."""

    def update(self, new_scale: float | Tensor | None = None) -> None:
        super().update(new_scale)


def half(
    work: Workload, steps: int, clock: Clock, *, precision: str, capture: bool, scheduled: bool = False,
    host: bool = False, accumulation: int = 1,
) -> None:  # fmt: skip
    """Train in half precision; on several ranks, replicas on a stream that can be captured."""
    several, on_gpu = dist.is_initialized(), work.device.type == "cuda"
    beside = torch.cuda.stream(torch.cuda.Stream()) if several and on_gpu else contextlib.nullcontext()
    with beside:
        model, optimizer = work.build()
        model = parallelize(model, "ddp") if several else model
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.999**step) if scheduled else None
        run = Engine(
            model, optimizer, Fit(), scheduler=schedule, device=work.device, precision=precision, grad_clip=CLIP,
            hooks=[Ticks(clock)], capture=capture and on_gpu, accumulation_steps=accumulation,
        )  # fmt: skip
        if host:
            run.precision = Precision("fp16", run.device, scaler=HostScaler(run.device.type))
        x, y = tensors(work, steps * accumulation)
        loader = TensorLoader(x, y, batch_size=work.shape[0], shuffle=True, num_buffers=None if several else 1)
        run.run(loader, max_steps=steps)
    if several:
        dist.barrier()


def halves(*, several: bool) -> Ways:
    """Return the ways in half precision, of one process or of replicas."""
    found: Ways = {}
    for name, options in {
        "bf16": {"precision": "bf16"},
        "fp16": {"precision": "fp16"},
        **({} if several else {
            "fp16, a schedule": {"precision": "fp16", "scheduled": True},
            "fp16, read by the host": {"precision": "fp16", "host": True},
        }),
        **({"bf16, two micro-batches": {"precision": "bf16", "accumulation": 2}} if several else {}),
    }.items():  # fmt: skip
        for capture in (False, True):
            way = functools.partial(half, capture=capture, **options)
            found[name + (", captured" if capture else "")] = (way, None)
    return found


def measure_halves(case: Case, *, several: bool, rounds: int, steps: int) -> Iterator[list[dict[str, str]]]:
    """Yield the rows of the table after each round."""
    ways = halves(several=several)
    found: dict[str, list[Cost]] = {}
    turns = rounds_of(case.work, ways, lambda: Watch(max(steps // 5, 5), steps), steps=steps, rounds=rounds)
    for number, (way, clock) in enumerate(turns, start=1):
        found.setdefault(way, []).append(clock.per_step())
        print(f"{case.title}, {way}: {found[way][-1].wall:,.0f} µs a step", flush=True)
        if number % len(ways) == 0:
            yield [
                {"workload": case.title, "way": name, COLUMNS[1]: spread([cost.wall for cost in found[name]]),
                 COLUMNS[2]: spread([cost.processor for cost in found[name]])}
                for name in ways
            ]  # fmt: skip


def run_halves(names: Sequence[str], device: torch.device, *, rounds: int, steps: int | None) -> None:
    """Measure and write the table; on several ranks, rank 0 does."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"])) if device.type == "cuda" else device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rows: list[dict[str, str]] = []
    for name in names:
        case = cases(device)[name]
        case.title = case.title.removesuffix(", bf16").removesuffix(", fp32")
        *_, last = measure_halves(case, several=several, rounds=rounds, steps=steps or case.steps // 2)
        rows += last
        if steps is not None:
            print(*last, sep="\n")
        elif not several or dist.get_rank() == 0:
            on = f" on {dist.get_world_size()} replicas" if several else ""
            write_result(
                "overhead_gpu_replicas" if several else "overhead_gpu_halves",
                f"Microseconds of an optimizer step of the Engine in half precision on a GPU{on}",
                ("workload", *COLUMNS[:3]), rows, describe() | {"rounds": str(rounds)}, partial=name != names[-1],
            )  # fmt: skip
    if several:
        dist.destroy_process_group()


# -- rounds and table ---------------------------------------------------------------------------------------------


def measure(case: Case, *, rounds: int, steps: int, more: Ways | None = None) -> Iterator[dict[str, list[Cost]]]:
    """Yield the cost of a step by each way after each round, without ways that failed."""
    ways = {**OURS, **(more or {})}
    if case.with_peers:
        ways |= {name: (forgiving(name, PEERS[name][0]), None) for name in installed(PEERS, PEERS)}
    found: dict[str, list[Cost]] = {}
    turns = rounds_of(case.work, ways, lambda: Watch(max(steps // 5, 5), steps), steps=steps, rounds=rounds)
    for number, (way, clock) in enumerate(turns, start=1):
        if len(clock.times) == 2:
            found.setdefault(way, []).append(clock.per_step())
            print(f"{case.title}, {way}: {found[way][-1].wall:,.0f} µs a step", flush=True)
        done, left = divmod(number, len(ways))
        if not left:
            yield {way: found[way] for way in ways if len(found.get(way, ())) == done}


def rows_of(found: dict[str, list[Cost]]) -> list[dict[str, str]]:
    rows = []
    for way, costs in found.items():
        row = {
            "way": way, "µs a step": spread([cost.wall for cost in costs]),
            "processor µs a step": spread([cost.processor for cost in costs]),
        }  # fmt: skip
        for column, base in zip(COLUMNS[3:], (LOOP, FLOOR), strict=True):
            row[column] = f"{median(cost.wall / of.wall for cost, of in zip(costs, found[base], strict=True)):.3f}"
        rows.append(row)
    return rows


def versions() -> dict[str, str]:
    """Return the versions of the peers, by package name."""
    names = {"ignite": "pytorch-ignite"}
    packages = [str(PEERS[name][1]) for name in installed(PEERS, PEERS)]
    return {package: importlib.metadata.version(names.get(package, package)) for package in packages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=("mlp", "d128", "d256"), default=["mlp", "d128", "d256"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compiled", action="store_true", help="also a compiled model, captured: takes minutes")
    parser.add_argument("--halves", action="store_true", help="only half precision, eager and captured")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.halves:
        device = torch.device("cpu" if options.tiny else "cuda")
        run_halves(options.workloads, device, rounds=options.rounds, steps=10 if options.tiny else None)
        return
    if options.tiny:
        case = cases(torch.device("cpu"))["mlp"]
        case.with_peers = False
        (found,) = measure(case, rounds=1, steps=20)
        print(*rows_of(found), sep="\n")
        return
    if not torch.cuda.is_available():
        parser.error("there is no GPU here; overhead.py is the benchmark of the CPU, and --tiny a trial")
    for name in options.workloads:
        case = cases(torch.device("cuda"))[name]
        title = f"Microseconds of an optimizer step on a GPU, gradients clipped: {case.title}"
        peers = versions() if case.with_peers else {}
        turns = measure(
            case, rounds=options.rounds, steps=case.steps, more=COMPILED if options.compiled else None
        )  # fmt: skip
        for number, found in enumerate(turns, start=1):
            machine = describe() | {"rounds": str(number)} | peers
            partial = number < options.rounds
            write_result(f"overhead_gpu_{name}", title, COLUMNS, rows_of(found), machine, partial=partial)


if __name__ == "__main__":
    main()
