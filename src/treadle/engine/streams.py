"""Random streams of the ranks at the start of a run."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch

from treadle import distributed
from treadle.data.agreement import numbers_of_ranks
from treadle.seed import RngState, mix_seed


def separate_streams() -> None:
    """Derive a random stream per rank from rank 0's, if ranks would draw the same numbers.

    This covers Python's, numpy's and torch's generators; generators that already differ are kept. Rank 0 draws as a
    single process does. Called once at the start of a run, after the weights exist, so that they can be initialized
    identically on all ranks.
    """
    if distributed.world_size() == 1:
        return
    state, rank = RngState.capture(), distributed.rank()
    rows = numbers_of_ranks([
        _digest(repr(state.python).encode()),
        _digest(state.numpy[1].tobytes() + bytes(str(state.numpy[2]), "ascii")),
        _digest(state.torch.numpy().tobytes()),
    ])  # fmt: skip
    for kind, seed in enumerate((random.seed, lambda n: np.random.seed(n % 2**32), torch.manual_seed)):
        if rows[rank][kind] in (row[kind] for row in rows[:rank]):
            seed(mix_seed(rows[0][kind], rank))


def _digest(state: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little") >> 1
