"""Settings of the spectra trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from treadle.capture.compile import check_compile
from treadle.engine.settings import check_capture
from treadle.errors import refuse_unknown
from treadle.errors.arguments import check_least, check_within, checked
from treadle.faces.parallel import ParallelConfig, as_parallel, block_name
from treadle.seed import as_seed


def _plain_parallel(value: ParallelConfig | Mapping[str, Any] | str | None) -> dict[str, Any] | str | None:
    """Return the setting in a form that a checkpoint can store and the constructor accepts."""
    config = as_parallel(value)
    if config is None or isinstance(value, str):
        return value if isinstance(value, str) else None
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    plain = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    plain["blocks"] = None if config.blocks is None else [block_name(block) for block in config.blocks]
    for field in ("param_dtype", "reduce_dtype"):
        if isinstance(plain[field], torch.dtype):
            plain[field] = names.get(plain[field], str(plain[field]))
    return plain


@checked
@dataclass
class TrainerConfig:
    """Settings of :class:`SpectraTrainer`, validated on construction.

    Raises:
        ConfigError: a value is out of range; the allowed values are listed.

    Example:
        >>> TrainerConfig(reduction="sum").to_dict()["reduction"]
        'sum'
    """

    out_dir: str | Path = "runs"
    """Folder for checkpoints, history and exports; created when training starts."""
    device: torch.device | str | int | None = None
    """None selects CUDA, then MPS, then the CPU."""
    amp: bool = True
    """Mixed precision, on every device type."""
    amp_dtype: Literal["bf16", "fp16"] = "bf16"
    enable_tf32: bool = False
    """Allow TF32 in matmul and cuDNN while ``fit`` runs."""
    grad_clip: float | None = 1.0
    """Maximum gradient norm; None or 0 disables clipping."""
    use_ema: bool = True
    """Average the weights (EMA); validation and exports use the average."""
    ema_decay: float = 0.999
    """EMA decay, in [0, 1]."""
    loss_type: Literal["mse", "sse"] = "mse"
    reduction: Literal["mean", "batch_mean", "sum"] = "mean"
    """``"mean"``: per masked element; ``"batch_mean"``: per spectrum; ``"sum"``."""
    early_stop_patience: int | None = 20
    """Epochs without improvement before training stops; None disables early stopping."""
    early_stop_start_ratio: float = 0.5
    """Fraction of the total epochs before which no epoch counts against the patience."""
    early_stop_min_delta: float = 0.0
    """Minimum improvement that counts."""
    resume_from: str | Path | None = "auto"
    """``"auto"``: the furthest intact checkpoint of the run, if any; a path must exist; None starts from scratch."""
    selection: Literal["best", "last"] = "best"
    """``"best"``: by validation loss, with early stopping; ``"last"``: a fixed budget."""
    accumulation_steps: int = 1
    """Micro-batches per optimizer step."""
    max_non_finite_grad_retries: int | None = None
    """Retries with fresh micro-batches before NonFiniteError."""
    eval_seed: int = 0
    """Seed of the masks of every validation."""
    background_saves: bool = False
    """Copy the state at the end of an epoch and write it during the next one, one write at a time; costs host memory
    for one copy of the state. ``fit`` returns when everything is written."""
    parallel: ParallelConfig | str | None = None
    """``"ddp"`` or ``"fsdp"`` distributes the model over the ranks started by torchrun; None does not distribute it.
    For more options pass ``parallel=ParallelConfig(...)`` to the trainer."""
    capture: bool | str = False
    """Whether to replay the step as one CUDA graph; ``"auto"`` warns if that is impossible, True raises."""
    compile: bool | str = False
    """True compiles the model in place, ``"blocks"`` each of its repeated blocks; see ``treadle.compile_model``."""

    def __post_init__(self) -> None:
        as_seed("eval_seed", self.eval_seed)
        as_parallel(self.parallel)
        check_capture(self.capture)
        check_compile(self.compile)
        check_least(0, grad_clip=self.grad_clip, early_stop_min_delta=self.early_stop_min_delta)
        check_least(0, max_non_finite_grad_retries=self.max_non_finite_grad_retries)
        check_least(1, early_stop_patience=self.early_stop_patience, accumulation_steps=self.accumulation_steps)
        check_within("[0, 1]", ema_decay=self.ema_decay, early_stop_start_ratio=self.early_stop_start_ratio)

    def idle(self) -> Iterator[tuple[str, str]]:
        """Yield the fields that another one switches off, with the reason.

        Example:
            >>> list(TrainerConfig(use_ema=False).idle())
            [('ema_decay', 'use_ema is False')]
        """
        if not self.use_ema:
            yield "ema_decay", "use_ema is False"
        if not self.amp:
            yield "amp_dtype", "amp is False"
        if self.selection == "last":
            names = ("early_stop_patience", "early_stop_start_ratio", "early_stop_min_delta")
            yield from ((name, "selection is 'last'") for name in names)
        elif self.early_stop_patience is None:
            yield "early_stop_start_ratio", "early_stop_patience is None"

    def __eq__(self, other: object) -> bool:
        """Return whether all settings are equal; a path equals its string, so ``from_dict(to_dict())`` is equal."""
        return self.to_dict() == other.to_dict() if isinstance(other, TrainerConfig) else NotImplemented

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["parallel"] = _plain_parallel(self.parallel)
        return {key: str(value) if isinstance(value, (Path, torch.device)) else value for key, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainerConfig:
        """Build settings from a mapping.

        Raises:
            ConfigError: a key is unknown; the closest match is named.
        """
        refuse_unknown("TrainerConfig", values, [field.name for field in dataclasses.fields(cls)])
        return cls(**values)
