"""Settings of an astronomy run as nested dataclasses and YAML."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from typing import Any, TypeVar

from treadle import config as config_files
from treadle.astro.cutouts import CUTOUT_BANDS
from treadle.astro.loss_inputs import LossConfig
from treadle.astro.vocab import FIRST_SPECTRUM_TYPE, SPECTRUM_GROUPS
from treadle.capture.compile import check_compile
from treadle.config.sections import from_nested
from treadle.errors import ConfigError, refuse_unknown
from treadle.errors.arguments import check_above, check_least, check_within, checked
from treadle.faces.parallel import as_parallel

DEFAULTS = "defaults.yaml"
"""Packaged file with every setting and its meaning; a test keeps it equal to the defaults below."""


@checked
@dataclass
class VocabConfig:
    """Vocabulary sizes, the arguments of `build_vocab_spec`."""

    image: int = 2048
    """Ids of the image codebook."""
    scalar: int = 56320
    """Ids of all scalar columns together: columns x bins."""
    scalar_bins: int | None = 1024
    """Ids per column."""
    spectrum: int = 2048
    """Ids per spectrum group."""
    spectrum_groups: list[str] = field(default_factory=lambda: list(SPECTRUM_GROUPS))
    """Names of the groups, in the order of their ids."""

    def __post_init__(self) -> None:
        check_least(1, vocab__image=self.image, vocab__scalar=self.scalar, vocab__spectrum=self.spectrum)
        bins = self.scalar_bins
        whole = bins is None or (bins >= 1 and self.scalar % bins == 0)
        _require(whole, "vocab.scalar_bins", bins, f"must divide vocab.scalar={self.scalar}")
        names = self.spectrum_groups
        distinct = all(isinstance(name, str) for name in names) and len(set(names)) == len(names)
        _require(distinct, "vocab.spectrum_groups", names, "must be names, each of them once")


@checked
@dataclass
class SequencesConfig:
    """Sequence lengths."""

    max_seq_len: int = 2048
    """Maximum sequence length, and the number of positions of the model."""
    max_image_tokens: int = 576
    """Maximum per object of `MultiFieldTokenDataset`; the rest is truncated."""
    max_scalar_tokens: int = 512
    """The same for scalars."""
    max_spec_tokens_per_group: int = 512
    """The same for each spectrum group."""

    def __post_init__(self) -> None:
        check_least(1, **{f"sequences.{name}": value for name, value in vars(self).items()})


@checked
@dataclass
class ModelConfig:
    """Sizes of `CausalTransformerLM`, which validates them."""

    n_types: int = 20
    """Rows of the type table; at least 7 + spectrum groups."""
    d_model: int = 768
    """Model width."""
    n_layers: int = 12
    """Number of layers."""
    n_heads: int = 12
    """Attention heads; must divide ``d_model``."""
    d_ff: int = 3072
    """Width of the feed-forward layers."""
    dropout: float = 0.1
    """Dropout probability, in [0, 1)."""

    def __post_init__(self) -> None:
        check_least(1, **{f"model.{name}": value for name, value in vars(self).items() if name != "dropout"})
        _require(self.d_model % self.n_heads == 0, "model.n_heads", self.n_heads, f"must divide {self.d_model}")
        check_within("[0, 1)", model__dropout=self.dropout)


@checked
@dataclass
class MeaningfulLossConfig:
    """Settings of the expected-value terms of the loss."""

    enabled: bool = True
    """False: cross-entropy only."""
    sample_k_per_modality: int = 4096
    """Maximum number of positions per modality at which the terms are computed."""
    weight_image: float = 0.1
    """Weight of the image term; 0 omits it."""
    weight_scalar: float = 0.1
    """Weight of the scalar term."""
    weight_spectrum: float = 0.1
    """Weight of the spectrum term."""

    def __post_init__(self) -> None:
        LossConfig.read(self)  # the losses know the valid values


@checked
@dataclass
class TrainingConfig:
    """Settings of `AstroTrainer` and the data loader; steps are optimizer steps throughout."""

    seed: int = 0
    """Seed of the sampled positions; seeding the global generators is up to the caller."""
    batch_size: int = 16
    """Sequences per micro-batch."""
    epochs: int = 5
    """Total epochs, including those before a resume."""
    learning_rate: float = 0.0002
    """Peak learning rate, reached at the end of the warm-up."""
    weight_decay: float = 0.05
    """Weight decay, applied only to matrices."""
    warmup_steps: int = 2000
    """Linear warm-up steps."""
    total_steps: int | None = None
    """Last step of the schedule, warm-up included; None uses the steps of all epochs."""
    min_lr_ratio: float = 0.1
    """Learning rate at the last step, as a fraction of ``learning_rate``."""
    grad_clip: float | None = 1.0
    """Maximum gradient norm; None or 0 disables clipping."""
    grad_accum_steps: int = 1
    """Micro-batches per step."""
    max_non_finite_grad_retries: int | None = None
    """Retries with fresh micro-batches before NonFiniteError; None: no retries."""
    num_workers: int = 4
    """Number of data-loading processes."""
    pin_memory: bool = True
    """Copy to a CUDA device from pinned memory; no effect without CUDA."""
    persistent_workers: bool = True
    """Keep workers alive between epochs; no effect without workers."""
    prefetch_factor: int = 2
    """Batches that each worker prefetches; no effect without workers."""
    log_every: int | None = 50
    """Steps between log lines; None or 0 disables them."""
    save_every_steps: int | None = 5000
    """Steps between step checkpoints; None or 0 disables them."""
    meaningful_loss: MeaningfulLossConfig = field(default_factory=MeaningfulLossConfig)
    """The expected-value terms."""
    parallel: str | None = None
    """``ddp`` or ``fsdp`` distributes the model over the ranks started by torchrun; null does not distribute it."""
    compile: bool | str = False
    """True compiles the forward pass of the model, ``blocks`` each of its layers."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "grad_accum_steps", "prefetch_factor", "total_steps"):
            check_least(1, **{f"training.{name}": getattr(self, name)})
        for name in ("weight_decay", "warmup_steps", "num_workers", "grad_clip", "max_non_finite_grad_retries",
                     "log_every", "save_every_steps"):  # fmt: skip
            check_least(0, **{f"training.{name}": getattr(self, name)})
        as_parallel(self.parallel)
        check_compile(self.compile, name="training.compile")
        check_above(0, training__learning_rate=self.learning_rate)
        check_within("[0, 1]", training__min_lr_ratio=self.min_lr_ratio)


