"""Reading run folders: of every face, of runs that go on or were killed, and of folders that hold no run."""

from __future__ import annotations

import io
import json
import re
import time

import pytest
import torch
from rich.console import Console

import treadle
from hook_kit import Small, Stop
from run_page_kit import make_run, session_lines, step_rows, write_checkpoint, write_lines
from treadle.checkpoint import load_checkpoint, save_checkpoint
from treadle.checkpoint.lock import holder, run_lock
from treadle.checkpoint.safe.inspect import glance, inspect_path
from treadle.cli.runpage import summary
from treadle.cli.runpage.curves import MOST_POINTS, RunAxes, constants_of, series_of
from treadle.cli.runpage.files import as_epochs, read_lines, read_tail, runs_below
from treadle.cli.runpage.records import read_run
from treadle.cli.runpage.sessions import Timeline, read_sessions
from treadle.cli.runpage.summary import summarize
from treadle.cli.runs import _show


def status(folder):
    return summarize(read_run(folder, brief=True)).status


def series(folder, chart, label="training"):
    (found,) = [one for one in series_of(read_run(folder)) if (one.chart, one.label) == (chart, label)]
    return found


def test_a_finished_run(tmp_path):
    folder = make_run(tmp_path / "run")
    run = read_run(folder)
    assert len(run.steps) == 120
    assert run.config == {"seed": 0, "optimizer.lr": 0.1, "optimizer.name": "</script><b>"}
    assert run.results == {"test.loss": 0.4}
    assert [path.name for path in run.pictures] == ["two_words.png"]
    assert run.samples == {"samples.txt": "a <sample> & more"}
    row = summarize(run)
    assert (row.status, row.step, row.total_steps, row.epoch) == ("finished", 120, 120, 12)
    assert (row.metric, row.best, row.best_epoch, row.seconds, row.device) == ("val_loss", 0.4, 12, 12.0, "cpu")
    assert row == summarize(read_run(folder, brief=True))


def test_a_run_of_a_script_with_only_some_hooks(tmp_path):
    hooks = [
        treadle.LoggingHook(1, sync=False), treadle.JsonlHook(), treadle.SessionLogHook(), treadle.CheckpointingHook(2),
    ]  # fmt: skip
    Small(4, tmp_path / "points", hooks).train()
    run = read_run(tmp_path / "points")
    assert len(run.steps) == 4  # every run folder has a step log
    assert {one.chart for one in series_of(run)} >= {"loss"}
    assert [one.step for one in run.checkpoints] == [4, 4, 4, 2]  # two of them links
    assert summarize(run).status == "finished"
    Small(4, tmp_path / "bare", [treadle.CheckpointingHook(2)]).train()
    run = read_run(tmp_path / "bare")
    assert {one.chart for one in series_of(run)} >= {"loss"}
    assert (run.config["trainer.max_steps"], run.config["optimizer.lr"]) == (4, 0.01)  # of settings.json
    assert (summarize(run).status, summarize(run).step) == ("finished", 4)  # by the target in the checkpoint
    with pytest.raises(RuntimeError):
        Small(4, tmp_path / "failed", [treadle.StepLogHook(), treadle.SessionLogHook(), Stop(3)]).train()
    row = summarize(read_run(tmp_path / "failed"))
    assert (row.status, row.reason, row.step) == ("failed", "RuntimeError: stopped", 3)


def test_step_and_epoch_of_a_run_agree(tmp_path):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = treadle.Trainer(model, optimizer, torch.nn.MSELoss(), device="cpu", progress=False)
    batch = (torch.ones(2, 1), torch.ones(2, 1))
    trainer.train([batch] * 3, 5, [batch], save_dir=tmp_path, save_freq=None)
    row = summarize(read_run(tmp_path, brief=True))
    assert (row.step, row.epoch) == (15, 5)
    for name in ("steps.jsonl", "sessions.jsonl", "last.pt"):  # as folders of before have no logs
        (tmp_path / name).unlink(missing_ok=True)
    tree = load_checkpoint(tmp_path / "best_model.pt")
    save_checkpoint({**tree, "global_step": 6, "epoch": 2}, tmp_path / "best_model.pt")
    row = summarize(read_run(tmp_path, brief=True))
    assert (row.step, row.epoch) == (None, 5)


def test_torn_lines_and_files_that_are_being_written(tmp_path):
    write_lines(tmp_path / "steps.jsonl", step_rows(5), torn='{"step": 6, "ep')
    write_lines(tmp_path / "sessions.jsonl", session_lines(10, status=None), torn='[1]\n{"step": "7"}\n"x"')
    (tmp_path / "training_history.json").write_text('[{"epoch": 1')
    (tmp_path / "config.json").write_text("")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.pt").write_bytes(b"PK\3\4 half")
    (tmp_path / "checkpoints" / "checkpoint_latest.pt").symlink_to("gone.pt")
    run = read_run(tmp_path)
    assert [row["step"] for row in run.steps] == [1, 2, 3, 4, 5]
    assert len(run.sessions) == 2
    assert (run.epochs, run.config) == ([], {})
    assert all(one.problem for one in run.checkpoints)
    assert len(run.checkpoints) == 2


