"""Random kills over all faces and both writers: does every rerun resume, and does the end equal the undisturbed run?

    python benchmarks/soak.py --kills 1000        # a night
    python benchmarks/soak.py --minutes 3         # what CI runs

Each run is a forked child that trains in its own folder, evaluating in a hook now and then; on ranks it is one
child a rank. It is killed at a random moment (SIGKILL, or SIGTERM, also inside those evaluations; of ranks, one or
all), or its disk is full for a while; between two starts the folder may be replaced by a copy without its links, whose
write times are reversed. That continues until one start reaches the end. Its final state is then compared with that of
a run that nobody disturbed, tensors by torch.equal; no temporary file may be left, and the folder may be no larger than
a few checkpoints more than the undisturbed one.
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from machine import describe, write_result
from torch.utils.data import DataLoader

import astro_trainer_kit
import functional_kit
import graph_kit
from helpers import Augmented, MeanSquare, differences, small_model
from spectra_kit import make as make_spectra
from treadle import (
    BaseHook,
    BaseTrainer,
    BestRule,
    CheckpointingHook,
    EmaHook,
    Engine,
    EpochTrainer,
    LoggingHook,
    parallelize,
    set_seed,
)
from treadle.checkpoint import files, find_latest
from treadle.checkpoint.find_step import states_in
from treadle.checkpoint.order import is_aside
from treadle.data import RankBatchSampler

ENDED, FAILED, FULL = 0, 1, 3
_LEFT = 128 + signal.SIGTERM
_GRACE = 15.0  # seconds that the other ranks have once one has ended badly
_ROOM = 3.0  # times the undisturbed folder: files of two steps more, and copies of the best


class Looks(BaseHook):
    """Evaluates every few steps, as users do, on its training data."""

    def __init__(self, every: int = 5):
        self.every = every

    def on_after_step(self, trainer: Engine) -> None:
        if trainer.step % self.every == 0:
            trainer.evaluate(trainer.cursor.loader)


def saving(interval: int, **settings: Any) -> CheckpointingHook:
    return CheckpointingHook(interval, exit_signals=[signal.SIGTERM], **settings)


class Mini(BaseTrainer):
    def build_data_loader(self) -> Any:
        return DataLoader(Augmented(40), batch_size=4, shuffle=True)

    def build_model(self) -> Any:
        return small_model()

    def build_optimizer(self) -> Any:
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def build_hooks(self) -> Any:
        return [LoggingHook(7), Looks(), EmaHook(0.9), saving(3)]

    def forward(self, input: Any) -> Any:
        x, y = input
        return (self.model(x) - y).square().mean(), {}


def mini(folder: Path) -> None:
    set_seed(0)
    Mini(60, workspace=folder, device="cpu", grad_clip=1.0).train()


def epochs(folder: Path, **settings: Any) -> None:
    set_seed(0)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    hooks = [EmaHook(0.9, use_buffers=True), Looks(), saving(4, **settings)]
    engine = Engine(
        model, optimizer, MeanSquare(), device="cpu", accumulation_steps=2, hooks=hooks, workspace=folder,
    )  # fmt: skip
    driver = EpochTrainer(engine, best=BestRule("val_loss"))
    loader = DataLoader(Augmented(40), batch_size=4, shuffle=True)
    driver.fit(loader, DataLoader(Augmented(12), batch_size=6), 12)


def sharded(folder: Path) -> None:
    epochs(folder, sharded=True)


def background(folder: Path) -> None:
    epochs(folder, background=True)


def on_ranks(folder: Path, kind: str, **settings: Any) -> None:
    set_seed(0)
    model = parallelize(small_model(), kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    hooks = [EmaHook(0.9, use_buffers=True), Looks(), saving(4, **settings)]
    engine = Engine(model, optimizer, MeanSquare(), device="cpu", accumulation_steps=2, hooks=hooks, workspace=folder)
    data, held_out = Augmented(40), Augmented(12)
    loader = DataLoader(data, batch_sampler=RankBatchSampler(data, global_batch_size=4, shuffle=True))
    evaluated = DataLoader(held_out, batch_sampler=RankBatchSampler(held_out, global_batch_size=6))
    EpochTrainer(engine, best=BestRule("val_loss")).fit(loader, evaluated, 12)


def replicas(folder: Path) -> None:
    on_ranks(folder, "ddp")


def replicas_background(folder: Path) -> None:
    on_ranks(folder, "ddp", background=True)


def shards_on_ranks(folder: Path) -> None:
    on_ranks(folder, "fsdp")


def shards_background(folder: Path) -> None:
    on_ranks(folder, "fsdp", background=True)


def functional(folder: Path) -> None:
    trainer = functional_kit.make(hooks=[Looks(), saving(7)])
    data = functional_kit.loader(shuffle=True), functional_kit.loader(seed=6)
    trainer.train(data[0], 15, data[1], folder, 4, resume_from="auto")


def spectra(folder: Path) -> None:
    make_spectra(folder, epochs=8, hooks=[Looks(), saving(5)], background_saves=True).fit(8)


def graphs(folder: Path) -> None:
    data = graph_kit.graphs()
    trainer = graph_kit.make(folder, hooks=[Looks(), saving(5)])
    trainer.fit(graph_kit.loader(data, shuffle=True), graph_kit.loader(data), 6, resume_from="auto")


def astro(folder: Path) -> None:
    trainer = astro_trainer_kit.make(folder, hooks=[Looks(), saving(5)], total_steps=30)
    trainer.train(6, astro_trainer_kit.loader(), resume_from="auto")


FACES: dict[str, Callable[[Path], None]] = {
    "BaseTrainer": mini, "EpochTrainer": epochs, "EpochTrainer, shards": sharded,
    "EpochTrainer, background": background, "Trainer": functional, "SpectraTrainer": spectra, "GraphTrainer": graphs,
    "AstroTrainer": astro,
}  # fmt: skip
ON_RANKS: dict[str, Callable[[Path], None]] = {
    "2 ranks, replicas": replicas, "2 ranks, replicas, background": replicas_background,
    "2 ranks, shards": shards_on_ranks, "2 ranks, shards, background": shards_background,
}  # fmt: skip


# -- one start of a run -------------------------------------------------------------------------------------------


def fill_the_disk(after: int) -> None:
    """Lets every write from the ``after``-th file on fail, as on a full disk."""
    real, count = os.replace, 0

    def replace(*given: Any, **named: Any) -> None:
        nonlocal count
        count += 1
        if count > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*given, **named)

    files.os.replace = replace  # type: ignore[assignment]


def child(train: Callable[[Path], None], folder: Path, rank: int, ranks: int, full_after: int | None) -> int:
    """Trains in this process; returns its exit status."""
    try:
        if ranks > 1:
            dist.init_process_group("gloo", init_method=f"file://{folder}.ranks", rank=rank, world_size=ranks)
        if full_after is not None:
            fill_the_disk(full_after)
        train(folder)
        if ranks > 1:
            dist.barrier()
            dist.destroy_process_group()
        return ENDED
    except SystemExit as left:
        return int(left.code or 0)
    except BaseException as error:  # noqa: BLE001  (a child reports by its status)
        if full_after is None and ranks == 1:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
        (folder.parent / f"error_{rank}.txt").write_text(traceback.format_exc())
        return FAILED if full_after is None else FULL


def start(
    train: Callable[[Path], None],
    folder: Path,
    *,
    ranks: int = 1,
    kill_after: float | None = None,
    by: int = signal.SIGKILL,
    hit: Collection[int] | None = None,
    full_after: int | None = None,
) -> int:
    """Trains in one child a rank; ``hit`` are the ranks that are killed.

    Returns:
        The exit status: 0 at the end, -9 or 143 when killed in time, 3 with a full disk.
    """
    Path(f"{folder}.ranks").unlink(missing_ok=True)
    children = {}
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os._exit(child(train, folder, rank, ranks, full_after))
        children[pid] = rank
    ended: dict[int, int] = {}
    began, deadline = time.monotonic(), float("inf")
    kill_at = float("inf") if kill_after is None else began + kill_after
    while len(ended) < ranks:
        for pid in [pid for pid in children if pid not in ended]:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                ended[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > kill_at:
            kill_at = float("inf")
            for pid in [pid for pid, rank in children.items() if pid not in ended and (hit is None or rank in hit)]:
                os.kill(pid, by)
        if any(ended.values()) and deadline == float("inf"):
            deadline = time.monotonic() + _GRACE
        if time.monotonic() > deadline:  # as a launcher does
            deadline = float("inf")
            for pid in children.keys() - ended.keys():
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)
    # What befell the others follows from what befell one.
    ranking = [-signal.SIGKILL, -signal.SIGTERM, FULL, FAILED, _LEFT, ENDED]
    return min(ended.values(), key=lambda status: ranking.index(status) if status in ranking else -1)


def replace_by_copy(folder: Path) -> None:
    """Puts a copy in the place of a folder: without its links, and with reversed write times."""
    copy = folder.with_name(f"{folder.name}.copy")
    shutil.copytree(folder, copy, symlinks=True)
    states = sorted(copy.rglob("*.pt"), key=lambda path: path.lstat().st_mtime_ns, reverse=True)
    for number, path in enumerate(states):
        if path.is_symlink():
            path.unlink()
        else:
            os.utime(path, ns=(10**18 + number * 10**9,) * 2)
    shutil.rmtree(folder)
    copy.rename(folder)


# -- what is compared ---------------------------------------------------------------------------------------------


def end_of(folder: Path) -> dict[str, Any]:
    """Returns the furthest state of a run, without what no two runs share."""
    found = find_latest(state for place in (folder, folder / "checkpoints") for state in states_in(place))
    assert found is not None, folder
    tree = {key: value for key, value in found[1].items() if key not in ("config", "versions")}
    records = [{key: value for key, value in record.items() if key != "time"} for record in tree.get("history") or []]
    return {**tree, "history": records}


def litter_in(folder: Path) -> list[Path]:
    names = (".treadle-tmp", ".trial", ".old")
    return [path for path in folder.rglob(".*") if path.name.endswith(names) or is_aside(path)]


def size_of(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file() and not path.is_symlink())


def soak(name: str, root: Path, *, kills: int, until: float, chance: random.Random) -> dict[str, Any]:
    train, ranks = (FACES[name], 1) if name in FACES else (ON_RANKS[name], 2)
    straight = root / name / "straight"
    straight.parent.mkdir()
    if ranks == 1:
        train(root / name / "warm")  # what is imported here, no child has to import
    else:
        import torch.distributed.checkpoint
        import torch.distributed.fsdp  # noqa: F401
    began = time.perf_counter()
    assert start(train, straight, ranks=ranks) == ENDED
    duration = time.perf_counter() - began
    expected, room = end_of(straight), _ROOM * size_of(straight.rglob("*"))
    row = {"face": name, "kills": 0, "terms": 0, "full": 0, "copies": 0, "runs": 0}
    bad = {"different": 0, "unreadable": 0, "litter": 0, "too large": 0}
    while row["kills"] + row["terms"] < kills and (row["runs"] == 0 or time.monotonic() < until):
        folder = root / name / f"run{row['runs']}"
        for attempt in range(12):
            left_alone = attempt == 11 or time.monotonic() > until
            by = chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
            full = None if left_alone or chance.random() > 0.2 else chance.randrange(8)
            # Within the first half, so that most attempts are killed.
            hit = None if chance.random() < 0.5 else [chance.randrange(ranks)]
            kill_after = None if left_alone else chance.uniform(0, duration / 2)
            status = start(train, folder, ranks=ranks, kill_after=kill_after, by=by, hit=hit, full_after=full)
            row["kills"] += status in (-signal.SIGKILL, -signal.SIGTERM)
            row["terms"] += status == _LEFT
            row["full"] += status == FULL
            if status == FAILED:
                bad["unreadable"] += 1
                print(*(path.read_text() for path in folder.parent.glob("error_*.txt")), sep="\n", file=sys.stderr)
            bad["too large"] += size_of(folder.rglob("*")) > room
            if status == ENDED:
                break
            if folder.exists() and chance.random() < 0.2:
                replace_by_copy(folder)
                row["copies"] += 1
        row["runs"] += 1
        bad["different"] += bool(differences(expected, end_of(folder)))
        bad["litter"] += bool(litter_in(folder))
        shutil.rmtree(folder)
    return {**row, **bad}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=None, help="stop after so long, however many kills that is")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faces", nargs="*", default=[*FACES, *ON_RANKS], choices=[*FACES, *ON_RANKS])
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # before any work: OpenMP threads do not survive a fork
    chance, rows = random.Random(arguments.seed), []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        for number, name in enumerate(arguments.faces, start=1):
            share = (
                float("inf") if arguments.minutes is None else arguments.minutes * 60 * number / len(arguments.faces)
            )
            kills = -(-arguments.kills // len(arguments.faces))
            rows.append(soak(name, Path(root), kills=kills, until=began + share, chance=chance))
            print(rows[-1], flush=True)
    bad = ["different", "unreadable", "litter", "too large"]
    columns = ["face", "kills", "terms", "full", "copies", "runs", *bad]
    if arguments.minutes is None:
        write_result("soak", "Random kills over the faces", columns, rows, describe())
    return 1 if any(row[name] for row in rows for name in bad) else 0


if __name__ == "__main__":
    sys.exit(main())
