"""What is built for others to install is whole: a wheel and a source archive, each installed by itself and run."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = """
import pathlib, sys, treadle, torch
from treadle.datasets import load_tecator
assert pathlib.Path(treadle.__file__).is_relative_to(sys.prefix), treadle.__file__
x = torch.tensor(load_tecator().spectra[:8]).float()
trainer = treadle.Trainer(m := torch.nn.Linear(100, 1), torch.optim.SGD(m.parameters(), 0.1), torch.nn.MSELoss())
trainer.train([(x, torch.zeros(8, 1))], 2, save_dir="run")
print(treadle.__version__)
"""


def pip(*words):
    subprocess.run([sys.executable, "-m", "pip", *words, "--quiet", "--no-deps"], cwd=ROOT, check=True, timeout=600)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    code = f"import hatchling.build as b; print(b.build_sdist({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    (source,) = folder.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(folder / "source", filter="data")
    (unpacked,) = (folder / "source").iterdir()
    code = f"import hatchling.build as b; print(b.build_wheel({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=unpacked, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return source, wheel


def test_the_wheel_that_the_source_archive_gives_has_every_file_of_the_package(built):
    source, wheel = built
    own = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "treadle").rglob("*")}
    kept = {name for name in own if (ROOT / "src" / name).is_file() and "__pycache__" not in name}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert kept - names == set()
    with tarfile.open(source) as archive:
        there = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", "SECURITY.md", "CITATION.cff"} <= there


@pytest.mark.slow
def test_the_wheel_trains_in_an_environment_of_its_own(built, tmp_path):
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    packages = next((environment / "lib").glob("python*/site-packages"))
    # torch and the others of this environment, but not the library, which must come from the wheel
    (packages / "others.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n", encoding="utf-8")
    pip("install", "--target", str(packages), str(built[1]))
    python = environment / "bin" / "python"
    done = subprocess.run([python, "-c", RUN], cwd=tmp_path, capture_output=True, text=True, env={}, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "0.1.0"
    shown = subprocess.run([python, "-m", "treadle", "runs", "."], cwd=tmp_path, capture_output=True, text=True, env={})
    assert "finished" in shown.stdout
