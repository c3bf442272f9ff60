"""Loaders, samplers and the position of a run in its data."""

from __future__ import annotations

from treadle.data.amount import steps_per_epoch
from treadle.data.cursor import Cursor, Group
from treadle.data.mapped import MappedLoader
from treadle.data.order import GlobalOrder
from treadle.data.ranks import RankBatchSampler, rank_and_worker, shard_iterable
from treadle.data.sharded_stream import ShardedStream
from treadle.data.shuffle_buffer import ShuffleBuffer
from treadle.data.source import Source
from treadle.data.sources import open_source
from treadle.data.tensors import TensorLoader
from treadle.data.transfer import TransferLoader

__all__ = [
    "Cursor",
    "GlobalOrder",
    "Group",
    "MappedLoader",
    "RankBatchSampler",
    "ShardedStream",
    "ShuffleBuffer",
    "Source",
    "TensorLoader",
    "TransferLoader",
    "open_source",
    "rank_and_worker",
    "shard_iterable",
    "steps_per_epoch",
]
