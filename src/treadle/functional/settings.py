"""The ``training`` part of a user's config: read from whatever it is, checked, with defaults."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import logging
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, get_args

from treadle.capture.checkpointing import Checkpointing, check_checkpointing
from treadle.checkpoint.retention import Retention
from treadle.data.amount import Amount
from treadle.engine.limits import Duration, Limits
from treadle.errors import ConfigError, nearest, refuse_unknown
from treadle.faces.build import EngineArguments
from treadle.optim.precision import PrecisionName
from treadle.optim.schedules import ScheduleShape

_log = logging.getLogger("treadle.functional")
_WHERE = "config.training"
_FIRST = (
    "max_grad_norm", "scheduler_step_per_batch", "weight_decay", "learning_rate", "gradient_accumulation_steps",
    "mixed_precision", "max_non_finite_grad_retries", "log_interval", "min_delta", "ema_decay",
)  # fmt: skip
_UNUSED = ("batch_size", "num_epochs", "epochs", "seed", "max_eval_samples")
_OF_FILES = ("checkpoint_dir", "save_interval")
_NOWHERE = {"eval_interval": "evaluations come after each epoch; ValidationHook(interval=...) evaluates between steps"}


class _Default(int):
    """A default value that a config may replace, unlike the same number given by the user."""


EVERY_EPOCH = _Default(1)


@dataclass(frozen=True)
class RunDefaults:
    """Files of a run as a config names them, for arguments of ``train`` that are not given.

    Raises:
        ConfigError: the interval is no number of epochs.

    Example:
        >>> RunDefaults("runs", 5).files(None, EVERY_EPOCH), RunDefaults("runs", 5).files("other", 1)
        (('runs', 5), ('other', 1))
    """

    checkpoint_dir: str | Path | None = None
    save_interval: int | None = None

    def __post_init__(self) -> None:
        interval = self.save_interval
        if interval is not None and (isinstance(interval, bool) or not isinstance(interval, Integral) or interval < 0):
            raise ConfigError(
                "must be a whole number of epochs >= 0, or None", argument=f"{_WHERE}.save_interval", value=interval
            )

    def files(self, save_dir: str | Path | None, save_freq: int | None) -> tuple[str | Path | None, int | None]:
        """Return the folder of a call and the epochs between two numbered checkpoints."""
        given = save_freq if self.save_interval is None or type(save_freq) is not _Default else self.save_interval
        return self.checkpoint_dir if save_dir is None else save_dir, None if given is None else int(given)


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of :class:`treadle.Trainer`, read from ``config.training``; None means the default everywhere.

    Raises:
        ConfigError: a value is outside its range.

    Example:
        >>> TrainingSettings(max_grad_norm=1.0).log_interval
        50
    """

    max_grad_norm: float | None = None
    """Total 2-norm to clip to; None or 0 off."""
    scheduler_step_per_batch: bool = False
    """True steps the scheduler with every applied step, False with every epoch."""
    weight_decay: float | None = None
    """Of the optimizer that the trainer builds; 0.01 by default."""
    learning_rate: float | None = None
    """Of the optimizer that the trainer builds; 1e-4 by default."""
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
    """Decay of an averaged copy of the weights, which evaluations then score; None keeps none."""
    max_time: Duration | None = None
    """How long one call of ``train`` may take: seconds, ``"HH:MM:SS"``, ``"1h30m"`` or a timedelta."""
    limit_train_batches: Amount | None = None
    """Micro-batches of an epoch, or a float, the part of it."""
    limit_eval_batches: Amount | None = None
    """Batches of ``evaluate`` and ``validate``, also while training, or a float, the part of the loader."""
    overfit_batches: Amount | None = None
    """Batches at the start of the loader that make every epoch, read once."""
    fast_dev_run: bool | int = False
    """True or a number: so many steps and batches of an evaluation, once; nothing is written or resumed."""
    num_sanity_eval_steps: int = 0
    """Batches to evaluate before step 1 of a fresh run; -1 for all."""
    save_total_limit: int | None = None
    """Numbered checkpoints in ``save_dir`` that stay, the newest ones; None keeps all."""
    save_top_k: int | None = None
    """Numbered checkpoints that stay as well, those of the best epochs; alone, the newest one stays beside them."""
    save_on_signal: bool = True
    """Save and leave at Ctrl-C and SIGTERM where there is a ``save_dir``, with 128 + the signal as exit code."""
    grad_clip_value: float | None = None
    """Largest absolute value of a gradient's element; None or 0 off. Not together with ``max_grad_norm``."""
    gradient_checkpointing: Checkpointing = False
    """True computes activations again in the backward pass: by the model's own method where it has one, else in each
    item of its ModuleLists; or names of modules, such as ``["layers.*"]``."""
    lr_scheduler: str | None = None
    """A schedule by name, over all steps of ``train``: ``"cosine"``, ``"linear"``, ``"wsd"``, ``"inverse_sqrt"`` or
    ``"constant"``."""
    warmup_steps: int | None = None
    """Updates of linear warm-up of ``lr_scheduler``."""
    warmup_ratio: float | None = None
    """The warm-up as a part of all steps, in place of ``warmup_steps``."""
    min_lr_scale: float = 0.0
    """The last factor of the rate in ``lr_scheduler``."""

    def __post_init__(self) -> None:
        try:
            Limits.among(vars(self))  # refuses bad values now
        except ConfigError as error:
            raise error.renamed(f"{_WHERE}.{error.argument}") from None
        for name in ("max_grad_norm", "grad_clip_value", "weight_decay", "learning_rate", "ema_decay", "min_delta"):
            self._check(name, Real, 0, math_name="a number")
        for name in ("max_non_finite_grad_retries", "log_interval"):
            self._check(name, Integral, 0, math_name="a whole number")
        for name in ("gradient_accumulation_steps", "save_total_limit", "save_top_k"):
            self._check(name, Integral, 1, math_name="a whole number")
        if self.ema_decay is not None and self.ema_decay > 1:
            raise ConfigError("must lie in [0, 1], or be None", argument=f"{_WHERE}.ema_decay", value=self.ema_decay)
        if not (isinstance(self.mixed_precision, bool) or self.mixed_precision in (None, *get_args(PrecisionName))):
            raise ConfigError(
                "must be 'bf16', 'fp16', True (bf16), False or None",
                argument=f"{_WHERE}.mixed_precision",
                value=self.mixed_precision,
            )
        check_checkpointing(self.gradient_checkpointing, name=f"{_WHERE}.gradient_checkpointing")
        for name in ("scheduler_step_per_batch", "save_on_signal"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError("must be True or False", argument=f"{_WHERE}.{name}", value=getattr(self, name))

        self._check_schedule()

    def _check_schedule(self) -> None:
        for name in ("warmup_steps", "warmup_ratio"):
            if self.lr_scheduler is None and getattr(self, name) is not None:
                raise ConfigError(
                    "belongs to a schedule by name; set lr_scheduler too, such as 'cosine'",
                    argument=f"{_WHERE}.{name}",
                    value=getattr(self, name),
                )
        try:
            _ = self.schedule
        except ConfigError as error:
            names = {"min_scale": "min_lr_scale"}
            name = str(error.argument)
            raise error.renamed(f"{_WHERE}.{names.get(name, name)}") from None

    def _check(self, name: str, kind: type, least: Any, *, math_name: str) -> None:
        value: Any = getattr(self, name)
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, kind) or not value >= least:
            raise ConfigError(f"must be {math_name} >= {least}, or None", argument=f"{_WHERE}.{name}", value=value)

    def described(self) -> dict[str, Any]:
        """Return plain values for checkpoints: the older settings, and of the newer ones those that are set."""
        limits = Limits.among(vars(self)).given()
        default = TrainingSettings()
        changed = {name: value for name, value in vars(self).items() if value != getattr(default, name)}
        first = {name: getattr(self, name) for name in _FIRST}
        return {**first, **{name: value for name, value in changed.items() if name not in limits}, **limits}

    def retention(self) -> Retention:
        """Return the rule by which numbered checkpoints are deleted; the best ones come on top."""
        alone = self.save_total_limit is None and self.save_top_k is not None
        return Retention(1 if alone else self.save_total_limit)

    def engine_arguments(self) -> EngineArguments:
        """Return the arguments of the engine among them, by its names."""
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
        """The shape of the schedule that is asked for by name, or None."""
        if self.lr_scheduler is None:
            return None
        return ScheduleShape(self.lr_scheduler, self.warmup_steps, self.warmup_ratio, self.min_lr_scale)

    @property
    def precision(self) -> PrecisionName | None:
        """The name of the autocast type, or None."""
        if isinstance(self.mixed_precision, bool):
            return "bf16" if self.mixed_precision else None
        return self.mixed_precision


