"""Result of a bench as plain values."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from treadle.cli.bench.advice import Advice
from treadle.cli.bench.floor import Ceilings, Floor
from treadle.cli.bench.trials import Trial


@dataclass
class BenchResult:
    """Result of a bench: everything that is printed or written.

    Attributes:
        target: the script, configuration or pack that was run.
        face: the face of its trainer.
        device: where it ran.
        precision: ``"bf16"``, ``"fp16"`` or None.
        num_threads: CPU threads.
        steps: number of measured steps.
        parts: seconds of each part of a typical step, whose time is their sum.
        means: seconds of each part, averaged over all steps, which includes occasional work such as a save.
        num_calls: operator calls per step.
        launches: kernel launches per step; None on the CPU.
        host_reads: line of code -> reads of the device by the host per step.
        floor: the lower bound of the time of a step.
        ceilings: the peak rates of the machine.
        trials: settings that were tried, or the reason why not.
        advice: what to do about it.
        left_out: hooks that were removed for the measurement.
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
        """Seconds of a typical step."""
        return sum(self.parts.values())

    @property
    def times_floor(self) -> float | None:
        """The time of a step divided by its floor."""
        return None if self.floor is None or not self.floor.seconds else self.step_seconds / self.floor.seconds

    def to_dict(self) -> dict[str, Any]:
        """Return the result for JSON: times in seconds, sizes in bytes."""
        return {**dataclasses.asdict(self), "step_seconds": self.step_seconds, "times_floor": self.times_floor}
