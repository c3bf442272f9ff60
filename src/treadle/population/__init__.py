"""Populations of concurrent runs, each bitwise equal to the run alone: seeds, sweeps and searches."""

from __future__ import annotations

from treadle.population.comparison import Difference, difference
from treadle.population.population import Population
from treadle.population.results import Results, Summary
from treadle.population.search import SuccessiveHalving
from treadle.population.sweeps import Uniform, draws, grid

__all__ = [
    "Difference",
    "Population",
    "Results",
    "SuccessiveHalving",
    "Summary",
    "Uniform",
    "difference",
    "draws",
    "grid",
]
