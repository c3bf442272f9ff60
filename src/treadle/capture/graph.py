"""CUDA graphs, and the memory that they read from and write to."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from treadle.device import keep_garbage_from_forks
from treadle.device.handover import host_is_shared

_WARM_UPS = 3


class CudaGraph:
    """Captured work of a function, replayed with one launch.

    Graphs captured one after another and replayed one at a time may share memory.

    Args:
        share: another graph whose memory pool to share.
    """

    def __init__(self, share: CudaGraph | None = None):
        keep_garbage_from_forks()
        self._graph = torch.cuda.CUDAGraph()
        self._pool = None if share is None else share._graph.pool()

    def record(self, function: Callable[[], Any], *, prepare: Callable[[], None], warm_ups: int = _WARM_UPS) -> Any:
        """Call a function a few times to warm up and once to capture it; return the result of the last call.

        Tensors in it, and others that the function wrote to, hold the results of the latest replay.

        Args:
            function: launches work on the current stream and reads nothing from the device.
            prepare: called before each call, outside the capture.
            warm_ups: calls before the capture; none if all its kernels were launched before.

        Raises:
            RuntimeError: something in the function cannot be captured.
        """
        usual = torch.cuda.current_stream()
        # A run on a separate stream is captured there: kernels write into per-stream workspaces, so two graphs captured
        # on one stream cannot be replayed concurrently.
        alone = usual != torch.cuda.default_stream()
        recording_stream = usual if alone else _recording_stream(torch.cuda.current_device())
        recording_stream.wait_stream(usual)
        with torch.cuda.stream(recording_stream):
            for _ in range(warm_ups):
                prepare()
                function()
        usual.wait_stream(recording_stream)
        prepare()
        reason: list[BaseException] = []
        try:
            # Threads of data loaders and of background saves may use the device meanwhile.
            recording = torch.cuda.graph(
                self._graph, pool=self._pool, stream=recording_stream, capture_error_mode="thread_local"
            )
            with _without_collection(), recording, _first_error_kept(reason):
                return function()
        except BaseException as error:  # noqa: BLE001  # it is raised again, or what led to it
            torch.cuda.set_stream(usual)  # torch does not restore the stream if a capture fails
            _end_broken_recording(recording_stream)
            raise (reason or [error])[0] from None  # the error of the capture names no cause

    def replay(self) -> None:
        """Launch the captured work."""
        self._graph.replay()

    def drop(self) -> None:
        """Free the captured work, also if something still refers to this object; it cannot be replayed any more."""
        self._graph.reset()

    def seconds(self, *, prepare: Callable[[], None]) -> float:
        """Replay a few times, and return the shortest device time."""
        took: list[float] = []
        for _ in range(_WARM_UPS):
            prepare()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            self.replay()
            end.record()
            end.synchronize()
            took.append(begin.elapsed_time(end) / 1e3)
        return min(took)


@functools.cache
def _recording_stream(device: int) -> torch.cuda.Stream:
    """Return the capture stream of a device; torch's default belongs to the device that was used first."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Disable garbage collection inside the block: freeing an earlier graph would break the recording."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def _first_error_kept(reason: list[BaseException]) -> Iterator[None]:
    """Keep the error of the block, which the end of a failed capture would replace."""
    try:
        yield
    except BaseException as error:
        reason.append(error)
        raise


def _end_broken_recording(stream: torch.cuda.Stream) -> None:
    """Capture nothing successfully, to reset the random generator's capture state."""
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        torch.zeros(1, device="cuda")


class Branch:
    """Branch of a captured step that may run concurrently with the rest.

    Without capture everything runs in order, and also if several runs share the GPU: graphs with branches block each
    other.

    Args:
        device: device of the step.

    Example:
        >>> branch = Branch(torch.device("cpu"))
        >>> with branch.after(branch.mark()):
        ...     total = torch.ones(2).sum()
        >>> branch.join(); total
        tensor(2.)
    """

    def __init__(self, device: torch.device):
        recording = device.type == "cuda" and torch.cuda.is_current_stream_capturing() and not host_is_shared()
        self._stream = _branch_stream(torch.cuda.current_device()) if recording else None

    def mark(self) -> torch.cuda.Event | None:
        """Return a mark of the work launched so far."""
        if self._stream is None:
            return None
        mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record()
        return mark

    @contextlib.contextmanager
    def after(self, mark: torch.cuda.Event | None) -> Iterator[None]:
        """Make launches inside the block wait only for those before a mark."""
        if self._stream is None or mark is None:
            yield
            return
        self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Make later launches, and those after the step, wait for the branch."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


@functools.cache
def _branch_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def capturable(optimizer: Optimizer) -> Iterator[None]:
    """Set ``capturable`` of an optimizer during capture; a fused one has its state on the device anyway."""
    recording = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    groups = [group for group in optimizer.param_groups if recording and "capturable" in group]
    before = [group["capturable"] for group in groups]
    for group in groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group, value in zip(groups, before, strict=True):
            group["capturable"] = value
