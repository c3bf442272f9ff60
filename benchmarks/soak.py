"""Random SIGKILLs over the faces: does every rerun resume, and does the end equal the uninterrupted run?

    python benchmarks/soak.py --kills 300

Each run is a forked child that trains in a folder of its own and is killed at a random moment, again and again, until
one reaches the end. Its final state is then compared with that of a run that nobody disturbed, tensors by torch.equal.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from machine import describe, write_result
from torch.utils.data import DataLoader

from helpers import Augmented, MeanSquare, differences, small_model
from spectra_kit import make as make_spectra
from treadle import BaseTrainer, BestRule, CheckpointingHook, EmaHook, Engine, EpochTrainer, LoggingHook, set_seed
from treadle.checkpoint import find_latest, load_checkpoint


class Mini(BaseTrainer):
    def build_data_loader(self) -> Any:
        return DataLoader(Augmented(40), batch_size=4, shuffle=True)

    def build_model(self) -> Any:
        return small_model()

    def build_optimizer(self) -> Any:
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def build_hooks(self) -> Any:
        return [LoggingHook(7), EmaHook(0.9), CheckpointingHook(3)]

    def forward(self, input: Any) -> Any:
        x, y = input
        return (self.model(x) - y).square().mean(), {}


def mini(folder: Path) -> None:
    set_seed(0)
    Mini(120, workspace=folder, device="cpu", grad_clip=1.0).train()


def epochs(folder: Path) -> None:
    set_seed(0)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    hooks = [EmaHook(0.9, use_buffers=True), CheckpointingHook(4)]
    engine = Engine(model, optimizer, MeanSquare(), device="cpu", accumulation_steps=2, hooks=hooks)
    engine.workspace = folder
    driver = EpochTrainer(engine, best=BestRule("val_loss"))
    loader = DataLoader(Augmented(40), batch_size=4, shuffle=True)
    driver.fit(loader, DataLoader(Augmented(12), batch_size=6), 20)


def spectra(folder: Path) -> None:
    make_spectra(folder, epochs=12).fit(12)


def newest(folder: Path) -> dict[str, Any]:
    found = find_latest((folder / "checkpoints").glob("checkpoint_step_*.pt"))
    assert found is not None
    return found[1]


def last(folder: Path) -> dict[str, Any]:
    return load_checkpoint(folder / "checkpoints" / "last.pt")


FACES: dict[str, tuple[Callable[[Path], None], Callable[[Path], dict[str, Any]]]] = {
    "BaseTrainer": (mini, newest),
    "EpochTrainer": (epochs, newest),
    "SpectraTrainer": (spectra, last),
}


def run_in_a_child(train: Callable[[Path], None], folder: Path, kill_after: float | None) -> int:
    """Returns the child's exit status: 0 at the end, -9 when it was killed in time."""
    pid = os.fork()
    if pid == 0:
        try:
            train(folder)
            os._exit(0)
        except BaseException as error:  # noqa: BLE001  (a child reports by its status)
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            os._exit(1)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def without_config(tree: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if key != "config"}


def soak(name: str, kills: int, chance: random.Random, root: Path) -> dict[str, Any]:
    train, read = FACES[name]
    straight = root / name / "straight"
    began = time.perf_counter()
    assert run_in_a_child(train, straight, None) == 0
    duration = time.perf_counter() - began
    expected = without_config(read(straight))
    result = {"face": name, "kills": 0, "runs": 0, "different": 0, "unreadable": 0}
    while result["kills"] < kills:
        folder = root / name / f"run{result['runs']}"
        for attempt in range(12):
            # Within the first half, so that most attempts are killed; the last one is left alone.
            status = run_in_a_child(train, folder, chance.uniform(0, duration / 2) if attempt < 11 else None)
            result["kills"] += status == -signal.SIGKILL
            result["unreadable"] += status == 1
            if status == 0:
                break
        result["runs"] += 1
        result["different"] += bool(differences(expected, without_config(read(folder))))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # before any work: OpenMP threads do not survive a fork
    chance = random.Random(arguments.seed)
    rows = []
    with tempfile.TemporaryDirectory() as root:
        for name in FACES:
            rows.append(soak(name, -(-arguments.kills // len(FACES)), chance, Path(root)))
    columns = ["face", "kills", "runs", "different", "unreadable"]
    write_result("soak", "Random SIGKILLs over the faces", columns, rows, describe())
    return 1 if any(row["different"] or row["unreadable"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
