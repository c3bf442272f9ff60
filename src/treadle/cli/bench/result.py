"""What a bench found, as plain values."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from treadle.cli.bench.advice import Advice
from treadle.cli.bench.floor import Ceilings, Floor
from treadle.cli.bench.trials import Trial


@dataclass
class BenchResult:
    """Everything that is shown or written.

    Attributes:
        target: what was run.
        face: of its trainer.
        device: where it ran.
        precision: ``"bf16"``, ``"fp16"`` or None.
        num_threads: of the CPU.
        steps: how many were measured.
        parts: seconds of each part of a typical step, whose time is their sum.
        means: seconds of each part, the mean of all steps: with what happens every few steps only, such as a save.
        num_calls: operator calls of a step.
        launches: kernel launches of a step; None on the CPU.
        host_reads: line of code -> reads of the device by the host, for each step.
        floor: the least time of a step.
        ceilings: what the machine reaches.
        trials: settings that were tried, or why not.
        advice: what to do about it.
        left_out: hooks that were taken out for the measurement.
    """

    target: str
    face: str = ""
    device: str = ""
    precision: str | None = None
    num_threads: int = 1
    steps: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    means: dict[str, float] = field(default_factory=dict)
    num_calls: float = 0.0
    launches: float | None = None
    host_reads: dict[str, float] = field(default_factory=dict)
    floor: Floor | None = None
    ceilings: Ceilings | None = None
    trials: list[Trial] = field(default_factory=list)
    advice: list[Advice] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def step_seconds(self) -> float:
        """The time of a typical step."""
        return sum(self.parts.values())

    @property
    def times_floor(self) -> float | None:
        """The step over its floor."""
        return None if self.floor is None or not self.floor.seconds else self.step_seconds / self.floor.seconds

    def to_dict(self) -> dict[str, Any]:
        """Return the result for JSON: times in seconds, sizes in bytes."""
        return {**dataclasses.asdict(self), "step_seconds": self.step_seconds, "times_floor": self.times_floor}
