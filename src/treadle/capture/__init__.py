"""Training steps replayed as one CUDA graph: forward, backward, clipping and update, with the same results.

The captured function is :meth:`Engine.train_step` itself. The first step of every shape runs eagerly, so that the
optimizer has its state; before the second, the step is warmed up and captured, weights, optimizer and RNG are restored,
and one replay is compared with one eager step to the bit. Averages updated in every step are updated in the graph; the
schedule, and averages with an interval, outside it.

The learning rate becomes a float32 tensor on the device, which the schedule changes in place. An eager run with a
tensor learning rate has the same results; one with a Python float rounds in float64.

A non-finite gradient is skipped by the optimizer on the device, and so is every following step until the host has
detected it: some steps later, and before anything is saved, logged or evaluated. By then parameters have no ``grad``
for a hook to inspect.
"""

from __future__ import annotations
