"""A population in processes of its own; each starts an interpreter with torch, which takes seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from population_kit import alone, make, make_that_warns, same_folder
from treadle.population import Population
from treadle.population.results import read_rows

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
from pathlib import Path
from population_kit import Fit, make
from treadle.population import Population

def slow(seed, workspace):
    import time
    trainer = make(seed=seed, workspace=workspace)
    forward = trainer.forward
    trainer.forward = lambda input: (time.sleep(0.05), forward(input))[1]
    return trainer

if __name__ == "__main__":
    Population(slow, seeds=range(3), out=sys.argv[1], workers=int(sys.argv[2]), turn=1).run()
"""


def test_members_in_processes_are_the_same_as_their_runs_alone(tmp_path):
    settings = [{"seed": 0}, {"seed": 1, "bad": True}, {"seed": 2, "steps": 6}]
    results = Population(make, settings, out=tmp_path / "all", workers=2, progress=False).run()
    assert [row.status for row in results.rows] == ["finished", "failed", "finished"]
    for row in (results.rows[0], results.rows[2]):
        alone(tmp_path / row.name, **row.settings)
        same_folder(tmp_path / "all" / row.name, tmp_path / row.name)


def test_warnings_of_members_in_processes_name_them(tmp_path, capfd):
    Population(make_that_warns, seeds=[1, 3], out=tmp_path, workers=1, progress=False).run()
    shown = capfd.readouterr().err.splitlines()
    assert [line for line in shown if "odd" in line] == ["warning: seed=1: 1 is odd", "warning: seed=3: 3 is odd"]


@pytest.mark.parametrize("workers", [0, 2])
def test_killed_and_run_again_the_end_is_the_same(tmp_path, workers):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path / "all"), str(workers)]
    paths = [str(Path(__file__).parents[2]), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment) as process:
        checkpoint = tmp_path / "all" / "seed=0" / "checkpoints" / "checkpoint_step_5.pt"
        deadline = time.monotonic() + 120
        while not checkpoint.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert not read_rows(tmp_path / "all" / "population.json")
    subprocess.run(command, env=environment, check=True, timeout=300)
    rows = read_rows(tmp_path / "all" / "population.json")
    assert sorted((row.name, row.status) for row in rows) == [(f"seed={seed}", "finished") for seed in range(3)]
    for seed in range(3):
        alone(tmp_path / f"alone{seed}", seed=seed)
        mine, theirs = tmp_path / "all" / f"seed={seed}", tmp_path / f"alone{seed}"
        assert (mine / "steps.jsonl").read_text() == (theirs / "steps.jsonl").read_text()
        one, two = (torch.load(folder / "checkpoints" / "checkpoint_step_14.pt") for folder in (mine, theirs))
        assert all(torch.equal(one["model"][name], two["model"][name]) for name in two["model"])
