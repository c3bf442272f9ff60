"""Eight seeds trained together on a GPU against one after another, and four on the CPU in processes.

    python benchmarks/population.py                # on a GPU; writes results/population.md and .json
    python benchmarks/population.py --cpu          # on the CPU; writes results/population_cpu.md and .json
    python benchmarks/population.py --tiny         # a trial on the CPU, writes nothing

On a GPU every member is a run with captured steps, a folder, a step log and its own seed. Alone, a run's rate is
measured from the end of its warm-up, which includes capturing, to its end; together, all steps between the last
member's warm-up and the first member's end count. The total time, from the creation of the first run to the end of the
last, is given too. Every member is then compared with its run alone: weights to the bit, and the step log. One
population of the MLP is killed by SIGKILL, rerun and compared as well. "By hand" is what the GPU gives: the same steps
as one graph for each member, without a trainer, data or log, launched in turn; of the MLP 16 steps a graph.

On the CPU, ``treadle train spectra`` runs four seeds, one after another and by ``--seeds 0..3``, alternating.
"""

from __future__ import annotations

import argparse
import functools
import gc
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from graphs_gpu import collate, make_step, our_model
from machine import describe, write_result
from molecules import load, made_up
from overhead import CLIP, Fit, step_by_hand
from overhead_gpu import Case, cases, tensors
from spectra import Sizes, build, ours, spectra
from torch import Tensor, nn

from treadle import BaseHook, BaseTrainer, CheckpointingHook, TensorLoader, set_seed
from treadle.graphs import GraphTrainer, get_loss_fn, pad_batch, plan_buckets
from treadle.population import Population
from treadle.spectra.losses import masked_mse

COLUMNS = (
    "workload", "members", "alone, steps/s", "together, steps/s", "times", "by hand, steps/s", "by hand, times",
    "whole time, times", "MiB a member", "weights equal", "step log equal",
)  # fmt: skip
MARK = 20  # steps


