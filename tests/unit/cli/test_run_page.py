"""``treadle report`` and ``treadle runs``: what they write, of which runs, and what they say instead."""

from __future__ import annotations

import json
import re

import pytest

from command_kit import treadle
from run_page_kit import make_run, session_lines, step_rows, write_checkpoint, write_lines
from treadle.checkpoint.lock import run_lock
from treadle.cli import report
from treadle.cli.runpage import page as run_page


@pytest.fixture(autouse=True)
def light_library(monkeypatch):
    """The plotting library is five megabytes, and only a browser reads it."""
    real = run_page.plotting_library
    monkeypatch.setattr(run_page, "plotting_library", lambda: "/* plotly */")
    return real


def page_of(folder, *arguments):
    assert treadle("report", folder, *arguments) == 0
    return (folder / "report.html").read_text(encoding="utf-8")


def data_of(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_a_page_holds_all_that_the_run_recorded(tmp_path, capsys):
    text = page_of(make_run(tmp_path / "spectra"))
    assert capsys.readouterr().out.strip() == str(tmp_path / "spectra" / "report.html")
    assert "finished · step 120 / 120 · epoch 12 · best val_loss 0.4 · 0:00:12 of training · cpu" in text
    for part in ("Sessions", "Results", "Configuration", "Pictures", "Samples", "Checkpoints", "Environment"):
        assert f"<h2>{part}</h2>" in text
    assert "<td>checkpoints/last.pt</td>" in text
    assert "a &lt;sample&gt; &amp; more" in text
    assert 'alt="two words" src="data:image/png;base64,iVBOR' in text
    data = data_of(text)
    assert [chart["title"] for chart in data["charts"]] == [
        "Loss", "Gradient norm", "Learning rate", "Speed (steps/s)",
    ]  # fmt: skip
    assert {one["label"] for one in data["charts"][0]["series"]} == {"training", "validation", "best"}
    assert data["axes"] == ["step", "epoch", "time"]
    assert data["reload"] is None


def test_nothing_in_a_run_is_read_as_html_or_loaded_from_elsewhere(tmp_path):
    text = page_of(make_run(tmp_path / "<b>run<b>"))
    assert "</script><b>" not in text
    assert "<b>run" not in text
    assert "&lt;/script&gt;&lt;b&gt;" in text
    assert data_of(text)["runs"] == ["<b>run<b>"]
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:)""", text)
    assert "default-src 'none'" in text


def test_runs_beside_each_other_show_what_differs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, lr in (("one", 0.1), ("two", 0.2)):
        make_run(tmp_path / name, lr=lr, best=lr)
    assert treadle("report", "one", "two", "--out", "both.html") == 0
    text = (tmp_path / "both.html").read_text()
    before = text[: text.index("All 3 settings")]
    configuration = before[before.index("<h2>Configuration</h2>") :]
    assert "<td>optimizer.lr</td><td>0.1</td><td>0.2</td>" in configuration
    assert "seed" not in configuration
    assert "No difference between the 2 runs." in text[text.index("<h2>Environment</h2>") :]
    assert data_of(text)["runs"] == ["one", "two"]
    assert {one["run"] for one in data_of(text)["charts"][0]["series"]} == {0, 1}


def test_a_folder_of_runs_stands_for_its_runs_and_names_stay_apart(tmp_path):
    for path in ("a/run", "b/run", "b/run/lora"):
        make_run(tmp_path / path, steps=20)
    assert data_of(page_of(tmp_path))["runs"] == ["a/run", "b/run", "b/run/lora"]
    assert data_of(page_of(tmp_path / "a" / "run"))["runs"] == ["run"]


def test_runs_without_settings_of_their_own_are_not_compared(tmp_path):
    make_run(tmp_path / "one", steps=20)
    write_checkpoint(tmp_path / "bare" / "checkpoints" / "last.pt", 5, 1, best=None)
    text = page_of(tmp_path)
    assert "Without a file of settings: bare" in text
    assert "bare: no curves were recorded; a StepLogHook writes every step." in text


def test_a_run_of_a_command_has_a_time_axis_and_its_device(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "line.yaml").write_text(
        "seed: 0\nimports: [line.py]\ntrainer: {type: line.Line, max_steps: 6, workspace: run}\n"
    )
    (tmp_path / "line.py").write_text(
        "from hook_kit import Small\nfrom treadle import StepLogHook\n\n\nclass Line(Small):\n"
        "    def build_hooks(self):\n        return [StepLogHook()]\n"
    )
    assert treadle("train", "line.yaml") == 0
    text = page_of(tmp_path / "run")
    assert data_of(text)["axes"] == ["step", "epoch", "time"]
    assert "finished · step 6 / 6" in text
    assert "<td>parameters</td><td>4</td>" in text
    assert "<td>trainer.max_steps</td><td>6</td>" in text


def test_the_steps_at_which_a_later_process_took_the_run_up(tmp_path):
    write_lines(tmp_path / "steps.jsonl", step_rows(40))
    first, second = session_lines(20, status=None), session_lines(40, start=9000.0)
    write_lines(tmp_path / "sessions.jsonl", [*first, {**second[0], "step": 20}, *second[3:]])
    assert data_of(page_of(tmp_path))["resumes"] == {"step": [20], "epoch": [2.0], "time": [2.0]}


def test_a_torn_run_and_one_that_goes_on(tmp_path):
    write_lines(tmp_path / "steps.jsonl", step_rows(30), torn='{"step": 31, "lo')
    write_lines(tmp_path / "sessions.jsonl", session_lines(30, status=None), torn="{")
    with run_lock(tmp_path):
        text = page_of(tmp_path)
    assert ">running · step 30 / 30" in text
    assert "<td>running</td>" in text
    text = page_of(tmp_path)
    assert "<td>no end recorded</td>" in text
    assert ">stopped · step 30 / 30" in text
    assert "its process ended without a record" in text


def raise_(error):
    raise error


def test_errors_name_the_folder_and_what_to_do(tmp_path, capsys, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    run, broken = (make_run(tmp_path / name, steps=10) for name in ("run", "broken"))
    picture = broken / "pictures" / "two_words.png"
    real = type(picture).read_bytes
    denied = PermissionError(13, "Permission denied", str(picture))
    monkeypatch.setattr(type(picture), "read_bytes", lambda path: raise_(denied) if path == picture else real(path))
    for arguments, message in (
        ((tmp_path / "empty",), "holds no record of a run"),
        ((tmp_path / "gone",), "no such folder"),
        ((run, "--out", tmp_path / "file" / "page.html"), "--out"),
        ((run, "--watch", "--interval", 0), "--interval 0"),
        ((broken,), "two_words.png cannot be read"),
    ):
        assert treadle("report", *arguments) == 2
        assert message in capsys.readouterr().err
    assert treadle("runs", tmp_path / "gone") == 2
    assert "no such folder" in capsys.readouterr().err


def test_without_plotly_the_extra_is_named(light_library, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "plotly.offline", None)
    with pytest.raises(ImportError, match=r"treadle\[cli\]"):
        light_library()


def test_watch_writes_until_the_run_ends(tmp_path, monkeypatch):
    write_lines(tmp_path / "steps.jsonl", step_rows(30))
    pages = []

    def sleep(seconds):
        pages.append((seconds, data_of((tmp_path / "report.html").read_text())))
        write_lines(tmp_path / "steps.jsonl", step_rows(30 + 10 * len(pages)))
        if len(pages) == 2:
            lock.__exit__(None, None, None)

    monkeypatch.setattr(report.time, "sleep", sleep)
    lock = run_lock(tmp_path)
    lock.__enter__()
    last = data_of(page_of(tmp_path, "--watch", "--interval", 3))
    assert [(seconds, page["reload"]) for seconds, page in pages] == [(3.0, 3.0), (3.0, 3.0)]
    lengths = [len(page["charts"][0]["series"][0]["y"]) for page in [*(page for _, page in pages), last]]
    assert lengths == [30, 40, 50]
    assert last["reload"] is None


def test_watch_waits_for_what_the_process_writes_after_a_training_that_was_finished(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path / "run", steps=20)
    (run / "metrics.json").rename(run / "later")
    alive, pages = [True, True, False], []

    def sleep(seconds):
        pages.append(data_of((run / "report.html").read_text()))
        lock.__exit__(None, None, None)
        if len(pages) == 2:
            (run / "later").rename(run / "metrics.json")

    monkeypatch.setattr(report.time, "sleep", sleep)
    monkeypatch.setattr("treadle.checkpoint.files.process_lives", lambda pid: alive.pop(0))
    lock = run_lock(run)
    lock.__enter__()
    last = page_of(run, "--watch")
    assert [page["reload"] for page in pages] == [10.0, 10.0, 10.0]
    assert "<h2>Results</h2>" in last
    assert "run: finished" in capsys.readouterr().err


def test_watch_does_not_wait_for_the_process_of_a_run_that_was_killed(tmp_path, monkeypatch):
    write_lines(tmp_path / "steps.jsonl", step_rows(7))
    write_lines(tmp_path / "sessions.jsonl", session_lines(7, status=None))
    monkeypatch.setattr(report.time, "sleep", lambda seconds: lock.__exit__(None, None, None))
    monkeypatch.setattr("treadle.checkpoint.files.process_lives", lambda pid: pytest.fail("it was asked for"))
    lock = run_lock(tmp_path)
    lock.__enter__()
    assert "stopped: its process ended without a record" in page_of(tmp_path, "--watch")


def test_ctrl_c_ends_watching_with_a_page_that_stays_as_it_is(tmp_path, monkeypatch):
    write_lines(tmp_path / "steps.jsonl", step_rows(3))

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(report.time, "sleep", interrupt)
    with run_lock(tmp_path):
        assert data_of(page_of(tmp_path, "--watch"))["reload"] is None


def test_the_table_of_runs(tmp_path, capsys):
    make_run(tmp_path / "good", steps=20)
    (tmp_path / "bad").mkdir()
    write_lines(tmp_path / "bad" / "steps.jsonl", step_rows(7))
    failed = {**session_lines(7)[-1], "status": "failed", "error": "NonFiniteError: loss"}
    write_lines(tmp_path / "bad" / "sessions.jsonl", [*session_lines(7)[:-1], failed])
    assert treadle("runs", tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["run", "status", "step", "epoch"]
    assert any(re.match(r"good +finished +20 / 20 +2 +val_loss 0.4 +0:00:02 +cpu ", line) for line in lines)
    assert any(re.match(r"bad +failed +7 / 7 +– +\(loss 0.3679\) ", line) for line in lines)
    assert lines[-1] == f"{tmp_path / 'bad'}: NonFiniteError: loss"
    assert treadle("runs", tmp_path, "--json") == 0
    rows = {row["folder"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows[str(tmp_path / "good")]["best"] == 0.4
    assert rows[str(tmp_path / "bad")]["status"] == "failed"
    (tmp_path / "none").mkdir()
    assert treadle("runs", tmp_path / "none") == 0
    assert "no runs below" in capsys.readouterr().err
