"""Optimizers, schedules, weight averages, precision, gradients, loss weights and refused steps."""

from __future__ import annotations