class Clock(BaseHook):
    """Hook that records the time every few steps."""

    state_key = "clock"

    def __init__(self, warm_up: int) -> None:
        self.warm_up = warm_up
        self.marks: list[tuple[int, float]] = []

    def steps_ahead(self, trainer: Any) -> int | None:
        return None

    def on_after_step(self, trainer: Any) -> None:
        if trainer.step >= self.warm_up and (not self.marks or trainer.step - self.marks[-1][0] >= MARK):
            if not self.marks and torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()
            self.marks.append((trainer.step, time.perf_counter()))

    def on_after_train(self, trainer: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        self.marks.append((trainer.step, time.perf_counter()))

    def steps_until(self, moment: float) -> float:
        """Return the steps made by a given time, interpolated between two marks."""
        for (step, at), (later, then) in zip(self.marks, self.marks[1:], strict=False):
            if at <= moment <= then:
                return step + (later - step) * (moment - at) / max(then - at, 1e-9)
        return self.marks[-1][0] if moment > self.marks[-1][1] else self.marks[0][0]


@dataclass
class Made:
    """Run: its training function, its model and its clock."""

    train: Callable[[], Any]
    model: Callable[[], nn.Module]
    clock: Clock


Factory = Callable[[int, Path], Made]


def trainer_of(
    case: Case,
    steps: int,
    seed: int,
    workspace: Path,
    *,
    interval: int = 0,
    batches: int = 1000,
    hooks: Sequence[BaseHook] = (),
) -> Made:
    """Return a run of one of the models of ``overhead_gpu.py``."""
    work, clock = case.work, Clock(steps // 4)

    class Seeded(BaseTrainer):
        def build_data_loader(self) -> Iterable[Any]:
            rows = tensors(work, batches)
            return TensorLoader(*rows, batch_size=work.shape[0], shuffle=True, seed=seed, num_buffers=1)

        def build_model(self) -> nn.Module:
            return work.make().to(work.device)

        def build_optimizer(self) -> torch.optim.Optimizer:
            fused = True if work.device.type == "cuda" else None
            return torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=fused)

        def build_hooks(self) -> list[BaseHook]:
            return [clock, *hooks, *([CheckpointingHook(interval)] if interval else [])]

        def forward(self, input: Any) -> Any:
            return FIT.step(self.model, input)

    trainer = Seeded(
        steps, grad_clip=CLIP, mixed_precision="bf16" if work.bf16 else None, device=work.device, workspace=workspace,
        capture=work.device.type == "cuda", progress=False,
    )  # fmt: skip
    return Made(trainer.train, lambda: trainer.model, clock)


FIT = Fit()


def spectra_of(epochs: int, sizes: Sizes, batch_size: int, seed: int, workspace: Path) -> Made:
    """Return a run of treadle's masked autoencoder on patches, of ``spectra.py``."""
    trainer = ours("patches", batch_size=batch_size, folder=workspace, sizes=sizes, captured=True)
    torch.manual_seed(seed)  # the model's weights are the same; its masks are not
    clock = Clock(40)
    trainer._engine.hooks = [*trainer._engine.hooks, clock]
    return Made(functools.partial(trainer.fit, epochs), lambda: trainer.model, clock)


def molecules_of(
    epochs: int,
    layers: int,
    padded: list[Any],
    device: torch.device,
    seed: int,
    workspace: Path,
    *,
    deterministic: bool = False,
) -> Made:
    """Return a run of the graph transformer of ``graphs_gpu.py``; its layers use atomic additions unless disabled."""
    if deterministic:
        set_seed(seed, deterministic=True)
    model, clock = our_model(layers).to(device), Clock(len(padded))
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    trainer = GraphTrainer(
        model, optimizer, loss_fn=get_loss_fn("regression", "mae"), device=device, log_every=None, capture=on_gpu,
        checkpoint_dir=workspace, hooks=[clock], progress=False,
    )  # fmt: skip
    return Made(lambda: trainer.fit(padded, epochs=epochs), lambda: trainer.model, clock)


def padded_batches(size: int, count: int, device: torch.device, *, tiny: bool, repeats: int = 1) -> list[Any]:
    graphs, draw = made_up(64) if tiny else load(None)[0], random.Random(0)
    order = [i for _ in range(repeats) for i in draw.sample(range(len(graphs)), min(len(graphs), count))]
    parts = [collate([graphs[i] for i in order[at : at + size]]) for at in range(0, len(order) - size + 1, size)]
    buckets = plan_buckets([SimpleNamespace(**graph) for graph in graphs], size, num_buckets=2)
    batches = [pad_batch(part, buckets) for part in parts]
    return [batch.pin_memory() if device.type == "cuda" else batch for batch in batches]


# -- the steps by hand --------------------------------------------------------------------------------------------


def optimizer_by_hand(weights: list[nn.Parameter], device: torch.device) -> torch.optim.Optimizer:
    rate = torch.tensor(1e-3, device=device)
    return torch.optim.AdamW(weights, lr=rate, fused=True, capturable=device.type == "cuda")


def step_of_case(case: Case) -> Callable[[], object]:
    """Return a step of one of the models of ``overhead_gpu.py``."""
    work = case.work
    model = work.make().to(work.device)
    optimizer = optimizer_by_hand(list(model.parameters()), work.device)
    x, y = tensors(work, 1)
    return functools.partial(step_by_hand, work, model, optimizer, (x, y))


def step_of_spectra(sizes: Sizes, batch_size: int) -> Callable[[], object]:
    """Return a step of the masked autoencoder on patches, with an average of the weights."""
    model: Any = build("patches", sizes)
    weights = list(model.parameters())
    average = [weight.detach().clone() for weight in weights]
    optimizer = optimizer_by_hand(weights, sizes.device)
    x = spectra()[0][:batch_size].to(sizes.device)
    visible_mask, count = model.make_visible(len(x)), model.visible_count()

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(sizes.device.type, torch.bfloat16):
            loss = masked_mse(model(x, visible_mask, visible_count=count)[0], x, ~visible_mask)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, CLIP)
        optimizer.step()
        torch._foreach_lerp_(average, weights, 1e-3)

    return step


def step_of_molecules(layers: int, padded: list[Any], device: torch.device) -> Callable[[], object]:
    """Return a step of the graph transformer, on the first batch."""
    model = our_model(layers).to(device)
    return functools.partial(make_step(model, model, device), padded[0].to(device))


def by_hand(make: Callable[[], Callable[[], object]], members: int, *, steps: int) -> tuple[float, float]:
    """Return the steps per second of one member and of all, each a graph of some steps on a stream."""
    graphs = []
    for seed in range(members):
        set_seed(seed)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            step = make()
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(steps):
                step()
        graphs.append((graph, stream, step))  # the graph holds addresses only

    def rate(count: int) -> float:
        started, done = time.perf_counter(), 0
        while time.perf_counter() - started < 0.5:
            for graph, stream, _ in graphs[:count]:
                with torch.cuda.stream(stream):
                    graph.replay()
            done += count * steps
        torch.cuda.synchronize()
        return done / (time.perf_counter() - started)

    return rate(1), rate(members)


