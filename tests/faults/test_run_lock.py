"""One process per run folder: the second is refused by name, and the lock dies with its process however that ends."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import spectra_kit
from fault_points import in_child
from helpers import scalar_engine
from treadle import BaseHook, CheckpointingHook, JsonlHook, SessionLogHook, StepLogHook
from treadle.checkpoint import load_checkpoint, lock
from treadle.checkpoint.lock import LOCK_NAME, RunLock, check_free, run_lock
from treadle.errors import CheckpointError


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(lock, "_RETRY_SECONDS", 0.1)


class Holder:
    """A forked process that runs an action until it is told to end."""

    def __init__(self, action):
        ready, self.told = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                action(lambda: os.write(ready[1], b"x"), lambda: os.read(self.told[0], 1))
                os._exit(0)
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(7)
        os.close(ready[1])
        assert os.read(ready[0], 1) == b"x", "the child ended before it was ready"
        os.close(ready[0])

    def finish(self):
        os.write(self.told[1], b"x")
        return self.wait()

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self):
        status = os.waitpid(self.pid, 0)[1]
        for end in self.told:
            os.close(end)
        return status


def holding(folder):
    def action(say_ready, wait):
        with run_lock(folder):
            say_ready()
            wait()

    return Holder(action)


def test_a_second_process_is_refused_with_the_number_and_machine_of_the_first(tmp_path):
    holder = holding(tmp_path)
    for attempt in (lambda: RunLock().take(tmp_path), lambda: check_free(tmp_path)):
        with pytest.raises(CheckpointError, match=rf"process {holder.pid} on '{os.uname().nodename}'") as caught:
            attempt()
        assert "\n" not in str(caught.value)
    assert holder.finish() == 0
    assert os.listdir(tmp_path) == []
    check_free(tmp_path)
    with run_lock(tmp_path):
        pass


def test_a_killed_holder_hinders_nobody(tmp_path):
    holder = holding(tmp_path)
    holder.kill()
    assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == holder.pid
    check_free(tmp_path)
    with run_lock(tmp_path):
        assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == os.getpid()
    assert os.listdir(tmp_path) == []


def test_within_one_process_the_lock_is_shared_and_the_last_one_gives_it_back(tmp_path):
    first, second = RunLock(), RunLock()
    first.take(tmp_path)
    first.take(tmp_path)
    second.take(tmp_path)
    first.release()
    first.release()
    assert os.listdir(tmp_path) == [LOCK_NAME]
    second.release()
    assert os.listdir(tmp_path) == []


def test_a_forked_child_neither_holds_the_lock_nor_takes_it_away(tmp_path):
    def child():
        with pytest.raises(CheckpointError, match="in use by"):
            RunLock().take(tmp_path)
        mine.release()

    with run_lock(tmp_path):
        mine = RunLock()
        mine.take(tmp_path)
        assert in_child(child) == 0
        assert in_child(child) == 0, "the first child unlocked the parent's lock"
        mine.release()


class Rows(Dataset):
    def __init__(self, slow=0.0):
        self.slow = slow

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        time.sleep(self.slow)
        return torch.tensor(1.0)


def test_a_killed_run_whose_workers_live_on_does_not_hinder_the_rerun(tmp_path):
    def run(say_ready, wait):
        class Ready(BaseHook):
            def on_after_step(self, trainer):
                if trainer.step == 2:
                    say_ready()
                    wait()

        hooks = [CheckpointingHook(1, path=tmp_path / "run"), Ready()]
        loader = DataLoader(Rows(0.01), batch_size=None, num_workers=2, prefetch_factor=2)
        scalar_engine(hooks=hooks).run(loader, max_steps=5)

    holder = Holder(run)
    children = children_of(holder.pid)
    for pid in children:
        os.kill(pid, signal.SIGSTOP)  # else they may end before all is tried: they look for their parent now and then
    holder.kill()
    assert len(children) >= 2
    try:
        assert all(alive(pid) for pid in children), "workers are gone, and nothing was tried"
        engine = scalar_engine(hooks=[CheckpointingHook(1, path=tmp_path / "run")])
        engine.run([1.0] * 9, max_steps=4)
        assert load_checkpoint(tmp_path / "run" / "checkpoint_latest.pt")["global_step"] == 4
    finally:
        for pid in children:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def children_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(number) for number in file.read().split()]


# -- the runs -----------------------------------------------------------------------------------------------------


def test_two_runs_of_the_step_face_in_one_folder_the_second_is_refused_and_touches_nothing(tmp_path):
    def run(say_ready, wait):
        class Ready(BaseHook):
            def on_after_step(self, trainer):
                if trainer.step == 2:
                    say_ready()
                    wait()

        scalar_engine(hooks=[CheckpointingHook(1, path=tmp_path), Ready()]).run([1.0] * 9, max_steps=3)

    class Seen(BaseHook):
        def on_before_train(self, trainer):
            raise AssertionError("an event was fired in a folder that belongs to another run")

    holder = Holder(run)
    before = sorted(os.listdir(tmp_path))
    for load in ("latest", None):
        with pytest.raises(CheckpointError, match=f"process {holder.pid}"):
            scalar_engine(hooks=[Seen(), CheckpointingHook(1, path=tmp_path, load=load)]).run([1.0] * 9, max_steps=4)
    assert sorted(os.listdir(tmp_path)) == before
    assert load_checkpoint(tmp_path / "checkpoint_step_1.pt")["global_step"] == 1  # reading never locks
    assert holder.finish() == 0
    engine = scalar_engine(hooks=[CheckpointingHook(1, path=tmp_path)])
    engine.run([1.0] * 9, max_steps=4)
    assert engine.model.weight.item() == -4.0
    assert LOCK_NAME not in os.listdir(tmp_path)


def test_two_runs_of_the_spectra_face_in_one_folder_the_second_is_refused(tmp_path):
    def run(say_ready, wait):
        class Ready(BaseHook):
            def on_after_epoch(self, trainer):
                if trainer.epoch == 1:
                    say_ready()
                    wait()

        spectra_kit.make(tmp_path, hooks=[Ready()]).fit(1)

    holder = Holder(run)
    history = (tmp_path / "training_history.json").read_text()
    with pytest.raises(CheckpointError, match=f"process {holder.pid}"):
        spectra_kit.make(tmp_path).fit(2)
    assert (tmp_path / "training_history.json").read_text() == history
    assert not (tmp_path / "training_history.1.json").exists()
    assert holder.finish() == 0
    assert spectra_kit.make(tmp_path).fit(2)["epochs"] == 2


@pytest.mark.parametrize("steps", [2, 5])
def test_a_run_that_failed_or_had_nothing_to_do_gives_the_folder_back(tmp_path, steps):
    class Fails(BaseHook):
        def on_after_step(self, trainer):
            if trainer.step == 4:
                raise KeyboardInterrupt

    scalar_engine(hooks=[CheckpointingHook(1, path=tmp_path)]).run([1.0] * 9, max_steps=2)
    kept = scalar_engine(hooks=[CheckpointingHook(1, path=tmp_path), Fails()])
    if steps == 5:
        with pytest.raises(KeyboardInterrupt):
            kept.run([1.0] * 9, max_steps=5)
    else:
        kept.run([1.0] * 9, max_steps=2)

    def another():
        scalar_engine(hooks=[CheckpointingHook(1, path=tmp_path)]).run([1.0] * 9, max_steps=6)

    assert in_child(another) == 0
    assert kept.step >= 2


# -- where locks are not what they should be ----------------------------------------------------------------------


def test_a_file_system_without_locks_is_used_with_one_warning(tmp_path, monkeypatch, caplog):
    def unsupported(*args):
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(lock.fcntl, "flock", unsupported)
    with caplog.at_level(logging.WARNING, "treadle"):
        for _ in range(3):
            with run_lock(tmp_path):
                assert os.listdir(tmp_path) == []
        check_free(tmp_path)
    assert caplog.text.count("cannot be locked") == 1


def test_a_platform_without_locks_is_used_with_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(lock, "fcntl", None)
    with caplog.at_level(logging.WARNING, "treadle"), run_lock(tmp_path):
        check_free(tmp_path)
    assert "cannot be locked" in caplog.text


def test_a_lock_file_that_was_removed_under_a_waiting_process_is_made_anew(tmp_path, monkeypatch):
    real, calls = lock.fcntl.flock, []

    def removes_it_first(descriptor, how):
        if not calls:
            os.unlink(tmp_path / LOCK_NAME)
        calls.append(how)
        return real(descriptor, how)

    with monkeypatch.context() as patch:
        patch.setattr(lock.fcntl, "flock", removes_it_first)
        mine = RunLock()
        mine.take(tmp_path)
    assert len(calls) == 2

    def another():
        with pytest.raises(CheckpointError, match="in use by"):
            RunLock().take(tmp_path)

    assert in_child(another) == 0
    mine.release()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x"}', '{"pid": 1}'])
def test_a_holder_that_cannot_be_read_is_another_process(tmp_path, content):
    holder = holding(tmp_path)
    (tmp_path / LOCK_NAME).write_text(content)
    with pytest.raises(CheckpointError, match="another process"):
        RunLock().take(tmp_path)
    holder.finish()


def test_a_file_in_place_of_the_folder_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="file"):
        RunLock().take(tmp_path / "file" / "run")
    check_free(tmp_path / "file" / "run")


class FinishedElsewhere(BaseHook):
    """Another process takes the folder between the look at it and the first event."""

    def __init__(self, folder):
        self.folder, self.holder = folder, None

    def checkpoint_to_resume(self, trainer):
        def hold(ready, wait):
            with run_lock(self.folder):
                ready()
                wait()

        self.holder = Holder(hold)


def test_a_process_that_is_refused_has_touched_no_file_of_the_other(tmp_path):
    lines = '{"step": 1, "loss": 0.5}\n'
    for name in ("metrics.jsonl", "steps.jsonl", "sessions.jsonl"):
        (tmp_path / name).write_text(lines)
    other = FinishedElsewhere(tmp_path / "checkpoints")
    logs = [hook(tmp_path / f"{name}.jsonl") for hook, name in
            ((JsonlHook, "metrics"), (StepLogHook, "steps"), (SessionLogHook, "sessions"))]  # fmt: skip
    engine = scalar_engine(hooks=[*logs, CheckpointingHook(1, path=tmp_path / "checkpoints"), other])
    with pytest.raises(CheckpointError, match="is in use by process"):
        engine.run([1.0], max_steps=2)
    other.holder.finish()
    found = {path.name: path.read_text() for path in tmp_path.glob("*.jsonl")}
    assert found == dict.fromkeys(("metrics.jsonl", "steps.jsonl", "sessions.jsonl"), lines)
    engine.run([1.0], max_steps=2)
    assert engine.step == 2, "and goes on once the folder is free"
