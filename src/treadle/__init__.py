"""PyTorch training that you can stop, resume and replay to the bit.

One step loop, familiar front ends, and science packs. Names and packs are loaded lazily: ``treadle.spectra``, or ``from
treadle.spectra import ChemoMAE``.
"""

from __future__ import annotations

import typing as _typing

from treadle.lazy import lazy_names as _lazy_names
from treadle.requirements import installed_torch as _installed_torch
from treadle.requirements import refuse_old_torch as _refuse_old_torch

_refuse_old_torch(_installed_torch())

if _typing.TYPE_CHECKING:
    from treadle.capture.checkpointing import checkpoint_model
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
    from treadle.engine.limits import Limits
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
    from treadle.faces.finders import find_batch_size, find_learning_rate
    from treadle.faces.parallel import ParallelConfig, parallelize
    from treadle.faces.step import BaseTrainer
    from treadle.faces.summary import summary
    from treadle.functional import Trainer
    from treadle.hooks import (
        BaseHook,
        CheckpointingHook,
        CsvHook,
        CudaMaxMemoryHook,
        EmaHook,
        HistoryHook,
        ImageFileLoggerHook,
        JsonlHook,
        LoggingHook,
        MlflowHook,
        NonFiniteHook,
        OptunaPruningHook,
        ProfilerHook,
        ProgressBarHook,
        ProgressHook,
        SessionLogHook,
        SignalHook,
        StepLogHook,
        StuckRankHook,
        SwaHook,
        TensorBoardHook,
        ThroughputHook,
        Tracker,
        TrackioHook,
        ValidationHook,
        WandbHook,
    )
    from treadle.hooks.trackers import with_trackers
    from treadle.means import Total, Weighted
    from treadle.nested import flatten_nested_dict, key_average, map_nested_tensor
    from treadle.optim.schedules import build_schedule
    from treadle.optim.swa import SwaSchedule
    from treadle.population import Population
    from treadle.runs.exact import replay, verify
    from treadle.runs.hub import push_to_hub
    from treadle.runs.opening import open_run
    from treadle.seed import ReproducibilityContext, set_seed
    from treadle.task import StepOutput, Task

    __version__: str

__all__ = [
    "BaseHook",
    "BaseTrainer",
    "BestRule",
    "CheckpointError",
    "CheckpointingHook",
    "ConfigError",
    "CsvHook",
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
    "Limits",
    "LoggingHook",
    "MappedLoader",
    "MlflowHook",
    "NonFiniteError",
    "NonFiniteHook",
    "OptunaPruningHook",
    "OutOfMemoryError",
    "ParallelConfig",
    "Population",
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
    "SwaHook",
    "SwaSchedule",
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
    "ValidationHook",
    "WandbHook",
    "Weighted",
    "__version__",
    "build_schedule",
    "checkpoint_model",
    "compile_model",
    "find_batch_size",
    "find_learning_rate",
    "flatten_nested_dict",
    "get_device",
    "key_average",
    "load_foreign",
    "load_weights",
    "map_nested_tensor",
    "open_run",
    "parallelize",
    "push_to_hub",
    "rank_and_worker",
    "read_foreign",
    "replay",
    "set_seed",
    "shard_iterable",
    "steps_per_epoch",
    "summary",
    "verify",
    "verify_checkpoint",
    "with_trackers",
]

_HOMES = {
    "requirements": ["__version__"],
    "capture.checkpointing": ["checkpoint_model"],
    "capture.compile": ["compile_model"],
    "checkpoint": ["load_weights", "verify_checkpoint"],
    "data": [
        "MappedLoader", "RankBatchSampler", "TensorLoader", "TransferLoader", "rank_and_worker", "shard_iterable",
        "steps_per_epoch",
    ],
    "device": ["get_device"],
    "engine": ["Engine"],
    "engine.best": ["BestRule", "EarlyStopping"],
    "engine.limits": ["Limits"],
    "errors": [
        "CheckpointError", "ConfigError", "DataExhaustedError", "NonFiniteError", "OutOfMemoryError", "RankLostError",
        "TreadleError",
    ],
    "exchange": ["ForeignCheckpoint", "load_foreign", "read_foreign"],
    "faces.epochs": ["EpochTrainer"],
    "faces.finders": ["find_batch_size", "find_learning_rate"],
    "faces.parallel": ["ParallelConfig", "parallelize"],
    "faces.step": ["BaseTrainer"],
    "faces.summary": ["summary"],
    "functional": ["Trainer"],
    "hooks": [
        "BaseHook", "CheckpointingHook", "CsvHook", "CudaMaxMemoryHook", "EmaHook", "HistoryHook",
        "ImageFileLoggerHook", "JsonlHook", "LoggingHook", "MlflowHook", "NonFiniteHook", "OptunaPruningHook",
        "ProfilerHook", "ProgressBarHook", "ProgressHook", "SessionLogHook", "SignalHook", "StepLogHook",
        "StuckRankHook", "SwaHook", "TensorBoardHook", "ThroughputHook", "Tracker", "TrackioHook", "ValidationHook",
        "WandbHook",
    ],
    "hooks.trackers": ["with_trackers"],
    "means": ["Total", "Weighted"],
    "nested": ["flatten_nested_dict", "key_average", "map_nested_tensor"],
    "optim.schedules": ["build_schedule"],
    "optim.swa": ["SwaSchedule"],
    "population": ["Population"],
    "runs.exact": ["replay", "verify"],
    "runs.hub": ["push_to_hub"],
    "runs.opening": ["open_run"],
    "seed": ["ReproducibilityContext", "set_seed"],
    "task": ["StepOutput", "Task"],
}  # fmt: skip
_ROOMS = (
    "astro", "builder", "capture", "checkpoint", "config", "data", "datasets", "device", "distributed", "engine",
    "errors", "exchange", "faces", "functional", "graphs", "hooks", "means", "nested", "optim", "population", "runs",
    "seed", "spectra", "task", "text",
)  # fmt: skip

if not _typing.TYPE_CHECKING:  # type checkers must not accept names that do not exist
    __getattr__, __dir__ = _lazy_names(globals(), _HOMES, modules=_ROOMS)
