"""Background saves that are killed, fail, meet a signal or a fork: the old file or the new one, and no hang."""

from __future__ import annotations

import errno
import importlib.util
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import functional_kit
import spectra_kit as kit
from fault_points import hurt, in_child, killed, no_space, record
from helpers import differences, scalar_engine
from processes import Forked
from treadle import CheckpointingHook, Trainer, verify_checkpoint
from treadle.checkpoint import load_checkpoint
from treadle.checkpoint.lock import LOCK_NAME
from treadle.engine.state import RunState
from treadle.errors import CheckpointError

CHILD = Path(__file__).with_name("background_child.py")
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHILD.parents[1])}


def run(folder, steps=4, **settings):
    settings = {"interval": 2, "keep_previous": 1, "path": folder, "background": True, **settings}
    engine = scalar_engine(hooks=[CheckpointingHook(**settings)])
    engine.run([1.0, 2.0], max_steps=steps)
    return engine


def points_to_hurt(seen):
    """All but the lock, and of the many writes inside one file every tenth."""
    numbered = [(n, call) for n, (call, name) in enumerate(seen, start=1) if name != LOCK_NAME]
    return [n for n, call in numbered if call != "write" or n % 10 == 0]


@pytest.mark.parametrize("act", [no_space, killed])
def test_hurt_at_any_call_the_folder_keeps_a_state_and_a_rerun_ends_as_if_nothing_had_been(tmp_path, act):
    run(tmp_path / "old", 2)
    shutil.copytree(tmp_path / "old", tmp_path / "clean", symlinks=True)
    seen = record(tmp_path / "clean", lambda: run(tmp_path / "clean", 6))
    expected = load_checkpoint(tmp_path / "clean" / "checkpoint_latest.pt")
    for at in points_to_hurt(seen):
        folder = tmp_path / "hurt"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "old", folder, symlinks=True)
        error = hurt(folder, lambda: run(folder, 6), at, act)
        assert error is None or isinstance(error, CheckpointError), (at, seen[at - 1], repr(error))
        assert "\n" not in str(error or "")
        files = [path for path in folder.glob("checkpoint_step_*.pt") if not path.is_symlink()]
        assert [path for path in files if verify_checkpoint(path) != []] == [], (at, seen[at - 1])
        assert files, (at, seen[at - 1])
        if act is not killed and seen[at - 1][0] not in ("unlink", "remove"):
            assert list(folder.glob(".*treadle-tmp")) == [], (at, seen[at - 1])
        run(folder, 6)
        assert differences(expected, load_checkpoint(folder / "checkpoint_latest.pt")) == [], (at, seen[at - 1])
        assert list(folder.glob(".*treadle-tmp")) == [], (at, seen[at - 1])


def test_killed_at_any_call_the_spectra_trainer_goes_on_and_best_and_last_are_right(tmp_path):
    def fit(folder, epochs=2):
        kit.make(folder, background_saves=True, hooks=()).fit(epochs)

    def end(folder):
        trees = [load_checkpoint(folder / "checkpoints" / name) for name in ("best.pt", "last.pt")]
        trees.append(load_checkpoint(folder / "best_model.pt"))
        for tree in trees:
            tree.pop("config", None)
        return trees

    fit(tmp_path / "old", 1)
    shutil.copytree(tmp_path / "old", tmp_path / "clean")
    seen = record(tmp_path / "clean", lambda: fit(tmp_path / "clean"))
    expected = end(tmp_path / "clean")
    assert expected[0]["epoch"] == 2
    renames = [n for n, (call, _) in enumerate(seen, start=1) if call in ("replace", "fsync", "link")]
    assert len(renames) >= 6
    for at in renames:
        folder = tmp_path / "hurt"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "old", folder)
        hurt(folder, lambda: fit(folder), at, killed)
        assert verify_checkpoint(folder / "checkpoints" / "last.pt") == [], (at, seen[at - 1])
        fit(folder)
        assert differences(expected, end(folder)) == [], (at, seen[at - 1])


def test_a_file_that_may_not_grow_ends_the_run_in_one_line_and_the_old_state_stays(tmp_path):
    run(tmp_path, 2)
    before = (tmp_path / "checkpoint_step_2.pt").read_bytes()

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))
        with pytest.raises(CheckpointError, match=r"checkpoint_step_4\.pt' was not written: .*File too large"):
            run(tmp_path, 40)

    assert in_child(limited) == 0
    assert (tmp_path / "checkpoint_step_2.pt").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_latest.pt", "checkpoint_step_2.pt"]


def start(workspace, where):
    command = [sys.executable, str(CHILD), str(workspace), where]
    pipe = subprocess.PIPE
    return Forked(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=ENV)


