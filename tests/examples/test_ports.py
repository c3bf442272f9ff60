"""Ports of public scripts: shorter than the original, exact over kills, and they learn."""

from __future__ import annotations

import logging
import re
import runpy
import sys
from pathlib import Path

import pytest

import treadle

PORTS = Path(__file__).parents[2] / "examples" / "ports"
NAMES = sorted(path.stem for path in PORTS.glob("*.py"))
TABLE = re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\) \| (\d+) \| .* \| (\d+) \|", (PORTS / "README.md").read_text(), re.M)


def test_the_table_of_lines_is_right_and_no_port_is_longer_than_its_original():
    counted = {name: len((PORTS / f"{name}.py").read_text().splitlines()) for name in NAMES}
    assert {name: int(ours) for name, ours, _ in TABLE} == counted
    assert all(int(ours) <= int(theirs) for _, ours, theirs in TABLE)


def run(name, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
    runpy.run_path(str(PORTS / f"{name}.py"), run_name="__main__")


def test_the_classifier_runs_and_a_second_call_has_nothing_to_do(tmp_path, monkeypatch, capsys):
    for _ in range(2):
        run("timm_classifier", monkeypatch, "--epochs", 1, "--out", tmp_path)
    first, again = re.findall(r"accuracy of the average ([\d.]+)", capsys.readouterr().out)
    assert first == again
    assert (tmp_path / "best_model.pt").exists()


# Seven processes each: the exactness of all faces and loaders is in the fast tests, that of these scripts is here.
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_port_is_exact(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = treadle.verify(str(PORTS / f"{name}.py"), steps=14)
    assert result.verdict == "EXACT", str(result)


@pytest.mark.slow  # a minute of training
def test_the_ports_learn(tmp_path, monkeypatch, capsys, caplog):
    run("mnist", monkeypatch, "--epochs", 8, "--out", tmp_path / "mnist")
    assert float(re.search(r"accuracy ([\d.]+)", capsys.readouterr().out).group(1)) > 0.9
    run("timm_classifier", monkeypatch, "--epochs", 8, "--out", tmp_path / "timm")
    assert float(re.search(r"average ([\d.]+)", capsys.readouterr().out).group(1)) > 0.9
    with caplog.at_level(logging.INFO, "treadle"):
        run("dqn", monkeypatch, "--max-steps", 1500, "--out", tmp_path / "dqn")
    games = [float(length) for length in re.findall(r"game ([\d.]+)", caplog.text)]
    assert games[-1] > 2 * games[0]
