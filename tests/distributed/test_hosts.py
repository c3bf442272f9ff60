"""What hosts tell each other: the same rows in the same order, by gloo's collectives or in rounds, and never a hang."""

from __future__ import annotations

import math
import os
import threading
import time

import torch
import torch.distributed as dist

from ranks import outcomes_on_ranks, run_on_ranks
from step_kit import Counting
from treadle.distributed import ranks as distributed
from treadle.engine.failure import lost_rank
from treadle.hooks.thread_activity import thread_activity

LARGE = 2**60 + 1


def telling():
    """Return the messages of six turns, in rounds and by gloo's collectives, and the number of collectives."""
    rank, told, counts = dist.get_rank(), [], []
    for few in (4, 100):
        distributed._FEW = few
        for turn in range(6):
            if turn % 5 == rank:
                time.sleep(0.02)  # whoever is ahead must not be taken for another turn
            with Counting() as counting:
                numbers = distributed.gather_numbers([rank / 3, 100.0 * turn, math.nan])
                integers = distributed.gather_numbers([LARGE + rank, turn], dtype=torch.int64)
                largest = distributed.max_over_ranks(torch.tensor([rank, 255 - rank, turn], dtype=torch.uint8))
                decided = distributed.agree(turn if rank == turn % 5 else 0)
            counts.append(sum(counting.calls.values()))
            told.append((numbers, integers, largest.tolist(), decided))
    return repr(told), counts


def test_ranks_hear_all_numbers_in_rank_order_and_to_the_bit():
    expected = [
        (
            [[rank / 3, 100.0 * turn, math.nan] for rank in range(5)],
            [[LARGE + rank, turn] for rank in range(5)],
            [4, 255, turn],
            turn,
        )
        for turn in range(6)
    ]
    for told, counts in run_on_ranks(telling, 5):
        assert told == repr(expected * 2)
        assert counts == [0] * 6 + [4] * 6


def lost_in_a_round():
    distributed._FEW = 1
    if dist.get_rank() == 1:
        os._exit(9)
    try:
        distributed.gather_numbers([1.0])
    except RuntimeError as error:
        dist.destroy_process_group()
        return str(lost_rank(error))
    return None


def test_a_rank_that_died_is_found_in_a_round_too():
    assert outcomes_on_ranks(lost_in_a_round, 2)[0].result == "another rank exited first; its error is the cause"


def test_who_waits_in_a_round_for_another_rank_is_not_stuck(monkeypatch):
    class Sent:
        def wait(self):
            assert go_on.wait(120)

    go_on = threading.Event()
    for name, value in {"rank": 0, "world_size": 5, "control_group": None}.items():
        monkeypatch.setattr(distributed, name, lambda value=value: value)
    monkeypatch.setattr(dist, "isend", lambda *_, **__: Sent())
    monkeypatch.setattr(dist, "recv", lambda *_, **__: None)
    thread = threading.Thread(target=distributed.gather_numbers, args=([1.0],))
    thread.start()
    deadline = time.monotonic() + 60
    while not thread_activity(thread.ident).waits and time.monotonic() < deadline:
        time.sleep(0.01)
    waits = thread_activity(thread.ident).waits
    go_on.set()
    thread.join()
    assert waits
