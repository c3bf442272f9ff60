"""Prediction of the fat content of meat from spectra, with bounds."""

from __future__ import annotations

from own_project.hook import HardSamplesHook
from own_project.task import QuantileTask
from own_project.trainer import FatTrainer, network

__all__ = ["FatTrainer", "HardSamplesHook", "QuantileTask", "network"]
