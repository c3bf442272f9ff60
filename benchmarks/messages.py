"""Messages between ranks in a step of scaling.py's decoders, following treadle's layout, and their cost.

Bytes are counted as NCCL does: the buffer of an all-reduce, everything that is gathered or reduced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from decoder import Decoder
from torch import nn

from treadle.capture.compile import repeated_blocks
from treadle.distributed.replicas import _buckets

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"
HOST_GATHER, HOST_MAXIMUM = "gather between hosts", "maximum between hosts"
ON_DEVICE = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)
COMPUTED, REDUCED = 2, 4  # bytes of a number: weights are gathered in bfloat16, gradients reduced in float32
TOLD = 88  # bytes that each rank sends to the others in a step


@dataclass(frozen=True)
class Message:
    """One collective of a step.

    Attributes:
        operation: the name of the collective.
        num_bytes: its size, counted as above.
        hidden_by: the pass whose computation can hide it, ``"forward"`` or ``"backward"``; None: nothing can.
    """

    operation: str
    num_bytes: int
    hidden_by: str | None = None


def messages_of(way: str, size: str) -> list[Message]:
    """Return the collectives of a step in order.

    Args:
        way: ``"ddp"`` or ``"fsdp"``.
        size: of scaling.py.
    """
    with torch.device("meta"):
        model = Decoder(size)
    return _of_replicas(model) if way == "ddp" else _of_shards(model)


def _of_replicas(model: nn.Module) -> list[Message]:
    parameters = list(model.parameters())
    sizes = [sum(parameters[number].numel() for number in bucket.numbers) for bucket in _buckets(parameters)]
    *early, last = [REDUCED * size for size in sizes]
    return [
        Message(HOST_GATHER, TOLD),
        *(Message(ALL_REDUCE, size, "backward") for size in early),
        Message(ALL_REDUCE, last),  # holds the embeddings, whose gradient comes last
        Message(HOST_MAXIMUM, len(parameters)),
    ]


def _of_shards(model: nn.Module) -> list[Message]:
    blocks = [_numel(block) for block in repeated_blocks(model)]
    root = _numel(model) - sum(blocks)
    gathers = [COMPUTED * size for size in blocks]
    return [
        Message(ALL_GATHER, COMPUTED * root),  # stays gathered until the step is over
        Message(ALL_GATHER, gathers[0]),  # only an embedding is computed meanwhile
        *(Message(ALL_GATHER, size, "forward") for size in gathers[1:]),
        Message(HOST_GATHER, TOLD),
        *(Message(ALL_GATHER, size, "backward") for size in gathers),
        *(Message(REDUCE_SCATTER, REDUCED * size, "backward") for size in blocks),
        Message(REDUCE_SCATTER, REDUCED * root),
        Message(ALL_REDUCE, REDUCED),  # the norm
    ]


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def bus_share(operation: str, ranks: int) -> float:
    """Return the bytes over a rank's link per byte of a collective, as NCCL's tests count them."""
    return {ALL_REDUCE: 2.0, ALL_GATHER: 1.0, REDUCE_SCATTER: 1.0}[operation] * (ranks - 1) / ranks


# -- their cost ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """Linear cost of a collective in milliseconds: ``fixed + num_bytes * per_byte``."""

    fixed: float
    per_byte: float

    def ms(self, num_bytes: int) -> float:
        return self.fixed + num_bytes * self.per_byte


def fit(times: Sequence[tuple[float, float]]) -> Line:
    """Fit a line to (bytes, milliseconds) by least squares of relative errors; one size gives no slope."""
    if len({size for size, _ in times}) == 1:
        return Line(sum(ms for _, ms in times) / len(times), 0.0)
    weights = [1 / ms**2 for _, ms in times]
    total = sum(weights)
    size = sum(weight * size for weight, (size, _) in zip(weights, times, strict=True)) / total
    ms = sum(weight * ms for weight, (_, ms) in zip(weights, times, strict=True)) / total
    along = sum(weight * (each - size) ** 2 for weight, (each, _) in zip(weights, times, strict=True))
    slope = sum(weight * (x - size) * (y - ms) for weight, (x, y) in zip(weights, times, strict=True)) / along
    return Line(ms - slope * size, slope)


Cost = Callable[[Message, int], float]  # milliseconds of a message between so many ranks


def bandwidth_cost(gb_per_s: float) -> Cost:
    """Return the cost from one bus bandwidth; messages between hosts are free, since it includes their time."""

    def cost(message: Message, ranks: int) -> float:
        if message.operation not in ON_DEVICE:
            return 0.0
        return bus_share(message.operation, ranks) * message.num_bytes / gb_per_s / 1e6

    return cost


def measured_cost(rows: Iterable[Mapping[str, Any]]) -> Cost:
    """Return the cost from the linear fits in collectives.json.

    For more ranks than were measured, the bus bandwidth stays and the fixed cost grows with the logarithm of the ranks.
    """
    times: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for row in rows:
        if row["bytes"] != "fit":
            key = row["operation"], int(row["ranks"])
            times.setdefault(key, []).append((float(row["bytes"]), float(row["ms"])))
    lines = {key: fit(some) for key, some in times.items()}

    def cost(message: Message, ranks: int) -> float:
        known = max(each for name, each in lines if name == message.operation and each <= ranks)
        line, more = lines[message.operation, known], math.log2(ranks) / math.log2(known)
        if message.operation not in ON_DEVICE:
            return more * line.ms(message.num_bytes)
        wider = bus_share(message.operation, ranks) / bus_share(message.operation, known)
        return more * line.fixed + wider * line.per_byte * message.num_bytes

    return cost
