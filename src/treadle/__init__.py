"""PyTorch training that you can stop, resume and replay to the bit.

One step loop, familiar front ends, and science packs. A pack is imported when it is first asked for:
``treadle.spectra``, or ``from treadle.spectra import ChemoMAE``.
"""

from __future__ import annotations

import importlib as _importlib
import typing as _typing

from torch import __version__ as _torch_version

from treadle.requirements import refuse_old_torch as _refuse_old_torch

_refuse_old_torch(str(_torch_version))

from treadle.capture.compile import compile_model
from treadle.checkpoint import load_weights, verify_checkpoint
from treadle.data import (
    MappedLoader,
    RankBatchSampler,
    TensorLoader,
    TransferLoader,
    rank_and_worker,
    shard_iterable,
    steps_per_epoch,
)
from treadle.device import get_device
from treadle.engine import Engine
from treadle.engine.best import BestRule, EarlyStopping
from treadle.errors import (
    CheckpointError,
    ConfigError,
    DataExhaustedError,
    NonFiniteError,
    OutOfMemoryError,
    RankLostError,
    TreadleError,
)
from treadle.exchange import ForeignCheckpoint, load_foreign, read_foreign
from treadle.faces.epochs import EpochTrainer
from treadle.faces.parallel import ParallelConfig, parallelize
from treadle.faces.step import BaseTrainer
from treadle.functional import Trainer
from treadle.hooks import (
    BaseHook,
    CheckpointingHook,
    CudaMaxMemoryHook,
    EmaHook,
    HistoryHook,
    ImageFileLoggerHook,
    JsonlHook,
    LoggingHook,
    MlflowHook,
    NonFiniteHook,
    ProfilerHook,
    ProgressBarHook,
    ProgressHook,
    SessionLogHook,
    SignalHook,
    StepLogHook,
    StuckRankHook,
    TensorBoardHook,
    ThroughputHook,
    Tracker,
    TrackioHook,
    WandbHook,
)
from treadle.hooks.trackers import with_trackers
from treadle.means import Total, Weighted
from treadle.nested import flatten_nested_dict, key_average, map_nested_tensor
from treadle.runs.exact import replay, verify
from treadle.seed import ReproducibilityContext, set_seed
from treadle.task import StepOutput, Task

__all__ = [
    "BaseHook",
    "BaseTrainer",
    "BestRule",
    "CheckpointError",
    "CheckpointingHook",
    "ConfigError",
    "CudaMaxMemoryHook",
    "DataExhaustedError",
    "EarlyStopping",
    "EmaHook",
    "Engine",
    "EpochTrainer",
    "ForeignCheckpoint",
    "HistoryHook",
    "ImageFileLoggerHook",
    "JsonlHook",
    "LoggingHook",
    "MappedLoader",
    "MlflowHook",
    "NonFiniteError",
    "NonFiniteHook",
    "OutOfMemoryError",
    "ParallelConfig",
    "ProfilerHook",
    "ProgressBarHook",
    "ProgressHook",
    "RankBatchSampler",
    "RankLostError",
    "ReproducibilityContext",
    "SessionLogHook",
    "SignalHook",
    "StepLogHook",
    "StepOutput",
    "StuckRankHook",
    "Task",
    "TensorBoardHook",
    "TensorLoader",
    "ThroughputHook",
    "Total",
    "Tracker",
    "TrackioHook",
    "Trainer",
    "TransferLoader",
    "TreadleError",
    "WandbHook",
    "Weighted",
    "compile_model",
    "flatten_nested_dict",
    "get_device",
    "key_average",
    "load_foreign",
    "load_weights",
    "map_nested_tensor",
    "parallelize",
    "rank_and_worker",
    "read_foreign",
    "replay",
    "set_seed",
    "shard_iterable",
    "steps_per_epoch",
    "verify",
    "verify_checkpoint",
    "with_trackers",
]

_ON_DEMAND = ("astro", "builder", "config", "datasets", "graphs", "spectra", "text")

if not _typing.TYPE_CHECKING:  # a type checker is to see no name that is not there

    def __getattr__(name):
        if name in _ON_DEMAND:
            return _importlib.import_module(f"treadle.{name}")
        raise AttributeError(f"module 'treadle' has no attribute {name!r}")
