"""Distributed training: ranks, collectives on the host, exchange of gradients and messages."""

from __future__ import annotations

from treadle.distributed.ranks import (
    agree,
    collective_device,
    control_group,
    gather_numbers,
    gather_objects,
    is_distributed,
    is_dtensor,
    is_sharded,
    local,
    max_over_ranks,
    no_sync,
    rank,
    replicated,
    reshard,
    sharded_parts,
    start_max_over_ranks,
    sum_over_ranks,
    unwrap,
    world_size,
)

__all__ = [
    "agree",
    "collective_device",
    "control_group",
    "gather_numbers",
    "gather_objects",
    "is_distributed",
    "is_dtensor",
    "is_sharded",
    "local",
    "max_over_ranks",
    "no_sync",
    "rank",
    "replicated",
    "reshard",
    "sharded_parts",
    "start_max_over_ranks",
    "sum_over_ranks",
    "unwrap",
    "world_size",
]
