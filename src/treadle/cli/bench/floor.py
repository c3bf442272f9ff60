"""Lower bound of the time of a step on this machine, from its arithmetic or its memory traffic alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treadle.cli.bench.timing import clock_of, step_seconds
from treadle.engine import Engine
from treadle.nested import map_nested_tensor

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, None: torch.float32}
_SIDE = {"cuda": 8192, "cpu": 1024}  # rows and columns of the matrices
_COPIED = {"cuda": 1 << 30, "cpu": 1 << 27}  # bytes
_REPEATS = 5


@dataclass(frozen=True)
class Ceilings:
    """Measured peak rates of the machine.

    Attributes:
        flops_per_second: rate of a large matrix product in the run's dtype.
        bytes_per_second: rate of a large copy, read and written bytes together.
    """

    flops_per_second: float
    bytes_per_second: float


@dataclass(frozen=True)
class Floor:
    """Lower bound of the time of a step, by operations and by bytes.

    Attributes:
        flops: operations of a step: matrix products, convolutions, attention.
        bytes: the least number of bytes that a step moves, see :func:`least_bytes`.
        compute_seconds: ``flops`` at the ceiling.
        memory_seconds: ``bytes`` at the ceiling.
    """

    flops: int
    bytes: int
    compute_seconds: float
    memory_seconds: float

    @property
    def seconds(self) -> float:
        """The larger of the two, since arithmetic and memory traffic can overlap."""
        return max(self.compute_seconds, self.memory_seconds)


def floor_of(flops: int, num_bytes: int, ceilings: Ceilings) -> Floor:
    """Return the floor of a step.

    Example:
        >>> floor_of(100, 30, Ceilings(flops_per_second=10.0, bytes_per_second=10.0)).seconds
        10.0
    """
    return Floor(flops, num_bytes, flops / ceilings.flops_per_second, num_bytes / ceilings.bytes_per_second)


def measure_ceilings(device: torch.device, precision: str | None) -> Ceilings:
    """Measure a large matrix product and a large copy; this takes about a second and, on a GPU, 2.5 GB.

    Args:
        device: the device to measure.
        precision: None, ``"bf16"`` or ``"fp16"``: the dtype of the product.
    """
    kind = "cuda" if device.type == "cuda" else "cpu"
    side, clock = _SIDE[kind], clock_of(device)
    generator = torch.Generator(device).manual_seed(0)  # not the generator of the run
    left = torch.randn(side, side, device=device, generator=generator).to(_DTYPES[precision])
    product = step_seconds(lambda _: left @ left, [None], count=_REPEATS, clock=clock, block=1)
    source = torch.ones(_COPIED[kind], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = step_seconds(lambda _: target.copy_(source), [None], count=_REPEATS, clock=clock, block=1)
    return Ceilings(2 * side**3 / product, 2 * _COPIED[kind] / copy)


def least_bytes(engine: Engine, batches: Iterable[Any]) -> int:
    """Return the least number of bytes that a step moves.

    Parameters are read by every forward and backward pass, and read and written by the update; gradients are written
    and read; the optimizer's state is read and written; batches are read. Activations are not counted: how much of them
    reaches memory depends on the kernels.

    Args:
        engine: after a step, so that the optimizer has its state.
        batches: the micro-batches of one step.
    """
    batches = list(batches)
    trained = [p for group in engine.optimizer.param_groups for p in group["params"] if p.requires_grad]
    parameters, of_trained = size_of(engine.model.parameters()), size_of(trained)
    state = sum(size_of(_tensors(entry)) for entry in engine.optimizer.state.values())
    passes = 2 * max(1, len(batches))
    return passes * parameters + 2 * of_trained + 2 * of_trained + 2 * state + size_of(_tensors(batches))


def size_of(tensors: Iterable[Tensor]) -> int:
    """Return the size of tensors in bytes.

    Example:
        >>> size_of([torch.zeros(2, 3), torch.zeros(1, dtype=torch.int64)])
        32
    """
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _tensors(tree: Any) -> Iterator[Tensor]:
    found: list[Tensor] = []
    map_nested_tensor(lambda tensor: found.append(tensor), dict(tree) if isinstance(tree, Mapping) else tree)
    return iter(found)
