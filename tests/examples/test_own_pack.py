"""The pack in examples/own_pack, from its wheel in an environment of its own: every command works on its runs."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = ROOT / "examples" / "own_pack"


SEVERAL = """
import contextlib, io, json, sys
from treadle.cli.main import main

for command in sys.argv[1:]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main(command.split())
        except SystemExit as left:
            code = left.code or 0
    print(json.dumps([code, said.getvalue()]))
"""


def built(project: Path, folder: Path) -> Path:
    """The wheel of a project, built without a network."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q"]
    subprocess.run([*command, "-w", str(folder), str(project)], check=True, timeout=300)
    return max(folder.glob("*.whl"), key=lambda path: path.stat().st_mtime)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel of the pack, and that of treadle where it can be built."""
    folder = tmp_path_factory.mktemp("installed")
    project = shutil.copytree(PROJECT, folder / "project")  # a build leaves files beside the sources
    wheels = [built(Path(project), folder / "wheels")]
    paths = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    if importlib.util.find_spec("hatchling") is None:
        paths.insert(0, str(ROOT / "src"))
    else:
        wheels.append(built(ROOT, folder / "wheels"))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True, timeout=300)
    found = folder / "venv" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(found), "install", "--no-deps", "--no-index", "-q"]
    subprocess.run([*install, *map(str, wheels)], check=True, timeout=300)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (packages / "borrowed.pth").write_text("\n".join(paths) + "\n")
    return found


@pytest.fixture
def command(python: Path, tmp_path: Path):
    """Run treadle in that environment, in a folder of its own, and return what it wrote to stdout."""

    def run(*words: str, code: int = 0) -> str:
        done = subprocess.run(started(words), capture_output=True, text=True, timeout=300, **where)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def started(words: tuple[str, ...]) -> list[str]:
        return [str(python), "-m", "treadle", *words]

    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    where = {"cwd": tmp_path, "env": environment | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}}

    def in_one_process(*commands: str) -> list[tuple[int, str]]:
        done = subprocess.run(
            [str(python), "-c", SEVERAL, *commands], capture_output=True, text=True, timeout=300, **where
        )
        assert done.returncode == 0, done.stderr
        return [tuple(json.loads(line)) for line in done.stdout.splitlines()]

    run.in_one_process = in_one_process
    run.start = lambda *words: subprocess.Popen(started(words), stderr=subprocess.PIPE, text=True, **where)
    return run


def test_it_is_short():
    lines = [len(path.read_text().splitlines()) for path in PROJECT.rglob("*") if path.suffix in (".py", ".toml")]
    assert sum(lines) < 150


def test_an_installed_pack_has_every_command(command, tmp_path):
    run = tmp_path / "runs" / "waves"
    assert "  waves" in command("train", "--help")
    settings = ("steps=3000", "--out", "runs/waves")
    going = command.start("train", "waves", *settings)
    until = time.monotonic() + 120
    while not list(run.glob("checkpoints/checkpoint_step_*.pt")) and time.monotonic() < until:
        time.sleep(0.01)
    going.send_signal(signal.SIGINT)
    _, said = going.communicate(timeout=120)
    assert going.returncode == 130, said
    assert "the same command resumes from here" in said
    assert "steps was" not in said
    assert not (run / "metrics.json").exists()
    assert "stopped" in command("runs", "runs")

    said = command("train", "waves", *settings)
    assert "start     resumes from runs/waves/checkpoints/checkpoint_step_" in said
    assert "Mean squared error" in said
    assert "is finished" in command("train", "waves", *settings)
    assert json.loads((run / "run.json").read_text())["face"] == "waves"
    assert "data:image" not in (run / "page.html").read_text()
    straight = command("train", "waves", "steps=3000", "--out", "runs/straight")
    assert "start     fresh" in straight
    metrics = [json.loads((folder / "metrics.json").read_text()) for folder in (run, run.with_name("straight"))]
    assert metrics[0] == metrics[1]

    said = command.in_one_process(
        "replay runs/waves --step 30 --json", "replay runs/waves --step 3000 --json", "evaluate runs/waves --json",
        "evaluate runs/waves --split val", "predict runs/waves --out waves.csv", "report runs/waves", "runs runs",
        "train waves steps=3000 model.width=8 --out runs/waves", "train spectra --out runs/waves",
    )  # fmt: skip
    assert [code for code, _ in said] == [0] * 7 + [2, 2], said
    early, late, test, val, _, page, table, another, spectra = [text for _, text in said]
    assert json.loads(early)["equal"] is json.loads(late)["equal"] is True
    assert json.loads(late)["start_step"] > 0
    assert json.loads(test)["metrics"] == metrics[0]["test"]
    assert "val, weights of epoch" in val
    assert (tmp_path / "waves.csv").read_text().startswith("x_0,y_0,prediction_0\n")
    assert "runs/waves/report.html" in page
    assert table.count("finished") == 2
    assert "model.width was 32 and is now 8" in another
    assert "holds a run of 'treadle train waves'" in spectra


@pytest.mark.slow
def test_verify_says_exact(command):
    assert "EXACT" in command("verify", "waves", "steps=200")
