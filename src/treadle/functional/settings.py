"""Settings in the ``training`` part of a user's config: reading, validation and defaults."""

from __future__ import annotations

import dataclasses
import difflib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.capture.checkpointing import Checkpointing, check_checkpointing
from treadle.checkpoint.retention import Retention
from treadle.data.amount import Amount
from treadle.engine.limits import Duration, Limits
from treadle.errors import ConfigError, refuse_unknown
from treadle.errors.arguments import check_fields, check_least, check_within
from treadle.faces.build import EngineArguments
from treadle.functional.other_names import hint_for_unknown
from treadle.functional.user_config import UserConfig
from treadle.optim.precision import PrecisionName
from treadle.optim.schedules import ScheduleShape

_log = logging.getLogger("treadle.functional")
_WHERE = "config.training"
_FIRST = (
    "max_grad_norm", "scheduler_step_per_batch", "weight_decay", "learning_rate", "gradient_accumulation_steps",
    "mixed_precision", "max_non_finite_grad_retries", "log_interval", "min_delta", "ema_decay",
)  # fmt: skip
_LEAST = {
    0: ("max_grad_norm", "grad_clip_value", "weight_decay", "learning_rate", "ema_decay", "min_delta", "min_lr_scale",
        "max_non_finite_grad_retries", "log_interval"),
    1: ("gradient_accumulation_steps", "save_total_limit", "save_top_k"),
}  # fmt: skip
UNUSED = ("batch_size", "num_epochs", "epochs", "seed", "max_eval_samples")
_OF_FILES = ("checkpoint_dir", "save_interval")
_SYNONYMS = {
    "lr": "learning_rate", "max_epochs": "num_epochs", "grad_clip": "max_grad_norm", "amp": "mixed_precision",
    "accumulate_grad_batches": "gradient_accumulation_steps", "scheduler": "lr_scheduler",
}  # fmt: skip
_UNSUPPORTED = {
    "eval_interval": "evaluation runs after each epoch; ValidationHook(interval=...) evaluates between steps"
}


class _Default(int):
    """Default value that a config may override, unlike the same number given by the user."""


EVERY_EPOCH = _Default(1)