def read_settings(config: Any, keywords: Mapping[str, Any] | None = None) -> TrainingSettings:
    """Return the settings in ``config.training``, or ``config["training"]``; the config is not changed.

    Args:
        config: None, a mapping (OmegaConf's too), or any object with attributes. Other parts of it are not read.
        keywords: settings by their own names, which win over those of the config.

    Raises:
        ConfigError: a key is unknown, naming the nearest known one, a setting is beside the part ``training`` of a
            config that has none, or a value is outside its range.

    Example:
        >>> read_settings({"training": {"max_grad_norm": 1.0}}).max_grad_norm
        1.0
        >>> read_settings(None, {"max_grad_norm": 2.0}).max_grad_norm
        2.0
        >>> read_settings(None) == read_settings({}) == TrainingSettings()
        True
    """
    part = _part_of(config, "training")
    if part is None and config is not None and not isinstance(config, Mapping):
        _warn_of_flat_settings(config)
    values = {} if part is None else _fields_of(part)
    known = [field.name for field in dataclasses.fields(TrainingSettings)]
    if part is None and isinstance(config, Mapping):
        _warn_of_misspelt_part(config)
    misplaced = [name for name in known if isinstance(config, Mapping) and name in config]
    if misplaced and part is None:
        raise ConfigError(
            f"only its part 'training' is read, and it has none: write {{'training': {{{misplaced[0]!r}: ...}}}}, or "
            f"pass {misplaced[0]}= to the trainer",
            argument="config",
        )
    if misplaced:
        _log.warning(
            "config: only its 'training' part is read, and %r is outside of it: write {'training': {%r: ...}}",
            misplaced[0], misplaced[0],
        )  # fmt: skip
    refuse_unknown(_WHERE, values, [*known, *_UNUSED, *_OF_FILES, *_NOWHERE])
    for name in values.keys() & _NOWHERE.keys():
        _log.warning("config.training.%s=%s is not read: %s", name, values[name], _NOWHERE[name])
    given = {name: value for name, value in values.items() if name in known}
    # Where None means off it is kept; elsewhere it means the default.
    kept = {name: value for name, value in given.items() if value is not None or name == "log_interval"}
    return TrainingSettings(**{**kept, **_checked_keywords(keywords or {}, known)})


