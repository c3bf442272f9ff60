"""What hosts tell each other: the same rows in the same order, by gloo's collectives or in rounds."""

from __future__ import annotations

import math
import time

import pytest
import torch
import torch.distributed as dist

from ranks import run_on_ranks
from step_kit import Counting
from treadle import distributed

LARGE = 2**60 + 1


def telling():
    rank, told, counts = dist.get_rank(), [], []
    for turn in range(6):
        if turn % 5 == rank:
            time.sleep(0.02)  # whoever is ahead must not be taken for another turn
        with Counting() as counting:
            numbers = distributed.tell_ranks([rank / 3, 100.0 * turn, math.nan])
            integers = distributed.tell_ranks([LARGE + rank, turn], dtype=torch.int64)
            largest = distributed.max_over_ranks(torch.tensor([rank, -rank, turn], dtype=torch.uint8))
            decided = distributed.agree(turn if rank == turn % 5 else 0)
        counts.append(sum(counting.calls.values()))
        told.append((numbers, integers, largest.tolist(), decided))
    return repr(told), counts


@pytest.mark.parametrize("ranks", [3, 5])
def test_ranks_hear_all_numbers_in_rank_order_and_to_the_bit(ranks):
    for told, counts in run_on_ranks(telling, ranks):
        assert told == repr([
            (
                [[rank / 3, 100.0 * turn, math.nan] for rank in range(ranks)],
                [[LARGE + rank, turn] for rank in range(ranks)],
                [ranks - 1, 255, turn],
                turn if turn % 5 < ranks else 0,
            )
            for turn in range(6)
        ])  # fmt: skip
        assert counts == [0 if ranks > distributed._FEW else 4] * 6
