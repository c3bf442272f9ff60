"""The helper that starts ranks for the other tests: results in order, the first failure first, no hang."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from ranks import outcomes_on_ranks, run_on_ranks
from torchrun_of_forks import all_forked_first


def total(start):
    value = torch.tensor(start + dist.get_rank())
    dist.all_reduce(value)
    return dist.get_rank(), value


def fails_on_rank_1():
    if dist.get_rank() == 1:
        raise ValueError("only here")
    dist.barrier()


def dies_on_rank_1():
    if dist.get_rank() == 1:
        os._exit(7)
    time.sleep(600)


def hangs_on_rank_0():
    if dist.get_rank() == 0:
        time.sleep(600)


def test_results_come_back_in_rank_order():
    assert run_on_ranks(total, 3, 10) == [(0, torch.tensor(33)), (1, torch.tensor(33)), (2, torch.tensor(33))]


def test_the_rank_that_failed_first_is_shown_first():
    with pytest.raises(AssertionError, match=r"(?s)\A\n--- rank 1 of 2.*ValueError: only here"):
        run_on_ranks(fails_on_rank_1, 2)


def test_a_death_is_told_and_the_others_are_ended():
    first, second = outcomes_on_ranks(dies_on_rank_1, 2, grace=0.5)
    assert (second.exitcode, second.error) == (7, None)
    assert first.exitcode == -9
    assert not first.ok


def shows_the_hang(timeout):
    with pytest.raises(AssertionError, match="rank 0 of 2") as caught:
        run_on_ranks(hangs_on_rank_0, 2, timeout=timeout)
    return "hangs_on_rank_0" in str(caught.value)


def test_a_hang_is_reported_with_the_place():
    assert any(map(shows_the_hang, (3, 12, 48)))  # on a slow machine a rank may not be there before the first is over


def test_no_rank_that_torchrun_forks_runs_before_all_are_forked(tmp_path):
    ran = tmp_path / "ran"
    with all_forked_first():
        child = os.fork()
        if child == 0:
            ran.touch()
            os._exit(0)
        time.sleep(0.1)
        before = ran.exists()
    os.waitpid(child, 0)
    assert (before, ran.exists()) == (False, True)
