"""The step replayed as one CUDA graph: forward, backward, clip and update launched at once, with the same numbers.

The captured function is :meth:`Engine.train_step` itself. The first step of every shape runs eagerly, so that the
optimizer has its state; before the second, the step is warmed up and recorded, weights, optimizer and random numbers
are restored, and one replay is compared with one eager step to the bit. Averages that move with every step do so in the
graph; the schedule, and averages with an interval, move beside it.

The learning rate becomes a tensor on the device, in float32, which the schedule changes in place. An eager run whose
learning rate is a tensor has the same numbers; one whose learning rate is a Python number rounds in float64.

A gradient that is not finite is left out by the optimizer on the device, and so is every step after it until the host
has seen it: some steps later, and before anything is saved, logged or evaluated. Parameters have no ``grad`` then that
a hook could look at.
"""

from __future__ import annotations
