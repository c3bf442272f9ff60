"""Killed ranks and signals under torchrun: the run goes on by itself from the newest whole checkpoint, to the bit."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

import launched_child
from helpers import differences
from launched_child import train
from processes import Forked
from ranks import TORCHRUN_OF_FORKS, launch_environment, run_on_ranks

STEPS = 24
PATIENCE = 200.0  # seconds; a start takes 20 s on a busy machine


class Job:
    """A run under torchrun, in a folder of its own."""

    def __init__(self, kind, folder, *, ranks=2, steps=STEPS, max_restarts=0):
        self.kind, self.folder, self.kills = kind, folder, 0
        folder.mkdir()
        self.log = folder / "log"
        options = [f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}"]
        command = [*TORCHRUN_OF_FORKS, *options, launched_child.__file__, kind, str(folder), str(steps)]
        with self.log.open("w") as log:
            self.process = Forked(command, stdout=log, stderr=log, env=launch_environment())

    def wait_for(self, condition):
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.002)

    def step_of(self, rank):
        """The last step of a rank since the last kill; -1 before it has said one."""
        path = self.folder / f"rank_{rank}"
        _, step, starts = map(int, path.read_text().split()) if path.exists() else (0, -1, -1)
        return step if starts == self.kills else -1

    def signal(self, rank, number, *, at_step):
        self.wait_for(lambda: self.step_of(rank) >= at_step)
        os.kill(int((self.folder / f"rank_{rank}").read_text().split()[0]), number)

    def kill(self, rank, *, at_step):
        self.signal(rank, signal.SIGKILL, at_step=at_step)
        self.kills += 1

    def kill_in_a_save(self, rank, *, after_step):
        self.wait_for(lambda: self.step_of(rank) >= after_step)
        (self.folder / "hold").touch()
        self.wait_for((self.folder / f"held_{rank}_{self.kills}").exists)
        assert any((self.folder / "checkpoints").glob("checkpoint_step_*/UNFINISHED"))
        self.kill(rank, at_step=after_step)
        (self.folder / "hold").unlink()

    def kill_at_a_random_moment(self, rank, rng, *, after_step):
        self.wait_for(lambda: self.step_of(rank) >= after_step)
        time.sleep(rng.random() * 3 * launched_child.STEP_TIME)
        self.kill(rank, at_step=after_step)

    def end(self):
        return self.process.wait(PATIENCE)

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(PATIENCE)


@pytest.fixture
def jobs(tmp_path):
    started = []

    def start(kind, **settings):
        started.append(Job(kind, tmp_path / f"{kind}_{len(started)}", **settings))
        return started[-1]

    yield start
    for job in started:
        job.stop()


def undisturbed(folder, steps, *kinds):
    states = []
    for kind in kinds:
        own = Path(folder, kind)
        own.mkdir(exist_ok=True)
        launched_child.STEP_TIME = 0.0
        states.append(train(kind, own, steps))
    return states


def check_equal(job, reference):
    found = torch.load(job.folder / "final.pt", weights_only=False)
    assert differences(reference, found) == []
    assert len(found["model"]) > 5


def test_killed_ranks_resume_by_themselves_and_end_as_if_nothing_had_happened(jobs, tmp_path):
    replicas, sharded = jobs("ddp", max_restarts=1), jobs("fsdp", max_restarts=1)
    replicas.kill(1, at_step=8)
    sharded.kill_in_a_save(1, after_step=5)
    references = run_on_ranks(undisturbed, 2, str(tmp_path), STEPS, "ddp", "fsdp", timeout=PATIENCE)[0]
    for job, reference in zip((replicas, sharded), references, strict=True):
        assert job.end() == 0, job.log.read_text()
        assert (job.folder / "restarts").read_text() == "1"
        check_equal(job, reference)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_twenty_random_kills_change_nothing(jobs, kind, tmp_path):
    rng, steps = random.Random(kind), 120
    job = jobs(kind, steps=steps, max_restarts=20)
    for number, step in enumerate(sorted(rng.sample(range(2, steps - 8), 20))):
        if kind == "fsdp" and number % 4 == 0:
            job.kill_in_a_save(rng.randrange(2), after_step=step)
        else:
            job.kill_at_a_random_moment(rng.randrange(2), rng, after_step=step)
    assert job.end() == 0, job.log.read_text()
    assert (job.folder / "restarts").read_text() == "20"
    check_equal(job, run_on_ranks(undisturbed, 2, str(tmp_path), steps, kind, timeout=PATIENCE)[0][0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_each_of_eight_ranks_is_killed_in_turn_and_nothing_changes(jobs, kind, tmp_path):
    rng, steps, apart = random.Random(kind), 54, 6  # a kill costs three steps at most, so each comes after the last
    job = jobs(kind, ranks=8, steps=steps, max_restarts=8)
    for number, rank in enumerate(rng.sample(range(8), 8)):
        step = 2 + apart * number + rng.randrange(apart // 2)
        if kind == "fsdp" and number % 4 == 0:
            job.kill_in_a_save(rank, after_step=step)
        else:
            job.kill_at_a_random_moment(rank, rng, after_step=step)
    assert job.end() == 0, job.log.read_text()
    assert (job.folder / "restarts").read_text() == "8"
    check_equal(job, run_on_ranks(undisturbed, 8, str(tmp_path), steps, kind, timeout=PATIENCE)[0][0])


def test_a_signal_to_one_rank_saves_on_all_and_all_leave_with_its_number(jobs):
    started = [jobs("ddp", steps=4000), jobs("fsdp", steps=4000)]
    for rank, job in enumerate(started):
        job.signal(rank, signal.SIGTERM, at_step=4)
    for job in started:
        assert job.end() == 1  # torchrun's own code for ranks that failed
        left = [(job.folder / f"left_{rank}").read_text().split() for rank in range(2)]
        assert left[0] == left[1]
        code, step = left[0]
        assert code == "143"
        assert "exitcode  : 143" in job.log.read_text()
        saved = job.folder / "checkpoints" / f"checkpoint_step_{step}"
        assert (saved.with_suffix(".pt") if job.kind == "ddp" else saved / "WHOLE.json").exists()


def test_a_signal_to_torchrun_reaches_all_ranks_which_save_and_leave(jobs):
    job = jobs("fsdp", steps=4000)
    job.wait_for(lambda: min(job.step_of(rank) for rank in range(2)) >= 4)
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 1
    left = [(job.folder / f"left_{rank}").read_text().split() for rank in range(2)]
    assert left[0] == left[1]
    assert left[0][0] == "143"
    assert (job.folder / "checkpoints" / f"checkpoint_step_{left[0][1]}" / "WHOLE.json").exists()
