"""SessionLogHook: when a process started, where it stood, how it ended; never the end of a training."""

from __future__ import annotations

import itertools
import json

import pytest

from hook_kit import Small, Stop, run_engine, run_mini
from treadle import CheckpointingHook, SessionLogHook
from treadle.engine.observers import observing
from treadle.hooks import BaseHook, sessionlog
from treadle.runs.record_hooks import SessionKeeper


def lines(folder):
    return [json.loads(line) for line in (folder / "sessions.jsonl").read_text().splitlines()]


class Clock:
    """Stands in for the module ``time``; every look at it is ``pace`` seconds later."""

    def __init__(self, pace):
        self.now, self.pace = 1000.0, pace

    def time(self):
        self.now += self.pace
        return self.now

    monotonic = time


@pytest.fixture
def clock(monkeypatch):
    made = Clock(10.0)
    monkeypatch.setattr(sessionlog, "time", made)
    return made


def test_start_steps_and_end(tmp_path, clock):
    run_mini(tmp_path, [SessionLogHook()])
    found = lines(tmp_path)
    assert [(line["event"], line["step"]) for line in found] == [
        ("start", 0), ("step", 1), ("step", 2), ("step", 3), ("step", 4), ("end", 4),
    ]  # fmt: skip
    start, end = found[0], found[-1]
    assert start["target"] == {"max_steps": 4, "epochs": None}
    assert start["device"] == "cpu"
    assert start["num_parameters"] == 4
    assert set(start["versions"]) >= {"treadle", "python", "torch", "numpy"}
    assert end["status"] == "finished"
    assert "error" not in end
    assert {line["total_steps"] for line in found} == {4}
    assert [line["time"] for line in found] == sorted({line["time"] for line in found})


def test_lines_are_at_least_a_second_and_at_most_a_minute_apart(tmp_path, clock):
    clock.pace = 0.09  # two looks at it where a line is written, one where none is
    Small(60, tmp_path, [SessionLogHook()]).train()
    times = [line["time"] for line in lines(tmp_path) if line["event"] == "step"]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert len(times) > 3
    assert min(gaps) >= 1.0
    hook = SessionLogHook()
    hook._file, hook._started, clock.now = tmp_path / "late", 0.0, 1e6
    engine = run_engine(None, [])
    hook.on_after_step(engine)
    assert hook._due - clock.now <= 60.0


def test_a_clock_that_is_set_back_stops_no_lines(tmp_path, clock):
    clock.time = lambda: 5.0
    run_mini(tmp_path, [SessionLogHook()])
    assert [line["event"] for line in lines(tmp_path)] == ["start", "step", "step", "step", "step", "end"]


def test_a_failure_and_a_signal_are_told_apart(tmp_path):
    class Leave(BaseHook):
        def on_after_step(self, trainer):
            raise SystemExit(143)

    for error, status in ((RuntimeError, "failed"), (SystemExit, "stopped")):
        folder = tmp_path / status
        with pytest.raises(error):
            Small(4, folder, [SessionLogHook(), Stop(2) if error is RuntimeError else Leave()]).train()
        assert lines(folder)[-1]["status"] == status
        assert lines(folder)[-1].get("error") == ("RuntimeError: stopped" if status == "failed" else None)


def test_a_resumed_run_cuts_what_it_does_again_and_a_fresh_one_sets_the_file_aside(tmp_path, clock):
    for error in (True, False):
        hooks = [CheckpointingHook(2), SessionLogHook()]
        trainer = Small(6, tmp_path, [*hooks, Stop(3)] if error else hooks)
        if error:
            with pytest.raises(RuntimeError):
                trainer.train()
        else:
            trainer.train()
    told = [(line["event"], line["step"]) for line in lines(tmp_path)]
    assert told == [
        ("start", 0),
        ("step", 1),
        ("step", 2),
        ("start", 2),
        *[("step", n) for n in (3, 4, 5, 6)],
        ("end", 6),
    ]
    Small(1, tmp_path, [SessionLogHook()]).train()
    assert (tmp_path / "sessions.1.jsonl").is_file()
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 1]


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert run_mini(tmp_path, [SessionLogHook("file/sessions.jsonl")]).step == 4
    assert [record.levelname for record in caplog.records if "SessionLogHook" in record.message] == ["WARNING"]


def test_it_puts_nothing_into_a_checkpoint(tmp_path):
    assert run_mini(tmp_path, [SessionLogHook()]).state_dict()["hooks"] == {}


def test_commands_add_one_above_the_folder_of_checkpoints(tmp_path):
    for workspace, hooks in (
        (tmp_path / "run" / "checkpoints", []),
        (tmp_path / "own", [SessionLogHook("mine.jsonl")]),
    ):
        with observing(SessionKeeper()):
            run_engine(workspace, hooks)
    with observing(SessionKeeper()):
        run_engine(None, [])
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert files == ["own/mine.jsonl", "run/sessions.jsonl"]
