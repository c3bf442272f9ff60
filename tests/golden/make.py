"""Writes the golden files beside this script: checkpoints of every face and run folders of every command.

They were written by the commit before the source was restructured; later code must load them and go on to the bit. Run
it by hand, with nothing or the parts to write: ``python tests/golden/make.py [faces] [runs] [said]``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

import torch  # noqa: E402

import golden_kit as kit  # noqa: E402
import golden_runs_kit as runs_kit  # noqa: E402
from ranks import run_on_ranks  # noqa: E402
from treadle.checkpoint import load_checkpoint, save_checkpoint  # noqa: E402

FACES = kit.FILES / "faces"


def on_ranks(folder: str) -> Any:
    """Runs the sharded face on this rank; returns the end's values from rank 0."""
    os.chdir(folder)
    return kit.end_of(kit.run("fsdp", Path("fsdp")))


def make_faces() -> dict[str, Any]:
    """Writes the checkpoint and the end state of each face; returns the indexes of the checkpoints."""
    found = {}
    shutil.rmtree(FACES, ignore_errors=True)
    FACES.mkdir(parents=True)
    for face in kit.MAKE:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            if face == "fsdp":
                end = run_on_ranks(on_ranks, 2, folder)[0]
            else:
                end = kit.end_of(kit.run(face, Path(face)))
            os.chdir(TESTS)
            made = Path(folder, face, "saved", kit.checkpoint_name(face))
            (shutil.copytree if made.is_dir() else shutil.copyfile)(made, kit.golden(face))
            save_checkpoint(end, FACES / f"{face}-end.pt")
            refuse_paths(FACES, folder)
        found[face] = kit.index(load_checkpoint(kit.golden(face)))
    return found


def make_runs() -> None:
    """Writes an interrupted and a finished folder of every run; the finished one of text-lora is that of text."""
    shutil.rmtree(kit.FILES / "runs", ignore_errors=True)
    (kit.FILES / "runs").mkdir()
    for name, run in runs_kit.RUNS.items():
        with tarfile.open(runs_kit.archive(name), "w:xz") as packed:
            for state in runs_kit.STATES[: 1 if name == "text-lora" else 2]:
                with tempfile.TemporaryDirectory() as folder:
                    made = make_run(name, run, state, Path(os.path.realpath(folder)))
                    packed.add(made, f"{state}/{made.name}", filter=anonymous)


def make_run(name: str, run: runs_kit.GoldenRun, state: str, folder: Path) -> Path:
    """Makes a run, without its pictures and pages, with a placeholder for the folder; returns the run folder."""
    os.chdir(folder)
    runs_kit.with_scripts(folder)
    with runs_kit.interrupted(run) if state == "interrupted" else contextlib.nullcontext():
        code = runs_kit.start(run)
    if code != (run.code if state == "interrupted" else 0):
        raise SystemExit(f"{name}, {state}: exit code {code}")
    os.chdir(TESTS)
    made = folder / runs_kit.FOLDER
    shutil.rmtree(made / "pictures", ignore_errors=True)
    for page in made.glob("*.html"):
        page.unlink()
    runs_kit.replace_text(made, str(folder), runs_kit.PLACE)
    refuse_paths(made, str(folder))
    return made


def anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Removes the user's name and number from an entry of an archive."""
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def refuse_paths(folder: Path, *names: str) -> None:
    """Raises where a file holds the name of a folder of this machine."""
    for path in folder.rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        for name in (*names, str(TESTS), str(Path.home()) + "/"):
            if name.encode() in data:
                raise SystemExit(f"{path} holds the path {name}")


def main(parts: list[str]) -> None:
    torch.set_num_threads(1)
    kit.FILES.mkdir(exist_ok=True)
    path = kit.FILES / "golden.json"
    recorded = json.loads(path.read_text()) if path.exists() else {}
    recorded["platform"] = kit.this_platform()
    if not parts or "faces" in parts:
        recorded["checkpoints"] = make_faces()
    if not parts or "runs" in parts:
        recorded["manual"] = runs_kit.manual_digest()
        make_runs()
    if not parts or "runs" in parts or "said" in parts:
        with tempfile.TemporaryDirectory() as folder:
            recorded["runs"] = runs_kit.listed(Path(folder))
        with tempfile.TemporaryDirectory() as folder:
            recorded["evaluations"] = runs_kit.evaluations(Path(folder))
            os.chdir(TESTS)
            recorded["predictions"] = {name: runs_kit.predictions(name, Path(folder, name)) for name in runs_kit.PACKS}
    path.write_text(json.dumps(recorded, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
