"""Settings of ``treadle train spectra``, and the effect of a rerun with changed settings."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch

from treadle.errors.arguments import check_above, check_least, check_within
from treadle.runs.settings import check_seeds, without
from treadle.runs.split import DataConfig
from treadle.spectra.config import TrainerConfig

FLAGS = {"trainer.out_dir": "--out", "trainer.device": "--device", "trainer.resume_from": "--resume or --no-resume"}
"""Trainer settings that the command sets from its own options."""

FREE = (
    "epochs", "threads", "schedule.warmup_epochs", "schedule.min_lr_scale", "trainer.amp", "trainer.amp_dtype",
    "trainer.enable_tf32", "trainer.grad_clip", "trainer.early_stop_patience", "trainer.early_stop_start_ratio",
    "trainer.early_stop_min_delta", "trainer.max_non_finite_grad_retries", "trainer.parallel", "trainer.capture",
    "trainer.compile",
)  # fmt: skip
"""Settings that a resumed run may change; others are stored in checkpoints or would make the history meaningless."""


@dataclass
class ModelConfig:
    """Model choice and arguments of ``ChemoMAE``.

    Small and with fixed positions on purpose: within two minutes on a CPU, many epochs of a small model reach a lower
    loss than few epochs of a large one (0.025 against 0.14 with the defaults of ``ChemoMAE`` reduced to d_model=128),
    and fixed positions a lower one than learned positions (0.027 against 0.046), which have not learned their order by
    then.
    """

    d_model: int = 64
    """Width of the tokens."""
    nhead: int = 4
    """Attention heads; must divide ``d_model``."""
    num_layers: int = 2
    """Transformer layers."""
    dim_feedforward: int = 128
    """Width of the feed-forward layers."""
    dropout: float = 0.0
    """Dropout probability; hiding three quarters of each spectrum regularises enough."""
    use_learnable_pos: bool = False
    """Learned positions; False uses fixed sine/cosine positions."""
    latent_dim: int = 64
    """Width of the latent on the unit sphere."""
    n_blocks: int = 32
    """Equal blocks that masks are drawn over; a divisor of the 256 channels."""
    n_mask: int = 24
    """Blocks hidden from the encoder; many, since hidden tokens cost nothing."""
    residual: bool = False
    """Train ``ResidualMAE`` instead of ``ChemoMAE``: it reconstructs hidden channels better and estimates uncertainty,
    but its latent is less useful with few labels. ``use_learnable_pos`` then has no effect, nor does ``n_mask`` in
    training."""

    def __post_init__(self) -> None:
        check_within("[0, 1]", model__dropout=self.dropout)


@dataclass
class OptimizerConfig:
    """Arguments of ``build_optimizer`` (AdamW)."""

    lr: float = 3e-3
    """Peak learning rate."""
    weight_decay: float = 0.05
    """Decoupled weight decay of the weight matrices."""

    def __post_init__(self) -> None:
        check_above(0, optimizer__lr=self.lr)
        check_least(0, optimizer__weight_decay=self.weight_decay)


@dataclass
class ScheduleConfig:
    """Arguments of ``build_scheduler``: linear warm-up, then cosine decay over the rest of ``epochs``."""

    warmup_epochs: int = 5
    """Warm-up epochs."""
    min_lr_scale: float = 0.02
    """Fraction of the learning rate at the last step."""

    def __post_init__(self) -> None:
        check_least(0, schedule__warmup_epochs=self.warmup_epochs)
        check_within("[0, 1]", schedule__min_lr_scale=self.min_lr_scale)


@dataclass
class SpectraConfig:
    """All settings of ``treadle train spectra``.

    Example:
        >>> SpectraConfig().model.latent_dim
        64
    """

    seed: int = 0
    """Seed of weights, data order, masks and the folds of the probes."""
    epochs: int = 80
    """Total epochs; the learning-rate schedule ends with the last one."""
    batch_size: int = 32
    """Batch size, summed over all ranks."""
    threads: int | None = 1
    """CPU threads; None keeps torch's default, one per core.

    Tensors this small gain little from a second thread, and when other programs keep the cores busy the threads wait
    for each other: measured on two busy cores, 1,300 spectra per second with one thread and 30 to 200 with two. With
    one thread, results also do not depend on the machine's number of cores.
    """
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    # An average over 100 steps (2 epochs): the library's default, 1,000 steps, is a fifth of this short run.
    trainer: TrainerConfig = field(default_factory=lambda: TrainerConfig(ema_decay=0.99))
    """Fields of ``TrainerConfig``."""

    def __post_init__(self) -> None:
        check_least(1, epochs=self.epochs, batch_size=self.batch_size, threads=self.threads)
        check_seeds(seed=self.seed)

    @classmethod
    def for_device(cls, device: torch.device) -> SpectraConfig:
        """Return the defaults, with mixed precision where it is faster.

        On a CPU without bf16 units a bf16 step takes over ten times as long as one in fp32, and with them a model of
        this size gains nothing (measured for this command), so the CPU default is fp32.
        """
        config = cls()
        config.trainer = dataclasses.replace(config.trainer, amp=device.type != "cpu")
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as nested plain values, without those that are command options."""
        return without(self, FLAGS)
