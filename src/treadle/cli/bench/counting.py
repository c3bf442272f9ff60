"""Counts of a step: operator calls, reads of the device by the host and their lines, operations, kernel launches."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import treadle.data

_PASSED_OVER = (Path(torch.__file__).parent, Path(__file__).parent, Path(contextlib.__file__).parent / "contextlib.py")
_ON_THE_CPU_ALWAYS = (Path(torch.__file__).parent / "optim", Path(treadle.data.__file__).parent)
_READS = ("_local_scalar_dense", "is_nonzero", "equal")
_SIZES = (  # the host reads the size of their result
    "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount", "repeat_interleave",
)  # fmt: skip
_MASKS = (torch.bool, torch.uint8)
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")


class CallCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of operator calls inside the block, and of reads of the device by the host with the lines that made them.

    A read is an operation that waits for the GPU: reading the value of a tensor, a copy to the CPU, a result whose size
    depends on the data. In a run on the CPU, only the first kind is counted, which would wait on a GPU too; reads by
    torch's optimizers and by data loading are ignored, since these stay on the CPU everywhere.

    Args:
        device: the device of the run.

    Attributes:
        num_calls: number of operator calls.
        reads: line of code -> number of reads.

    Example:
        >>> with CallCounter(torch.device("cpu")) as counter:
        ...     value = (torch.ones(2) + 1).sum().item()
        >>> counter.num_calls, sum(counter.reads.values())
        (4, 1)
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.num_calls = 0
        self.reads: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one call and execute it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.num_calls += 1
        name = func.__name__.partition(".")[0]
        if self._reads(name, args, kwargs, result):
            self.reads[place_of_call()] += 1
        return result

    def _reads(self, name: str, args: Any, kwargs: Mapping[str, Any], result: Any) -> bool:
        tensors = [value for value in args if isinstance(value, Tensor)]
        if not any(value.device.type == self.device.type for value in tensors):
            return False
        if self.device.type != "cuda":
            return name in _READS and not _inside(_ON_THE_CPU_ALWAYS)
        if name in _READS or name in _SIZES:
            return kwargs.get("output_size") is None  # of repeat_interleave, if the caller knows it
        if name == "index":  # by a mask: the size of the result is its number of True entries
            return any(isinstance(value, Tensor) and value.dtype in _MASKS for value in args[1])
        if name == "copy_":  # a copy into pinned memory does not wait
            into, rest = tensors[0], args[2:]
            return into.device.type == "cpu" and not (into.is_pinned() and rest and rest[0])
        return name == "_to_copy" and isinstance(result, Tensor) and result.device.type == "cpu"


def _inside(folders: Sequence[Path]) -> bool:
    """Return whether a file of these folders is on the call stack."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if any(path.is_relative_to(folder) for folder in folders):
            return True
        frame = frame.f_back
    return False


def place_of_call() -> str:
    """Return the line of code that called torch, as ``folder/file.py:12 in function``; skip this package."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if not str(path).startswith("<") and not any(path.is_relative_to(folder) for folder in _PASSED_OVER):
            short = Path(*path.parts[-2:]).as_posix().removeprefix("/")
            return f"{short}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "unknown"


def count_flops(step: Callable[[], Any]) -> int:
    """Return the floating-point operations of the products, convolutions and attentions of a step.

    Example:
        >>> count_flops(lambda: torch.ones(2, 3) @ torch.ones(3, 5))
        60
    """
    with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


@contextlib.contextmanager
def counting_launches(found: dict[str, int], device: torch.device) -> Iterator[None]:
    """Count the kernel launches inside the block on a CUDA device, under ``"launches"`` if the profiler sees any."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        yield
        torch.cuda.synchronize(device)
    launches = launches_in({event.key: event.count for event in profiler.key_averages()})
    if launches:  # the system may hide the launches from a profiler
        found["launches"] = launches


def launches_in(counts: Mapping[str, int]) -> int:
    """Return the kernel launches among a profiler's events; the launch of a whole graph is one.

    Example:
        >>> launches_in({"cudaLaunchKernel": 7, "cudaGraphLaunch": 1, "aten::add": 9})
        8
    """
    return sum(counts.get(name, 0) for name in _LAUNCHES)