# -- measuring ----------------------------------------------------------------------------------------------------


@dataclass
class Ended:
    """Results of a finished run."""

    weights: dict[str, Tensor]
    log: str
    clock: Clock


def ended(made: Made, folder: Path) -> Ended:
    log = next(folder.rglob("steps.jsonl"), folder / "steps.jsonl")
    weights = {name: value.detach().cpu() for name, value in made.model().state_dict().items()}
    return Ended(weights, log.read_text() if log.exists() else "", made.clock)


def taken() -> int:
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


@dataclass
class Workload:
    """Workload whose data is read when it is run.

    Attributes:
        make: returns the factory of its members.
        by_hand: returns what makes a step by hand; None if that is not measured.
        steps: steps in a graph by hand.
    """

    make: Callable[[], Factory]
    by_hand: Callable[[], Callable[[], Callable[[], object]]] | None = None
    steps: int = 1

    def ceiling(self, members: int) -> dict[str, str]:
        """Return the columns of the steps by hand."""
        if self.by_hand is None or not torch.cuda.is_available():
            return {}
        one, every = by_hand(self.by_hand(), members, steps=self.steps)
        return {"by hand, steps/s": f"{every:,.0f}", "by hand, times": f"{every / one:.2f}"}


def measure(name: str, workload: Workload, members: int, folder: Path) -> list[dict[str, str]]:
    """Train the members alone and together; return a row, and for the MLP one about its blocks of steps."""
    make = workload.make()
    alone: dict[int, Ended] = {}
    torch.use_deterministic_algorithms(False)
    started = time.perf_counter()
    for seed in range(members):
        place = folder / f"alone{seed}"
        set_seed(seed)
        made = make(seed, place)
        made.train()
        alone[seed] = ended(made, place)
    whole_alone = time.perf_counter() - started
    del made
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    together: dict[int, Made] = {}
    before, most = taken(), [0]

    def keeping(seed: int, workspace: Path) -> Callable[[], Any]:
        together[seed] = make(seed, workspace)
        return together[seed].train

    started = time.perf_counter()
    results = Population(keeping, seeds=range(members), out=folder / "together", progress=False).run()
    whole_together = time.perf_counter() - started
    most[0] = taken() - before
    equal, logs = [], []
    for row in results.rows:
        assert row.status == "finished", row.error
        seed = row.settings["seed"]
        mine = ended(together[seed], folder / "together" / row.name)
        theirs = alone[seed]
        equal.append(all(torch.equal(mine.weights[key], value) for key, value in theirs.weights.items()))
        logs.append(mine.log == theirs.log)
    rates = [rate_of([alone[seed].clock]) for seed in alone]
    rate = rate_of([together[seed].clock for seed in together])
    row = {
        "workload": name, "members": str(members), "alone, steps/s": f"{median(rates):,.0f}",
        "together, steps/s": f"{rate:,.0f}", "times": f"{rate / median(rates):.2f}", **workload.ceiling(members),
        "whole time, times": f"{whole_alone / whole_together:.2f}",
        "MiB a member": f"{most[0] / members / 2**20:,.0f}",
        "weights equal": f"{sum(equal)} of {members}", "step log equal": f"{sum(logs)} of {members}",
    }  # fmt: skip
    print(row, f"alone {whole_alone:.1f} s, together {whole_together:.1f} s", flush=True)
    return [row, *([step_by_step(make, alone[0], folder / "single")] if "MLP" in name else [])]


class Looks(BaseHook):
    """Hook that observes every step individually, so that no steps run ahead."""

    def on_after_step(self, trainer: Any) -> None:
        pass


def step_by_step(make: Callable[..., Made], blocks: Ended, place: Path) -> dict[str, str]:
    """Compare a run with a hook that observes every step with one whose steps ran ahead; return a row."""
    set_seed(0)
    made = make(0, place, hooks=[Looks()])
    made.train()
    single = ended(made, place)
    equal = all(torch.equal(single.weights[key], value) for key, value in blocks.weights.items())
    return {
        "workload": "MLP, steps that ran ahead against each by itself", "members": "1",
        "alone, steps/s": f"{rate_of([made.clock]):,.0f}", "weights equal": f"{int(equal)} of 1",
        "step log equal": f"{int(single.log == blocks.log)} of 1",
    }  # fmt: skip


