"""A rank that fails says so first and by name; the others say that they are not the cause; nobody waits for ever."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranks import outcomes_on_ranks, torchrun
from treadle import BaseTrainer
from treadle.checkpoint import writer
from treadle.checkpoint.writer import CheckpointWriter
from treadle.engine.failure import lost_rank
from treadle.errors import RankLostError


class Data:
    """Rank 1 meets ``trouble`` when it reads its third batch."""

    def __init__(self, trouble):
        self.trouble = trouble

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 2 and dist.get_rank() == 1:
            self.trouble()
        if index == 8:
            raise IndexError
        return torch.ones(2, 3)


def broken_sample():
    raise ValueError("a broken sample")


def sudden_death():
    os._exit(9)


class Failing(BaseTrainer):
    trouble = staticmethod(broken_sample)

    def build_data_loader(self):
        return Data(self.trouble)

    def build_model(self):
        return nn.parallel.DistributedDataParallel(nn.Linear(3, 1))

    def build_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def forward(self, input):
        return self.model(input).mean(), {}


def meet(trouble, folder):
    trainer = Failing(8, workspace=folder)
    trainer.trouble = trouble
    train(trainer, folder)


def train(trainer, folder):
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{folder}/error_{dist.get_rank()}.json"
    messages = []
    trainer.logger.error = lambda message, *values: messages.append(message % values)
    try:
        trainer.train()
    finally:
        with open(f"{folder}/log_{dist.get_rank()}", "w") as file:
            file.write("\n".join(messages))
        if dist.get_rank() == 1:
            time.sleep(0.3)  # what rank 0 says must not depend on who is faster


def test_the_failing_rank_is_named_and_the_other_says_that_it_is_not_the_cause(tmp_path):
    first, second = outcomes_on_ranks(meet, 2, broken_sample, str(tmp_path))
    line = (tmp_path / "log_1").read_text()
    assert re.fullmatch(r"rank 1 of 2 \(.+, process \d+\) failed at step 2, epoch 0: ValueError: a broken sample", line)
    assert second.error.rstrip().endswith("ValueError: a broken sample")
    assert second.failed_at < first.failed_at
    assert (tmp_path / "log_0").read_text() == "rank 0: another rank exited first; its error is the cause"
    assert first.error.rstrip().endswith("RankLostError: another rank exited first; its error is the cause")
    # What torchrun shows as the cause is the earliest.
    times = [int(json.loads((tmp_path / f"error_{rank}.json").read_text())["message"]["extraInfo"]["timestamp"])
             for rank in range(2)]  # fmt: skip
    assert times[1] < times[0]


def test_a_rank_that_died_is_no_fault_of_the_others(tmp_path):
    _, second = outcomes_on_ranks(meet, 2, sudden_death, str(tmp_path))
    assert second.exitcode == 9
    assert (tmp_path / "log_0").read_text() == "rank 0: another rank exited first; its error is the cause"


def cannot_build(folder):
    trainer = Failing(8, workspace=folder)
    if dist.get_rank() == 1:
        trainer.build_optimizer = broken_sample
    train(trainer, folder)


def test_a_rank_that_cannot_build_its_parts_is_named_too(tmp_path):
    outcomes_on_ranks(cannot_build, 2, str(tmp_path))
    assert "failed at step 0, epoch 0: ValueError: a broken sample" in (tmp_path / "log_1").read_text()
    assert "another rank exited first" in (tmp_path / "log_0").read_text()


def waits_for_a_silent_rank():
    group, options = dist.new_group(), dist.BarrierOptions()
    options.timeout = timedelta(seconds=1)  # not of the group: on a slow machine it takes as long to make one
    if dist.get_rank() == 0:
        try:
            group.barrier(options).wait()
        except RuntimeError as error:
            return str(lost_rank(error))
    return None


def test_a_timeout_is_told_apart_from_an_end():
    told, _ = outcomes_on_ranks(waits_for_a_silent_rank, 2)
    assert "did not answer within the timeout" in told.result


@pytest.mark.parametrize("error", [
    RuntimeError("CUDA error: timed out"), ValueError("gloo: connection closed by peer"), RuntimeError("nccl is fast"),
    ConnectionResetError("connection reset by peer"), RuntimeError("mat1 and mat2 shapes"),
])  # fmt: skip
def test_errors_of_ones_own_are_not_blamed_on_others(error):
    assert lost_rank(error) is None


def test_what_is_raised_from_a_lost_rank_is_no_cause_either():
    error = RuntimeError("my own words")
    error.__cause__ = RankLostError("another rank exited first")
    assert lost_rank(error) is error.__cause__


def test_a_save_with_other_ranks_is_given_up_after_a_failure_and_keeps_no_process_alive(monkeypatch, caplog):
    monkeypatch.setattr(writer, "_PATIENCE", 0.3)
    never = threading.Event()
    saving = CheckpointWriter()
    saving.save(lambda buffers: {}, lambda tree: never.wait(), collective=True)
    thread = saving._running[0].thread
    started = time.monotonic()
    saving.close(ValueError("of training"))  # returns, although the write goes on
    assert time.monotonic() - started >= 0.3
    assert "another rank stopped taking part" in caplog.text
    assert thread.is_alive()
    assert thread.daemon
    never.set()


def test_a_save_on_ones_own_is_waited_for_after_a_failure_too(monkeypatch):
    monkeypatch.setattr(writer, "_PATIENCE", 0.0)
    written = []
    saving = CheckpointWriter()
    saving.save(lambda buffers: {}, lambda tree: (time.sleep(0.3), written.append(True)))
    saving.close(ValueError("of training"))
    assert written == [True]


def test_under_torchrun_the_cause_comes_first_and_is_the_one_of_the_summary(tmp_path):
    done = torchrun(__file__, str(tmp_path))
    assert done.returncode == 1
    said = [done.stderr.find(text) for text in (
        "rank 1 of 2", "[rank1]: ValueError: a broken sample", "rank 0: another rank exited first",
        "Root Cause (first observed failure)", "(local_rank: 1)",
    )]  # fmt: skip
    if said[2] < 0:  # the launcher was quicker to end the other rank than that rank to say why it ends
        del said[2]
    assert said == sorted(said), done.stderr
    assert said[0] == 0
    summary = done.stderr[said[-2] :]
    assert "ValueError: a broken sample" in summary
    assert "RankLostError" not in summary


if __name__ == "__main__":  # what torchrun runs
    dist.init_process_group("gloo")
    Failing(8, workspace=sys.argv[1]).train()