def finish(workspace):
    spec = importlib.util.spec_from_file_location("signal_child", CHILD.with_name("signal_child.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["signal_child"] = module
    spec.loader.exec_module(module)
    module.run(workspace)


@pytest.mark.parametrize(("where", "number"), [("save", signal.SIGTERM), ("step", signal.SIGINT)])
def test_a_signal_waits_for_the_write_then_saves_and_resumes_exactly(tmp_path, where, number):
    child = start(tmp_path, where)
    assert child.stdout.readline() == "READY\n"
    child.send_signal(number)
    assert child.stdout.readline() == "HEARD\n"
    out, err = child.communicate(timeout=60)
    assert child.returncode == 128 + number, err
    assert "finished" not in out
    folder = tmp_path / "checkpoints"
    latest = load_checkpoint(folder / "checkpoint_latest.pt")
    assert latest["global_step"] == max(load_checkpoint(path)["global_step"] for path in folder.glob("*_step_*.pt"))
    if where == "save":  # the one that was being written is there too
        assert verify_checkpoint(folder / "checkpoint_step_3.pt") == []
    assert list(folder.glob(".*treadle-*")) == []
    finish(tmp_path)
    finish(tmp_path / "straight")
    assert differences(*(load_checkpoint(path / "end.pt") for path in (tmp_path, tmp_path / "straight"))) == []


def test_a_third_signal_ends_the_wait_for_a_write(tmp_path):
    child = start(tmp_path, "save")
    assert child.stdout.readline() == "READY\n"
    for _ in range(2):
        child.send_signal(signal.SIGTERM)
        assert child.stdout.readline() == "HEARD\n"
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == -signal.SIGTERM  # while the write waits
    child.communicate()


def test_data_workers_that_are_forked_while_a_save_is_written_do_not_hang(tmp_path):
    child = start(tmp_path, "workers")
    try:
        out, err = child.communicate(timeout=120)
    finally:
        child.kill()
    assert out == "finished\n", err
    assert err.count("still writing") == 25 * 40  # the last step once more, when its epoch was counted
    assert load_checkpoint(tmp_path / "checkpoint_latest.pt")["global_step"] == 24


def test_a_forked_child_waits_for_no_thread_that_it_does_not_have(tmp_path):
    import threading

    from treadle.checkpoint.writer import CheckpointWriter

    opened, writer = threading.Event(), CheckpointWriter()
    writer.save(lambda buffers: {"w": buffers.copy(torch.ones(3))}, lambda tree: opened.wait(30))

    def wait():
        signal.alarm(20)
        writer.close()

    assert in_child(wait) == 0
    opened.set()
    writer.close()


def test_a_state_is_reported_as_saved_once_it_is_on_the_disk(tmp_path, monkeypatch):
    real, seen = RunState.record_saved, []

    def record_saved(self, path, step):
        real(self, path, step)
        seen.append((load_checkpoint(path)["global_step"], step))

    monkeypatch.setattr(RunState, "record_saved", record_saved)
    kit.make(tmp_path, epochs=2, background_saves=True).fit(2)
    assert seen == [(4, 4), (8, 8)]


# -- files of two writers -----------------------------------------------------------------------------------------


class Own(Trainer):
    """Trains each epoch through a method of its own, so that its record is complete after the hooks' last event."""

    def train_epoch(self, train_dataloader, eval_dataloader=None, epoch=0):
        return {**super().train_epoch(train_dataloader, eval_dataloader, epoch), "added": 1.0}


def fit_spectra(folder):
    kit.make(folder, background_saves=True, hooks=[CheckpointingHook(1, path=folder / "steps")]).fit(4)


def fit_own(folder):
    trainer = functional_kit.make(Own, hooks=[CheckpointingHook(1, path=folder / "steps")])
    data = functional_kit.loader(), functional_kit.loader(seed=6)
    trainer.train(data[0], 4, data[1], folder, resume_from="auto")


@pytest.mark.parametrize("fit", [fit_spectra, fit_own])
def test_no_state_of_a_hook_is_further_than_the_best_weights_that_it_names(tmp_path, fit, monkeypatch):
    fit(tmp_path / "straight")
    real, kept = os.replace, []

    def replace(source, target, **named):
        if Path(target).name == "best_model.pt":
            kept.append(target)
            if len(kept) == 4:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(source, target, **named)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(CheckpointError):
        fit(tmp_path / "run")
    assert len(kept) == 4
    fit(tmp_path / "run")
    best = [torch.load(tmp_path / name / "best_model.pt") for name in ("straight", "run")]
    assert differences(*({key: value for key, value in one.items() if key != "history"} for one in best)) == []
