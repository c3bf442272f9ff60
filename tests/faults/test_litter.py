"""What killed saves leave is removed when the next run takes the folder, under whatever name it lies there."""

from __future__ import annotations

import os

import pytest

from helpers import scalar_engine
from treadle import CheckpointingHook
from treadle.checkpoint.lock import RunLock

DEAD = 2**22 - 7  # beyond the numbers that processes get here


def litter(folder, pid):
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    names = ["checkpoint_step_9.pt", "checkpoints/last.pt", "history.json", "best_model.pt"]
    made = []
    for name in names:
        path = folder / name
        made.append(path.with_name(f".{path.name}.{pid}.treadle-tmp"))
        made[-1].write_bytes(b"half")
    made.append(folder / f".pretrained.{pid}.treadle-tmp")
    made[-1].mkdir()
    (made[-1] / "model.safetensors").write_bytes(b"half")
    return made


@pytest.mark.parametrize("pid", [DEAD, os.getpid()], ids=["dead", "own"])
def test_the_next_run_that_owns_the_folder_removes_it(tmp_path, pid):
    made = litter(tmp_path, pid)
    lock = RunLock()
    lock.take(tmp_path)
    assert not any(path.exists() for path in made)
    lock.release()


def test_what_a_living_process_may_be_writing_stays(tmp_path):
    made = litter(tmp_path, os.getppid())
    lock = RunLock()
    lock.take(tmp_path)
    assert all(path.exists() for path in made)
    lock.release()


def test_a_folder_inside_that_another_run_holds_is_left_alone(tmp_path):
    made = litter(tmp_path, DEAD)
    inner, outer = RunLock(), RunLock()
    inner.take(tmp_path / "checkpoints")
    kept = tmp_path / "checkpoints" / f".last.pt.{DEAD}.treadle-tmp"
    kept.write_bytes(b"half")
    outer.take(tmp_path)
    assert {path for path in (*made, kept) if path.exists()} == {kept}
    inner.release()
    outer.release()


def test_a_run_with_a_checkpointing_hook_clears_its_folder_and_a_step_is_no_litter(tmp_path):
    made = litter(tmp_path, DEAD)
    scalar_engine(hooks=[CheckpointingHook(1, path=tmp_path)]).run([1.0], max_steps=2)
    assert not any(path.exists() for path in made)
    assert (tmp_path / "checkpoint_step_2.pt").exists()


@pytest.mark.parametrize("name", [f".checkpoint_step_9.pt.{DEAD}.treadle-tmp", ".checkpoint_latest.trial"])
def test_the_rerun_of_a_finished_run_removes_what_its_last_save_left(tmp_path, name):
    scalar_engine(hooks=[CheckpointingHook(1, path=tmp_path)]).run([1.0], max_steps=2)
    (tmp_path / name).symlink_to("nothing")
    scalar_engine(hooks=[CheckpointingHook(1, path=tmp_path)]).run([1.0], max_steps=2)
    assert not os.path.lexists(tmp_path / name)
