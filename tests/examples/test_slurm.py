"""The batch script for Slurm: what it starts, what it does at a signal, and when it queues itself again."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "slurm" / "train.sbatch"
# srun hands signals on, as Slurm's does; torchrun leaves with 1 after a signal, as torch's does.
STUBS = {
    "scontrol": 'if [ "$1 $2" = "show job" ]; then\n'
    'echo "JobId=42 JobState=${STATE:-RUNNING} StartTime=2026-11-29T12:42:09 PreemptTime=${PREEMPTED:-None}"\n'
    'elif [ "$1" = show ]; then\n'
    '[ "$HOW" = early ] && kill -TERM "$(cut -d " " -f 4 "/proc/$PPID/stat")"  # the script\n'
    'printf "node7\\nnode8\\n"; else echo "$*" >> "$RECORD"; fi',
    "scancel": 'kill -TERM "$(cat "$RECORD.srun")"',
    "srun": 'echo $$ > "$RECORD.srun"\n'
    'trap \'kill -TERM "$task"\' TERM\n"$@" &\ntask=$!\necho waits >> "$RECORD"\nwait "$task"; code=$?\n'
    'while kill -0 "$task" 2>/dev/null; do wait "$task"; code=$?; done\nexit "$code"',
    "torchrun": 'echo "torchrun $*" >> "$RECORD"\ncase "$HOW" in done) exit 0 ;; broken) exit 1 ;; esac\n'
    'trap \'sleep 0.2; echo saved >> "$RECORD"; [ "$HOW" = finishes ] && exit 0; exit 1\' TERM\n'
    "echo started >> \"$RECORD\"\nwhile :; do sleep 0.05; done",
}  # fmt: skip


@pytest.fixture
def job(tmp_path):
    """Start the script with stubs of what it calls; return the process and the file in which they write."""
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    record = tmp_path / "record"
    started = []

    def start(how, **told):
        slurm = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2"}
        env = {
            **os.environ,
            **slurm,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "RECORD": str(record),
            "HOW": how,
            **told,
        }
        started.append(subprocess.Popen(["bash", str(SCRIPT), *ARGUMENTS], env=env))
        return started[-1], record

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()


ARGUMENTS = ["fit.yaml", "trainer.max_steps=9", "seed=%a", "trainer.workspace=run-%a"]
PATIENCE = 120.0  # seconds


def wait_until_all_listen(process, record):
    """A signal that comes before ends a script that would hand it on."""
    words, deadline = {"waits", "started"}, time.monotonic() + PATIENCE
    while not (record.exists() and words <= set(record.read_text().split()) and catches(process.pid, signal.SIGTERM)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def catches(pid, number):
    """Return whether a process has a handler for a signal; True where the system does not tell."""
    status = Path(f"/proc/{pid}/status")
    caught = re.search(r"SigCgt:\s*(\w+)", status.read_text()) if status.exists() else None
    return caught is None or bool(int(caught[1], 16) >> (number - 1) & 1)


def test_the_ranks_meet_on_the_first_machine_and_get_the_settings(job):
    process, record = job("done")
    assert process.wait(PATIENCE) == 0
    said = record.read_text()
    assert "--rdzv-endpoint=node7:29542" in said  # of its own for each job that shares the machine
    assert "--nnodes=2" in said
    assert "-m treadle train fit.yaml trainer.max_steps=9" in said
    assert "requeue" not in said


def test_a_signal_reaches_the_ranks_and_the_job_is_queued_again_once_they_have_saved(job):
    process, record = job("waits")
    wait_until_all_listen(process, record)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 143
    assert record.read_text().splitlines()[-2:] == ["saved", "requeue 42"]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the stub finds the script in /proc")
def test_a_signal_before_anything_runs_queues_the_job_again(job):
    process, record = job("early")
    assert process.wait(PATIENCE) == 143
    assert record.read_text().splitlines()[-1] == "requeue 42"


@pytest.mark.parametrize(("how", "code"), [("broken", 1), ("done", 0)])
def test_a_job_that_failed_or_ended_is_not_queued_again(job, how, code):
    process, record = job(how)
    assert process.wait(PATIENCE) == code
    assert "requeue" not in record.read_text()


@pytest.mark.parametrize(("when", "again"), [("2026-11-29T12:42:38", True), ("2026-11-29T12:40:00", False)])
def test_ranks_that_slurm_itself_signalled_because_of_a_pre_emption_are_queued_again(job, when, again):
    process, record = job("broken", PREEMPTED=when)  # since this start, or before it
    assert process.wait(PATIENCE) == (143 if again else 1)
    assert ("requeue 42" in record.read_text()) == again


def test_a_job_that_was_cancelled_is_not_queued_again(job):
    process, record = job("waits", STATE="COMPLETING")
    wait_until_all_listen(process, record)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 143
    assert "requeue" not in record.read_text()


def test_a_run_of_a_population_gets_its_number(job):
    process, record = job("done", SLURM_ARRAY_TASK_ID="3")
    assert process.wait(PATIENCE) == 0
    assert "trainer.max_steps=9 seed=3 trainer.workspace=run-3" in record.read_text()


def test_a_run_that_ends_while_it_is_asked_to_leave_is_not_queued_again(job):
    process, record = job("finishes")
    wait_until_all_listen(process, record)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0
    assert "requeue" not in record.read_text()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_shellcheck_finds_nothing():
    assert subprocess.run(["shellcheck", str(SCRIPT)]).returncode == 0


def test_bash_reads_it():
    assert subprocess.run(["bash", "-n", str(SCRIPT)]).returncode == 0
