"""``treadle.verify`` as a function, and the fixture ``treadle_exact`` for the test suites of users."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import exact_targets
import treadle
from treadle import ConfigError

TESTS = Path(__file__).parents[1]


def test_a_function_that_resumes_to_the_bit_is_exact(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = treadle.verify(exact_targets.train_exactly, steps=8, kills=2)
    assert result.verdict == "EXACT", str(result)
    assert str(result).startswith("EXACT: 8 steps, 2 kills")
    assert list(tmp_path.iterdir()) == []  # the runs wrote to a folder of their own


def test_a_function_that_keeps_something_no_checkpoint_holds_is_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = treadle.verify(exact_targets.train_with_a_hidden_count, steps=8, kills=1)
    assert result.verdict == "NOT EXACT"
    assert "first difference: step" in str(result)


def test_a_function_inside_another_is_refused():
    def inner():
        raise AssertionError

    with pytest.raises(ConfigError, match="at the top level of a module"):
        treadle.verify(inner)


def test_a_script_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"no_such\.py"):
        treadle.verify("no_such.py")


def test_a_step_of_a_script_is_replayed_as_its_record_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = Path("train.py")
    script.write_text(
        "import exact_targets\nfrom treadle import CheckpointingHook, StepLogHook, set_seed\nset_seed(0)\n"
        "hooks = [StepLogHook(), CheckpointingHook(5, keep_previous=9)]\n"
        "exact_targets.Fit(12, device='cpu', workspace='runs/logged', hooks=hooks).train()\n"
    )
    runpy.run_path(str(script), run_name="__main__")
    found = treadle.replay("runs/logged", 8, script=script)
    assert (found.equal, found.step, found.start_step, found.differences) == (True, 8, 5, {})
    assert found.batches[0][0].shape == (4, 3)
    record = Path("runs/logged/steps.jsonl")
    rows = record.read_text().splitlines(keepends=True)
    record.write_text("".join(row for row in rows if json.loads(row)["step"] != 8))
    assert treadle.replay("runs/logged", 8, script=script).equal is None


def test_a_step_before_the_first_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="step=0"):
        treadle.replay(tmp_path, 0)


SUITE = """
from __future__ import annotations

import exact_targets


def test_good(treadle_exact):
    treadle_exact(exact_targets.train_exactly, steps=6, kills=1)


def test_bad(treadle_exact):
    treadle_exact(exact_targets.train_with_a_hidden_count, steps=6, kills=1)
"""


def test_the_fixture_fails_the_test_of_a_training_that_is_not_exact(tmp_path):
    (tmp_path / "test_mine.py").write_text(SUITE)
    # Installed, the plugin comes by its entry point.
    found = [one for one in entry_points(group="pytest11") if one.value == "treadle.runs.pytest_plugin"]
    plugin = [] if found else ["-p", "treadle.runs.pytest_plugin"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugin, "-o", f"pythonpath={TESTS}", "."],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "NOT EXACT: step" in done.stdout