@dataclass(frozen=True)
class RunDefaults:
    """Files of a run according to a config, for omitted arguments of ``train``.

    Raises:
        ConfigError: the interval is not a number of epochs.

    Example:
        >>> RunDefaults("runs", 5).files(None, EVERY_EPOCH), RunDefaults("runs", 5).files("other", 1)
        (('runs', 5), ('other', 1))
    """

    checkpoint_dir: str | Path | None = None
    save_interval: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, _WHERE)
        check_least(0, **{f"{_WHERE}.save_interval": self.save_interval})

    def files(self, save_dir: str | Path | None, save_freq: int | None) -> tuple[str | Path | None, int | None]:
        """Return the folder of a call and the epochs between numbered checkpoints."""
        given = save_freq if self.save_interval is None or type(save_freq) is not _Default else self.save_interval
        return self.checkpoint_dir if save_dir is None else save_dir, None if given is None else int(given)


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of :class:`treadle.Trainer`, read from ``config.training``; None always means the default.

    Raises:
        ConfigError: a value is outside its range.

    Example:
        >>> TrainingSettings(max_grad_norm=1.0).log_interval
        50
    """

    max_grad_norm: float | None = None
    """Total 2-norm to clip to; None or 0 off."""
    scheduler_step_per_batch: bool = False
    """Whether the scheduler steps after every applied step rather than after every epoch."""
    weight_decay: float | None = None
    """Weight decay of the optimizer that the trainer builds; 0.01 by default."""
    learning_rate: float | None = None
    """Learning rate of the optimizer that the trainer builds; 1e-4 by default."""
    gradient_accumulation_steps: int = 1
    """Micro-batches per step."""
    mixed_precision: PrecisionName | bool | None = None
    """``"bf16"``, ``"fp16"``, True (bf16), False or None (full)."""
    max_non_finite_grad_retries: int | None = None
    """Fresh groups to try before NonFiniteError."""
    log_interval: int | None = 50
    """Steps between log lines; None or 0 off."""
    min_delta: float = 0.0
    """Smallest improvement that counts, for the best epoch and early stopping."""
    ema_decay: float | None = None
    """Decay of an exponential moving average of the weights, which evaluations then score; None keeps none."""
    max_time: Duration | None = None
    """Time limit of one call of ``train``: seconds, ``"HH:MM:SS"``, ``"1h30m"`` or a timedelta."""
    limit_train_batches: Amount | None = None
    """Micro-batches per epoch, or a float, a fraction of it."""
    limit_eval_batches: Amount | None = None
    """Batches of ``evaluate`` and ``validate``, also during training, or a float, a fraction of the loader."""
    overfit_batches: Amount | None = None
    """Number of batches from the start of the loader that make up every epoch, read once."""
    fast_dev_run: bool | int = False
    """True or a number of steps and of batches per evaluation; nothing is written or resumed."""
    num_sanity_eval_steps: int = 0
    """Batches to evaluate before step 1 of a fresh run; -1 evaluates all."""
    save_total_limit: int | None = None
    """Number of newest numbered checkpoints to keep in ``save_dir``; None keeps all."""
    save_top_k: int | None = None
    """Number of best epochs whose numbered checkpoints are kept too; without ``save_total_limit``, so is the newest."""
    save_on_signal: bool = True
    """Whether Ctrl-C and SIGTERM save and exit, with 128 + the signal as exit code, if there is a ``save_dir``."""
    grad_clip_value: float | None = None
    """Largest absolute value of a gradient's element; None or 0 off. Not together with ``max_grad_norm``."""
    gradient_checkpointing: Checkpointing = False
    """True recomputes activations in the backward pass: by the model's own method if it has one, else in each item of
    its ModuleLists; or names of modules, such as ``["layers.*"]``."""
    lr_scheduler: str | None = None
    """Name of a schedule over all steps of ``train``: ``"cosine"``, ``"linear"``, ``"wsd"``, ``"inverse_sqrt"`` or
    ``"constant"``."""
    warmup_steps: int | None = None
    """Number of warm-up updates of ``lr_scheduler``, linear."""
    warmup_ratio: float | None = None
    """Warm-up as a fraction of all steps, instead of ``warmup_steps``."""
    min_lr_scale: float = 0.0
    """Final factor of the learning rate in ``lr_scheduler``."""

    def __post_init__(self) -> None:
        try:
            Limits.among(vars(self))  # validates the values now
        except ConfigError as error:
            raise error.renamed(f"{_WHERE}.{error.argument}") from None
        check_fields(self, _WHERE)
        for least, names in _LEAST.items():
            check_least(least, **{f"{_WHERE}.{name}": getattr(self, name) for name in names})
        check_within("[0, 1]", **{f"{_WHERE}.ema_decay": self.ema_decay})
        check_checkpointing(self.gradient_checkpointing, name=f"{_WHERE}.gradient_checkpointing")
        self._check_schedule()

    def _check_schedule(self) -> None:
        for name in ("warmup_steps", "warmup_ratio"):
            if self.lr_scheduler is None and getattr(self, name) is not None:
                raise ConfigError(
                    "needs a schedule by name; also set lr_scheduler, such as 'cosine'",
                    argument=f"{_WHERE}.{name}",
                    value=getattr(self, name),
                )
        try:
            _ = self.schedule
        except ConfigError as error:
            names = {"min_scale": "min_lr_scale"}
            name = str(error.argument)
            raise error.renamed(f"{_WHERE}.{names.get(name, name)}") from None

    def described(self) -> dict[str, Any]:
        """Return plain values for checkpoints: all older settings, and newer ones if set."""
        limits = Limits.among(vars(self)).given()
        default = TrainingSettings()
        changed = {name: value for name, value in vars(self).items() if value != getattr(default, name)}
        first = {name: getattr(self, name) for name in _FIRST}
        return {**first, **{name: value for name, value in changed.items() if name not in limits}, **limits}

    def retention(self) -> Retention:
        """Return the retention rule of numbered checkpoints, to which the best ones are added."""
        alone = self.save_total_limit is None and self.save_top_k is not None
        return Retention(1 if alone else self.save_total_limit)

    def engine_arguments(self) -> EngineArguments:
        """Return the settings that are arguments of the engine, under its names."""
        return {
            "scheduler_interval": "step" if self.scheduler_step_per_batch or self.lr_scheduler else "epoch",
            "precision": self.precision,
            "grad_clip": self.max_grad_norm,
            "grad_clip_value": self.grad_clip_value,
            "accumulation_steps": self.gradient_accumulation_steps,
            "max_non_finite_grad_retries": self.max_non_finite_grad_retries,
            "limits": Limits.among(vars(self)),
        }

    @property
    def schedule(self) -> ScheduleShape | None:
        """Shape of the schedule requested by name, or None."""
        if self.lr_scheduler is None:
            return None
        return ScheduleShape(self.lr_scheduler, self.warmup_steps, self.warmup_ratio, self.min_lr_scale)

    @property
    def precision(self) -> PrecisionName | None:
        """Name of the autocast dtype, or None."""
        if isinstance(self.mixed_precision, bool):
            return "bf16" if self.mixed_precision else None
        return self.mixed_precision


