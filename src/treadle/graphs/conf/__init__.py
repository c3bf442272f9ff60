"""Hydra config groups of graph runs: `train`, `model`, `dataset` and `pe`, read as ``pkg://treadle.graphs.conf``."""

from __future__ import annotations
