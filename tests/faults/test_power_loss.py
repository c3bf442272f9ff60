"""Power is lost after each call on the disk, in each face's folder and in shards: the last reported state is there."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import time
from collections import defaultdict
from unittest import mock

import pytest
import torch

from faces_kit import FACES, end_of, furthest_step, litter_in
from fault_points import Points, record
from helpers import differences
from power_loss import Recorder, crashes
from treadle.checkpoint import find_latest
from treadle.checkpoint.sharded import save_sharded
from treadle.engine.state import RunState
from treadle.errors import CheckpointError
from treadle.hooks.checkpointing import settled_states

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SAME_FILES = ("BaseTrainer, two optimizers", "Engine", "EpochTrainer, 2 workers")  # as others write
ALONE = [name for name, face in FACES.items() if face.ranks == 1 and name not in SAME_FILES]
OF_ONE_RUN = [name for name in ALONE if not FACES[name].runs]
SOME = ["EpochTrainer, shards", "Trainer"]  # the other faces take minutes
EPOCHS = 4  # a save of every kind comes twice and more


@contextlib.contextmanager
def reporting(report):
    """Call ``report(step, path)`` whenever a state is reported as saved."""
    real = RunState.record_saved

    def record_saved(self, path, step):
        real(self, path, step)
        report(step, str(path))

    with mock.patch.object(RunState, "record_saved", record_saved):
        yield


def furthest(folder):
    """Return the step of the furthest state that a run which starts in a folder finds; 0 where there is none."""
    for place in (folder, folder / "checkpoints"):
        settled_states(place)
    return furthest_step(folder)


def lose_power(tmp_path, name, *, each, reruns, most=None):
    """Try what may be there after every ``each``-th call; return how many layouts that were."""
    source, seen, face = tmp_path / "run", set(), FACES[name]
    recorder = Recorder(source)
    with recorder.watching(), reporting(lambda step, path: recorder.report(step)):
        face(source, EPOCHS)
    end = end_of(source)
    assert furthest(source) == max(call.step for call in recorder.calls) > 0
    for crash in crashes(recorder, each=each):
        if crash.key in seen:
            continue
        seen.add(crash.key)
        place = tmp_path / "after"
        shutil.rmtree(place, ignore_errors=True)
        crash.lay_out(place)
        assert furthest(place) >= crash.reported, (crash.after.text, crash.names)
        if len(seen) % reruns == 0:
            face(place, EPOCHS)
            assert differences(end, end_of(place)) == [], crash.after.text
        if len(seen) == most:
            break
    print(f"{name}: {len(recorder.calls)} calls, {len(seen)} layouts, {len(seen) // reruns} reruns")
    return len(seen)


@pytest.mark.parametrize("face", SOME)
def test_the_last_reported_state_survives_a_loss_of_power(tmp_path, face):
    assert lose_power(tmp_path, face, each=7, most=15, reruns=14) == 15


def test_a_reported_folder_survives_a_loss_of_power_while_it_is_written_again(tmp_path):
    def save(epoch):
        tree = {"format": {"name": "treadle", "version": 1}, "model": {"w": torch.full((3,), float(epoch))}}
        return save_sharded({**tree, "global_step": 60, "epoch": epoch}, tmp_path / "run" / "checkpoint_step_60")

    recorder = Recorder(tmp_path / "run")
    with recorder.watching():
        for epoch in (11, 12):
            save(epoch)
            recorder.report(epoch)
    found = dict.fromkeys((0, 11, 12), 0)
    for crash in {crash.key: crash for crash in crashes(recorder)}.values():
        place = tmp_path / "after"
        shutil.rmtree(place, ignore_errors=True)
        crash.lay_out(place)
        latest = find_latest(settled_states(place))
        tree = {"epoch": 0, "model": {"w": torch.zeros(1)}} if latest is None else latest[1]
        assert tree["epoch"] >= crash.reported, (crash.after.text, crash.names)
        assert tree["model"]["w"].unique().item() == tree["epoch"]
        found[tree["epoch"]] += 1
    assert all(found.values())


@pytest.mark.slow  # up to a thousand layouts for each face
@pytest.mark.parametrize("face", OF_ONE_RUN)
def test_the_last_reported_state_survives_a_loss_of_power_after_any_call(tmp_path, face):
    assert lose_power(tmp_path, face, each=1, reruns=10) > 40


# -- errors -------------------------------------------------------------------------------------------------------


def failing(number):
    def act():
        raise OSError(number, os.strerror(number))

    return act


def telling(seen):
    """Return the first, the middle and the last of the calls of a kind on a file, for every kind and file."""
    found = defaultdict(list)
    for at, call in enumerate(seen, start=1):
        found[call].append(at)
    return sorted({at for ats in found.values() for at in (ats[0], ats[len(ats) // 2], ats[-1])})


def hurt_everywhere(tmp_path, name, number, *, each):
    """Let every ``each``-th of the telling calls of a run fail once; return how many that were.

    What was reported is there, and a rerun ends the same.
    """
    straight, face = tmp_path / "straight", FACES[name]
    ats = telling(record(straight, lambda: face(straight, EPOCHS)))[each - 1 :: each]
    ends = [end_of(run) for run in face.runs_in(straight)]
    for at in ats:
        folder, reported = tmp_path / f"hurt{at}", []
        # An error of a file that the run could do without, such as the log of sessions, does not end it.
        quiet = contextlib.suppress(CheckpointError, OSError, RuntimeError)
        points = Points(folder, at, failing(number))
        with quiet, reporting(lambda *saved, to=reported: to.append(saved)), points.watching():
            face(folder, EPOCHS)
        for run in face.runs_in(folder):
            mine = [step for step, path in reported if path.startswith(str(run))]
            assert furthest(run) >= max(mine, default=0), (at, points.seen[at - 1])
        face(folder, EPOCHS)
        found = [end_of(run) for run in face.runs_in(folder)]
        assert differences(ends, found) == [], (at, points.seen[at - 1])
        assert litter_in(folder) == [], (at, points.seen[at - 1])
        shutil.rmtree(folder)
    print(f"{name}: {len(ats)} calls failed")
    return len(ats)


def test_an_error_of_the_disk_loses_no_reported_state(tmp_path):
    assert hurt_everywhere(tmp_path, "Trainer", errno.EIO, each=29) >= 4


@pytest.mark.slow  # a run and a rerun for each call
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
@pytest.mark.parametrize("face", ALONE)
def test_an_error_of_the_disk_anywhere_loses_no_reported_state(tmp_path, face, number):
    assert hurt_everywhere(tmp_path, face, number, each=1) > 60


@pytest.mark.slow  # seconds of waiting
@pytest.mark.parametrize("face", ["EpochTrainer, background"])
def test_a_slow_disk_changes_nothing(tmp_path, face):
    FACES[face](tmp_path / "straight")
    chance = random.Random(0)
    points = Points(tmp_path / "slow")
    points.reach = lambda call, path: time.sleep(chance.random() * 0.002)
    with points.watching():
        FACES[face](tmp_path / "slow")
    assert differences(end_of(tmp_path / "straight"), end_of(tmp_path / "slow")) == []
