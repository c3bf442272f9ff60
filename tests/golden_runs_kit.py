"""The runs of the golden folders: how each is started and interrupted, and which commands read it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import runpy
import shutil
import signal
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import golden_kit
from treadle.cli.main import main
from treadle.hooks import StepLogHook

SCRIPTS = Path(__file__).parent / "golden" / "scripts"
FOLDER = "run"
"""The name of a run's folder, in the folder that its command is given in."""
PLACE = "@GOLDEN@"
"""Stands in the golden files for the folder that a command is given in."""


@dataclass(frozen=True)
class GoldenRun:
    """Run of a command or a script.

    Attributes:
        start: the arguments of ``treadle``, or a script with its arguments.
        cut: the step at which SIGINT comes, in the middle of an epoch.
        replayed: steps of the finished run that are replayed.
        replay: further arguments of ``treadle replay``; None if replay is not supported.
        evaluate: the arguments of each ``treadle evaluate`` to run, after the run folder.
        stage: the part of the run, a folder in it, in which it is interrupted.
        code: the exit code of the interrupted run.
    """

    start: Sequence[str]
    cut: int
    replayed: Sequence[int] = ()
    replay: Sequence[str] | None = ("--device", "cpu")
    evaluate: Sequence[Sequence[str]] = ()
    stage: str = ""
    code: int = 130

    @property
    def is_script(self) -> bool:
        return self.start[0].endswith(".py")


def _pack(name: str, *settings: str) -> tuple[str, ...]:
    return ("train", name, *settings, "--out", FOLDER, "--device", "cpu")


_TEXT = _pack(
    "text", "epochs=2", "data.max_topics=20", "data.vocab_size=280", "data.block_length=32", "data.val_fraction=0.2",
    "model.n_embd=8", "model.n_layer=1", "model.n_head=2", "schedule.warmup_steps=2", "training.checkpoint_interval=5",
    "lora.epochs=2", "lora.r=2", "lora.val_fraction=0.3", "samples.num_tokens=8", "samples.count=1",
)  # fmt: skip
ON_CPU = ("--device", "cpu")
PACKS = ("spectra", "graphs", "astro", "text")

RUNS = {
    "spectra": GoldenRun(
        _pack(
            "spectra", "epochs=2", "data.max_rows=120", "batch_size=16", "model.d_model=8", "model.nhead=2",
            "model.num_layers=1", "model.dim_feedforward=8", "model.latent_dim=4", "model.n_mask=28",
            "model.dropout=0.1", "schedule.warmup_epochs=1", "trainer.accumulation_steps=2",
        ),
        cut=5, replayed=(2, 6), evaluate=[ON_CPU, ("--split", "val", *ON_CPU)],
    ),
    "graphs": GoldenRun(
        _pack(
            "graphs", "training.epochs=2", "training.batch_size=16", "training.scheduler.warmup_epochs=1",
            "model.hidden_dim=8", "model.num_layers=1", "model.num_heads=2", "model.dropout=0.1", "pe=light",
            "dataset=synthetic/tree", "dataset.num_graphs=64", "dataset.task=local_vs_global", "dataset.num_workers=0",
            "dataset.root=data",
        ),
        cut=6, replayed=(3, 8), evaluate=[ON_CPU],
    ),
    "astro": GoldenRun(
        _pack(
            "astro", "data.max_rows=60", "tokens.v_image=4", "tokens.patch_size=16", "tokens.scalar_bins=3",
            "tokens.v_spectra=4", "tokens.segment=64", "repeats.xdf=1", "repeats.spex=1", "model.d_model=8",
            "model.n_heads=2", "model.n_layers=1", "model.d_ff=8", "training.epochs=2", "training.batch_size=32",
            "training.warmup_steps=2",
        ),
        cut=6, replayed=(3, 7), evaluate=[ON_CPU],
    ),
    "text": GoldenRun(_TEXT, cut=22, replayed=(3, 33), evaluate=[ON_CPU]),
    "text-lora": GoldenRun(_TEXT, cut=9, stage="lora"),
    "config": GoldenRun(
        ("train", "fit.yaml"), cut=7, replayed=(3, 11), replay=(), evaluate=[ON_CPU],
    ),
    "base": GoldenRun(
        ("base.py", FOLDER, "16"), cut=9, replayed=(4, 14), replay=("--script", "base.py", "--", FOLDER, "16"),
    ),
    "functional": GoldenRun(("functional.py", FOLDER, "3"), cut=5, replay=None),
}  # fmt: skip


def start(run: GoldenRun) -> int:
    """Start a run in this process, in the current folder, and return its exit code."""
    if not run.is_script:
        return treadle(*run.start)
    argv, sys.argv = sys.argv, list(run.start)
    try:
        runpy.run_path(run.start[0], run_name="__main__")
    except SystemExit as left:
        return _code(left)
    except KeyboardInterrupt:
        return 130
    finally:
        sys.argv = argv
    return 0


