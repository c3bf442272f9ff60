"""The user project in examples/own_project: strict types by its own settings, and the commands of its README."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from command_kit import read, treadle

ROOT = Path(__file__).parents[2]
PROJECT = ROOT / "examples" / "own_project"


@pytest.mark.slow
def test_mypy_passes_by_the_projects_own_settings(tmp_path):
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout


def test_make_check_and_make_test_look_at_the_project_too():
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'^files = \[.*"examples/own_project"', settings, flags=re.MULTILINE)
    assert re.search(r'^testpaths = \[.*"examples/own_project/tests"', settings, flags=re.MULTILINE)


def test_the_configuration_trains_goes_on_is_evaluated_and_predicts(tmp_path, monkeypatch, capsys):
    shutil.copy(PROJECT / "run.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(PROJECT / "src"), *sys.path])
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    for last in (6, 12):
        assert treadle("train", "run.yaml", f"trainer.max_steps={last}", "trainer.device=cpu") == 0
    assert "checkpoint_step_6.pt" in capsys.readouterr().err
    assert treadle("evaluate", "runs/fat") == 0
    assert set(read("runs/fat/eval_results_test.json")["metrics"]) == {"loss", "inside", "losses"}
    assert treadle("predict", "runs/fat", "--out", "fat.csv") == 0
    assert Path("fat.csv").read_text().startswith("low,median,high\n")


def test_the_readme_names_the_files_that_are_there():
    text = (PROJECT / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `([^`]+)`", text, flags=re.MULTILINE)
    assert len(named) == 5
    assert [name for name in named if not (PROJECT / name).is_file()] == []
