"""Settings of ``treadle train text``, and those that a rerun may change."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from treadle.capture.compile import check_compile
from treadle.engine.settings import check_capture
from treadle.errors import ConfigError
from treadle.errors.arguments import check_above, check_least, check_within
from treadle.faces.parallel import as_parallel
from treadle.runs.settings import check_seeds

_SCHEDULE = ("epochs", "schedule.warmup_steps", "schedule.min_lr_scale")
_LORA = ("lora.r", "lora.alpha", "lora.dropout", "lora.lr", "lora.val_fraction", "lora.test_fraction")
_LATE = (
    "samples.prompt", "samples.count", "samples.num_tokens", "samples.temperature", "samples.top_k", "samples.seed",
)  # fmt: skip
FREE = (
    "threads", "training.checkpoint_interval", "training.parallel", "training.compile", "training.capture",
    "lora.epochs", *_SCHEDULE, *_LORA, *_LATE,
)  # fmt: skip
"""Settings that a resumed run may change; others are stored in checkpoints or would make the history meaningless."""


def needs_new_lora(changed: Iterable[str]) -> bool:
    """Return whether these changed settings affect the start of the fine-tuning, so that it must start over.

    Example:
        >>> needs_new_lora(["lora.r", "threads"]), needs_new_lora(["lora.epochs", "samples.seed"])
        (True, False)
    """
    return bool(set(changed) & {*_SCHEDULE, *_LORA})


def _check_test_fraction(section: str, value: float | None) -> None:
    if value is not None and not 0 <= value < 1:
        raise ConfigError("must be None, or at least 0 and below 1", argument=f"{section}.test_fraction", value=value)


@dataclass
class DataConfig:
    """Settings of the corpus and its token blocks."""

    vocab_size: int = 1024
    """Vocabulary size of the byte-level BPE tokenizer, trained on the training topics."""
    block_length: int = 64
    """Tokens per block, and the context length of the model.

    Short on purpose: with 100,000 training tokens and a few minutes, a model of this size reached a loss of 3.70 with
    64 and 3.98 with 128.
    """
    val_fraction: float = 0.1
    """Fraction of the text for validation, in whole topics; it selects the best epoch."""
    test_fraction: float | None = None
    """Fraction of the text for the test, in whole topics, never used for selection; 0 disables it. None: 0.1, or 0 in a
    run started by a version without this split."""
    split_seed: int = 0
    """Seed of the split of topics."""
    max_topics: int | None = None
    """Use only this many of the shortest topics; None uses all 79."""

    def __post_init__(self) -> None:
        check_least(2, data__block_length=self.block_length)
        check_least(1, data__max_topics=self.max_topics)
        _check_test_fraction("data", self.test_fraction)
        check_seeds(data__split_seed=self.split_seed)


@dataclass
class ModelConfig:
    """Fields of ``GPT2Config``."""

    n_embd: int = 128
    """Width; a multiple of n_head."""
    n_layer: int = 2
    """Transformer layers."""
    n_head: int = 4
    """Attention heads."""
    dropout: float = 0.1
    """Dropout probability of embeddings, attention and residuals."""


@dataclass
class OptimizerConfig:
    """AdamW; biases and LayerNorm weights are not decayed."""

    lr: float = 2e-3
    """Peak learning rate."""
    weight_decay: float = 0.1
    """Decoupled weight decay of the weight matrices."""

    def __post_init__(self) -> None:
        check_above(0, optimizer__lr=self.lr)
        check_least(0, optimizer__weight_decay=self.weight_decay)


@dataclass
class ScheduleConfig:
    """Linear warm-up, then cosine decay over the rest of ``epochs``."""

    warmup_steps: int = 100
    """Warm-up steps."""
    min_lr_scale: float = 0.05
    """Fraction of the learning rate at the last step."""

    def __post_init__(self) -> None:
        check_least(0, schedule__warmup_steps=self.warmup_steps)
        check_within("[0, 1]", schedule__min_lr_scale=self.min_lr_scale)


@dataclass
class TrainingConfig:
    """Step settings of both trainings of the run."""

    accumulation_steps: int = 1
    """Batches per step, each weighted by its tokens."""
    mixed_precision: str | None = None
    """None, bf16 or fp16."""
    grad_clip: float | None = 1.0
    """Maximum gradient norm; None or 0 disables clipping."""
    checkpoint_interval: int = 200
    """Steps between checkpoints."""
    parallel: str | None = None
    """How the ranks started by torchrun share the first training: ddp, fsdp, or None for ddp if there are several. The
    fine-tuning runs only on rank 0."""
    compile: bool | str = False
    """True compiles the model in place, blocks each of its blocks; the fine-tuning is not compiled."""
    capture: bool | str = False
    """True replays each step as one CUDA graph and raises if that is impossible; auto does so where possible.

    The fine-tuning treats True as auto, since an error would come only after the first training."""

    def __post_init__(self) -> None:
        as_parallel(self.parallel)
        check_compile(self.compile, name="training.compile")
        check_capture(self.capture)
        if self.mixed_precision not in (None, "bf16", "fp16"):
            raise ConfigError(
                "must be none, bf16 or fp16", argument="training.mixed_precision", value=self.mixed_precision
            )
        check_least(0, training__grad_clip=self.grad_clip)
        check_least(
            1, training__accumulation_steps=self.accumulation_steps,
            training__checkpoint_interval=self.checkpoint_interval,
        )  # fmt: skip


@dataclass
class LoraConfig:
    """Settings of the fine-tuning: low-rank updates of every linear layer, trained on the topics about statements."""

    epochs: int = 6
    """Epochs of the fine-tuning; its learning-rate schedule ends with them."""
    lr: float = 1e-3
    """Peak learning rate; no weight decay. Low on purpose: with 5e-3 the best of ten epochs was the first."""
    r: int = 8
    """Rank of the updates."""
    alpha: float = 16.0
    """The updates are scaled by alpha / r."""
    dropout: float = 0.2
    """Dropout probability of the updates' input."""
    val_fraction: float = 0.25
    """Fraction of the text about statements for validation, in whole topics."""
    test_fraction: float | None = None
    """Fraction of the text about statements for the test, in whole topics; 0 disables it. None: 0.25, or 0 in a run
    started by a version without this split."""

    def __post_init__(self) -> None:
        _check_test_fraction("lora", self.test_fraction)
        check_least(1, lora__epochs=self.epochs, lora__r=self.r)
        check_above(0, lora__lr=self.lr, lora__alpha=self.alpha)
        check_within("[0, 1)", lora__dropout=self.dropout)