def treadle(*arguments: object) -> int:
    """Run a command in this process and return its exit code; forget the user's modules afterwards."""
    path = list(sys.path)
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as left:
        return _code(left)
    finally:
        sys.path[:] = path
        sys.modules.pop("golden_parts", None)
    raise AssertionError("a command always exits")


def _code(left: SystemExit) -> int:
    return left.code if isinstance(left.code, int) else 0


@contextlib.contextmanager
def interrupted(run: GoldenRun) -> Iterator[None]:
    """Send this process a SIGINT after the step at which the run is interrupted."""
    original = StepLogHook.on_after_step

    def and_interrupt(hook: Any, trainer: Any) -> None:
        original(hook, trainer)
        if trainer.step == run.cut and run.stage in ("", Path(trainer.workspace).name):
            os.kill(os.getpid(), signal.SIGINT)

    StepLogHook.on_after_step = and_interrupt  # type: ignore[method-assign]
    try:
        yield
    finally:
        StepLogHook.on_after_step = original  # type: ignore[method-assign]


# -- archives -----------------------------------------------------------------------------------------------------


STATES = ("interrupted", "finished")


def archive(name: str) -> Path:
    """Return the golden file of a run, with a folder for each state."""
    return golden_kit.FILES / "runs" / f"{name}.tar.xz"


def unpack(name: str, state: str, folder: Path) -> Path:
    """Put a golden run folder and the scripts into ``folder``; return the run folder."""
    folder.mkdir(exist_ok=True)
    with_scripts(folder)
    with tarfile.open(archive(name)) as packed:
        members = [member for member in packed.getmembers() if member.name.startswith(f"{state}/")]
        for member in members:
            member.name = member.name.removeprefix(f"{state}/")
            if member.islnk():
                member.linkname = member.linkname.removeprefix(f"{state}/")
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        packed.extractall(folder, members, **safe)  # type: ignore[arg-type]
    replace_text(folder / FOLDER, PLACE, str(folder))
    return folder / FOLDER


def with_scripts(folder: Path) -> None:
    """Put the scripts and the configuration into ``folder``."""
    for path in SCRIPTS.iterdir():
        if path.is_file():
            shutil.copy(path, folder)


def replace_text(folder: Path, old: str, new: str) -> None:
    """Replace a string in the JSON files of a folder."""
    for path in folder.rglob("*.json"):
        text = path.read_text(encoding="utf-8")
        if old in text:
            path.write_text(text.replace(old, new), encoding="utf-8")


def manual_digest() -> str:
    """Return a digest of Python's manual, which the text pack trains on and which differs between Python versions."""
    from treadle.text import load_manual

    return hashlib.sha256(repr(sorted(load_manual().items())).encode()).hexdigest()[:16]


def listed(folder: Path) -> dict[str, Any]:
    """Unpack all golden folders below ``folder``; return the rows of ``treadle runs`` without their ages."""
    for name in RUNS:
        for state in STATES[: 1 if name == "text-lora" else 2]:
            unpack(name, state, folder / f"{name}-{state}")
    code, said = spoken("runs", folder, "--json")
    assert code == 0
    rows = json.loads(said)
    for row in rows:
        row["folder"] = str(Path(row["folder"]).relative_to(folder))
        row.pop("updated", None)
    return {row.pop("folder"): row for row in sorted(rows, key=lambda row: str(row["folder"]))}


def spoken(*arguments: object) -> tuple[int, str]:
    """Run a command in this process; return its exit code and standard output."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = treadle(*arguments)
    return code, said.getvalue()


def predictions(name: str, folder: Path) -> dict[str, str]:
    """Unpack a golden folder in ``folder`` and return the index of the output of ``treadle predict``."""
    run = unpack(name, "finished", folder)
    before = os.getcwd()
    os.chdir(folder)
    code, said = spoken("predict", FOLDER, "--json", *ON_CPU)
    os.chdir(before)
    assert code == 0
    shown = json.loads(said)
    path = folder / shown["path"]
    assert path.parent == run
    if path.suffix != ".npz":
        return golden_kit.index({**shown, "written": path.read_text(encoding="utf-8")})
    with np.load(path) as opened:
        arrays = {key: torch.from_numpy(opened[key]) for key in opened.files}
    return golden_kit.index({**shown, "written": arrays})


def evaluation_key(name: str, arguments: Sequence[str]) -> str:
    """Return the name of a recorded evaluation."""
    return " ".join((name, *arguments))


def evaluations(folder: Path) -> dict[str, Any]:
    """Unpack the golden folders below ``folder``; return the output of each ``treadle evaluate``."""
    found = {}
    for name, run in RUNS.items():
        for number, arguments in enumerate(run.evaluate):
            where = folder / f"{name}-{number}"
            unpack(name, "finished", where)
            os.chdir(where)
            code, said = spoken("evaluate", FOLDER, "--json", *arguments)
            assert code == 0
            found[evaluation_key(name, arguments)] = json.loads(said)
    return found
