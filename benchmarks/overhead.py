"""Overhead of a step: a hand-written loop, treadle and its peers, in one run on one machine.

    python benchmarks/overhead.py                      # writes results/overhead.md and .json
    python benchmarks/overhead.py --tiny               # a trial, writes nothing

This benchmark trains on the CPU; ``overhead_gpu.py`` trains on a GPU.

All train the same model on the same batches, which are in memory already, with the same AdamW, gradients clipped. Every
round runs every way, in a new order each time, so that other load on the machine affects all of them. A step is timed
from the end of one to the end of the next, by clocks read in each way's own callback: wall-clock time and this
process's processor time. A round counts with its median step, since on a shared machine an interrupted step costs
several times as much; work that a way does only every few dozen steps is excluded (``scale.py`` has means over a long
run). The comparison with the loop uses processor time. Peers that are not installed are omitted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import itertools
import logging
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
from machine import describe, write_result
from torch import Tensor, nn
from torch.nn import functional as F

from treadle import BaseHook, BaseTrainer, EmaHook, Engine, LoggingHook, ProgressHook, StepOutput, Trainer
from treadle.engine.block import StepBlock

CLIP = 1.0
COLUMNS = ("workload", "way", "µs a step", "processor µs a step", "more than the loop", "of the loop")


class Net(nn.Sequential):
    """MLP with layers 64-64-1."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


class Encoder(nn.Module):
    """Transformer on positions of 64 numbers, with heads of width 32."""

    def __init__(self, width: int = 128, num_layers: int = 4) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, width // 32, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.inward, self.outward = nn.Linear(64, width), nn.Linear(width, 1)
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.outward(self.layers(self.inward(x)).mean(1))


@dataclass
class Workload:
    """Model and batches of a workload.

    Attributes:
        make: builds the model.
        shape: of one batch.
        device: of model and batches.
        bf16: whether the forward pass is under autocast.
        share: divisor of the requested number of steps.
        fused: whether the optimizer is fused; by default on CUDA.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    device: torch.device
    bf16: bool = False
    share: int = 1
    fused: bool | None = None

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = self.make().to(self.device)
        fused = self.fused or (True if self.device.type == "cuda" else None)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)

    def batches(self, count: int) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        few = [torch.randn(self.shape, generator=generator).to(self.device) for _ in range(16)]
        pairs = [(x, x.flatten(1).sum(1, keepdim=True)) for x in few]
        return [pairs[number % 16] for number in range(count)]

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)


class Cost(NamedTuple):
    """Microseconds of a step: wall-clock time and this process's processor time."""

    wall: float
    processor: float


@dataclass
class Clock:
    """Clock that records when steps end."""

    warm_up: int
    times: list[tuple[float, float]] = field(default_factory=list)

    def tick(self) -> None:
        self.times.append((time.perf_counter(), time.process_time()))

    def steps_ahead(self) -> int | None:
        """Return how many captured steps may run before one must be recorded individually."""
        return 1

    def per_step(self) -> Cost:
        """Return the median time from one step's end to the next, without those at the start."""
        pairs = list(itertools.pairwise(self.times[self.warm_up :]))
        return Cost(*(1e6 * median(end[clock] - start[clock] for start, end in pairs) for clock in (0, 1)))


AnyClock = TypeVar("AnyClock", bound=Clock)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x).float(), y)


# -- the ways -----------------------------------------------------------------------------------------------------


