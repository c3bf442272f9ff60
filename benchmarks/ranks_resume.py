"""Runs of many ranks that stop inside an epoch, resume on as many or half the ranks, or lose one rank after another.

    python benchmarks/ranks_resume.py --ranks 8          # on GPUs of one host; writes results/ranks_resume.md and .json
    python benchmarks/ranks_resume.py --tiny --ranks 4   # on the CPU with gloo, a trial that writes nothing

Weights, optimizer and everything else in a checkpoint are compared bit for bit, by a hash of each whole tensor:

    to as many    stopped and resumed, at the end of training, against an uninterrupted run
    to half       the state loaded by half as many ranks against the saved one; then they train to the end of the epoch
    killed        every rank once, at a random moment, under torchrun --max-restarts; the end against an unkilled run

Algorithms are deterministic. The table is written after every launch: on four H200s, with 135 million parameters, all
of them need about five minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import RawArray
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from decoder import SIZES, NextToken
from machine import describe, write_result
from scaling import MOST, build
from torch.utils.data import DataLoader, TensorDataset

from treadle import BaseHook, CheckpointingHook, Engine, RankBatchSampler, StepOutput
from treadle.checkpoint.sharded import extract_tensors
from treadle.runs.launch import process_group

WAYS = ("ddp", "fsdp")
ROWS, CUT, EPOCHS = 2, 3, 4  # samples of a rank's batch; steps before the stop; an epoch has six

COLUMNS = ("model", "way", "ranks", "what", "tensors equal", "samples of the epoch", "last loss", "kills")


class Noting(NextToken):
    """Task that notes which samples were read, and the last loss, where no checkpoint holds it: in a queue."""

    def __init__(self) -> None:
        self.notes: queue.SimpleQueue[tuple[list[int], float]] = queue.SimpleQueue()

    def step(self, model: Any, batch: Any, totals: Any = None, generator: Any = None) -> StepOutput:
        output = super().step(model, batch[0].to(next(model.parameters()).device))
        self.notes.put((batch[1].tolist(), float(output.loss.detach())))
        return output

    def drained(self) -> tuple[list[int], float]:
        """Return the samples read since the last call, and the last loss."""
        notes = [self.notes.get() for _ in range(self.notes.qsize())]
        return [number for read, _ in notes for number in read], notes[-1][1] if notes else math.nan


class Cut(BaseHook):
    def on_after_step(self, trainer: Engine) -> None:
        trainer.should_stop = trainer.should_stop or trainer.step == CUT - 1  # the ranks agree on it in the next step


class Dies(BaseHook):
    """Hook that kills rank n in start number n, at a random moment within some steps."""

    timer: threading.Timer | None = None

    def __init__(self) -> None:
        start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        chance = random.Random(start)
        at, delay = 1 + start * 2 + chance.randrange(2), 0.1 * chance.random()
        self.moment = RawArray("d", [start, at, delay])  # numbers of this start: no checkpoint holds such an array

    def on_after_step(self, trainer: Engine) -> None:
        start, at, delay = self.moment
        if self.timer is None and trainer.step >= at and dist.get_rank() == start:
            self.timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
            self.timer.start()
        if trainer.is_last_step and self.timer is not None:
            self.timer.join()  # a run that ended before its kill would count one kill less


def samples(size: str, ranks: int) -> TensorDataset:
    """Return tokens and sample numbers for six steps of a number of ranks; the last step is short."""
    *_, length, _, vocab = SIZES[size]
    count = 5 * ROWS * ranks + ranks
    tokens = torch.randint(0, vocab, (count, length), generator=torch.Generator().manual_seed(1))
    return TensorDataset(tokens, torch.arange(count))


def engine_of(
    way: str, size: str, device: torch.device, folder: Path | None = None, hooks: Sequence[BaseHook] = (), **saving: Any
) -> tuple[Engine, Noting]:
    model, optimizer = build(way, size, device)
    kept = [] if folder is None else [CheckpointingHook(path=folder, **{"interval": 1000, **saving})]
    task = Noting()
    precision = "bf16" if way == "ddp" else None
    engine = Engine(
        model, optimizer, task, device=device, precision=precision, grad_clip=1.0, hooks=[*hooks, *kept]
    )  # fmt: skip
    return engine, task


def hashes(engine: Engine) -> dict[str, str]:
    """Return a hash of each tensor of the state, whole, on rank 0."""
    found = {}
    for key, value in extract_tensors(engine.state_dict())[0].items():
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        found[key] = hashlib.blake2b(data).hexdigest()
    return found


# -- one launch ---------------------------------------------------------------------------------------------------


def as_many(way: str, size: str, device: torch.device, folder: Path, ranks: int) -> dict[str, Any]:
    """Run without a stop, with a stop, and the rest of the latter."""
    loader = loader_of(size, ranks)
    straight, _ = engine_of(way, size, device)
    straight.run(loader, epochs=EPOCHS)
    found: dict[str, Any] = {"straight": hashes(straight)}
    del straight
    cut, task = engine_of(way, size, device, folder / way, [Cut()])
    cut.run(loader, epochs=1)
    found |= {"saved": hashes(cut), "read": gathered(task.drained()[0]), "steps": cut.step}
    del cut
    if dist.get_rank() == 0:
        shutil.copytree(folder / way, folder / f"{way}_for_half", symlinks=True)
    dist.barrier()
    again, task = engine_of(way, size, device, folder / way)
    again.run(loader, epochs=1)
    found["read on"] = gathered(task.drained()[0])
    again.run(loader, epochs=EPOCHS)
    return found | {"resumed": hashes(again), "loss": task.drained()[1]}


def half(way: str, size: str, device: torch.device, folder: Path, ranks: int) -> dict[str, Any]:
    """Return the loaded batches, then the rest of the epoch."""
    loader = loader_of(size, ranks)
    engine, task = engine_of(way, size, device, folder / f"{way}_for_half")
    engine.run(loader, max_steps=CUT)
    found = {"loaded": hashes(engine), "steps": engine.step}
    engine.run(loader, epochs=1)
    read, loss = task.drained()
    return found | {"read on": gathered(read), "loss": loss}


def killed(way: str, size: str, device: torch.device, folder: Path, ranks: int) -> dict[str, Any]:
    """Train to the end despite kills."""
    saving = {"interval": 1 if size == "tiny" else 4, "background": way == "fsdp", "keep_previous": 1}
    engine, task = engine_of(way, size, device, folder / f"{way}_killed", [Dies()], **saving)
    engine.run(loader_of(size, ranks), epochs=EPOCHS)
    return {"end": hashes(engine), "kills": int(os.environ["TORCHELASTIC_RESTART_COUNT"]), "loss": task.drained()[1]}


LEGS = {"as many": as_many, "half": half, "killed": killed}


def loader_of(size: str, ranks: int) -> DataLoader[Any]:
    data = samples(size, ranks)
    return DataLoader(data, batch_sampler=RankBatchSampler(data, ROWS, shuffle=True, seed=3))


def gathered(own: list[int]) -> list[int]:
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    return [number for each in told for number in each]


def worker(options: argparse.Namespace) -> None:
    torch.use_deterministic_algorithms(True)  # warnings only would leave attention its atomic additions
    torch.set_num_threads(1)
    with process_group():
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        found = {
            way: LEGS[options.leg](way, options.size, device, options.folder, options.ranks) for way in options.ways
        }
        if dist.get_rank() == 0:
            options.found.write_text(json.dumps(found), encoding="utf-8")
        dist.barrier()


# -- all launches -------------------------------------------------------------------------------------------------


def launch(
    leg: str, processes: int, ways: Sequence[str], options: argparse.Namespace, folder: Path, restarts: int = 0
) -> dict[str, dict[str, Any]]:
    """Return what rank 0 found, by way."""
    found = folder / "found.json"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}",
        f"--max-restarts={restarts}", __file__, "--leg", leg, "--found", str(found), "--folder", str(folder),
        "--ranks", str(options.ranks), "--size", options.size, "--ways", *ways,
    ]  # fmt: skip
    command += ["--tiny"] if options.tiny else []
    environment = {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ}
    subprocess.run(command, check=True, env=environment | ({"CUDA_VISIBLE_DEVICES": ""} if options.tiny else {}))
    told: dict[str, dict[str, Any]] = json.loads(found.read_text(encoding="utf-8"))
    return told


def equal(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    same = sum(other.get(key) == value for key, value in one.items())
    return f"{same} of {len(one.keys() | other.keys())}"


def each_once(read: list[int], size: str, ranks: int) -> str:
    return "each once" if sorted(read) == list(range(len(samples(size, ranks)))) else f"NOT each once: {sorted(read)}"


def rows_of(options: argparse.Namespace, folder: Path) -> Iterator[list[dict[str, Any]]]:
    """Run everything; yield the rows of each launch."""
    size, ranks = options.size, options.ranks
    whole = launch("as many", ranks, WAYS, options, folder)
    yield [
        {
            "model": size, "way": way, "ranks": f"{ranks} to {ranks}",
            "what": f"stopped after step {first['steps']}, resumed",
            "tensors equal": equal(first["straight"], first["resumed"]), "last loss": f"{first['loss']:.3f}",
            "samples of the epoch": each_once(first["read"] + first["read on"], size, ranks),
        }
        for way, first in whole.items()
    ]  # fmt: skip
    fewer = launch("half", ranks // 2, WAYS, options, folder)
    yield [
        {
            "model": size, "way": way, "ranks": f"{ranks} to {ranks // 2}",
            "what": f"loaded at step {second['steps']}, trained on",
            "tensors equal": equal(whole[way]["saved"], second["loaded"]), "last loss": f"{second['loss']:.3f}",
            "samples of the epoch": each_once(whole[way]["read"] + second["read on"], size, ranks),
        }
        for way, second in fewer.items()
    ]  # fmt: skip
    for way in WAYS:
        end = launch("killed", ranks, [way], options, folder, restarts=ranks)[way]
        yield [
            {
                "model": size, "way": way, "ranks": str(ranks), "what": "each rank killed once", "kills": end["kills"],
                "tensors equal": equal(whole[way]["straight"], end["end"]), "last loss": f"{end['loss']:.3f}",
            }
        ]  # fmt: skip


def run(options: argparse.Namespace, folder: Path) -> None:
    """Run everything and write the table after every launch."""
    machine = describe() | {"gpus": str(torch.cuda.device_count())}
    title = f"Runs of {options.ranks} GPUs that were stopped or killed, and resumed: tensors compared bit for bit"
    rows: list[dict[str, Any]] = []
    for more in rows_of(options, folder):
        print(*more, sep="\n", flush=True)
        rows += more
        if not options.tiny:
            write_result("ranks_resume", title, COLUMNS, rows, machine, partial=len(rows) < 3 * len(WAYS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="GPUs; an even number")
    parser.add_argument("--size", choices=SIZES, default="100m")
    parser.add_argument("--disk", type=Path, help="folder for the checkpoints")
    parser.add_argument("--tiny", action="store_true", help="a small decoder on the CPU, and no files")
    for name in ("--leg", "--found", "--folder"):
        parser.add_argument(name, type=str if name == "--leg" else Path, help=argparse.SUPPRESS)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tiny:
        options.size = "tiny"
    elif not torch.cuda.is_available():
        parser.error("needs GPUs; --tiny is a trial on the CPU")
    if not 2 <= options.ranks <= MOST or options.ranks % 2:
        parser.error(f"--ranks {options.ranks}: must be even, since half as many resume, and {MOST} at most")
    if options.leg:
        worker(options)
        return
    with tempfile.TemporaryDirectory(dir=options.disk) as folder:
        run(options, Path(folder))


if __name__ == "__main__":
    main()