def rate_of(clocks: list[Clock]) -> float:
    """Return the steps per second of all runs between the last one's warm-up and the first one's end."""
    start, end = max(clock.marks[0][1] for clock in clocks), min(clock.marks[-1][1] for clock in clocks)
    steps = sum(clock.steps_until(end) - clock.steps_until(start) for clock in clocks)
    return steps / (end - start) if end > start else float("nan")


def workloads(device: torch.device, *, tiny: bool) -> dict[str, Workload]:
    """Return the workloads by title."""
    steps = {"mlp": (8000, 2000)} if tiny else {"mlp": (8000, 2000), "d128": (800, 400), "d256": (120, 60)}
    sizes = Sizes(device, width=16, num_layers=1, repeats=1) if tiny else Sizes(device, repeats=20)
    batch_size, layers = (256, 2) if tiny else (64, 10)

    def of_case(case: Case, count: int, batches: int) -> Factory:
        return functools.partial(trainer_of, case, 80 if tiny else count, batches=batches)

    def padded(repeats: int = 1) -> list[Any]:
        return padded_batches(4 if tiny else 32, 64 if tiny else 2048, device, tiny=tiny, repeats=repeats)

    def of_molecules(epochs: int, *, deterministic: bool = False, repeats: int = 1) -> Factory:
        return functools.partial(molecules_of, epochs, layers, padded(repeats), device, deterministic=deterministic)

    found: dict[str, Workload] = {}
    for name, (count, batches) in steps.items():
        case = cases(device)[name]
        found[case.title] = Workload(
            functools.partial(of_case, case, count, batches),
            lambda case=case: functools.partial(step_of_case, case), 16 if name == "mlp" else 1,
        )  # fmt: skip
    found["masked autoencoder of spectra, d256 x4, batch 64, bf16"] = Workload(
        lambda: functools.partial(spectra_of, 2, sizes, batch_size),
        lambda: functools.partial(step_of_spectra, sizes, batch_size),
    )
    molecules = "graph transformer of molecules, d64 x10, batch 32, fp32"
    found[molecules] = Workload(
        functools.partial(of_molecules, 3 if tiny else 6),
        lambda: functools.partial(step_of_molecules, layers, padded(), device),
    )
    found[f"{molecules}, epochs as long as those of ZINC"] = Workload(functools.partial(of_molecules, 2, repeats=5))
    found[f"{molecules}, torch's deterministic kernels"] = Workload(
        functools.partial(of_molecules, 2, deterministic=True)
    )
    return found


# -- killed and run again -----------------------------------------------------------------------------------------


