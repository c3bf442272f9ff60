"""examples/slurm under a real Slurm of one node: pre-empted, out of time, on a node that dies, cancelled, as an array.

Needs root, slurm-wlm and munge; everything else a job needs is made here. Each job trains on two ranks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from helpers import differences

HERE = Path(__file__).parent
SCRIPT = HERE.parents[1] / "examples" / "slurm" / "train.sbatch"
MISSING = [name for name in ("slurmctld", "slurmd", "munged") if shutil.which(name, path="/usr/sbin:/sbin") is None]
pytestmark = [
    pytest.mark.slow,  # minutes: each start of a job imports torch on three processes
    pytest.mark.skipif(bool(MISSING), reason=f"needs slurm-wlm and munge; missing: {', '.join(MISSING)}"),
    pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="munged and slurmd are started as root"),
]
STEPS, PATIENCE = 240, 600.0


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    subprocess.run(["bash", str(HERE / "one_node.sh"), "start", str(folder)], check=True, timeout=60)
    paths = [str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin", "/sbin"]
    yield {
        **os.environ, "SLURM_CONF": f"{folder}/slurm.conf", "PATH": os.pathsep.join(paths), "RANKS_PER_NODE": "2",
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    subprocess.run(["bash", str(HERE / "one_node.sh"), "stop", str(folder)], check=True)


class Job:
    """A job of examples/slurm in a folder of its own."""

    def __init__(self, slurm, folder, *options, pause=0.1, arguments=()):
        self.slurm, self.folder = slurm, folder
        folder.mkdir(exist_ok=True)
        shutil.copy(HERE / "fit_slowly.py", folder)
        (folder / "fit.yaml").write_text(
            f"seed: 0\nimports: [fit_slowly.py]\ntrainer: {{type: fit_slowly.Fit, max_steps: {STEPS}, device: cpu, "
            f"workspace: run, pause: {pause}}}\n"
        )
        options = ["--nodes=1", "--gpus-per-node=0", "--cpus-per-task=2", "--time=30", "--output=log_%a.txt", *options]
        self.number = self.asked("sbatch", "--parsable", *options, str(SCRIPT), "fit.yaml", *arguments).strip()

    def asked(self, *command):
        return subprocess.run(
            command, env=self.slurm, cwd=self.folder, check=True, capture_output=True, text=True, timeout=60
        ).stdout

    def about(self, key):
        told = self.asked("scontrol", "show", "job", "-o", self.number)
        return next(word.partition("=")[2] for word in told.split() if word.startswith(f"{key}="))

    def wait_for(self, condition, what):
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come\n{self.log[-3000:]}"
            time.sleep(0.3)

    @property
    def log(self):
        return "".join(path.read_text() for path in sorted(self.folder.glob("log_*.txt")))

    def trains(self, starts):
        """Wait until the job trains after this many starts."""
        self.wait_for(lambda: self.log.count("  target     step") >= starts or self.is_over(), f"start {starts}")
        time.sleep(1.5)

    def is_over(self):
        return self.about("JobState") in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

    def end(self, state="COMPLETED"):
        self.wait_for(self.is_over, "the end")
        assert self.about("JobState") == state, self.log[-3000:]
        return weights(self.folder / "run")


def weights(run):
    tree = torch.load(run / "checkpoints" / f"checkpoint_step_{STEPS}.pt", weights_only=True)
    return {key: tree[key] for key in ("model", "optimizer", "rng", "global_step", "epoch")}


@pytest.fixture(scope="module")
def straight(slurm, tmp_path_factory):
    return Job(slurm, tmp_path_factory.mktemp("straight"), pause=0.0).end()


def preempt(job):
    """Let a job of the partition above need the whole node for a moment."""
    asked = ("sbatch", "--parsable", "--partition=high", "--ntasks=1", "--cpus-per-task=8", "--output=/dev/null")
    other = job.asked(*asked, "--wrap", "true").strip()
    job.wait_for(
        lambda: "JobState=COMPLETED" in job.asked("scontrol", "show", "job", "-o", other), "the other job's end"
    )


def test_pre_empted_20_times_it_ends_as_undisturbed(slurm, straight, tmp_path):
    job = Job(slurm, tmp_path / "job", pause=0.25)
    times = 0
    while times < 20:
        job.trains(times + 1)
        assert not job.is_over(), f"it ended after {times} pre-emptions"
        preempt(job)
        times += 1
    assert differences(straight, job.end()) == []
    assert int(job.about("Restarts")) == 20
    assert job.log.count("saving at step") >= 15  # the others came before or after the steps


def test_at_its_time_limit_it_queues_itself_again(slurm, straight, tmp_path):
    job = Job(slurm, tmp_path / "job", "--time=2", "--signal=B:TERM@40", pause=0.5)
    assert differences(straight, job.end()) == []
    assert int(job.about("Restarts")) >= 1


def lose_the_node(job):
    """Kill the daemon of the node and all that the job runs there, tell the controller, and start the node again."""
    folder = Path(job.slurm["SLURM_CONF"]).parent
    os.kill(int((folder / "slurmd.pid").read_text()), signal.SIGKILL)
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            steps = (process / "cmdline").read_bytes().startswith(f"slurmstepd: [{job.number}.".encode())
            mine = f"SLURM_CONF={folder}/".encode() in (process / "environ").read_bytes()
            if (steps and mine) or f"\0SLURM_JOB_ID={job.number}\0".encode() in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
    job.asked("scontrol", "update", "nodename=ALL", "state=down", "reason=dead")
    job.asked("slurmd", "-f", job.slurm["SLURM_CONF"], "-c")


def test_a_node_that_dies_is_replaced(slurm, straight, tmp_path):
    job = Job(slurm, tmp_path / "job", pause=0.25)
    job.trains(1)
    lose_the_node(job)
    assert differences(straight, job.end()) == []
    assert int(job.about("Restarts")) == 1


def test_a_cancelled_job_saves_and_is_not_queued_again(slurm, tmp_path):
    job = Job(slurm, tmp_path / "job", pause=0.25)
    job.trains(1)
    job.asked("scancel", job.number)
    job.wait_for(job.is_over, "the end")
    time.sleep(3.0)
    assert job.about("JobState") == "CANCELLED"
    assert int(job.about("Restarts")) == 0
    assert "saving at step" in job.log


def test_a_population_is_an_array_and_each_run_goes_on_by_itself(slurm, tmp_path):
    job = Job(slurm, tmp_path / "job", "--array=0-1", arguments=("seed=%a", "trainer.workspace=run_%a"))
    job.trains(2)
    preempt(job)
    ends = [job.folder / f"run_{member}" for member in range(2)]
    last = f"checkpoints/checkpoint_step_{STEPS}.pt"
    job.wait_for(lambda: all((end / last).exists() for end in ends), "the ends")
    one, other = map(weights, ends)
    assert differences(one["model"], other["model"]) != []
    job.wait_for(lambda: not job.asked("squeue", "--noheader").strip(), "an empty queue")