def step_by_hand(
    work: Workload, model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]
) -> Tensor:
    optimizer.zero_grad()
    with work.autocast():
        loss = loss_of(model, batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    return loss


def hand(work: Workload, steps: int, clock: Clock) -> None:
    model, optimizer = work.build()
    for batch in work.batches(steps):
        step_by_hand(work, model, optimizer, batch)
        clock.tick()


class Ticks(BaseHook):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_after_step(self, trainer: Engine) -> None:
        self.clock.tick()

    def steps_ahead(self, trainer: Engine) -> int | None:
        return self.clock.steps_ahead()

    def on_after_steps(self, trainer: Engine, block: StepBlock) -> None:
        for _ in range(len(block)):
            self.clock.tick()


class Fit:
    def step(self, model: nn.Module, batch: Any, totals: Any = None, generator: Any = None) -> StepOutput:
        return StepOutput(loss_of(model, batch))


def engine(work: Workload, steps: int, clock: Clock, hooks: Sequence[BaseHook] = ()) -> None:
    model, optimizer = work.build()
    run = Engine(
        model, optimizer, Fit(), device=work.device, precision="bf16" if work.bf16 else None, grad_clip=CLIP,
        hooks=[*hooks, Ticks(clock)],
    )  # fmt: skip
    run.run(work.batches(steps), max_steps=steps)


def engine_and_hooks(work: Workload, steps: int, clock: Clock) -> None:
    engine(work, steps, clock, [EmaHook(0.999), ProgressHook(1000), LoggingHook(1000)])


def functional(work: Workload, steps: int, clock: Clock) -> None:
    model, optimizer = work.build()
    settings = {"max_grad_norm": CLIP, "log_interval": None, "mixed_precision": work.bf16}
    run = Trainer(
        model, optimizer, nn.MSELoss(), config={"training": settings}, device=work.device, hooks=[Ticks(clock)]
    )
    run.train(work.batches(steps), num_epochs=1)


def parts_of(work: Workload, steps: int) -> type:
    """Return the methods of a trainer subclass, shared by treadle and trainloop."""

    class Parts:
        def build_data_loader(self) -> Any:
            return work.batches(steps)

        def build_model(self) -> nn.Module:
            self.built = work.build()
            return self.built[0]

        def build_optimizer(self) -> torch.optim.Optimizer:
            return self.built[1]

        def forward(self, input: Any) -> Any:
            return loss_of(self.model, input), {}  # type: ignore[attr-defined]

    return Parts


def trainer(work: Workload, steps: int, clock: Clock) -> None:
    class Mini(parts_of(work, steps), BaseTrainer):  # type: ignore[misc]
        def build_hooks(self) -> list[BaseHook]:
            return [Ticks(clock)]

    Mini(steps, grad_clip=CLIP, mixed_precision="bf16" if work.bf16 else None, device=work.device).train()


class Batches:
    """List that Lightning does not mistake for a collection of loaders."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def lightning(work: Workload, steps: int, clock: Clock) -> None:
    import lightning as L

    refused = work.bf16 and work.device.type == "cuda"  # its own clipping, for a fused optimizer under autocast

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.built = work.build()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return loss_of(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.built

        def configure_gradient_clipping(self, optimizer: Any, *given: Any, **named: Any) -> None:
            if refused:
                nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            else:
                super().configure_gradient_clipping(optimizer, *given, **named)

    class Tick(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            clock.tick()

    L.Trainer(
        accelerator="gpu" if work.device.type == "cuda" else "cpu", devices=1, max_steps=steps, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        gradient_clip_val=None if refused else CLIP,
        precision="bf16-mixed" if work.bf16 else "32-true", callbacks=[Tick()],
    ).fit(Module(), Batches(work.batches(steps)))  # fmt: skip


def hugging_face(work: Workload, steps: int, clock: Clock) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    model, optimizer = work.build()

    class Tick(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

    class Mine(Trainer):
        def get_train_dataloader(self) -> Any:
            return [{"x": x, "y": y} for x, y in work.batches(steps)]

        def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Tensor:
            return loss_of(model, (inputs["x"], inputs["y"]))

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, report_to=[], logging_strategy="no", save_strategy="no", max_grad_norm=CLIP,
            disable_tqdm=True, use_cpu=work.device.type == "cpu", bf16=work.bf16,
        )  # fmt: skip
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        Mine(model, arguments, callbacks=[Tick()], optimizers=(optimizer, schedule)).train()


def accelerate(work: Workload, steps: int, clock: Clock) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # else the precision of the first one applies to all
    accelerator = Accelerator(mixed_precision="bf16" if work.bf16 else "no", cpu=work.device.type == "cpu")
    model, optimizer = accelerator.prepare(*work.build())
    for batch in work.batches(steps):
        optimizer.zero_grad()
        with accelerator.autocast():
            loss = loss_of(model, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        clock.tick()


def ignite(work: Workload, steps: int, clock: Clock) -> None:
    from ignite.engine import Engine as IgniteEngine
    from ignite.engine import Events

    model, optimizer = work.build()

    def update(_: Any, batch: Any) -> Tensor:
        return step_by_hand(work, model, optimizer, batch).detach()

    run = IgniteEngine(update)
    run.add_event_handler(Events.ITERATION_COMPLETED, lambda: clock.tick())
    run.run(work.batches(steps), max_epochs=1)


def trainloop(work: Workload, steps: int, clock: Clock) -> None:
    from trainloop.hooks import BaseHook as Hook
    from trainloop.trainer import BaseTrainer as Base

    class Tick(Hook):
        def on_after_step(self, *_: Any) -> None:
            clock.tick()

    class Mine(parts_of(work, steps), Base):  # type: ignore[misc]
        def build_hooks(self) -> list[Any]:
            return [Tick()]

    precision = "bf16" if work.bf16 else None
    Mine(steps, grad_clip=CLIP, mixed_precision=precision, device=work.device).train()


Way = Callable[[Workload, int, Clock], None]
Ways = Mapping[str, tuple[Way, str | None]]  # by name: the training function, and the package that it needs
WAYS: Ways = {
    "hand loop": (hand, None),
    "treadle Engine": (engine, None),
    "treadle BaseTrainer": (trainer, None),
    "treadle Trainer": (functional, None),
    "treadle Engine, average and two reports": (engine_and_hooks, None),
    "Ignite": (ignite, "ignite"),
    "Accelerate": (accelerate, "accelerate"),
    "HF Trainer": (hugging_face, "transformers"),
    "trainloop": (trainloop, "trainloop"),
    "Lightning": (lightning, "lightning"),
}


def installed(ways: Ways, names: Iterable[str]) -> list[str]:
    """Return the names of the ways whose package is installed."""
    return [name for name in names if ways[name][1] is None or importlib.util.find_spec(str(ways[name][1]))]


# -- rounds and table ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def silent() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def rounds_of(
    work: Workload, ways: Ways, make_clock: Callable[[], AnyClock], *, steps: int, rounds: int
) -> Iterator[tuple[str, AnyClock]]:
    """Run every way in each round, in a new order each time; yield its name and its clock."""
    draw = random.Random(0)
    for _ in range(rounds):
        for way in draw.sample(list(ways), len(ways)):
            clock = make_clock()
            with silent():
                ways[way][0](work, steps, clock)
            yield way, clock


def measure(work: Workload, ways: Sequence[str], *, steps: int, rounds: int) -> dict[str, list[Cost]]:
    """Return the cost of a step by each way, in each round."""
    found: dict[str, list[Cost]] = {way: [] for way in ways}
    chosen = {way: WAYS[way] for way in ways}
    for way, clock in rounds_of(work, chosen, lambda: Clock(max(2, steps // 10)), steps=steps, rounds=rounds):
        found[way].append(clock.per_step())
    return found


def rows_of(name: str, found: dict[str, list[Cost]]) -> list[dict[str, str]]:
    loop = [cost.processor for cost in found["hand loop"]]
    rows = []
    for way, costs in found.items():
        pairs = list(zip([cost.processor for cost in costs], loop, strict=True))
        rows.append({
            "workload": name, "way": way, "µs a step": spread([cost.wall for cost in costs]),
            "processor µs a step": spread([cost.processor for cost in costs]),
            "more than the loop": f"{median(value - base for value, base in pairs):+,.0f}",
            "of the loop": f"{median(value / base for value, base in pairs):.3f}",
        })  # fmt: skip
    return rows


def spread(values: Sequence[float]) -> str:
    """Return the median, with minimum and maximum in brackets."""
    return f"{median(values):,.0f} ({min(values):,.0f} – {max(values):,.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="of each way in each round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    workloads = {
        "MLP 64-64-1, batch 4": Workload(Net, (4, 64), device),
        "MLP 64-64-1, batch 32": Workload(Net, (32, 64), device),
        "transformer d128 x4, batch 4": Workload(Encoder, (4, 32, 64), device, share=20),
    }
    if options.tiny:
        options.steps, options.rounds = 20, 1
    there = installed(WAYS, options.ways)
    rows = []
    for name, work in workloads.items():
        found = measure(work, there, steps=max(options.steps // work.share, 6), rounds=options.rounds)
        rows += rows_of(name, found)
    if options.tiny:
        print(*rows, sep="\n")
        return
    write_result("overhead", "Microseconds of an optimizer step, gradients clipped", COLUMNS, rows, describe())


if __name__ == "__main__":
    main()