@checked
@dataclass
class PathsConfig:
    """File paths of a project; ``{field}`` is replaced by the name of a field."""

    datacube_template: str = "datacube_{field}.parquet"
    """Object tables."""
    image_tokens_template: str = "outputs/image_tokens/datacube_{field}_tokens.npz"
    """Image tokens."""
    scalar_tokens_template: str = "outputs/scalar_tokens/datacube_{field}_scalar_tokens.npz"
    """Scalar bins."""
    spectrum_tokens_template: str = "outputs/spectrum_tokens/datacube_{field}_spectrum_tokens.npz"
    """Spectrum tokens."""
    image_latents_template: str = "outputs/image_latents/datacube_{field}_latents.npz"
    """Image latents."""
    scalar_tokenizer_config: str = "scalar_tokenizers/scalar_tokenizer_config.npz"
    """Scalar tokenizer."""
    spectrum_tokenizer_config: str = "spectrum_tokenizers/spectrum_tokenizer_config.npz"
    """Spectrum tokenizer."""
    image_autoencoder: str = "image_tokenizers/autoencoder_splus_cuts.pt"
    """Weights of the `AutoEncoder`."""
    image_codebook: str = "image_tokenizers/codebook_kmeans_2048.joblib"
    """Image codebook."""
    output_dir: str = "runs_tokens_transformer"
    """Checkpoints and history."""


@checked
@dataclass
class DataConfig:
    """Selection of objects."""

    mag_filter: dict[str, Any] = field(default_factory=lambda: {"column": "mag_pstotal_r", "min": 14.0, "max": 22.0})
    """``column``, ``min`` and ``max`` of the magnitude, both ends exclusive."""
    magerr_max: float = 2.0
    """Upper limit of the magnitude error, exclusive."""
    splus_bands: list[str] = field(
        default_factory=lambda: ["u", "i", "r", "g", "z", "j0378", "j0395", "j0410", "j0430", "j0515", "j0660", "j0861"]
    )
    """Bands of the tables."""

    def __post_init__(self) -> None:
        refuse_unknown("data.mag_filter", self.mag_filter, ("column", "min", "max"))
        check_least(0, data__magerr_max=self.magerr_max)


@checked
@dataclass
class ScalarTokenizerConfig:
    """Sizes of the scalar tokenizer."""

    n_bins: int = 1024
    """Bins per column."""
    max_values_per_col: int = 2_000_000
    """Maximum number of values to fit per column."""
    max_values_per_file_per_col: int = 100_000
    """Maximum per column from one file."""

    def __post_init__(self) -> None:
        check_least(1, **vars(self))


@checked
@dataclass
class SpectrumTokenizerConfig:
    """Sizes of the spectrum tokenizer."""

    codebook_size: int = 2048
    """Entries of each codebook."""
    groups: list[str] = field(default_factory=lambda: list(SPECTRUM_GROUPS))
    """Names of the groups."""

    def __post_init__(self) -> None:
        check_least(1, codebook_size=self.codebook_size)


