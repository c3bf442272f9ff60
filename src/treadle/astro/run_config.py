"""Settings of ``treadle train astro``, and those that a rerun may change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from treadle.astro.config import MeaningfulLossConfig, TrainingConfig
from treadle.errors import ConfigError
from treadle.errors.arguments import check_least, check_within
from treadle.runs.settings import check_seeds, without
from treadle.runs.split import DataConfig

FLAGS = {
    "training.seed": "seed",
    "training.log_every": "the file steps.jsonl, which has every step",
}
"""Trainer settings that cannot be set on the command line."""

FREE = (
    "threads", "mixed_precision", "training.epochs", "training.warmup_steps", "training.total_steps",
    "training.min_lr_ratio", "training.grad_clip", "training.max_non_finite_grad_retries", "training.num_workers",
    "training.pin_memory", "training.persistent_workers", "training.prefetch_factor", "training.save_every_steps",
    "training.parallel", "training.compile",
)  # fmt: skip
"""Settings that a resumed run may change; others are stored in checkpoints or would make the history meaningless."""


@dataclass
class TokensConfig:
    """Arguments of ``fit_tokenizers``."""

    v_image: int = 128
    """Patches in the image codebook."""
    scalar_bins: int = 64
    """Quantile bins per column."""
    v_spectra: int = 64
    """Segments in the codebook of each spectrum group."""
    patch_size: int = 8
    """Patch size in pixels; a divisor of 32."""
    segment: int = 16
    """Spectrum points per token; a divisor of 64."""

    def __post_init__(self) -> None:
        check_least(
            2, tokens__v_image=self.v_image, tokens__scalar_bins=self.scalar_bins, tokens__v_spectra=self.v_spectra
        )
        for name, length in (("patch_size", 32), ("segment", 64)):
            if getattr(self, name) < 1 or length % getattr(self, name):
                raise ConfigError(
                    f"must be a divisor of {length}", argument=f"tokens.{name}", value=getattr(self, name)
                )


@dataclass
class RepeatsConfig:
    """Passes over the training objects of each survey per epoch."""

    xdf: int = 4
    """Galaxy images; there are few."""
    spex: int = 3
    """Spectra of dwarfs."""
    sdss: int = 1
    """The catalogue, which has the most objects."""

    def __post_init__(self) -> None:
        check_least(1, repeats__xdf=self.xdf, repeats__spex=self.spex, repeats__sdss=self.sdss)


@dataclass
class ModelConfig:
    """Sizes of ``CausalTransformerLM``; the numbers of ids and types follow from the tokens."""

    d_model: int = 64
    """Model width."""
    n_layers: int = 2
    """Number of layers."""
    n_heads: int = 4
    """Attention heads; must divide ``d_model``."""
    d_ff: int = 128
    """Width of the feed-forward layers."""
    dropout: float = 0.1
    """Dropout probability, in [0, 1)."""

    def __post_init__(self) -> None:
        check_least(
            1, model__d_model=self.d_model, model__n_layers=self.n_layers, model__n_heads=self.n_heads,
            model__d_ff=self.d_ff,
        )  # fmt: skip
        if self.d_model % self.n_heads:
            raise ConfigError(
                f"must divide model.d_model={self.d_model!r}", argument="model.n_heads", value=self.n_heads
            )
        check_within("[0, 1)", model__dropout=self.dropout)


def _training_config() -> TrainingConfig:
    # The data are in memory: workers would cost more than they save.
    return TrainingConfig(
        batch_size=32, epochs=6, learning_rate=5e-3, warmup_steps=50, num_workers=0, save_every_steps=None,
        meaningful_loss=MeaningfulLossConfig(weight_scalar=1.0),
    )  # fmt: skip


@dataclass
class AstroRunConfig:
    """All settings of ``treadle train astro``.

    Example:
        >>> AstroRunConfig().model.d_model
        64
    """

    seed: int = 0
    """Seed of weights, data order, dropout, k-means and the sampled loss positions."""
    threads: int | None = 1
    """CPU threads; None keeps torch's default, one per core.

    With one, results do not depend on the machine's number of cores.
    """
    mixed_precision: str | None = None
    """None, bf16 or fp16."""
    use_ce: bool = True
    """Whether the loss includes the cross-entropy; ``training.meaningful_loss`` configures the other terms."""
    hidden_scalars: float = 0.5
    """Mean fraction of scalars replaced by MISS in training, redrawn each time; at most 0.5."""
    start_from_codebooks: bool = True
    """Whether ids of similar values start with similar embeddings (``initialise_from_codebooks``)."""
    scalars_last: float = 0.5
    """Fraction of sequences, redrawn each time, whose scalars come after the spectra instead of before them."""
    # XDF has 16 tiles: with a tenth, the test split would have only two.
    data: DataConfig = field(default_factory=lambda: DataConfig(test_fraction=0.2))
    """The split of each of the three surveys."""
    repeats: RepeatsConfig = field(default_factory=RepeatsConfig)
    tokens: TokensConfig = field(default_factory=TokensConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=_training_config)
    """Fields of ``treadle.astro.TrainingConfig``."""

    def __post_init__(self) -> None:
        check_least(1, threads=self.threads)
        check_seeds(seed=self.seed)
        check_within("[0, 0.5]", hidden_scalars=self.hidden_scalars)
        check_within("[0, 1)", scalars_last=self.scalars_last)
        if self.mixed_precision not in (None, "bf16", "fp16"):
            raise ConfigError("must be none, bf16 or fp16", argument="mixed_precision", value=self.mixed_precision)

    @classmethod
    def for_device(cls, device: torch.device) -> AstroRunConfig:
        """Return the defaults, with mixed precision where it is faster: not on CPUs, most of which lack bf16 units."""
        return cls(mixed_precision=None if device.type == "cpu" else "bf16")

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as nested plain values, without those that cannot be set on the command line."""
        return without(self, FLAGS)


def loss_line(values: Mapping[str, Any]) -> str:
    """Describe the loss terms as a string.

    Args:
        values: settings as returned by `AstroRunConfig.to_dict`.

    Example:
        >>> loss_line(AstroRunConfig().to_dict()).partition(" of ")[0]
        'cross-entropy + 0.1 x squared error'
    """
    terms = ["cross-entropy"] if values["use_ce"] else []
    meaningful = values["training"]["meaningful_loss"]
    if meaningful["enabled"]:
        weights = {name: meaningful[f"weight_{part}"] for part, name in _MODALITIES.items()}
        terms += [f"{weight:g} x squared error of {name}" for name, weight in weights.items() if weight]
    return " + ".join(terms)


_MODALITIES = {"image": "pictures", "scalar": "scalars", "spectrum": "spectra"}
