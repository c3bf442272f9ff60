"""A torch that is too old is named, with what is needed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import treadle
from treadle.checkpoint.schema import versions
from treadle.cli.main import main
from treadle.requirements import TORCH, refuse_old_torch
from treadle.runs.folder import write_record

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("version", ["2.7.0", "2.13.0+cpu", "3.0.0a1", "10.1", "unknown"])
def test_what_is_new_enough_or_unknown_passes(version):
    refuse_old_torch(version)


@pytest.mark.parametrize("version", ["2.6.1", "1.13.1+cu117"])
def test_in_a_script_it_is_an_import_error(monkeypatch, version):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(ImportError, match=rf"torch >= 2\.7, and this is torch {re.escape(version)}; run: pip install"):
        refuse_old_torch(version)


@pytest.mark.parametrize("argv", [["/usr/bin/treadle", "train"], ["-m", "train"]])
def test_the_command_says_it_in_one_line_and_leaves(monkeypatch, capsys, argv):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "treadle", "train"])
    with pytest.raises(SystemExit) as left:
        refuse_old_torch("2.5.1")
    assert left.value.code == 1
    assert capsys.readouterr().err == (
        "error: treadle needs torch >= 2.7, and this is torch 2.5.1; run: pip install --upgrade 'torch>=2.7'\n"
    )


def test_the_oldest_version_is_that_of_the_package():
    needed = re.search(r'"torch>=(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert (int(needed[1]), int(needed[2])) == TORCH


def test_it_is_asked_before_anything_of_an_old_torch_is_used(tmp_path):
    (tmp_path / "torch.py").write_text("__version__ = '2.5.1'\n")  # with nothing else in it
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT / 'src')!r}]; import treadle"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1].startswith("ImportError: treadle needs torch >= 2.7, and this is torch 2.5.1")


def test_a_source_tree_that_is_not_installed_has_an_unknown_version(monkeypatch, tmp_path, capsys):
    found = metadata.distribution
    assert treadle.__version__  # kept by the package once it is read: put back for the tests after this one
    monkeypatch.delitem(vars(treadle), "__version__")

    def distribution(name):
        if name == "treadle":
            raise metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    write_record(tmp_path, {"face": "spectra", "config": {}})
    assert json.loads((tmp_path / "run.json").read_text())["version"] == "unknown"
    assert treadle.__version__ == versions()["treadle"] == "unknown"
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == "treadle unknown\n"


def test_one_place_asks_for_the_version_of_treadle():
    asking = [
        path.name for path in (ROOT / "src").rglob("*.py") if re.search(r"version\(['\"]treadle", path.read_text())
    ]
    assert asking == ["requirements.py"]