def read_run_defaults(config: Any) -> RunDefaults:
    """Return the files of a run that ``config.training`` names.

    Example:
        >>> read_run_defaults({"training": {"checkpoint_dir": "runs"}})
        RunDefaults(checkpoint_dir='runs', save_interval=None)
    """
    part = _part_of(config, "training")
    values = {} if part is None else _fields_of(part)
    return RunDefaults(**{name: values[name] for name in _OF_FILES if name in values})


def _part_of(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _checked_keywords(keywords: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    for name in keywords:
        if name not in known:
            raise ConfigError(f"no such argument of the trainer; {nearest(name, known)}", argument=name)
    return dict(keywords)


def _warn_of_flat_settings(config: Any) -> None:
    """Warn of an object without a part ``training`` that has settings of it as its own attributes."""
    known = {field.name for field in dataclasses.fields(TrainingSettings)}
    outside = sorted(known & _fields_of(config, closed=True).keys())
    if outside:
        _log.warning(
            "config: only its 'training' part is read, and this %s has none; %s %s not read: put them into "
            "SimpleNamespace(training=...) or {'training': {...}}",
            type(config).__name__, ", ".join(outside), "is" if len(outside) == 1 else "are",
        )  # fmt: skip


def _warn_of_misspelt_part(config: Mapping[Any, Any]) -> None:
    """Warn of a key that is almost ``training``; a config may well hold other parts, which are not read."""
    for key in difflib.get_close_matches("training", [key for key in config if isinstance(key, str)], n=1, cutoff=0.7):
        if key != "training":
            _log.warning("config: has no part 'training', and %r is not read; did you mean 'training'?", key)


def _fields_of(part: Any, *, closed: bool = False) -> dict[str, Any]:
    """Return the public fields of a mapping or of an object with attributes, its classes' included.

    Args:
        part: the object.
        closed: whether it may show none.

    Raises:
        ConfigError: it has no fields.
    """
    if isinstance(part, Mapping):
        return dict(part)
    if dataclasses.is_dataclass(part):
        return {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    for names in ("model_fields", "__attrs_attrs__"):  # pydantic's classes, and those of attrs
        declared = getattr(type(part), names, None)
        if declared:
            return {name: getattr(part, name) for name in (getattr(one, "name", one) for one in declared)}
    if isinstance(part, type):
        return _public(_attributes_of(part))
    if callable(getattr(part, "keys", None)) and hasattr(type(part), "__getitem__"):  # as ml_collections' ConfigDict
        return {str(name): part[name] for name in part.keys()}  # noqa: SIM118  (it need not be iterable)
    if hasattr(type(part), "__iter__") and hasattr(type(part), "__getitem__"):  # as qurious' Config
        return {str(name): part[name] for name in part}
    attributes = _attributes_of(part)
    found = {**_served_by(part), **_public(attributes)}
    # A bare namespace, or an object with nothing but hidden attributes that serves no key either.
    if not found and not closed and type(part) is not types.SimpleNamespace and (not attributes or _serves(part)):
        _refuse_closed(part)
    return found


def _public(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if not name.startswith("_") and not _is_method(value)}


def _serves(part: Any) -> bool:
    return hasattr(type(part), "__getattr__") or "__getattribute__" in vars(type(part))


def _served_by(part: Any) -> dict[str, Any]:
    """Return the settings that an object gives by ``__getattr__``, which has no list of them."""
    if not _serves(part):
        return {}
    found = {}
    for name in (*(field.name for field in dataclasses.fields(TrainingSettings)), *_UNUSED, *_OF_FILES, *_NOWHERE):
        with contextlib.suppress(AttributeError, KeyError):
            value = getattr(part, name)
            if value is not None and not _is_method(value):
                found[name] = value
    return found


def _attributes_of(part: Any) -> dict[str, Any]:
    owners = [*reversed(part.__mro__ if isinstance(part, type) else type(part).__mro__), part]
    found: dict[str, Any] = {}
    for owner in owners:
        slots = vars(owner).get("__slots__", ()) if isinstance(owner, type) else ()
        held = [name for name in ((slots,) if isinstance(slots, str) else slots) if hasattr(part, name)]
        found.update({name: value for name, value in getattr(owner, "__dict__", {}).items() if name not in held})
        found.update({name: getattr(part, name) for name in held})
    return {name: value for name, value in found.items() if not (name.startswith("__") and name.endswith("__"))}


def _refuse_closed(part: Any) -> None:
    raise ConfigError(
        f"a {type(part).__name__} shows neither keys nor attributes, so its settings cannot be read; "
        "pass a dict, a dataclass or an object with attributes",
        argument=_WHERE,
    )


def _is_method(value: Any) -> bool:
    return callable(value) or isinstance(value, (property, classmethod, staticmethod, types.MemberDescriptorType))