def read_settings(config: Any, keywords: Mapping[str, Any] | None = None) -> TrainingSettings:
    """Read the settings in ``config.training`` or ``config["training"]``, without changing the config.

    Args:
        config: None, a mapping (including OmegaConf's), or any object with attributes. Other parts are not read.
        keywords: settings by name, which override those of the config.

    Raises:
        ConfigError: a key is unknown (the closest is suggested), a config without ``training`` has settings elsewhere,
            or a value is outside its range.

    Example:
        >>> read_settings({"training": {"max_grad_norm": 1.0}}).max_grad_norm
        1.0
        >>> read_settings(None, {"max_grad_norm": 2.0}).max_grad_norm
        2.0
        >>> read_settings(None) == read_settings({}) == TrainingSettings()
        True
    """
    known = [field.name for field in dataclasses.fields(TrainingSettings)]
    whole = config_of(config)
    part = whole.part("training")
    values = {} if part is None else part.fields()
    _refuse_misplaced(whole, known, has_part=part is not None)
    for name in values.keys() & _SYNONYMS.keys():
        raise ConfigError(f"unknown key {name!r}; did you mean {_SYNONYMS[name]!r}?", argument=_WHERE)
    refuse_unknown(_WHERE, values, [*known, *UNUSED, *_OF_FILES, *_UNSUPPORTED])
    for name in values.keys() & _UNSUPPORTED.keys():
        _log.warning("config.training.%s=%s has no effect: %s", name, values[name], _UNSUPPORTED[name])
    given = {name: value for name, value in values.items() if name in known}
    # None is kept where it means off; elsewhere it means the default.
    kept = {name: value for name, value in given.items() if value is not None or name == "log_interval"}
    given_by_name = _checked_keywords(keywords or {}, known)
    try:
        return TrainingSettings(**{**kept, **given_by_name})
    except ConfigError as error:
        name = str(error.argument).removeprefix(f"{_WHERE}.")
        raise (error.renamed(name) if name in given_by_name else error) from None


def read_run_defaults(config: Any) -> RunDefaults:
    """Return the files of a run named in ``config.training``.

    Example:
        >>> read_run_defaults({"training": {"checkpoint_dir": "runs"}})
        RunDefaults(checkpoint_dir='runs', save_interval=None)
    """
    part = config_of(config).part("training")
    values = {} if part is None else part.fields()
    return RunDefaults(**{name: values[name] for name in _OF_FILES if name in values})


def config_of(config: Any) -> UserConfig:
    """Return a view of a user's config.

    Raises:
        ConfigError: it is a string, a number or another value without fields.

    Example:
        >>> config_of({"seed": 1}).value("seed")
        1
    """
    if isinstance(config, (str, bytes, int, float, Path)) or (isinstance(config, (list, set)) and config):
        raise ConfigError(
            "must be a dict, or an object, with a part 'training'; to read a file use treadle.config.load_config",
            argument="config", value=config,
        )  # fmt: skip
    known = [field.name for field in dataclasses.fields(TrainingSettings)]
    return UserConfig({} if config is None else config, "config", [*known, *UNUSED, *_OF_FILES, *_UNSUPPORTED])


def _checked_keywords(keywords: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    for name in keywords:
        if name not in known:
            raise ConfigError(f"no such argument of the trainer; {hint_for_unknown(name, known)}", argument=name)
    return dict(keywords)


def _refuse_misplaced(config: UserConfig, known: Sequence[str], *, has_part: bool) -> None:
    """Refuse settings outside ``training`` if that part is missing; otherwise, and for misspelt parts, warn.

    Raises:
        ConfigError: the config has settings of the trainer but no part ``training``.
    """
    there = config.names()
    misplaced = [name for name in known if name in there]
    if misplaced and not has_part:
        raise ConfigError(
            f"only its part 'training' is read, which is missing: write {{'training': {{{misplaced[0]!r}: ...}}}} or "
            f"SimpleNamespace(training=...), or pass {misplaced[0]}= to the trainer",
            argument="config",
        )
    if misplaced:
        _log.warning(
            "config: only its 'training' part is read, but %r is outside it; write {'training': {%r: ...}}",
            misplaced[0], misplaced[0],
        )  # fmt: skip
    if has_part or not there:
        return
    near = difflib.get_close_matches("training", there, n=1, cutoff=0.7)
    _log.warning(
        "config: ignored, since it has no part 'training' (it has %s)%s",
        ", ".join(there), "; did you mean 'training'?" if near else "",
    )  # fmt: skip
