"""Optimizers and what moves with them: schedules, averages, precision, gradients, loss weights, refused steps."""

from __future__ import annotations
