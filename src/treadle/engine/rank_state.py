"""What each rank has of its own: random streams, the state of its loader, its sums of the running epoch."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from treadle import distributed
from treadle.checkpoint.schema import to_plain
from treadle.data.agreement import numbers_of_ranks
from treadle.means import RunningMeans
from treadle.seed import RngState, mix_seed

if TYPE_CHECKING:
    from treadle.engine.loop import Engine

_OWN_DATA = ("opening", "generators", "loader")


def separate_streams() -> None:
    """Gives ranks that would draw the same random numbers streams of their own, made from rank 0's and the rank.

    Python's, numpy's and torch's generators each; what a user seeded apart stays. Rank 0 draws as one process does.
    Called once at the start of a run, when the weights are there, so that they may be drawn alike on all ranks.
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


def gather_rank_state(engine: Engine, tree: dict[str, Any]) -> None:
    """Adds every rank's own state to a checkpoint tree whose other entries are alike on all; all ranks take part."""
    own = {
        "rng": RngState.capture().to_plain(),
        "data": {key: tree["data"].get(key) for key in _OWN_DATA},
        "epoch_means": tree["progress"]["epoch_means"],
    }
    if distributed.world_size() == 1:
        tree["rng"] = [own["rng"]]
        return
    everyone = distributed.gather_objects(to_plain(own, "rank"))
    tree["rng"] = [each["rng"] for each in everyone]
    tree["data"]["ranks"] = [each["data"] for each in everyone]
    tree["progress"]["epoch_means"] = {
        **tree["progress"]["epoch_means"], "ranks": [each["epoch_means"] for each in everyone],
    }  # fmt: skip


def load_epoch_means(means: RunningMeans, saved: Mapping[str, Any], *, device: torch.device) -> None:
    """Restores the sums of the running epoch; those of another number of ranks all go to the first one."""
    of_ranks = saved.get("ranks") or [saved]
    if len(of_ranks) == distributed.world_size():
        means.load_state_dict(of_ranks[distributed.rank()], device=device)
        return
    means.reset()
    for state in of_ranks:
        part = RunningMeans()
        part.load_state_dict(state, device=device)
        means.include(part)
    if distributed.rank() != 0:
        names = means.names()
        means.reset()
        means.align([names])  # sums over ranks need the same names on all


def own_rng(engine: Engine, saved: Sequence[Mapping[str, Any]] | None) -> RngState | None:
    """Returns this rank's random state of a checkpoint; for another number of ranks, fresh streams made from it."""
    if not saved:
        return None
    ranks, rank = distributed.world_size(), distributed.rank()
    if len(saved) == ranks:
        return RngState.from_plain(dict(saved[rank]))
    engine.logger.warning(
        "the checkpoint was written by %d ranks and this run has %d: the random streams start fresh", len(saved), ranks,
        extra={"topic": "number of ranks"},
    )  # fmt: skip
    of_first = _digest(saved[0]["torch"].cpu().numpy().tobytes())
    return RngState.seeded(mix_seed(of_first, engine.step, ranks, rank))
