"""The front ends that the core offers: the step face, and the epoch driver that the other faces use."""

from __future__ import annotations
