"""Power is lost after each call on the disk, in each face's folder and in shards: the last reported state is there."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import random
import shutil
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from fault_points import Points, record
from helpers import differences
from power_loss import Recorder, crashes
from treadle.checkpoint import find_latest
from treadle.checkpoint.find_step import states_in
from treadle.checkpoint.sharded import save_sharded
from treadle.checkpoint.store import open_checkpoint
from treadle.engine.state import RunState
from treadle.errors import CheckpointError
from treadle.hooks.checkpointing import settled_states

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FACES = [
    "BaseTrainer", "EpochTrainer", "EpochTrainer, shards", "EpochTrainer, background", "Trainer", "SpectraTrainer",
    "GraphTrainer", "AstroTrainer",
]  # fmt: skip
SOME = ["EpochTrainer, shards", "Trainer"]  # the other faces take minutes


@pytest.fixture
def soak(monkeypatch):
    """The faces of the soak, which use their own folders and a checkpointing hook, and the comparison of their ends."""
    known = {"soak", "machine"} - set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("soak")
    for name in known:
        sys.modules.pop(name, None)


@contextlib.contextmanager
def reporting(report):
    """Calls ``report(step)`` whenever a state is reported as saved."""
    real = RunState.record_saved

    def record_saved(self, path, step):
        real(self, path, step)
        report(step)

    with mock.patch.object(RunState, "record_saved", record_saved):
        yield


def furthest(folder):
    """Returns the step of the furthest state that a run which starts in a folder finds; 0 where there is none."""
    places = [folder, folder / "checkpoints"]
    for place in places:
        settled_states(place)
    found = find_latest((state for place in places for state in states_in(place)), load=open_checkpoint)
    return 0 if found is None else int(found[1].get("global_step", 0))  # exported weights have none


def lose_power(soak, tmp_path, face, *, each, most=None, reruns):
    """Tries what may be there after every ``each``-th call; returns how many layouts that were."""
    source, seen = tmp_path / "run", set()
    recorder = Recorder(source)
    with recorder.watching(), reporting(recorder.report):
        soak.FACES[face](source)
    end = soak.end_of(source)
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
            soak.FACES[face](place)
            assert differences(end, soak.end_of(place)) == [], crash.after.text
        if len(seen) == most:
            break
    return len(seen)


@pytest.mark.parametrize("face", SOME)
def test_the_last_reported_state_survives_a_loss_of_power(soak, tmp_path, face):
    assert lose_power(soak, tmp_path, face, each=7, most=15, reruns=14) == 15


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


@pytest.mark.slow  # thousands of layouts for each face
@pytest.mark.parametrize("face", FACES)
def test_the_last_reported_state_survives_a_loss_of_power_after_any_call(soak, tmp_path, face):
    assert lose_power(soak, tmp_path, face, each=1, reruns=100) > 100


# -- errors -------------------------------------------------------------------------------------------------------


def failing(number):
    def act():
        raise OSError(number, os.strerror(number))

    return act


def hurt_everywhere(soak, tmp_path, face, number, *, each):
    """Lets every ``each``-th call of a run fail once: what was reported is there, and a rerun ends the same."""
    straight = tmp_path / "straight"
    calls = len(record(straight, lambda: soak.FACES[face](straight)))
    end = soak.end_of(straight)
    for at in range(each, calls + 1, each):
        folder = tmp_path / f"hurt{at}"
        reported = [0]
        # An error of a file that the run could do without, such as the log of sessions, does not end it.
        points, quiet = Points(folder, at, failing(number)), contextlib.suppress(CheckpointError, OSError)
        with quiet, reporting(reported.append), points.watching():
            soak.FACES[face](folder)
        assert furthest(folder) >= max(reported), (at, points.seen[at - 1])
        soak.FACES[face](folder)
        assert differences(end, soak.end_of(folder)) == [], (at, points.seen[at - 1])
        assert soak.litter_in(folder) == [], (at, points.seen[at - 1])
        shutil.rmtree(folder)


def test_an_error_of_the_disk_loses_no_reported_state(soak, tmp_path):
    hurt_everywhere(soak, tmp_path, "Trainer", errno.EIO, each=800)


@pytest.mark.slow  # a run and a rerun for each call
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
@pytest.mark.parametrize("face", FACES)
def test_an_error_of_the_disk_anywhere_loses_no_reported_state(soak, tmp_path, face, number):
    hurt_everywhere(soak, tmp_path, face, number, each=11)


@pytest.mark.slow  # seconds of waiting
@pytest.mark.parametrize("face", ["EpochTrainer, background"])
def test_a_slow_disk_changes_nothing(soak, tmp_path, face):
    soak.FACES[face](tmp_path / "straight")
    chance = random.Random(0)
    points = Points(tmp_path / "slow")
    points.reach = lambda call, path: time.sleep(chance.random() * 0.002)
    with points.watching():
        soak.FACES[face](tmp_path / "slow")
    assert differences(soak.end_of(tmp_path / "straight"), soak.end_of(tmp_path / "slow")) == []
