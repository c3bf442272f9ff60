"""Hooks: extensions that observe a run. One file per hook; none imports another."""

from __future__ import annotations

from treadle.engine.hook import EVENTS, BaseHook
from treadle.hooks.bar import ProgressBarHook
from treadle.hooks.checkpointing import CheckpointingHook
from treadle.hooks.csv import CsvHook
from treadle.hooks.ema import EmaHook
from treadle.hooks.equal_ranks import EqualRanksHook
from treadle.hooks.history import HistoryHook
from treadle.hooks.images import ImageFileLoggerHook
from treadle.hooks.jsonl import JsonlHook
from treadle.hooks.logging import LoggingHook
from treadle.hooks.memory import CudaMaxMemoryHook
from treadle.hooks.mlflow import MlflowHook
from treadle.hooks.nonfinite import NonFiniteHook
from treadle.hooks.optuna import OptunaPruningHook
from treadle.hooks.own_tracker import Tracker
from treadle.hooks.profiler import ProfilerHook
from treadle.hooks.progress import ProgressHook
from treadle.hooks.remote import RemoteWorkspaceHook
from treadle.hooks.remote_shards import RemoteShardsHook
from treadle.hooks.sessionlog import SessionLogHook
from treadle.hooks.signals import SignalHook
from treadle.hooks.steplog import StepLogHook
from treadle.hooks.swa import SwaHook
from treadle.hooks.tensorboard import TensorBoardHook
from treadle.hooks.throughput import ThroughputHook
from treadle.hooks.trackio import TrackioHook
from treadle.hooks.validation import ValidationHook
from treadle.hooks.wandb import WandbHook
from treadle.hooks.watchdog import StuckRankHook

__all__ = [
    "EVENTS",
    "BaseHook",
    "CheckpointingHook",
    "CsvHook",
    "CudaMaxMemoryHook",
    "EmaHook",
    "EqualRanksHook",
    "HistoryHook",
    "ImageFileLoggerHook",
    "JsonlHook",
    "LoggingHook",
    "MlflowHook",
    "NonFiniteHook",
    "OptunaPruningHook",
    "ProfilerHook",
    "ProgressBarHook",
    "ProgressHook",
    "RemoteShardsHook",
    "RemoteWorkspaceHook",
    "SessionLogHook",
    "SignalHook",
    "StepLogHook",
    "StuckRankHook",
    "SwaHook",
    "TensorBoardHook",
    "ThroughputHook",
    "Tracker",
    "TrackioHook",
    "ValidationHook",
    "WandbHook",
]
