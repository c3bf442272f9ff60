"""Front ends of the core: the step-based BaseTrainer, and the epoch driver that the other front ends use."""

from __future__ import annotations