@checked
@dataclass
class ImageTokenizerConfig:
    """Sizes of the image tokenizer."""

    cutout_size: int = 96
    """Side length in pixels."""
    latent_dim: int = 2
    """Latent channels."""
    codebook_size: int = 2048
    """Codebook entries."""
    bands: list[str] = field(default_factory=lambda: list(CUTOUT_BANDS))
    """Bands of an image, in the order of its channels."""

    def __post_init__(self) -> None:
        check_least(1, cutout_size=self.cutout_size, latent_dim=self.latent_dim, codebook_size=self.codebook_size)


@checked
@dataclass
class TokenizersConfig:
    """Sizes of the tokenizers."""

    scalar: ScalarTokenizerConfig = field(default_factory=ScalarTokenizerConfig)
    """Sizes of the scalar tokenizer."""
    spectrum: SpectrumTokenizerConfig = field(default_factory=SpectrumTokenizerConfig)
    """Sizes of the spectrum tokenizer."""
    image: ImageTokenizerConfig = field(default_factory=ImageTokenizerConfig)
    """Sizes of the image tokenizer."""


@checked
@dataclass
class AstroConfig:
    """All settings of an astronomy run.

    Example:
        >>> AstroConfig().training.meaningful_loss.weight_image
        0.1
    """

    vocab: VocabConfig = field(default_factory=VocabConfig)
    sequences: SequencesConfig = field(default_factory=SequencesConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizers: TokenizersConfig = field(default_factory=TokenizersConfig)

    def __post_init__(self) -> None:
        least = FIRST_SPECTRUM_TYPE + len(self.vocab.spectrum_groups)
        rule = f"must be at least {least}: {FIRST_SPECTRUM_TYPE} and one for each of vocab.spectrum_groups"
        _require(self.model.n_types >= least, "model.n_types", self.model.n_types, rule)


AstromodalConfig = AstroConfig
"""astromodal's name for :class:`AstroConfig`."""

Section = TypeVar(
    "Section",
    AstroConfig,
    PathsConfig,
    DataConfig,
    TokenizersConfig,
    VocabConfig,
    SequencesConfig,
    ModelConfig,
    TrainingConfig,
    MeaningfulLossConfig,
)


def _require(ok: bool, name: str, value: Any, rule: str) -> None:
    if not ok:
        raise ConfigError(rule, argument=name, value=value)


@checked
def load_config(path: str | os.PathLike[str] | None = None) -> AstroConfig:
    """Load settings from a YAML file, merged key by key over the packaged defaults.

    Args:
        path: a ``.yaml`` file with the settings that differ from the defaults (or another format that
            `treadle.config.load_config` reads); ``${...}`` may refer to any setting. None: the defaults.

    Raises:
        ConfigError: the file is missing or not a configuration, a key is unknown, or a value is invalid; the message
            names it.
        ImportError: a file, and OmegaConf is not installed.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "mine.yaml"
        >>> _ = file.write_text("training: {learning_rate: 1e-4}")
        >>> config = load_config(file)
        >>> config.training.learning_rate, config.training.epochs
        (0.0001, 5)
    """
    if path is None:
        return AstroConfig()
    with as_file(files("treadle.astro") / DEFAULTS) as defaults:
        return from_dict(config_files.load_config([defaults, path]))


@checked
def save_config(config: AstroConfig, path: str | os.PathLike[str]) -> None:
    """Write all settings atomically to a file that :func:`load_config` reads back equal.

    Args:
        config: the settings.
        path: a ``.yaml``, ``.yml`` or ``.py`` file; its folder is created.

    Raises:
        ConfigError: unsupported file type.
        CheckpointError: the file cannot be written; the previous file is intact.
        ImportError: a YAML file, and OmegaConf is not installed.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "mine.yaml"
        >>> save_config(AstroConfig(), file)
        >>> load_config(file) == AstroConfig()
        True
    """
    config_files.save_config(to_dict(config), path)


@checked
def to_dict(config: Section) -> dict[str, Any]:
    """Return all settings, or those of a section, as nested plain Python values.

    Example:
        >>> to_dict(AstroConfig())["sequences"]
        {'max_seq_len': 2048, 'max_image_tokens': 576, 'max_scalar_tokens': 512, 'max_spec_tokens_per_group': 512}
    """
    return dataclasses.asdict(config)


@checked
def from_dict(values: Mapping[str, Any], kind: type[Section] = AstroConfig) -> Section:  # type: ignore[assignment]
    """Build settings from nested plain values; missing ones keep their defaults.

    Args:
        values: not changed.
        kind: class of the section to build.

    Raises:
        ConfigError: a key is unknown (the closest match is named), or a value has the wrong type or is out of range.

    Example:
        >>> from_dict({"batch_size": 4}, TrainingConfig).batch_size
        4
    """
    return from_nested(kind, values)
