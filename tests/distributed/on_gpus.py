"""What `test_on_gpus.py` runs on every GPU through torchrun; rank 0 writes what it found as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from treadle import CheckpointingHook, Engine, StepOutput
from treadle.distributed import is_dtensor
from treadle.faces.parallel import parallelize
from treadle.hooks import BaseHook, EmaHook
from treadle.optim.precision import Precision

STEPS, ROWS = 12, 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward = nn.Linear(16, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1)) for _ in range(3))
        self.outward = nn.Linear(64, 1)

    def forward(self, x):
        x = self.inward(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.outward(x)


class Fit:
    def step(self, model, batch, totals=None, generator=None):
        return StepOutput((model(batch) - batch.sum(1, keepdim=True)).square().mean(), weight=float(len(batch)))


class Cut(BaseHook):
    def __init__(self, step):
        self.step = step

    def on_after_step(self, trainer):
        trainer.should_stop = trainer.should_stop or trainer.step == self.step


class Graphs(BaseHook):
    """Keeps the number of graphs; several ranks drop them at the end of a run."""

    count = 0

    def on_after_step(self, trainer):
        self.count = len(getattr(trainer.steps, "_steps", ()))


class NoReads(BaseHook):
    """Makes every wait for the device an error while a step runs, but for the first ones, which warm up."""

    def on_before_step(self, trainer):
        torch.cuda.set_sync_debug_mode("error" if trainer.step > 3 else "default")

    def on_after_step(self, trainer):
        torch.cuda.set_sync_debug_mode("default")


def engine(kind, folder=None, *, hooks=(), dropout=0.1, background=True, grad_clip=1.0, lr=1e-2, **options):
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        block[1].p = dropout
    model = parallelize(model.cuda(), kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    saving = [] if folder is None else [CheckpointingHook(4, path=folder, background=background)]
    hooks = [EmaHook(0.9), *saving, *hooks]
    run = Engine(model, optimizer, Fit(), device="cuda", grad_clip=grad_clip, hooks=hooks, **options)
    if "precision" in options:
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**20, growth_interval=3)
        run.precision = Precision(options["precision"], run.device, scaler=scaler)
    return run


def batches(rank, ranks, *, bad=None):
    """The rows of a rank; rank 1 gets a NaN at one step."""
    generator = torch.Generator().manual_seed(1)
    every = torch.randn(STEPS, ROWS * ranks, 16, generator=generator)
    own = every[:, rank * ROWS : (rank + 1) * ROWS].clone()
    if bad is not None and rank == 1:
        own[bad, 0, 0] = float("nan")
    return list(own.cuda())


def weights(run):
    whole = {}
    for name, value in {
        **run.model.state_dict(),
        **{f"ema.{n}": v for n, v in run.averages["ema"].snapshot()["shadow"].items()},
    }.items():
        name = name.removeprefix("module.")
        whole[name] = (value.full_tensor() if is_dtensor(value) else value).detach().cpu()
    return whole


def largest(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def trained(kind, rank, ranks, **settings):
    run = engine(kind, **settings)
    run.run(batches(rank, ranks), max_steps=STEPS)
    return weights(run)


def one_process(rank, ranks):
    """Every rank trains alone on the rows of all."""
    torch.manual_seed(0)
    model = Net().cuda()
    for block in model.blocks:
        block[1].p = 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for parts in zip(*(batches(each, ranks) for each in range(ranks)), strict=True):
        batch = torch.cat(parts)
        optimizer.zero_grad()
        (model(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {name: value.detach().cpu() for name, value in model.state_dict().items()}


def resumed(kind, rank, ranks, folder):
    """The end of a run that was cut at step 6 inside an epoch, beside that of one that was not."""
    torch.cuda.manual_seed(rank)
    straight = trained(kind, rank, ranks)
    torch.cuda.manual_seed(rank)
    engine(kind, folder, hooks=[Cut(6)]).run(batches(rank, ranks), max_steps=STEPS)
    torch.cuda.manual_seed(77)
    again = engine(kind, folder)
    again.run(batches(rank, ranks), max_steps=STEPS)
    assert again.state.source is not None
    return largest(straight, weights(again))


def captured(kind, rank, ranks):
    """The largest difference between captured and eager steps of replicas; the steps of a sharded model are eager."""
    if kind != "ddp":
        return 0.0
    found = []
    for options in ({}, {"accumulation_steps": 2}, {"precision": "fp16"}):
        ends = []
        with torch.cuda.stream(torch.cuda.Stream()):
            for capture in (False, True):
                torch.cuda.manual_seed(rank)
                graphs = Graphs()
                run = engine(kind, hooks=[graphs], lr=torch.tensor(1e-2), capture=capture, **options)
                run.run(batches(rank, ranks), max_steps=3 * STEPS)
                ends.append(weights(run))
                ends[-1] |= {"applied": torch.tensor(run.applied_steps)}
                if "precision" in options:
                    assert run.guard.skips is not None
                    assert 0 < run.applied_steps < run.step
                    ends[-1] |= {"scale": torch.tensor(run.precision.scaler.get_scale())}
        assert graphs.count
        found.append(largest(*ends))
    return max(found)


def skipped(kind, rank, ranks):
    """Return each rank's error for a NaN on rank 1 alone."""
    try:
        engine(kind).run(batches(rank, ranks, bad=5), max_steps=STEPS)
    except Exception as error:
        return type(error).__name__
    return "nothing"


def waits(kind, rank, ranks):
    try:
        run = engine(kind, hooks=[NoReads()])
        run.run(batches(rank, ranks), max_steps=STEPS)
    except RuntimeError as error:
        return str(error)[:200]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "none"


def main(folder):
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    alone = one_process(rank, ranks)
    found = {}
    for kind in ("ddp", "fsdp"):
        ends = trained(kind, rank, ranks, dropout=0.0)
        found[kind] = {
            "beside one process": largest({name: value for name, value in ends.items() if name in alone}, alone),
            "twice": largest(ends, trained(kind, rank, ranks, dropout=0.0)),
            "captured": captured(kind, rank, ranks),
            "resumed": resumed(kind, rank, ranks, Path(folder, kind)),
            "nan": skipped(kind, rank, ranks),
            "waits": waits(kind, rank, ranks),
        }
    told = [None] * ranks
    dist.all_gather_object(told, found)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
