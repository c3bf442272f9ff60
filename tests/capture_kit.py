"""Captured steps on the CPU: a stand-in for CUDA graphs that reruns its function."""

from __future__ import annotations

import treadle.capture.check
import treadle.capture.step
import treadle.capture.steps
from treadle.engine.attempt import clear_gradients


class Rerun:
    """Graph that calls its function at each replay and copies the results into those of the first call."""

    made = 0
    took = 0.0  # seconds of a replay

    def __init__(self, share=None):
        type(self).made += 1

    def record(self, function, *, prepare, warm_ups=3):
        self.step = function.__self__
        if not warm_ups:  # a graph of several steps leaves only rows, and recording runs nothing
            self.function, self.left = function, None
            return None
        for _ in range(warm_ups):
            prepare()
            left = function()
        self.function, self.left, self.flags = function, left, self.step._guard.flags
        return left

    def drop(self):
        del self.function

    def seconds(self, *, prepare):
        return self.took

    def replay(self):
        clear_gradients(self.step._engine)
        with self.step._engine.isolated_step(self.step._guard):
            again = self.function()
        if self.left is None:
            clear_gradients(self.step._engine)
            return
        for (mine, _), (new, _) in zip(self.left._results._packed, again._results._packed, strict=True):
            mine.copy_(new)
        self.flags.copy_(self.step._guard.flags)
        self.step._guard.flags = self.flags
        clear_gradients(self.step._engine)


def capture_on_the_cpu(monkeypatch):
    monkeypatch.setattr(treadle.capture.step, "CudaGraph", Rerun)
    monkeypatch.setattr(treadle.capture.steps, "reason_against", lambda engine: None)
    monkeypatch.setattr(treadle.capture.check, "_host_rng", lambda: 0)  # dropout draws there
    Rerun.made = 0


def refuse_on_the_device(monkeypatch):
    """Make captured steps report a refusal later, as on CUDA; eager ones are checked as on the CPU."""
    made = treadle.capture.steps.CapturedSteps.__init__

    def deferred(self, engine):
        decides = engine.max_non_finite_grad_retries or engine.guard.plan is not None or engine.precision.scaled
        engine.guard.deferred = not decides
        made(self, engine)
        engine.guard.deferred = False

    monkeypatch.setattr(treadle.capture.steps.CapturedSteps, "__init__", deferred)
