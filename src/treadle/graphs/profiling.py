"""Profiling of graph models: FLOPs, time and memory of a step, and their scaling.

Operations are counted by ``torch.utils.flop_counter`` while the model runs, so nothing is estimated from its settings.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from treadle.errors import ConfigError
from treadle.errors.arguments import check_least
from treadle.graphs.loops import train_step
from treadle.seed import forked_rng


@dataclass(frozen=True)
class RuntimeStats:
    """Timing statistics of a function, in milliseconds.

    Attributes:
        mean: mean of all runs.
        std: standard deviation; 0 for one run.
        min: shortest run.
        max: longest run.
        num_runs: number of timed runs.
    """

    mean: float
    std: float
    min: float
    max: float
    num_runs: int


@dataclass(frozen=True)
class FlopCount:
    """Floating-point operations of a call; a multiply-add counts as two.

    Attributes:
        total: total of the call.
        breakdown: counts by operator, such as ``aten.mm``.
    """

    total: int
    breakdown: dict[str, int]


def benchmark_function(
    function: Callable[[], Any], *, num_runs: int = 100, warmup_runs: int = 10, device: torch.device | str = "cpu"
) -> RuntimeStats:
    """Time a function, synchronising with the device before and after each run.

    Args:
        function: callable without arguments.
        num_runs: timed runs, >= 1.
        warmup_runs: untimed runs before those.
        device: synchronised if it is a GPU.

    Raises:
        ConfigError: there is no run to time.

    Example:
        >>> benchmark_function(lambda: sum(range(10)), num_runs=3, warmup_runs=0).num_runs
        3
    """
    check_least(1, num_runs=num_runs)
    on_gpu, times = torch.device(device).type == "cuda", []

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize(device)

    for number in range(warmup_runs + num_runs):
        wait()
        start = time.perf_counter()
        function()
        wait()
        if number >= warmup_runs:
            times.append(1000 * (time.perf_counter() - start))
    spread = statistics.stdev(times) if len(times) > 1 else 0.0
    return RuntimeStats(statistics.fmean(times), spread, min(times), max(times), num_runs)


def profile_forward(model: nn.Module, batch: Any, *, num_runs: int = 100, warmup_runs: int = 10) -> RuntimeStats:
    """Time the forward pass in eval mode without gradients; the mode of the model is restored."""

    def forward() -> None:
        with torch.no_grad():
            model(batch)

    with _mode(model, False):
        return _timed(model, forward, num_runs, warmup_runs)


def profile_training_step(
    model: nn.Module,
    batch: Any,
    optimizer: Optimizer,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    *,
    num_runs: int = 100,
    warmup_runs: int = 10,
) -> RuntimeStats:
    """Time forward, backward and the optimizer step, which changes the weights."""

    device = _device(model)
    with _mode(model, True):
        return _timed(model, lambda: train_step(model, batch, optimizer, loss_fn, device), num_runs, warmup_runs)


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _timed(model: nn.Module, function: Callable[[], Any], num_runs: int, warmup_runs: int) -> RuntimeStats:
    with forked_rng():
        return benchmark_function(function, num_runs=num_runs, warmup_runs=warmup_runs, device=_device(model))


@contextlib.contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def count_flops(model: nn.Module, batch: Any, *, backward: bool = False) -> FlopCount:
    """Count the FLOPs of a forward pass and, optionally, of the backward pass through the sum of its outputs.

    Args:
        model: called with the batch, in eval mode; gradients are left unchanged.
        batch: its input.
        backward: whether to include the backward pass.

    Example:
        >>> count_flops(nn.Linear(4, 3, bias=False), torch.ones(2, 4))
        FlopCount(total=48, breakdown={'aten.mm': 48})
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    counting = FlopCounterMode(display=False)
    with _mode(model, False), counting as counter, torch.set_grad_enabled(backward), forked_rng():
        output = model(batch)
        if backward:
            torch.autograd.grad(output.sum(), parameters, allow_unused=True)
    found = counter.get_flop_counts().get("Global", {})
    return FlopCount(counter.get_total_flops(), {str(name): int(count) for name, count in found.items()})


def memory_breakdown(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, float]:
    """Return the memory of ``parameters``, ``buffers``, ``gradients`` and ``optimizer`` state, in MiB.

    Example:
        >>> memory_breakdown(nn.Linear(1024, 256, bias=False))
        {'parameters': 1.0, 'buffers': 0.0, 'gradients': 0.0, 'optimizer': 0.0}
    """
    parameters = list(model.parameters())
    state = [] if optimizer is None else [value for entry in optimizer.state.values() for value in entry.values()]
    parts: dict[str, list[Any]] = {
        "parameters": parameters,
        "buffers": list(model.buffers()),
        "gradients": [parameter.grad for parameter in parameters],
        "optimizer": state,
    }
    return {name: _mebibytes(tensors) for name, tensors in parts.items()}


def _mebibytes(tensors: Iterable[Any]) -> float:
    return sum(one.numel() * one.element_size() for one in tensors if isinstance(one, Tensor)) / 2**20


def peak_memory(function: Callable[[], Any], device: torch.device | str) -> float:
    """Return the peak GPU memory in use while a function runs, in MiB.

    Raises:
        ConfigError: the device is not a GPU; only GPU memory is tracked.
    """
    if torch.device(device).type != "cuda":
        raise ConfigError("only the memory of a CUDA device is counted", argument="device", value=str(device))
    torch.cuda.reset_peak_memory_stats(device)
    function()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) / 2**20


def scaling_table(
    model_of: Callable[[Any], nn.Module],
    batch_of: Callable[[Any], Any],
    values: Sequence[Any],
    *,
    num_runs: int = 10,
    warmup_runs: int = 2,
) -> list[dict[str, Any]]:
    """Profile a model at several sizes of the model or of its input.

    Args:
        model_of: returns a model for each value.
        batch_of: returns its input for each value.
        values: such as numbers of nodes or layers.
        num_runs: timed runs of each.
        warmup_runs: untimed runs of each.

    Returns:
        One row per value: ``value``, ``parameters``, ``flops``, and the fields of :class:`RuntimeStats`.

    Example:
        >>> rows = scaling_table(lambda n: nn.Linear(n, 1, bias=False), lambda n: torch.ones(1, n), [2, 4])
        >>> [(row["value"], row["parameters"], row["flops"]) for row in rows]
        [(2, 2, 4), (4, 4, 8)]
    """
    rows = []
    for value in values:
        model, batch = model_of(value), batch_of(value)
        row = {"value": value, "parameters": sum(parameter.numel() for parameter in model.parameters())}
        row["flops"] = count_flops(model, batch).total
        rows.append({**row, **asdict(profile_forward(model, batch, num_runs=num_runs, warmup_runs=warmup_runs))})
    return rows