def killed(device: torch.device, members: int, folder: Path, *, steps: int) -> dict[str, str]:
    """Kill a population of the MLP by SIGKILL, rerun it, and compare its members with their runs alone."""
    command = [
        sys.executable,
        __file__,
        "--child",
        str(folder / "killed"),
        "--members",
        str(members),
        "--steps",
        str(steps),
    ]
    first = folder / "killed" / "seed=0" / "checkpoints" / f"checkpoint_step_{steps // 5}.pt"
    with subprocess.Popen(command) as process:
        deadline = time.monotonic() + 180
        while not first.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    reached = first.exists() and process.returncode == -signal.SIGKILL
    subprocess.run(command, check=True)
    equal, logs = 0, 0
    for seed in range(members):
        set_seed(seed)
        made = trainer_of(cases(device)["mlp"], steps, seed, folder / f"kept{seed}", interval=steps // 5)
        made.train()
        mine = folder / "killed" / f"seed={seed}"
        theirs = ended(made, folder / f"kept{seed}")
        saved = torch.load(mine / "checkpoints" / f"checkpoint_step_{steps}.pt", map_location="cpu")["model"]
        equal += all(torch.equal(saved[key], value) for key, value in theirs.weights.items())
        logs += (mine / "steps.jsonl").read_text() == theirs.log
    return {
        "workload": f"MLP, killed by SIGKILL after step {steps // 5} ({reached}) and run again",
        "members": str(members),
        "weights equal": f"{equal} of {members}", "step log equal": f"{logs} of {members}",
    }  # fmt: skip


def kill_and_compare(device: torch.device, members: int, steps: int) -> dict[str, str]:
    folder = Path(tempfile.mkdtemp())
    try:
        return killed(device, members, folder, steps=steps)
    except Exception as error:  # noqa: BLE001  # the table names it
        return {"workload": f"MLP, killed: failed, {type(error).__name__}: {error}"[:300]}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def child(folder: Path, members: int, steps: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def make(seed: int, workspace: Path) -> Callable[[], Any]:
        return trainer_of(cases(device)["mlp"], steps, seed, workspace, interval=steps // 5).train

    Population(make, seeds=range(members), out=folder, progress=False).run()


# -- the CPU ------------------------------------------------------------------------------------------------------


def spectra_command(seeds: str, out: Path, settings: list[str]) -> tuple[float, float]:
    """Return the wall-clock seconds of a command and the processor seconds of its processes."""
    single = "." not in seeds
    chosen = [f"seed={seeds}"] if single else ["--seeds", seeds]
    command = [
        sys.executable,
        "-m",
        "treadle",
        "train",
        "spectra",
        *settings,
        *chosen,
        "--device",
        "cpu",
        "--out",
        str(out),
    ]
    started, before = time.perf_counter(), os.times()
    with open(os.devnull, "w") as nothing:
        subprocess.run(command, check=True, stdout=nothing, stderr=nothing)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - started, used


def on_the_cpu(rounds: int, settings: list[str]) -> Iterator[dict[str, str]]:
    """Yield a row for each round."""
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            load_before = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
            together, of_all = spectra_command("0..3", folder / "together", settings)
            each = [spectra_command(str(seed), folder / f"alone{seed}", settings) for seed in range(4)]
            alone, processor = (sum(times) for times in zip(*each, strict=True))
            equal = sum(
                same_weights(folder / "together" / f"seed={seed}", folder / f"alone{seed}") for seed in range(4)
            )
            yield {
                "round": str(number + 1), "one after the other, s": f"{alone:.1f}", "together, s": f"{together:.1f}",
                "of it": f"{together / alone:.2f}",
                "processor s, one after the other": f"{processor:.1f}", "processor s, together": f"{of_all:.1f}",
                "weights equal": f"{equal} of 4",
                "load of the machine before": f"{load_before:.1f}",
            }  # fmt: skip


def same_weights(one: Path, two: Path) -> bool:
    ours, theirs = (torch.load(folder / "best_model.pt") for folder in (one, two))
    logs = [(folder / "steps.jsonl").read_text() for folder in (one, two)]
    return all(torch.equal(ours[name], theirs[name]) for name in theirs) and logs[0] == logs[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--only", nargs="+", default=[], help="workloads whose title contains one of these")
    parser.add_argument("--skip", nargs="+", default=[], help="workloads whose title contains one of these")
    parser.add_argument("--steps", type=int, default=2000, help="of the population that is killed")
    parser.add_argument("--rounds", type=int, default=2, help="with --cpu")
    parser.add_argument("--settings", nargs="*", default=[], help="with --cpu: settings of the runs")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.getLogger("treadle").setLevel(logging.ERROR)
    if options.child:
        child(options.child, options.members, options.steps)
        return
    if options.cpu:
        rows = list(on_the_cpu(options.rounds, options.settings))
        title = f"Four seeds of treadle train spectra {' '.join(options.settings)} on {os.cpu_count()} cores".replace(
            "  ", " "
        )
        write_result("population_cpu", title, tuple(rows[0]), rows, describe())
        return
    if not options.tiny and not torch.cuda.is_available():
        parser.error("there is no GPU here; use --cpu, or --tiny for a trial")
    device = torch.device("cpu" if options.tiny else "cuda")
    members = 2 if options.tiny else options.members
    found: list[dict[str, str]] = []
    title = "Eight seeds together on one GPU, against one after the other"
    for name, workload in workloads(device, tiny=options.tiny).items():
        if options.only and not any(part in name for part in options.only):
            continue
        if any(part in name for part in options.skip):
            continue
        folder = Path(tempfile.mkdtemp())
        try:
            found += measure(name, workload, members, folder)
        except Exception as error:  # noqa: BLE001  # the others go on, and the table names it
            found.append({"workload": f"{name}: failed, {type(error).__name__}: {error}"[:300]})
            print(found[-1], file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        if not options.tiny:
            write_result("population", title, COLUMNS, found, describe(), partial=True)
    if not options.only or "killed" in options.only:
        found.append(kill_and_compare(device, members, 100 if options.tiny else options.steps))
        print(found[-1], flush=True)
    if options.tiny:
        print(*found, sep="\n")
    else:
        write_result("population", title, COLUMNS, found, describe())


if __name__ == "__main__":
    main()
