"""Writes the golden files beside this script: checkpoints of every face and run folders of every command.

They were written by the commit before the source was restructured; later code must load them and go on to the bit. Run
it by hand, with nothing or some names to write: ``python tests/golden/make.py [faces] [runs]``.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

import torch  # noqa: E402

import golden_kit as kit  # noqa: E402
from ranks import run_on_ranks  # noqa: E402
from treadle.checkpoint import load_checkpoint, save_checkpoint  # noqa: E402

FACES = kit.FILES / "faces"


def on_ranks(folder: str) -> Any:
    """Runs the sharded face on this rank; returns the end's values from rank 0."""
    os.chdir(folder)
    return kit.end_of(kit.run("fsdp", Path("fsdp")))


def make_faces() -> dict[str, Any]:
    """Writes each face's checkpoint and the state of its end; returns what the checkpoints hold."""
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
    path.write_text(json.dumps(recorded, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
