"""Timing of the parts of a step, by wrapping calls of the run while it is measured.

At any moment the run is in exactly one part, so the parts of a step add up to the step. On a GPU, the marks between
parts are events in its stream: measuring never synchronizes, and the times read later are the GPU's own timeline,
including the time in which it waits for the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, Protocol

import torch

LOOP, DATA, FORWARD, BACKWARD, UPDATE = "rest of the loop", "data", "forward", "backward", "clip and optimizer"
AVERAGES, SCHEDULE, REPLAY, WRITES = "averages", "schedule", "captured step", "files"
HOOK = "hook "


class Clock(Protocol):
    """Clock that records marks and computes the time between two of them afterwards."""

    def mark(self) -> Any:
        """Return a mark of the current moment, or None if there is none, without waiting."""
        ...

    def seconds(self, first: Any, second: Any) -> float:
        """Return the time between two marks."""
        ...

    def finish(self) -> None:
        """Wait until every mark has been reached."""
        ...


class HostClock:
    """Clock of the CPU."""

    def mark(self) -> float:
        """Return the current time, in seconds."""
        return time.perf_counter()

    def seconds(self, first: float, second: float) -> float:
        """Return the time between two marks."""
        return second - first

    def finish(self) -> None:
        """Return at once: the CPU has nothing to wait for."""


class StreamClock:
    """Clock of a CUDA stream.

    Args:
        device: the device whose current stream is timed.
    """

    def __init__(self, device: torch.device):
        self.device = device

    def mark(self) -> torch.cuda.Event | None:
        """Record an event in the stream; None while a CUDA graph is captured, in which an event has no time."""
        if torch.cuda.is_current_stream_capturing():  # of the current device, which the capture sets
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        """Return the time between two completed events."""
        return float(first.elapsed_time(second)) / 1000

    def finish(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)


def clock_of(device: torch.device) -> Clock:
    """Return the clock for a device.

    Example:
        >>> type(clock_of(torch.device("cpu"))).__name__
        'HostClock'
    """
    return StreamClock(device) if device.type == "cuda" else HostClock()


class Timeline:
    """Record of the part of a step that the run was in over time.

    Args:
        clock: provides the marks.

    Example:
        >>> ticks = iter(range(9))
        >>> clock = HostClock(); clock.mark = lambda: next(ticks)
        >>> line = Timeline(clock)
        >>> line.begin_step("data"); line.switch("loop"); line.begin_step("data")
        >>> line.seconds()
        [{'data': 1.0, 'loop': 1.0}]
    """

    def __init__(self, clock: Clock):
        self.clock = clock
        self.part = LOOP
        self._records: list[list[tuple[str, Any]]] = []
        self._running: list[tuple[str, Any]] | None = None

    def begin_step(self, part: str) -> None:
        """End the current step, if any, and begin the next."""
        self.end_step()
        self._running = []
        self.switch(part)

    def end_step(self) -> None:
        """End the current step."""
        if self._running:
            self._running.append(("", self.clock.mark()))
            self._records.append(self._running)
        self._running = None

    def clear(self) -> None:
        """Discard all steps, including the current one."""
        self._records, self._running = [], None

    def drop_step(self) -> None:
        """Discard the current step, which contains something else, such as an evaluation."""
        self._running = None

    @property
    def num_steps(self) -> int:
        """Number of steps measured to their end."""
        return len(self._records)

    def switch(self, part: str) -> None:
        """Switch to another part of the step."""
        self.part = part
        if self._running is None:
            return
        mark = self.clock.mark()
        if mark is None:
            self.drop_step()  # a step that captures a graph is not measured
        else:
            self._running.append((part, mark))

    def inside(self, call: Callable[..., Any], part: str, *, after: str | None = None) -> Callable[..., Any]:
        """Wrap a call: it counts as ``part``, and what follows as ``after``, or as the part before the call."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            before = self.part
            self.switch(part)
            try:
                return call(*args, **kwargs)
            finally:
                self.switch(after or before)

        return timed

    def seconds(self) -> list[dict[str, float]]:
        """Return the seconds of every part, one mapping per step; wait for the device."""
        self.clock.finish()
        steps = []
        for record in self._records:
            parts: dict[str, float] = {}
            for (part, start), (_, end) in pairwise(record):
                parts[part] = parts.get(part, 0.0) + self.clock.seconds(start, end)
            steps.append(parts)
        return steps


def typical(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the parts of a typical step: the median of each, 0 for parts that most steps lack.

    The time of the step is their sum. On a busy machine every few steps are interrupted, each in a different part.

    Example:
        >>> typical([{"data": 1.0}, {"data": 2.0, "loop": 1.0}, {"data": 90.0, "loop": 2.0}])
        {'data': 2.0, 'loop': 1.0}
    """
    names = dict.fromkeys(name for parts in steps for name in parts)
    return {name: median(parts.get(name, 0.0) for parts in steps) for name in names}


def mean_parts(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each part over some steps; a part that a step lacks counts as 0.

    Example:
        >>> mean_parts([{"data": 1.0}, {"data": 2.0, "loop": 1.0}])
        {'data': 1.5, 'loop': 0.5}
    """
    names = dict.fromkeys(name for parts in steps for name in parts)
    return {name: sum(parts.get(name, 0.0) for parts in steps) / len(steps) for name in names}


def step_seconds(step: Callable[[Any], Any], groups: Sequence[Any], *, count: int, clock: Clock, block: int) -> float:
    """Return the median time of a step, over ``count`` steps on the given groups in turn.

    Args:
        step: runs one step on a group.
        groups: at least one.
        count: number of steps.
        clock: provides the marks.
        block: steps between two marks; more than one if a mark at every step would slow them down.
    """
    marks = [clock.mark()]
    for number in range(count):
        step(groups[number % len(groups)])
        if (number + 1) % block == 0:
            marks.append(clock.mark())
    clock.finish()
    return median(clock.seconds(first, second) / block for first, second in pairwise(marks))
