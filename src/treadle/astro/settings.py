"""Validation and normalization of AstroTrainer's arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from treadle.astro.config import AstroConfig, TrainingConfig, from_dict
from treadle.astro.loss_inputs import Codebooks, LossConfig, needed_codebooks
from treadle.astro.schedule import WarmupCosine
from treadle.astro.vocab import VocabSpec
from treadle.data.amount import steps_per_epoch
from treadle.distributed import unwrap
from treadle.errors import ConfigError
from treadle.optim.optimizer import can_be_fused, decay_groups
from treadle.optim.precision import PrecisionName


def training_settings(config: Any) -> TrainingConfig:
    """Return a copy of the training settings as a dataclass.

    Args:
        config: a mapping or a dataclass, like the loss settings in it, whose ``sample_k`` is ``sample_k_per_modality``;
            None for the defaults.

    Raises:
        ConfigError: a key is unknown, a value is invalid, or it is something else, such as all settings of a run.

    Example:
        >>> training_settings({"epochs": 3}).epochs
        3
    """
    if config is None:
        return TrainingConfig()
    values = _as_mapping(config)
    if isinstance(config, AstroConfig) or not isinstance(values, Mapping):
        raise ConfigError(
            f"a {type(config).__name__}; give the training part, such as load_config().training", argument="config"
        )
    if "meaningful_loss" in values:
        values = {**values, "meaningful_loss": _loss_section(values["meaningful_loss"])}
    return from_dict(values, TrainingConfig)


def _as_mapping(given: Any) -> Any:
    is_instance = dataclasses.is_dataclass(given) and not isinstance(given, type)
    return dataclasses.asdict(given) if is_instance else given


def _loss_section(given: Any) -> Any:
    """Return loss settings under the names of `MeaningfulLossConfig`; the losses use a shorter name for one of them."""
    values = _as_mapping(given)
    if not isinstance(values, Mapping) or "sample_k" not in values:
        return values
    settings = dataclasses.asdict(LossConfig.read(values))
    settings["sample_k_per_modality"] = settings.pop("sample_k")
    return settings


def precision_of(use_amp: bool | None, amp_dtype: PrecisionName, device: torch.device) -> PrecisionName | None:
    """Return the autocast dtype; ``use_amp=None`` enables autocast on CUDA.

    Example:
        >>> precision_of(None, "fp16", torch.device("cuda", 1)), precision_of(None, "fp16", torch.device("cpu"))
        ('fp16', None)
    """
    on = device.type == "cuda" if use_amp is None else use_amp
    return amp_dtype if on else None


def codebooks_of(
    vocab: VocabSpec, given: tuple[Any, Any, Any], config: LossConfig, *, use_ce: bool, device: torch.device
) -> Codebooks:
    """Validate the image, spectrum and scalar codebooks with a non-zero weight, and move them to the device.

    Raises:
        ConfigError: a codebook is missing or does not match, or no loss term is left.
    """
    weights = config.term_weights(vocab)
    if not use_ce and not any(weights.values()):
        raise ConfigError(
            "=False, and meaningful_loss is not enabled or has no weight: nothing would be trained; enable one of them",
            argument="use_ce",
        )
    arguments = (
        ("image_codebook", "weight_image", "img"),
        ("spectrum_codebook", "weight_spectrum", "spec"),
        ("scalar_centers", "weight_scalar", "sca"),
    )
    for (argument, setting, term), codebook in zip(arguments, given, strict=True):
        if weights[term] and codebook is None:
            raise ConfigError(
                f"=None, but meaningful_loss.{setting}={weights[term]}: give the codebook that the tokens "
                "were made with, or set the weight to 0",
                argument=argument,
            )
    return needed_codebooks(vocab, given, weights, device)


def check_model(model: nn.Module, vocab: VocabSpec) -> None:
    """Raise ConfigError if the model has a different number of ids."""
    size = getattr(unwrap(model), "vocab_size", None)
    if isinstance(size, int) and size != vocab.vocab_size:
        raise ConfigError(
            f"model has vocab_size={size} but the vocabulary has {vocab.vocab_size} ids; build the model for this "
            "vocabulary"
        )


def default_optimizer(model: nn.Module, settings: TrainingConfig) -> AdamW:
    """Build AdamW with betas (0.9, 0.95); weight decay applies to matrices, not to embeddings, norms and biases.

    Example:
        >>> optimizer = default_optimizer(nn.Linear(2, 1), TrainingConfig())
        >>> [group["weight_decay"] for group in optimizer.param_groups]
        [0.05, 0.0]
    """
    groups = decay_groups(model, settings.weight_decay, undecayed=(nn.Embedding,))
    parameters = [parameter for group in groups for parameter in group["params"]]
    return AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=can_be_fused(parameters) or None)


def default_schedule(
    optimizer: Optimizer, settings: TrainingConfig, loader: Iterable[Any], *, interval: str
) -> WarmupCosine:
    """Return the schedule of the settings, which counts steps.

    Raises:
        ConfigError: the interval is ``"epoch"``, or the loader has no length and no total is set.
    """
    if interval == "epoch":
        raise ConfigError(
            "='epoch' without a scheduler: the schedule of the settings counts steps; give a scheduler, or use 'step'",
            argument="scheduler_interval",
        )
    return WarmupCosine(
        optimizer, warmup_steps=settings.warmup_steps, min_lr_ratio=settings.min_lr_ratio,
        total_steps=schedule_length(settings, loader, settings.epochs),
    )  # fmt: skip


def schedule_length(settings: TrainingConfig, loader: Iterable[Any], epochs: int) -> int:
    """Return the last step of the schedule: ``total_steps`` if set, else the steps of all epochs.

    Raises:
        ConfigError: ``total_steps`` is not set and the loader has no length.

    Example:
        >>> schedule_length(TrainingConfig(grad_accum_steps=4), range(6), 5)
        10
    """
    if settings.total_steps is not None:
        return settings.total_steps
    try:
        steps = steps_per_epoch(loader, settings.grad_accum_steps)
    except TypeError:
        raise ConfigError(
            "=None and the train_loader has no length: set total_steps, the last step of the "
            "learning-rate schedule, or give a scheduler",
            argument="training.total_steps",
        ) from None
    return max(1, steps * max(1, epochs))