@dataclass
class SamplesConfig:
    """Settings of the samples drawn at the end, which can be redrawn with other settings."""

    prompt: str = ""
    """Start of the samples; empty lets the model begin a topic."""
    count: int = 3
    """Number of samples before and after the fine-tuning."""
    num_tokens: int = 160
    """Maximum number of tokens per sample; it ends earlier if the model ends its topic."""
    temperature: float = 0.7
    """Below 1 sharpens, above 1 flattens; 0 selects the most likely token."""
    top_k: int | None = 40
    """Sample only among this many most likely tokens; None among all."""
    seed: int = 0
    """Seed of the sampling generator."""

    def __post_init__(self) -> None:
        check_least(1, samples__count=self.count, samples__num_tokens=self.num_tokens, samples__top_k=self.top_k)
        check_least(0, samples__temperature=self.temperature)
        check_seeds(samples__seed=self.seed)


@dataclass
class TextConfig:
    """All settings of ``treadle train text``.

    Example:
        >>> TextConfig().data.vocab_size
        1024
    """

    seed: int = 0
    """Seed of weights, data order and dropout."""
    epochs: int = 14
    """Epochs of the training before the fine-tuning; the learning-rate schedule ends with them."""
    batch_size: int = 8
    """Batch size in blocks, summed over all ranks. Small on purpose: here more steps help more than precise
    gradients."""
    threads: int | None = 1
    """CPU threads; None keeps torch's default, one per core.

    With one, results do not depend on the machine's number of cores.
    """
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    samples: SamplesConfig = field(default_factory=SamplesConfig)

    def __post_init__(self) -> None:
        check_least(1, epochs=self.epochs, batch_size=self.batch_size, threads=self.threads)
        check_seeds(seed=self.seed)

    @classmethod
    def for_device(cls, device: torch.device) -> TextConfig:
        """Return the defaults, with mixed precision where it is faster: not on CPUs, most of which lack bf16 units."""
        config = cls()
        config.training.mixed_precision = None if device.type == "cpu" else "bf16"
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as nested plain values."""
        return dataclasses.asdict(self)