def test_a_folder_that_is_no_run_is_named_with_what_to_do(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    for folder, message in ((tmp_path, "holds no record of a run"), (tmp_path / "gone", "no such folder")):
        with pytest.raises(treadle.ConfigError, match=message):
            read_run(folder)
    assert list(runs_below(tmp_path)) == []


def test_runs_are_found_with_those_inside_of_them_and_nothing_twice(tmp_path):
    make_run(tmp_path / "a" / "one")
    make_run(tmp_path / "a" / "one" / "lora")
    write_checkpoint(tmp_path / "flat" / "checkpoint_epoch_3.pt", 3, 3)
    (tmp_path / "b" / "checkpoints").mkdir(parents=True)
    write_lines(tmp_path / "b" / "checkpoints" / "steps.jsonl", [])
    (tmp_path / "a" / "one" / "wandb" / "run").mkdir(parents=True)
    write_lines(tmp_path / "a" / "one" / "wandb" / "run" / "history.json", [])
    found = [path.relative_to(tmp_path).as_posix() for path in runs_below(tmp_path)]
    assert found == ["a/one", "a/one/lora", "b", "flat"]


def test_the_status_of_a_run_that_goes_on_or_was_killed(tmp_path, monkeypatch):
    write_lines(tmp_path / "sessions.jsonl", session_lines(20, status=None))
    (tmp_path / "checkpoints").mkdir()
    with run_lock(tmp_path / "checkpoints"):
        assert status(tmp_path) == "running"
        assert "process" in summarize(read_run(tmp_path)).reason
    assert status(tmp_path) == "stopped"  # killed: no end was written, and nobody holds the folder
    monkeypatch.setattr(summary.time, "time", lambda: 1002.0 + 60)
    assert status(tmp_path) == "running"  # no lock at all, and a line of a minute ago
    (tmp_path / "checkpoints" / ".treadle-lock").write_text("")  # left behind by a kill
    assert status(tmp_path) == "stopped"
    write_lines(tmp_path / "sessions.jsonl", session_lines(20, status="stopped"))
    assert status(tmp_path) == "stopped"


def test_the_end_of_a_long_log_is_enough_for_the_table(tmp_path):
    write_lines(tmp_path / "steps.jsonl", step_rows(2000))
    rows = read_run(tmp_path, brief=True).steps
    assert 0 < len(rows) < 1000
    assert rows == step_rows(2000)[-len(rows) :]
    assert read_tail(tmp_path / "gone.jsonl") == read_lines(tmp_path / "gone.jsonl") == []


def test_who_holds_a_folder_is_told_without_taking_it(tmp_path):
    assert holder(tmp_path) is None
    with run_lock(tmp_path):
        assert set(holder(tmp_path)) == {"pid", "host", "since"}
        (tmp_path / ".treadle-lock").write_text("torn")
        assert holder(tmp_path) == {}
    assert holder(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_glance_tells_what_an_inspection_does_and_reads_no_tensor(tmp_path):
    path = tmp_path / "checkpoint_step_3.pt"
    write_checkpoint(path, 3, 1)
    report = inspect_path(path)
    assert glance(path) == report
    damaged = bytearray(path.read_bytes())
    damaged[damaged.find(torch.full((3,), 1.5).numpy().tobytes())] ^= 1
    path.write_bytes(damaged)
    assert inspect_path(path)["problems"] != []
    assert glance(path) == report
    for junk in (b"PK\3\4", b"text"):
        path.write_bytes(junk)
        with pytest.raises(treadle.CheckpointError):
            glance(path)


def test_histories_in_every_form():
    records = [{"epoch": 1, "val_loss": 0.5}, {"epoch": 2, "val_loss": 0.4}]
    assert as_epochs(records) == records
    assert as_epochs({"epoch": [1, 2], "val_loss": [0.5, 0.4]}) == records
    assert as_epochs({"val": [{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": 0.4}]}) == records
    assert as_epochs("junk") == as_epochs([1, {"epoch": "x"}]) == as_epochs({"val": 3}) == []


def test_time_leaves_out_pauses_and_what_a_resumed_run_does_again():
    again = [line for line in session_lines(40, start=5000.0) if line["step"] > 20]
    again = [{**line, "time": line["time"] - 2.0} for line in again]
    lines = [*session_lines(20, status=None), {"event": "start", "step": 20, "time": 5000.0}, *again]
    timeline = Timeline(read_sessions(lines))
    assert timeline.at([0, 10, 20, 30, 40, None]) == [0.0, 1.0, 2.0, 3.0, 4.0, None]
    assert timeline.total == 4.0
    assert Timeline(read_sessions(session_lines(20))).speeds() == ([10, 20], [10.0, 10.0])
    assert Timeline([]).at([1]) == [None]


def test_a_point_lies_at_the_same_place_on_every_axis(tmp_path):
    folder = make_run(tmp_path)
    loss, validation = series(folder, "loss"), series(folder, "loss", "validation")
    index = loss.axes["step"].index(30)
    assert {name: axis[index] for name, axis in loss.axes.items()} == {"step": 30, "epoch": 3.0, "time": 3.0}
    assert {name: axis[2] for name, axis in validation.axes.items()} == {"step": 30, "epoch": 3, "time": 3.0}
    assert validation.y[2] == 1 / 3
    assert series(folder, "loss", "best").axes["step"] == [120]
    values = {"global_step": 50, "epoch": 2, "data.position": 5, "data.length": 10}
    assert RunAxes([], values, Timeline([])).of_epochs([1])["step"] == [20]


def test_few_points_stay_and_of_many_no_extreme_is_lost(tmp_path):
    rows = step_rows(20_001)
    rows[7_777]["loss"], rows[9_999]["loss"], rows[5]["loss"] = 1e6, -1e6, None
    write_lines(tmp_path / "steps.jsonl", rows)
    loss = series(tmp_path, "loss")
    assert len(loss.y) <= MOST_POINTS
    assert len(loss.raw["y"]) <= MOST_POINTS
    assert {1e6, -1e6} <= set(loss.raw["y"])
    assert loss.raw["axes"]["step"] == sorted(loss.raw["axes"]["step"])
    assert loss.axes["step"][-1] == 20_001
    known = [row["loss"] for row in rows[:27] if row["loss"] is not None]
    assert loss.y[0] == pytest.approx(sum(known) / len(known))
    write_lines(tmp_path / "steps.jsonl", step_rows(100))
    assert series(tmp_path, "loss").raw is None
    assert series(tmp_path, "loss").y == [row["loss"] for row in step_rows(100)]


def test_skipped_and_retried_steps_are_marked(tmp_path):
    rows = step_rows(10)
    rows[3].update(applied=False, loss=None, reason="no micro-batch had a loss")
    rows[6].update(retries=2)
    write_lines(tmp_path / "steps.jsonl", rows)
    skipped, retried = series(tmp_path, "loss", "skipped"), series(tmp_path, "loss", "retried")
    assert (skipped.axes["step"], skipped.y) == ([4], [rows[2]["loss"]])
    assert skipped.texts == ["step 4 skipped: no micro-batch had a loss"]
    assert retried.texts == ["step 7 applied after 2 retries"]


def test_learning_rates_are_one_curve_unless_groups_differ(tmp_path):
    write_lines(tmp_path / "steps.jsonl", step_rows(5))
    assert [one.label for one in series_of(read_run(tmp_path)) if one.chart == "lr"] == ["training"]
    rows = [{**row, "lr": [0.1, 0.2, 0.1]} for row in step_rows(5)]
    write_lines(tmp_path / "steps.jsonl", rows)
    assert [one.label for one in series_of(read_run(tmp_path)) if one.chart == "lr"] == ["group 0", "group 1"]


def test_what_never_changes_is_a_fact_and_no_curve(tmp_path):
    (tmp_path / "history.json").write_text(json.dumps([{"epoch": n, "n": 7, "loss": n} for n in (1, 2)]))
    run = read_run(tmp_path)
    assert constants_of(run) == {"n": 7}
    assert [one.chart for one in series_of(run)] == ["loss"]


def test_a_checkpoint_that_did_not_change_is_read_once(tmp_path, monkeypatch):
    from treadle.cli.runpage import checkpoints

    path = tmp_path / "checkpoints" / "last.pt"
    write_checkpoint(path, 3, 1)
    looks = []
    monkeypatch.setattr(checkpoints, "glance", lambda file: looks.append(file) or glance(file))
    assert [read_run(tmp_path).state.step for _ in range(2)] == [3, 3]
    assert len(looks) == 1
    torch.save({"global_step": 30, "more": torch.zeros(5)}, path)
    assert read_run(tmp_path).state.step == 30
    assert len(looks) == 2


def test_exported_weights_are_no_run_of_their_own_but_a_run_may_be_called_so(tmp_path):
    for name in ("a/run.json", "a/export/checkpoint_step_5.safetensors", "export/run.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("[]")
    assert [path.relative_to(tmp_path).as_posix() for path in runs_below(tmp_path)] == ["a", "export"]


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (200, ["run", "status", "step", "epoch", "best metric", "time", "device", "written"]),
        (60, ["run", "status", "step", "best metric", "time"]),
        (40, ["run", "status", "step"]),
    ],
)
def test_a_narrow_terminal_leaves_out_columns_and_cuts_no_word(tmp_path, width, columns):
    run = summary.RunSummary(
        tmp_path / "parabola", "finished", None, 100, 100, 12, "val_loss", 0.0527, 12, None, 44.0, "cpu", time.time()
    )
    out = io.StringIO()
    _show([run], tmp_path, Console(file=out, force_terminal=True, color_system=None, width=width))
    heads, row = out.getvalue().splitlines()
    assert [head for head in re.split(r"\s{2,}", heads.strip()) if head] == columns
    assert row.split()[:3] == ["parabola", "finished", "100"]
    assert "…" not in row
