"""The front ends that the core offers: the step face and the epoch driver that the other faces stand on."""

from __future__ import annotations
